"""What goes wrong around a central learner: what its user sees, how old what it trained on was, and
whether training goes on.

Each fault hits a learner and ten workers on volunteers' links, S = 6, after some steps; a liar is
one of the ten, from the start. What was trained on is judged by the versions of all its tokens
against the learner's at that time, and by the versions that really made it, which a liar hides.

    python bench_learner_faults.py            # R = 32; minutes
    python bench_learner_faults.py --quick    # R = 16, two faults

The exit status is 1 where a group over the bound was trained on, or training did not go on. What a
liar had believed is counted and does not change it: that is for the check of log-probs to lower.
"""

import argparse
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio
from learner_lab import STANDS_IN, TRAIN_S, lease_rules, play, rules_of, until_steps

from node.simulation.faults import LIARS, REPEATING, come_back
from node.simulation.learner import LEARNER, Actor, LearnerCase, SimulatedLearner
from swarm.leasing.leases import LeaseRules

WORKERS = 10
STALENESS_MAX = 6
PERIOD_STEPS = 4  # what the planner chooses here
SUPPLY = 1.5
TRANSFER_S = 0.5 * TRAIN_S
FAULT_STEP = 6
STEPS_AFTER = 14
AWAY_S = 60.0  # how long what was killed is away
GROUPS_PER_STEP = 32
KILLED_SHARE = 0.3
RESCORED_SHARE = 0.1
LIAR = 1

