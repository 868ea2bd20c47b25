"""What goes wrong around a central learner: what its user sees, how old what it trained on was, and
whether training goes on.

Each fault hits a learner and ten workers on volunteers' links, S = 6, after some steps; a liar is
one of the ten, from the start. What was trained on is judged by the versions of all its tokens
against the learner's at that time, and by the versions that really made it, which a liar hides.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from node.simulation.simulated_learner import LEARNER
from swarm.leases.lease_table import LeaseRules
from tests.simulation.lab_learner import Actor, LabCase, LabLearner
from tests.simulation.learner_lab import TRAIN_S, lease_rules, play, rules_of, until_steps
from tests.simulation.worker_faults import LIARS

WORKERS = 10
STALENESS_MAX = 6
PERIOD_STEPS = 4  # what the planner chooses here
SUPPLY = 1.5
TRANSFER_S = 0.5 * TRAIN_S
AWAY_S = 60.0  # how long what was killed is away
RESCORED_SHARE = 0.1
LIAR = 1

Fault = Callable[[LabLearner], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class FaultRow:
    """What came of one fault. Ages in steps; `over` by what groups say, `truly_over` by what made
    them."""

    seen: str
    over: int
    truly_over: int
    believed: int  # groups that were made by an older version than they said
    twice: int
    goes_on: bool  # as many steps came after the fault as were waited for

    @property
    def is_good(self) -> bool:
        """Nothing broke the bound, and training went on."""
        return not (self.over or self.twice) and self.goes_on


# --- faults --------------------------------------------------------------------------------------


async def nothing(there: LabLearner) -> str:
    """No fault: what the others are compared with."""
    await trio.lowlevel.checkpoint()
    return "nothing"


async def learner_killed(there: LabLearner) -> str:
    """In the middle of a step; it comes back on its newest checkpoint."""
    await trio.sleep(TRAIN_S / 2)
    before = there.steps[-1].step
    await there.kill(LEARNER)
    await trio.sleep(AWAY_S)
    await there.start(LEARNER)
    return _resumed(there, before)


def _resumed(there: LabLearner, before: int) -> str:
    assert there.up is not None
    return f"killed after step {before}, resumes at version {there.up.learner.version}"


def _thrown(there: LabLearner) -> str:
    counts = there.steps[-1].discarded_total
    return ", ".join(f"{why} {count}" for why, count in counts.items()) or "nothing"


def _liar(there: LabLearner) -> str:
    """What the learner shows of a liar, at the end."""
    assert there.up is not None
    liar = there.world.peer_id(LIAR)
    held = there.up.gater.ledger.account(liar).rejected
    offences = ", ".join(f"{reason} {count}" for reason, count in held.items()) or "nothing"
    banned = "banned" if there.up.gater.is_banned(liar) else "not banned"
    return f"held against it: {offences}; {banned} at the end"


FAULTS: dict[str, tuple[Fault, Actor | None]] = {
    "learner killed": (learner_killed, None),
    **{f"one lies about {what}": (nothing, actor) for what, actor in LIARS.items()},
}


def run_fault(name: str, groups_per_step: int, *, fault_step: int, steps: int) -> FaultRow:
    """Run one of `FAULTS`."""
    fault, actor = FAULTS[name]
    group_s = WORKERS * TRAIN_S / groups_per_step / SUPPLY
    leases = lease_rules()
    case = LabCase(
        rules_of(STALENESS_MAX, PERIOD_STEPS, groups_per_step, rescored_share=RESCORED_SHARE),
        (group_s,) * WORKERS,
        TRAIN_S,
        leases=LeaseRules(life_s_min=leases.life_s_min / 2),
        transfer_s=lambda host, version: TRANSFER_S,
        rescores=True,
    )
    seen, before = [""], [0]

    async def scene(there: LabLearner) -> None:
        await until_steps(there, fault_step, 100.0 * TRAIN_S * fault_step)
        seen[0] = await fault(there)
        before[0] = len(there.steps)
        await until_steps(there, before[0] + steps, 100.0 * TRAIN_S * steps)
        if actor is not None:
            seen[0] = _liar(there)
        if there.steps:
            seen[0] += f"; thrown away: {_thrown(there)}"

    there = play(case, scene, None if actor is None else {LIAR: actor})
    witness = there.witness
    return FaultRow(
        seen[0],
        witness.violations,
        witness.true_violations,
        witness.false_groups,
        witness.repeated,
        len(there.steps) - before[0] >= steps,
    )
