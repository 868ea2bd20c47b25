"""What keys that cost nothing take from a central learner: thirty of them ask for leases and never
deliver.

Some keep their keys; some take a new key as soon as the old one holds all that it gets, so that
nothing that is remembered of a key holds them back. They ask from one machine with the honest
workers, or each from a block of its own. An honest worker comes in the middle of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import trio

from swarm.simulation.links import separate_ips
from tests.simulation.lab_learner import LabCase, LabLearner
from tests.simulation.learner_lab import lease_rules, play, rules_of, volunteers
from tests.simulation.worker_faults import take_and_hold

KEYS = 30
KEYS_EVER = 600  # of those that take new ones; more than they come to use
WORKERS = 6
GROUPS_PER_STEP = 16
STALENESS_MAX = 4
TRAIN_S = 20.0
GROUP_S = 6.0
TRANSFER_S = 2.0
NEWCOMER_AT_S = 150.0
NEWCOMER = WORKERS  # the last honest host
ONE_MACHINE = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Siege:
    """Who asks without delivering."""

    on_one_machine: bool = False  # the honest workers' too; else each in a block of its own
    rotating: bool = False
    keys: int = KEYS


SIEGES = {
    "nobody": Siege(keys=0),
    "fixed, own blocks": Siege(),
    "rotating, one machine": Siege(on_one_machine=True, rotating=True),
}


@dataclass(frozen=True, slots=True)
class SiegeRow:
    """What came of one siege."""

    steps: int
    first_step_s: float | None
    newcomer_s: float | None  # from its start to its first admitted group; None: not by the end
    over: int  # groups over the bound that were trained on


def addresses(siege: Siege, honest: int, strangers: int) -> list[str]:
    """The address of each host."""
    if siege.on_one_machine:
        return [ONE_MACHINE] * (honest + strangers)
    return list(separate_ips(honest + strangers))


# Long: one scene, told in order.
def run_siege(name: str, *, counted_s: float, begins_at_s: float = 0.0) -> SiegeRow:
    """Run one of `SIEGES`, which begins so long after the first second."""
    siege = SIEGES[name]
    honest = 1 + WORKERS
    strangers = KEYS_EVER if siege.rotating else siege.keys
    case = LabCase(
        rules_of(STALENESS_MAX, 2, GROUPS_PER_STEP),
        (GROUP_S,) * (WORKERS + strangers),
        TRAIN_S,
        leases=lease_rules(),
        transfer_s=lambda host, version: TRANSFER_S,
    )
    keys = iter(range(honest, honest + strangers))
    admitted_at: list[float] = []
    first_step: list[float] = []

    async def besiege(there: LabLearner, keys: Iterator[int]) -> None:
        await trio.sleep(begins_at_s)
        for _ in range(siege.keys):
            hold = partial(take_and_hold, rotating=siege.rotating)
            there.nursery.start_soon(hold, there, keys)

    async def watch(there: LabLearner, started_s: float) -> None:
        newcomer = str(there.world.peer_id(NEWCOMER))
        while True:
            await trio.sleep(1.0)
            now_s = trio.current_time() - started_s
            if there.steps and not first_step:
                first_step.append(now_s)
            assert there.up is not None
            accounts = {each.worker: each for each in there.up.intake.book.accounts()}
            if newcomer in accounts and accounts[newcomer].known.admitted and not admitted_at:
                admitted_at.append(now_s - NEWCOMER_AT_S)

    async def scene(there: LabLearner) -> None:
        started_s = trio.current_time()
        there.nursery.start_soon(watch, there, started_s)
        there.nursery.start_soon(besiege, there, keys)
        await trio.sleep(0.5)
        for host in range(1, NEWCOMER):
            await there.start(host)
        await trio.sleep_until(started_s + NEWCOMER_AT_S)
        await there.start(NEWCOMER)
        await trio.sleep_until(started_s + counted_s)

    ips = addresses(siege, honest, strangers)
    there = play(case, scene, None, 0, volunteers(WORKERS + strangers), ips=ips, at_work=1)
    return SiegeRow(
        len(there.steps),
        first_step[0] if first_step else None,
        admitted_at[0] if admitted_at else None,
        there.witness.violations,
    )
