"""A learner and its workers over simulated links, for many steps, through deaths and partitions."""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from node.config import RunConfig
from node.config.run import LearnerRules, SamplingRules
from node.interfaces.engine import EngineInfo
from node.interfaces.trainer import TrainingGroup, TrainReport
from node.run.learner import Learner
from node.run.role import checkpoints_of
from node.simulation.simulated_learner import LEARNER, run_of
from node.simulation.simulated_policy import TimedTrainer
from swarm.leases.lease_table import LeaseRules
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import deterministic_run, open_world
from tests.simulation.lab_learner import Actor, LabCase, LabEngine, LabLearner
from tests.wire_samples import ALICE

Scene = Callable[[LabLearner], Awaitable[None]]

LINK = LinkProfile(latency_s=0.04, up_bytes_per_s=2e6, down_bytes_per_s=1e7)
RUN = RunConfig.model_validate(
    {"name": "fed", "environments": [{"name": "scripted_sum", "parameters": {"max": 9999}}]}
)
RULES = LearnerRules(
    peer=ALICE.peer_id, staleness_max=3, groups_per_step=8, group_size=4, rescored_share=0.0
)
LEASES = LeaseRules(target_s=8.0, first_s=10.0, life_s_min=20.0, groups_max=8)


def case(workers: int = 3, **changes: object) -> LabCase:
    rules = RULES.model_copy(update=changes)
    generate_s = tuple(1.0 + number for number in range(workers))
    return LabCase(rules, generate_s, train_s=3.0, leases=LEASES)


class Play:
    """One simulation, to be acted upon while it runs."""

    def __init__(
        self,
        directory: Path,
        what: LabCase,
        seed: int = 0,
        run: RunConfig = RUN,
        actors: dict[int, Actor] | None = None,
    ) -> None:
        self.directory = directory
        self.case = what
        self.seed = seed
        self.rules = run
        self.actors = actors or {}
        self.there: LabLearner | None = None

    def run(self, scene: Scene) -> LabLearner:
        async def main() -> None:
            hosts = 1 + len(self.case.generate_s)
            async with (
                open_world(self.seed, hosts, LINK) as world,
                trio.open_nursery() as nursery,
            ):
                run = run_of(world, self.case.rules, self.rules)
                assert run.learner is not None
                there = self.there = LabLearner(
                    self.case, world, self.directory, nursery, run, actors=self.actors
                )
                for host in range(hosts):
                    await there.start(host)
                await scene(there)
                nursery.cancel_scope.cancel()

        deterministic_run(main, seed=self.seed)
        assert self.there is not None
        return self.there


async def until_step(there: LabLearner, step: int, limit_s: float = 2_000.0) -> None:
    with trio.fail_after(limit_s):
        while not there.steps or there.steps[-1].step < step:  # noqa: ASYNC110 - of no one event
            await trio.sleep(1.0)


def check(there: LabLearner) -> None:
    """What holds of every run."""
    assert max(step.staleness_max for step in there.steps) <= RULES.staleness_max
    assert all(step.groups == RULES.groups_per_step for step in there.steps)


def test_workers_of_different_speeds_feed_a_learner(tmp_path: Path) -> None:
    async def scene(there: LabLearner) -> None:
        await until_step(there, 30)

    there = Play(tmp_path, case()).run(scene)
    check(there)
    by_worker: Counter[str] = Counter()
    for step in there.steps:
        by_worker.update(step.groups_by_worker)
    assert len(by_worker) == 3
    fast, slow = (by_worker[str(there.world.peer_id(host))] for host in (1, 3))
    assert fast > 1.5 * slow
    assert there.steps[-1].reward > there.steps[0].reward
    assert there.steps[-1].published_version >= 29
    assert any(each.policy_version > 20 for each in there.work[1])
    # tokens of more than one version were trained on, and what was discarded has a reason
    assert set(there.steps[-1].discarded_total) <= {"stale", "overtaken"}


def test_groups_of_a_worker_with_quantised_weights_are_counted_apart(tmp_path: Path) -> None:
    class Quantised(LabEngine):
        maker = EngineInfo("vllm", "awq")

    async def scene(there: LabLearner) -> None:
        await until_step(there, 10)

    there = Play(tmp_path, case(), actors={2: Actor(Quantised)}).run(scene)
    worker = str(there.world.peer_id(2))
    for step in there.steps:
        assert step.groups_quantised == step.groups_by_worker.get(worker, 0)
    assert sum(step.groups_quantised for step in there.steps) > 0
    assert any(step.groups_quantised < step.groups for step in there.steps)


def test_a_depth_that_is_lowered_below_the_period_starves_nobody(tmp_path: Path) -> None:
    """What is on offer is two steps old, and from now on leases want the newest."""

    async def scene(there: LabLearner) -> None:
        await until_step(there, 8)
        assert there.up is not None
        with trio.fail_after(500.0):
            while there.steps[-1].version - there.steps[-1].published_version < 2:  # noqa: ASYNC110
                await trio.sleep(0.1)
        there.up.intake.book.account.set_pacing(0)
        await until_step(there, there.steps[-1].step + 12)

    there = Play(tmp_path, case(publish_every_steps=3)).run(scene)
    check(there)
    last = there.steps[-8:]  # those before had groups of leases of before
    assert all(step.staleness_max == 0 for step in last)
    assert all(step.published_version == step.version for step in last)


