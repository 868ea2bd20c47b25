"""The capacity model against the production code in the WAN laboratory.

For each row the planner (`coordinator/model/capacity.py`) says which period κ to publish with, how
busy the learner will be and how old the oldest group; then a learner and its workers run that way,
on volunteers' links. R = 128, T_train = 100 s. A version's size follows from its row's T_bcast; the
broadcast is simulated by itself, and each worker has each version as much later.

    python bench_capacity.py            # both tables, 10^5 groups in the second; an hour
    python bench_capacity.py --quick    # a corner of each
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

import trio
from learner_lab import (
    GROUPS_PER_STEP,
    LEASE_LIFE_S,
    STANDS_IN,
    TRAIN_S,
    lease_rules,
    play,
    rules_of,
    until_steps,
    volunteers,
)

from coordinator.model.capacity import (
    Capacity,
    Form,
    Infeasible,
    Run,
    Worker,
    assess,
    predicted_broadcast,
)
from node.loops.learner import CREDITS_PER_STEP
from node.simulation.faults import REPEATING, storm
from node.simulation.learner import LearnerCase, SimulatedLearner
from swarm.leasing.leases import LeaseRules
from swarm.simulation.weights.broadcasts import BroadcastCase
from swarm.simulation.weights.broadcasts import simulate as broadcast
from swarm.weights.format.artifacts import CHUNK_TARGET_MAX, suggested_chunk_bytes

STALENESS = (2, 3, 6, 11)
BROADCASTS = (0.1, 0.5, 1.0, 2.0)  # steps
WORKERS = (8, 32)
SUPPLY = 1.1  # of what the learner consumes
SPEEDS = (1.3, 1.0, 0.7, 1.0)  # of workers in turn, over their mean
WARM_UP_STEPS = 6
STEPS = 12  # measured, or two periods if that is more
CHUNKS_MAX = 48  # of a simulated broadcast: more cost hours and change little
UTILISATION_WITHIN = 0.03
PATIENCE_S = 1_500.0  # of virtual time for the first steps, after which a row has none


@dataclass(frozen=True, slots=True)
class Setting:
    """One row: S, T_bcast in steps, how many workers and how fast they are together."""

    staleness_max: int
    broadcast_steps: float
    workers: int
    supply: float = SUPPLY


@dataclass(frozen=True, slots=True)
class Row:
    """What was said and what came. `said` is of the period that was used, None: the planner has
    none for it; `why` it would not plan, empty: it does."""

    setting: Setting
    period_steps: int
    said: Capacity | None
    why: str
    broadcast_s: float
    utilisation: float
    staleness_worst: int
    groups: int
    discarded: int
    violations: int

    @property
    def is_off(self) -> bool:
        """Whether the plan was further from what came than the goal allows."""
        if self.said is None or self.why:
            return False
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
        takes_s = predicted_broadcast(planned_run(2, size), planned, size).time_s
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


def plan(setting: Setting) -> tuple[int, Capacity | None, str]:
    """The period, what the model says of it, and why it is none of the planner's."""
    size = version_bytes(setting.workers, setting.broadcast_steps)
    run, workers = planned_run(setting.staleness_max, size), planned_workers(setting, lease_rules())
    best = assess(run, workers, Form.OVERLAPPED)
    if isinstance(best, Capacity):
        return best.period_steps, best, ""
    period_steps = max(1, setting.staleness_max - 1)  # what a learner does unless told otherwise
    said = assess(run, workers, Form.OVERLAPPED, period_steps)
    return period_steps, None if isinstance(said, Infeasible) else said, best.obstacle


def measure(setting: Setting, steps: int = STEPS, warm_up: int = WARM_UP_STEPS) -> Row:
    """Plan a setting and run it."""
    period_steps, said, why = plan(setting)
    times_s = broadcast_s(setting.workers, setting.broadcast_steps)
    steps = max(steps, 2 * period_steps)
    case = LearnerCase(
        rules_of(setting.staleness_max, period_steps, GROUPS_PER_STEP),
        group_seconds(setting),
        TRAIN_S,
        leases=lease_rules(),
        transfer_s=lambda host, version: times_s[host - 1],
    )
    hopeless = said is None

    async def scene(there: SimulatedLearner) -> None:
        limit_s = PATIENCE_S if hopeless else 40.0 * TRAIN_S * (warm_up + steps)
        await until_steps(there, warm_up + steps, limit_s)

    there = play(case, scene)
    counted = there.steps[warm_up:]
    busy_s = sum(step.train_s for step in counted)
    spent_s = busy_s + sum(step.idle_s for step in counted)
    if hopeless:
        busy_s, spent_s = sum(step.train_s for step in there.steps), PATIENCE_S
    first = counted[0].version - 1 if counted else 0
    ages = [age for version, age in there.witness.worst_at.items() if version >= first]
    discarded = there.steps[-1].discarded_total if there.steps else {}
    return Row(
        setting,
        period_steps,
        said,
        why,
        max(times_s),
        busy_s / spent_s if spent_s else 0.0,
        max(ages, default=0),
        there.witness.groups,
        sum(discarded.values()),
        there.witness.violations + there.witness.true_violations,
    )


def print_header() -> None:
    print(
        f"{'S':>3}{'T_bcast':>9}{'workers':>9}{'supply':>8}{'κ':>4}{'lab':>8}"
        f"{'| busy: said':>14}{'came':>8}{'| oldest: said':>16}{'came':>6}"
        f"{'groups':>9}{'thrown':>8}{'over S':>8}"
    )


