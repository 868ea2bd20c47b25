"""The capacity model against the production code on simulated links.

For each setting the planner (`coordinator/model/capacity.py`) says which period κ to publish with,
how busy the learner will be and how old the oldest group; then a learner and its workers run that
way, on volunteers' links. A version's size follows from the setting's T_bcast; the broadcast is
simulated by itself, and each worker has each version as much later.
"""

from dataclasses import dataclass
from functools import cache
from random import Random

import trio

from coordinator.model.capacity import (
    Capacity,
    Form,
    Run,
    Worker,
    assess,
    predicted_broadcast,
)
from node.run.learner import CREDITS_PER_STEP
from swarm.leases.lease_table import LeaseRules
from swarm.weights.artifacts import CHUNK_TARGET_MAX, suggested_chunk_bytes
from tests.simulation.lab_learner import LabCase, LabLearner
from tests.simulation.learner_lab import (
    GROUPS_PER_STEP,
    LEASE_LIFE_S,
    TRAIN_S,
    lease_rules,
    play,
    rules_of,
    until_steps,
    volunteers,
)
from tests.simulation.worker_faults import REPEATING, storm
from tests.support import script

simulated = script("simulated_broadcasts")
BroadcastCase, broadcast = simulated.BroadcastCase, simulated.simulate

SUPPLY = 1.1  # of what the learner consumes
SPEEDS = (1.3, 1.0, 0.7, 1.0)  # of workers in turn, over their mean
CHUNKS_MAX = 48  # of a simulated broadcast: more cost hours and change little
UTILISATION_WITHIN = 0.03


@dataclass(frozen=True, slots=True)
class Setting:
    """S, T_bcast in steps, how many workers and how fast they are together."""

    staleness_max: int
    broadcast_steps: float
    workers: int
    supply: float = SUPPLY


@dataclass(frozen=True, slots=True)
class Row:
    """What was said and what came."""

    said: Capacity
    broadcast_s: float
    utilisation: float
    staleness_worst: int
    violations: int

    @property
    def is_off(self) -> bool:
        """Whether the plan was further from what came than the goal allows."""
        above = self.said.staleness_worst - self.staleness_worst
        off = abs(self.said.utilisation - self.utilisation)
        return above not in (0, 1) or off > UTILISATION_WITHIN


def group_seconds(setting: Setting) -> tuple[float, ...]:
    """How long each worker takes for a group."""
    mean = setting.supply * GROUPS_PER_STEP / TRAIN_S / setting.workers
    speeds = [SPEEDS[number % len(SPEEDS)] for number in range(setting.workers)]
    scale = mean * len(speeds) / sum(speeds)
    return tuple(1.0 / (scale * speed) for speed in speeds)


def planned_workers(setting: Setting, leases: LeaseRules) -> list[Worker]:
    """The workers as the planner knows them: a lease is generated at a time."""
    links = volunteers(setting.workers)[1:]
    found = []
    for number, (group_s, link) in enumerate(zip(group_seconds(setting), links, strict=True)):
        groups = min(leases.groups_max, 1 + int(leases.target_s / group_s))
        found.append(
            Worker(
                f"w{number}",
                1.0 / group_s,
                groups * group_s,
                link.up_bytes_per_s,
                link.down_bytes_per_s,
            )
        )
    return found


def planned_run(staleness_max: int, size_bytes: int) -> Run:
    """The learner as the planner knows it."""
    return Run(
        GROUPS_PER_STEP,
        TRAIN_S,
        staleness_max,
        size_bytes,
        volunteers(1)[0].up_bytes_per_s,
        latency_s=0.025,
        inflight_groups_max=int(CREDITS_PER_STEP * GROUPS_PER_STEP),
    )