def test_a_mismatch_is_told_of_the_whole_distribution_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = TimedTrainer.train

    async def train_off_policy(self: TimedTrainer, groups: Sequence[TrainingGroup]) -> TrainReport:
        report = await train(self, groups)
        return replace(report, effective_share=0.5, mismatch_k3=0.25)

    async def scene(there: LabLearner) -> None:
        await until_step(there, 2)

    monkeypatch.setattr(TimedTrainer, "train", train_off_policy)
    told = {}
    for name, sampling in (
        ("plain", SamplingRules()),
        ("cool", SamplingRules(temperature=0.7)),
        ("cut", SamplingRules(top_p=0.9)),
    ):
        run = RUN.model_copy(update={"sampling": sampling})
        step = Play(tmp_path / name, case(), run=run).run(scene).steps[0]
        told[name] = (step.effective_share, step.mismatch_k3)
    assert told == {"plain": (0.5, 0.25), "cool": (0.5, 0.25), "cut": (None, None)}


@pytest.mark.long
def test_workers_die_and_come_back(tmp_path: Path) -> None:
    async def scene(there: LabLearner) -> None:
        for round_ in range(4):
            await until_step(there, 6 * (round_ + 1))
            victim = 1 + round_ % 3
            await there.kill(victim)
            await trio.sleep(15.0)
            await there.start(victim)
        await until_step(there, 36)

    there = Play(tmp_path, case()).run(scene)
    check(there)
    assert there.steps[-1].discarded_total.get("expired", 0) > 0
    lately: Counter[str] = Counter()
    for step in there.steps[-10:]:
        lately.update(step.groups_by_worker)
    assert len(lately) == 3  # those that came back are at work again


def test_a_learner_that_dies_resumes_within_the_bound(tmp_path: Path) -> None:
    killed_at: list[int] = []

    async def scene(there: LabLearner) -> None:
        await until_step(there, 11)
        await there.kill(LEARNER)
        killed_at.append(there.steps[-1].step)
        there.steps.clear()
        await trio.sleep(20.0)
        await there.start(LEARNER)
        await until_step(there, 25)

    there = Play(tmp_path, case()).run(scene)
    check(there)
    # versions are published every second step (S - 1), and resumed from what was published last
    assert killed_at[0] - 1 <= there.steps[0].step <= killed_at[0] + 1
    assert [step.step for step in there.steps] == list(
        range(there.steps[0].step, there.steps[-1].step + 1)
    )


def test_a_learner_that_leaves_keeps_groups_that_came_after_its_last_checkpoint(
    tmp_path: Path,
) -> None:
    kept: list[set[bytes]] = []

    async def scene(there: LabLearner) -> None:
        await until_step(there, 8)
        up, node = there.up, there.nodes[LEARNER]
        assert up is not None

        def saved() -> set[bytes] | None:
            """Groups in the checkpoint of the last step; None: it has none."""
            found = checkpoints_of(there.config_of(LEARNER)).latest()
            assert found is not None
            record = Learner.intake_record(found.directory)
            is_of_last = found.progress.round == up.learner.progress.round
            return {each[0] for each in record["groups"]} if record and is_of_last else None

        def held() -> set[bytes]:
            return {each[0] for each in up.intake.to_record()["groups"]}

        with trio.fail_after(500.0):
            while saved() is None or saved() == held():  # noqa: ASYNC110
                await trio.sleep(0.1)
            there.leaving[LEARNER].set()
            while node.phase != "leaving":  # noqa: ASYNC110
                await trio.sleep(0.1)
        kept.append(held())
        assert saved() == held()

    Play(tmp_path, case()).run(scene)
    assert kept[0]


def test_a_learner_whose_last_checkpoint_is_lost_goes_on_above_what_was_published(
    tmp_path: Path,
) -> None:
    published: list[int] = []

    async def scene(there: LabLearner) -> None:
        await until_step(there, 11)
        while there.work[1][-1].policy_version < there.steps[-1].published_version:  # noqa: ASYNC110
            await trio.sleep(0.5)
        published.append(there.steps[-1].published_version)
        await there.kill(LEARNER)
        there.steps.clear()
        for saved in (tmp_path / "host0" / "checkpoints").glob("round-*"):
            if int(saved.name.removeprefix("round-")) >= published[0] - 1:
                saved.rename(saved.with_name(f"damaged-{saved.name}"))
        await there.start(LEARNER)
        await until_step(there, 20, limit_s=300.0)

    there = Play(tmp_path, case()).run(scene)
    check(there)
    assert there.steps[0].version > published[0]
    assert there.steps[0].published_version > published[0]


def test_the_same_seed_gives_the_same_steps_and_another_does_not(tmp_path: Path) -> None:
    async def scene(there: LabLearner) -> None:
        await until_step(there, 8)

    def steps(name: str, seed: int) -> tuple[object, str]:
        there = Play(tmp_path / name, case(), seed).run(scene)
        return there.steps, there.world.trace_hash

    one = steps("one", 0)
    assert steps("two", 0) == one
    assert steps("three", 1)[1] != one[1]
