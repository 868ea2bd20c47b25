"""What each role shows of itself: in `status`, in `top`, and in the live panel."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from rich.console import Console

from node.config.run import LearnerRules
from node.observe import top as top_view
from node.observe.live import LiveView
from node.observe.records import StatusSnapshot
from node.observe.status import render_status, snapshot_json
from node.observe.text_format import WIDTH_COLUMNS
from node.run.learner_role import LearnerRole
from node.run.worker_role import WorkerRole
from node.simulation.simulated_learner import LearnerCase, SimulatedLearner, run_of
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import deterministic_run, open_world
from tests.simulation.test_swarm import CONFIG
from tests.unit.monitor_records import snapshot, step_done, work_done
from tests.wire_samples import ALICE

STEP = step_done(
    19,
    version=20,
    published_version=18,
    staleness_max=3,
    mismatch_k3=0.00123,
    effective_share=0.985,
    groups_quantised=2,
    discarded_total={"expired": 5},
)
LEARNER = snapshot(
    role="learner",
    round=19,
    policy_version=20,
    own_reward=STEP.reward,
    mismatch_k3=STEP.mismatch_k3,
    effective_share=STEP.effective_share,
    groups_quantised=2,
    staleness_bound=4,
    step=STEP,
    accepted=0,
    rejected={},
    pool_groups=0,
)
WORK = replace(
    work_done(29), policy_version=181, learner_version=183,
    verdicts_total={"accepted": 176, "stale": 7, "undelivered": 2},
)  # fmt: skip
WORKER = snapshot(
    role="worker",
    phase="generating",
    round=29,
    policy_version=181,
    parameters=0,
    own_reward=None,
    held_out_passed=None,
    held_out_first=None,
    staleness_bound=4,
    work=WORK,
    accepted=0,
    rejected={},
    pool_groups=0,
)
SAID: dict[str, tuple[StatusSnapshot, tuple[str, ...], tuple[str, ...]]] = {
    "learner": (
        LEARNER,
        (
            "step 19, policy version 20 (18 on offer)",
            "8 groups of 1 worker, 6 informative, 2 by quantised engines",
            "1.5 steps in the mean, 3 at most, 4 allowed",
            "waited 0.5 s, trained 2.0 s",
            "2 ready, 4 in workers' hands, 5 discarded",
            "k3 0.0012, effective sample 98.5 %",
        ),
        ("own groups", "tokens/s", "0 groups"),
    ),
    "worker": (
        WORKER,
        (
            "generating, batch 29, policy version 181 (the learner is at 183)",
            "185 groups, 176 accepted, 7 stale, 2 undelivered",
            "1,234 tokens/s, 29,000 tokens so far",
            "4 groups in 1.0 s, waited 0.1 s for work",
        ),
        ("held-out", "reward", "own groups", "0 groups", "0 parameters"),
    ),
}  # fmt: skip


def top(s: StatusSnapshot) -> str:
    out = io.StringIO()
    screen = top_view.node_screen(s, (), (), ())
    Console(file=out, width=WIDTH_COLUMNS, color_system=None).print(top_view.render(screen))
    return out.getvalue()


def panel(s: StatusSnapshot) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    with LiveView(console, interactive=True, clock=lambda: 0.0) as view:
        view.update(s)
    return out.getvalue()


@pytest.mark.parametrize("view", [render_status, top, panel])
@pytest.mark.parametrize("role", SAID)
def test_a_role_says_what_it_did_and_nothing_of_other_roles(
    role: str, view: Callable[[StatusSnapshot], str]
) -> None:
    shown, said, unsaid = SAID[role]
    text = view(shown)
    assert [part for part in said if part not in text] == []
    assert [part for part in unsaid if part in text] == []


@pytest.mark.parametrize("view", [render_status, top, panel])
def test_a_role_that_has_just_started_says_so(view: Callable[[StatusSnapshot], str]) -> None:
    fresh: dict[str, Any] = {"round": 0, "own_reward": None, "mismatch_k3": None}
    learner = view(replace(LEARNER, **fresh, step=None, effective_share=None, policy_version=1))
    assert "step 0, policy version 1" in learner
    assert "nothing yet: it waits for its first groups" in learner
    worker = view(replace(WORKER, **fresh, work=None, policy_version=0))
    assert "batch 0, no policy yet" in worker
    assert "nothing yet" in worker


@pytest.mark.parametrize("view", [render_status, top])
def test_a_node_says_how_far_its_engine_is_from_its_trainer(
    view: Callable[[StatusSnapshot], str],
) -> None:
    measured = {"mismatch_mean": 0.012, "mismatch_max": 0.4, "mismatch_k3": 2e-5}
    text = view(snapshot(**measured, effective_share=1.0, groups_quantised=3))
    assert "mean 0.012, max 0.4, k3 2e-05, effective sample 100.0 %" in text
    assert view is top or "3 by quantised engines" in text
    without = view(snapshot())
    assert "mismatch" not in without
    assert "quantised" not in without


def test_the_json_has_the_figures_of_a_role() -> None:
    assert json.loads(snapshot_json(LEARNER))["step"]["staleness_max"] == 3
    assert json.loads(snapshot_json(WORKER))["work"]["verdicts_total"]["accepted"] == 176


def test_a_node_s_snapshot_is_filled_by_its_role(tmp_path: Path) -> None:
    async def main() -> tuple[list[StatusSnapshot], list[StatusSnapshot]]:
        async with (
            open_world(0, 2, LinkProfile(latency_s=0.0)) as world,
            trio.open_nursery() as nursery,
        ):
            case = LearnerCase(
                LearnerRules(peer=ALICE.peer_id, staleness_max=7), (1.0,), train_s=1.0
            )
            run = run_of(world, case.rules, CONFIG.run)
            there = SimulatedLearner(case, world, tmp_path, nursery, run)
            for host in range(2):
                await there.start(host)
            learner, worker = there.roles[0], there.roles[1]
            assert isinstance(learner, LearnerRole)
            assert isinstance(worker, WorkerRole)
            fresh = [state_of(there, host) for host in range(2)]
            learner._last = STEP
            for number in range(28, 30):
                await worker._tell_work(replace(WORK, batch=number, generate_s=number - 27.0))
            worker._host.version = WORK.policy_version
            filled = [state_of(there, host) for host in range(2)]
            nursery.cancel_scope.cancel()
            return fresh, filled

    fresh, (learner, worker) = deterministic_run(main, seed=0)
    assert [(s.role, s.policy_version, s.round) for s in fresh] == [
        ("learner", 1, 0),
        ("worker", 0, 0),
    ]
    assert (learner.policy_version, learner.own_reward, learner.local_groups) == (20, 0.4, 8)
    assert (learner.mismatch_k3, learner.effective_share) == (0.00123, 0.985)
    assert (learner.groups_quantised, learner.staleness_bound, learner.step) == (2, 7, STEP)
    assert (worker.round, worker.policy_version, worker.local_groups) == (29, 181, 4)
    assert worker.tokens_per_s == (1000 + 500) / 2
    assert worker.work is not None
    assert worker.work.verdicts_total["accepted"] == 176


def state_of(there: SimulatedLearner, host: int) -> StatusSnapshot:
    return there.roles[host].status(there.nodes[host].snapshot())