Fault = Callable[[SimulatedLearner], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class FaultRow:
    """What came of one fault. Ages in steps; `over` by what groups say, `truly_over` by what made
    them."""

    fault: str
    seen: str
    groups: int
    worst: int
    over: int
    worst_true: int
    truly_over: int
    believed: int  # groups that were made by an older version than they said
    twice: int
    steps_after: int
    goes_on: bool  # as many steps came after the fault as were waited for

    @property
    def is_good(self) -> bool:
        """Nothing broke the bound, and training went on."""
        return not (self.over or self.twice) and self.goes_on


# --- faults --------------------------------------------------------------------------------------


async def nothing(there: SimulatedLearner) -> str:
    """No fault: what the others are compared with."""
    await trio.lowlevel.checkpoint()
    return "nothing"


async def learner_killed(there: SimulatedLearner) -> str:
    """In the middle of a step; it comes back on its newest checkpoint."""
    await trio.sleep(TRAIN_S / 2)
    before = there.steps[-1].step
    await there.kill(LEARNER)
    await trio.sleep(AWAY_S)
    await there.start(LEARNER)
    return _resumed(there, before)


async def checkpoint_lost(there: SimulatedLearner) -> str:
    """The same, and the checkpoint of what was published last is gone."""
    await trio.sleep(TRAIN_S / 2)
    before, published = there.steps[-1].step, there.steps[-1].published_version
    await there.kill(LEARNER)
    for saved in (there.directory / f"host{LEARNER}" / "checkpoints").glob("round-*"):
        if int(saved.name.removeprefix("round-")) >= published - 1:
            saved.rename(saved.with_name(f"damaged-{saved.name}"))
    await trio.sleep(AWAY_S)
    await there.start(LEARNER)
    return _resumed(there, before)


def _resumed(there: SimulatedLearner, before: int) -> str:
    assert there.up is not None
    return f"killed after step {before}, resumes at version {there.up.learner.version}"


async def workers_killed(there: SimulatedLearner) -> str:
    """30 % of them each minute, each away for a minute, to the end of the run."""
    rng, away = there.world.rng("killer"), set[int]()

    async def kill_on() -> None:
        async with trio.open_nursery() as nursery:
            while True:
                hosts = [h for h in there.transports if h != LEARNER and h not in away]
                for victim in rng.sample(hosts, min(len(hosts), round(KILLED_SHARE * WORKERS))):
                    away.add(victim)
                    await there.kill(victim)
                    nursery.start_soon(come_back, there, victim, AWAY_S, away)
                await trio.sleep(60.0)

    there.nursery.start_soon(kill_on)
    await trio.lowlevel.checkpoint()
    return "3 of 10 workers killed each minute"


def _thrown(there: SimulatedLearner) -> str:
    counts = there.steps[-1].discarded_total
    return ", ".join(f"{why} {count}" for why, count in counts.items()) or "nothing"


def _repeated(there: SimulatedLearner) -> int:
    assert there.up is not None
    count: int = there.up.intake.to_record()["book"]["repeated"]
    return count


def _liar(there: SimulatedLearner) -> str:
    """What the learner shows of a liar, at the end."""
    assert there.up is not None
    liar = there.world.peer_id(LIAR)
    held = there.up.gater.ledger.of(liar).rejected
    offences = ", ".join(f"{reason} {count}" for reason, count in held.items()) or "nothing"
    banned = "banned" if there.up.gater.is_banned(liar) else "not banned"
    return f"held against it: {offences}; {banned} at the end"


FAULTS: dict[str, tuple[Fault, Actor | None]] = {
    "none": (nothing, None),
    "learner killed": (learner_killed, None),
    "learner killed, newest checkpoint lost": (checkpoint_lost, None),
    "30 % of workers killed every minute": (workers_killed, None),
    "submissions twice, answers lost": (nothing, REPEATING),
    **{f"one lies about {what}": (nothing, actor) for what, actor in LIARS.items()},
}
QUICK = ("learner killed", "one lies about log-probs")


def run_fault(
    name: str,
    groups_per_step: int = GROUPS_PER_STEP,
    fault_step: int = FAULT_STEP,
    steps: int = STEPS_AFTER,
) -> FaultRow:
    """Run one of `FAULTS`."""
    fault, actor = FAULTS[name]
    group_s = WORKERS * TRAIN_S / groups_per_step / SUPPLY
    leases = lease_rules()
    case = LearnerCase(
        rules_of(STALENESS_MAX, PERIOD_STEPS, groups_per_step, rescored_share=RESCORED_SHARE),
        (group_s,) * WORKERS,
        TRAIN_S,
        leases=LeaseRules(life_s_min=leases.life_s_min / 2),
        transfer_s=lambda host, version: TRANSFER_S,
        rescores=True,
    )
    actors = dict.fromkeys(range(1, 1 + WORKERS), actor) if actor is REPEATING else {LIAR: actor}
    seen, before = [""], [0]

    async def scene(there: SimulatedLearner) -> None:
        await until_steps(there, fault_step, 100.0 * TRAIN_S * fault_step)
        seen[0] = await fault(there)
        before[0] = len(there.steps)
        await until_steps(there, before[0] + steps, 100.0 * TRAIN_S * steps)
        if actor is REPEATING:
            seen[0] = f"{_repeated(there)} submissions were answered before"
        elif actor is not None:
            seen[0] = _liar(there)
        if there.steps:
            seen[0] += f"; thrown away: {_thrown(there)}"

    there = play(case, scene, {h: each for h, each in actors.items() if each is not None})
    witness = there.witness
    return FaultRow(
        name,
        seen[0],
        witness.groups,
        witness.worst,
        witness.violations,
        witness.worst_true,
        witness.true_violations,
        witness.false_groups,
        witness.repeated,
        len(there.steps) - before[0],
        len(there.steps) - before[0] >= steps,
    )


def print_row(row: FaultRow) -> None:
    print(
        f"{row.fault}\n    {row.seen}\n    {row.groups} groups, oldest {row.worst}, over S "
        f"{row.over} | lies believed {row.believed}, truly oldest "
        f"{row.worst_true}, over S {row.truly_over} | twice {row.twice}"
        f" | {row.steps_after} steps after{'' if row.is_good else '  BAD'}",
        flush=True,
    )


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="16 groups a step, two faults")
    parser.add_argument("--only", choices=tuple(FAULTS), help="one fault")
    options = parser.parse_args()
    print(f"{STANDS_IN}\nLog-probs are those of a stand-in that drifts by 0.02 a version.\n")
    names = [options.only] if options.only else QUICK if options.quick else FAULTS
    rows = []
    for name in names:
        rows.append(run_fault(name, 16 if options.quick else GROUPS_PER_STEP))
        print_row(rows[-1])
    return int(not all(row.is_good for row in rows))


if __name__ == "__main__":
    sys.exit(main())
