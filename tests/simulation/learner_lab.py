"""What tests of a central learner share: a learner and workers on volunteers' links.

Intake, leases, quotas, the loops of learner and workers, signatures, rewards and checkpoints are
production code under a virtual clock; training and generation are timed stand-ins. Broadcasts are
run by themselves, with production code and the real sizes on the same links, and in the long runs
a version then reaches each worker after the time that its broadcast took there.
"""

import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import trio

from node.config import RunConfig
from node.config.run import LearnerRules
from node.simulation.simulated_learner import run_of
from swarm.identity import Identity
from swarm.leases.lease_table import LeaseRules
from swarm.simulation.links import LinkProfile, links_of
from swarm.simulation.world import deterministic_run, open_world
from tests.simulation.lab_learner import Actor, LabCase, LabLearner

GROUPS_PER_STEP = 128  # R
TRAIN_S = 100.0
GROUP_SIZE = 2  # G: what a group costs to sign, check and score grows with it, nothing else here
LEASE_LIFE_S = 300.0  # as a learner's process has it
RUN = RunConfig.model_validate(
    {"name": "lab", "environments": [{"name": "scripted_sum", "parameters": {"max": 99_999_999}}]}
)
NOBODY = str(Identity(bytes(32)).peer_id)  # in place of the learner, until there is one
Scene = Callable[[LabLearner], Awaitable[None]]


def rules_of(
    staleness_max: int, period_steps: int, groups_per_step: int = GROUPS_PER_STEP, **more: object
) -> LearnerRules:
    """The rules of a learner of the lab."""
    return LearnerRules.model_validate(
        {
            "peer": NOBODY,
            "staleness_max": staleness_max,
            "publish_every_steps": period_steps,
            "groups_per_step": groups_per_step,
            "group_size": GROUP_SIZE,
            "rescored_share": 0.0,
            **more,
        }
    )


def lease_rules() -> LeaseRules:
    """Those of a learner's process."""
    return LeaseRules(life_s_min=LEASE_LIFE_S)


def volunteers(workers: int) -> tuple[LinkProfile, ...]:
    """Links of the learner, on gigabit fibre, and of its workers."""
    return links_of("volunteer", 1 + workers)


def play(
    case: LabCase,
    scene: Scene,
    actors: dict[int, Actor] | None = None,
    seed: int = 0,
    links: tuple[LinkProfile, ...] | None = None,
    *,
    ips: Sequence[str] | None = None,
    at_work: int | None = None,
) -> LabLearner:
    """Run a scene with hosts at work, in a directory of its own; what it came to.

    `ips` is the address of each host; None: each has a block of its own. `at_work` is how many
    hosts are started, the learner among them; None: all. The others are the scene's.
    """
    found: list[LabLearner] = []
    links = links or volunteers(len(case.generate_s))

    async def main(directory: Path) -> None:
        async with (
            open_world(seed, len(links), links[0], dict(enumerate(links)), ips) as world,
            trio.open_nursery() as nursery,
        ):
            run = run_of(world, case.rules, RUN)
            there = LabLearner(case, world, directory, nursery, run, actors=actors or {})
            found.append(there)
            for host in range(len(links) if at_work is None else at_work):
                await there.start(host)
            await scene(there)
            nursery.cancel_scope.cancel()

    with tempfile.TemporaryDirectory(prefix="learner-lab-") as directory:
        deterministic_run(main, Path(directory), seed=seed)
    return found[0]


async def until_steps(there: LabLearner, count: int, limit_s: float) -> bool:
    """Wait until so many steps were made in all. Whether they were within `limit_s`."""
    with trio.move_on_after(limit_s):
        while len(there.steps) < count:  # noqa: ASYNC110 - of no one event
            await trio.sleep(1.0)
    return len(there.steps) >= count