@cache
def version_bytes(workers: int, broadcast_steps: float) -> int:
    """A version so large that the planner says it takes so many steps to all these workers."""
    planned = planned_workers(Setting(2, broadcast_steps, workers), lease_rules())
    least, most = 1, 1 << 40
    while most - least > 1_000:
        size = (least + most) // 2
        takes_s = predicted_broadcast(planned_run(2, size), planned, size)
        least, most = (size, most) if takes_s < broadcast_steps * TRAIN_S else (least, size)
    return least


@cache
def broadcast_s(workers: int, broadcast_steps: float) -> tuple[float, ...]:
    """When each worker has such a version, by production code on the same links."""
    size = version_bytes(workers, broadcast_steps)
    chunk_bytes = min(max(suggested_chunk_bytes(size), size // CHUNKS_MAX), CHUNK_TARGET_MAX)
    result = broadcast(BroadcastCase(size, chunk_bytes, volunteers(workers)))
    if result.unfinished:
        raise SystemExit(f"{result.unfinished} of {workers} workers never had the version")
    return result.times_s


def plan(setting: Setting) -> Capacity:
    """What the planner says of a setting, with the period that it chooses."""
    size = version_bytes(setting.workers, setting.broadcast_steps)
    run, workers = planned_run(setting.staleness_max, size), planned_workers(setting, lease_rules())
    best = assess(run, workers, Form.OVERLAPPED)
    assert isinstance(best, Capacity)
    return best


def measure(setting: Setting, steps: int, warm_up: int) -> Row:
    """Plan a setting and run it."""
    said = plan(setting)
    times_s = broadcast_s(setting.workers, setting.broadcast_steps)
    steps = max(steps, 2 * said.period_steps)
    case = LabCase(
        rules_of(setting.staleness_max, said.period_steps, GROUPS_PER_STEP),
        group_seconds(setting),
        TRAIN_S,
        leases=lease_rules(),
        transfer_s=lambda host, version: times_s[host - 1],
    )

    async def scene(there: LabLearner) -> None:
        await until_steps(there, warm_up + steps, 40.0 * TRAIN_S * (warm_up + steps))

    there = play(case, scene)
    counted = there.steps[warm_up:]
    busy_s = sum(step.train_s for step in counted)
    spent_s = busy_s + sum(step.idle_s for step in counted)
    first = counted[0].version - 1
    ages = [age for version, age in there.witness.worst_at.items() if version >= first]
    return Row(
        said,
        max(times_s),
        busy_s / spent_s,
        max(ages, default=0),
        there.witness.violations + there.witness.true_violations,
    )


# --- the bound under faults ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Storm:
    """What came of one run through random delays, deaths and duplicates."""

    there: LabLearner
    deaths: int
    repeats: int


def weather(staleness_max: int, steps: int, workers: int, groups_per_step: int) -> Storm:
    """A run in which versions take 0.1 to 2 steps to each worker, workers die, links stand still
    and one submission in five comes twice."""
    period_steps = max(1, min(staleness_max - 1, staleness_max - 3))
    setting = Setting(staleness_max, 0.5, workers, 1.3)
    scale = GROUPS_PER_STEP / groups_per_step
    delays = Random(f"delays/{staleness_max}")
    case = LabCase(
        rules_of(staleness_max, period_steps, groups_per_step),
        tuple(scale * each for each in group_seconds(setting)),
        TRAIN_S,
        leases=LeaseRules(life_s_min=LEASE_LIFE_S / 2),
        transfer_s=lambda host, version: TRAIN_S * delays.uniform(0.1, min(2.0, period_steps)),
    )
    deaths, repeats = [0], [0]

    async def scene(there: LabLearner) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(storm, there, deaths)
            await until_steps(there, steps, 60.0 * TRAIN_S * steps)
            assert there.up is not None
            repeats[0] = there.up.intake.to_record()["book"]["repeated"]
            nursery.cancel_scope.cancel()

    hosts = range(1, 1 + workers)
    there = play(case, scene, dict.fromkeys(hosts, REPEATING), seed=staleness_max)
    return Storm(there, deaths[0], repeats[0])