def print_row(row: Row) -> None:
    setting, said = row.setting, row.said
    busy = "-" if said is None else f"{said.utilisation:.1%}"
    oldest = "-" if said is None else str(said.staleness_worst)
    note = f"  no plan: {row.why}" if row.why else ("  OFF" if row.is_off else "")
    print(
        f"{setting.staleness_max:>3}{setting.broadcast_steps:>9.1f}{setting.workers:>9}"
        f"{setting.supply:>8.1f}{row.period_steps:>4}{row.broadcast_s:>8.1f}{busy:>14}"
        f"{row.utilisation:>8.1%}{oldest:>16}{row.staleness_worst:>6}{row.groups:>9}"
        f"{row.discarded:>8}{row.violations:>8}{note}",
        flush=True,
    )


def settings(quick: bool) -> list[Setting]:
    """The rows. Those with too few workers are there for utilisations that are not 100 %."""
    if quick:
        return [Setting(6, 0.1, 8)]
    rows = [Setting(s, b, n) for n in WORKERS for s in STALENESS for b in BROADCASTS]
    return rows + [Setting(6, 0.5, n, supply) for n in WORKERS for supply in (0.5, 0.8)]


# --- the bound under faults ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Storm:
    """What came of one run through random delays, deaths and duplicates."""

    staleness_max: int
    there: SimulatedLearner
    deaths: int
    repeats: int


def weather(
    staleness_max: int, steps: int, workers: int = 8, groups_per_step: int = GROUPS_PER_STEP
) -> Storm:
    """A run in which versions take 0.1 to 2 steps to each worker, workers die, links stand still
    and one submission in five comes twice."""
    period_steps = max(1, min(staleness_max - 1, staleness_max - 3))
    setting = Setting(staleness_max, 0.5, workers, 1.3)
    scale = GROUPS_PER_STEP / groups_per_step
    delays = Random(f"delays/{staleness_max}")
    case = LearnerCase(
        rules_of(staleness_max, period_steps, groups_per_step),
        tuple(scale * each for each in group_seconds(setting)),
        TRAIN_S,
        leases=LeaseRules(life_s_min=LEASE_LIFE_S / 2),
        transfer_s=lambda host, version: TRAIN_S * delays.uniform(0.1, min(2.0, period_steps)),
    )
    deaths, repeats = [0], [0]

    async def scene(there: SimulatedLearner) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(storm, there, deaths)
            await until_steps(there, steps, 60.0 * TRAIN_S * steps)
            assert there.up is not None
            repeats[0] = there.up.intake.to_record()["book"]["repeated"]
            nursery.cancel_scope.cancel()

    hosts = range(1, 1 + workers)
    there = play(case, scene, dict.fromkeys(hosts, REPEATING), seed=staleness_max)
    return Storm(staleness_max, there, deaths[0], repeats[0])


def print_storm(found: Storm) -> None:
    there, witness = found.there, found.there.witness
    busy_s = TRAIN_S * len(there.steps)
    busy = busy_s / (busy_s + sum(step.idle_s for step in there.steps))
    thrown = ", ".join(f"{why} {n}" for why, n in there.steps[-1].discarded_total.items())
    print(
        f"{found.staleness_max:>3}{len(there.steps):>7}{witness.groups:>9}{found.deaths:>8}"
        f"{found.repeats:>9}{busy:>8.1%}"
        f"{witness.worst:>8}{witness.violations + witness.true_violations:>8}{witness.repeated:>7}"
        f"  {thrown}",
        flush=True,
    )


def print_storms(bounds: Sequence[int], steps: int) -> tuple[int, int]:
    """All runs; groups consumed and violations in them."""
    print(
        f"{'S':>3}{'steps':>7}{'groups':>9}{'deaths':>8}{'repeats':>9}{'busy':>8}{'oldest':>8}"
        f"{'over S':>8}{'twice':>7}  thrown away"
    )
    groups = violations = 0
    for staleness_max in bounds:
        found = weather(staleness_max, steps)
        print_storm(found)
        groups += found.there.witness.groups
        violations += found.there.witness.violations + found.there.witness.true_violations
        violations += found.there.witness.repeated
    return groups, violations


def main() -> int:
    """Parse, run, print. The exit status is 1 where a plan was off or the bound broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a corner of each table")
    parser.add_argument("--only", choices=("model", "storm"), help="one of the tables")
    options = parser.parse_args()
    started_s = time.monotonic()
    print(f"{STANDS_IN}\nR = {GROUPS_PER_STEP}, T_train = {TRAIN_S:.0f} s\n")
    bad = 0
    if options.only != "storm":
        print("What the model says, and what came; T_bcast in steps as planned, in the lab in s")
        print_header()
        rows = []
        for setting in settings(options.quick):
            rows.append(measure(setting, *((6, 4) if options.quick else ())))
            print_row(rows[-1])
        planned = [row for row in rows if not row.why]
        off = sum(row.is_off for row in planned)
        print(f"{len(planned)} plans, {off} off; {sum(row.groups for row in rows)} groups\n")
        bad += off + sum(row.violations for row in rows)
    if options.only != "model":
        print("Random delays of versions, deaths of workers, links that stand still, duplicates")
        bounds, steps = ((6,), 6) if options.quick else (STALENESS, 200)
        groups, violations = print_storms(bounds, steps)
        print(f"{groups} groups consumed, {violations} over the bound or twice")
        bad += violations
    print(f"{time.monotonic() - started_s:.0f} s")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
