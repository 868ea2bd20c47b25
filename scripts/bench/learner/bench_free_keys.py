"""What keys that cost nothing take from a central learner: thirty of them ask for leases and never
deliver, from the learner's first second on, and ten minutes are counted.

Some keep their keys; some take a new key as soon as the old one holds all that it gets, so that
nothing that is remembered of a key holds them back. They ask from one machine with the honest
workers, from one address block, or each from a block of its own. An honest worker comes in the
middle of it. The last row's keys deliver a group each before they hold on to what they get.

    python bench_free_keys.py            # minutes
    python bench_free_keys.py --only "rotating, one machine"

The exit status is 1 where keys that never deliver took more than a fifth of the steps, or the
newcomer's first group was not in by the end.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import trio
from learner_lab import STANDS_IN, lease_rules, play, rules_of, volunteers

from node.simulation.faults import take_and_hold
from node.simulation.learner import LearnerCase, SimulatedLearner
from swarm.simulation.addresses import separate_ips

KEYS = 30
KEYS_EVER = 600  # of those that take new ones; more than they come to use
WORKERS = 6
GROUPS_PER_STEP = 16
STALENESS_MAX = 4
TRAIN_S = 20.0
GROUP_S = 6.0
TRANSFER_S = 2.0
COUNTED_S = 600.0
NEWCOMER_AT_S = 150.0
NEWCOMER = WORKERS  # the last honest host
KEPT_SHARE = 0.8  # of the steps without them: the goal
ONE_MACHINE = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Siege:
    """Who asks without delivering."""

    where: str = "own blocks"  # or "one block", "one machine": the honest workers' too
    rotating: bool = False
    delivers: int = 0  # groups of each key before it holds on
    keys: int = KEYS


SIEGES = {
    "nobody": Siege(keys=0),
    "fixed, own blocks": Siege(),
    "fixed, one block": Siege("one block"),
    "fixed, one machine": Siege("one machine"),
    "rotating, own blocks": Siege(rotating=True),
    "rotating, one block": Siege("one block", rotating=True),
    "rotating, one machine": Siege("one machine", rotating=True),
    "rotating after a group each, one machine": Siege("one machine", rotating=True, delivers=1),
}


@dataclass(frozen=True, slots=True)
class SiegeRow:
    """What came of one siege."""

    name: str
    steps: int
    first_step_s: float | None
    newcomer_s: float | None  # from its start to its first admitted group; None: not by the end
    keys_used: int
    over: int  # groups over the bound that were trained on


def addresses(siege: Siege, honest: int, strangers: int) -> list[str]:
    """The address of each host."""
    if siege.where == "one machine":
        return [ONE_MACHINE] * (honest + strangers)
    apart = list(separate_ips(honest + strangers))
    if siege.where == "one block":
        apart[honest:] = [f"198.18.7.{1 + number % 250}" for number in range(strangers)]
    return apart


# Long: one scene, told in order.
def run_siege(
    name: str, *, counted_s: float = COUNTED_S, begins_at_s: float = 0.0, seed: int = 0
) -> SiegeRow:
    """Run one of `SIEGES`, which begins so long after the first second."""
    siege = SIEGES[name]
    honest = 1 + WORKERS
    strangers = KEYS_EVER if siege.rotating else siege.keys
    case = LearnerCase(
        rules_of(STALENESS_MAX, 2, GROUPS_PER_STEP),
        (GROUP_S,) * (WORKERS + strangers),
        TRAIN_S,
        leases=lease_rules(),
        transfer_s=lambda host, version: TRANSFER_S,
    )
    keys = iter(range(honest, honest + strangers))
    admitted_at: list[float] = []
    first_step: list[float] = []

    async def besiege(there: SimulatedLearner, keys: Iterator[int]) -> None:
        await trio.sleep(begins_at_s)
        for _ in range(siege.keys):
            hold = partial(take_and_hold, rotating=siege.rotating)
            there.nursery.start_soon(hold, there, keys, siege.delivers)

    async def watch(there: SimulatedLearner, started_s: float) -> None:
        newcomer = str(there.world.peer_id(NEWCOMER))
        while True:
            await trio.sleep(1.0)
            now_s = trio.current_time() - started_s
            if there.steps and not first_step:
                first_step.append(now_s)
            assert there.up is not None
            accounts = {each.worker: each for each in there.up.intake.accounts()}
            if newcomer in accounts and accounts[newcomer].admitted and not admitted_at:
                admitted_at.append(now_s - NEWCOMER_AT_S)

    async def scene(there: SimulatedLearner) -> None:
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
    there = play(case, scene, None, seed, volunteers(WORKERS + strangers), ips=ips, at_work=1)
    return SiegeRow(
        name,
        len(there.steps),
        first_step[0] if first_step else None,
        admitted_at[0] if admitted_at else None,
        sum(host >= honest for host in there.transports),
        there.witness.violations,
    )


def print_row(row: SiegeRow) -> None:
    newcomer = "never" if row.newcomer_s is None else f"{row.newcomer_s:.0f} s"
    first = "none" if row.first_step_s is None else f"after {row.first_step_s:.0f} s"
    print(
        f"{row.name:42} {row.steps:3} steps, the first {first:12} newcomer's first group: "
        f"{newcomer:6} keys {row.keys_used:3} over S {row.over}",
        flush=True,
    )


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=tuple(SIEGES), help="one siege, and nobody's")
    options = parser.parse_args()
    print(f"{STANDS_IN}\n{KEYS} keys, {WORKERS} workers, R = {GROUPS_PER_STEP}, {COUNTED_S:g} s\n")
    rows = []
    for name in SIEGES:
        if options.only in (None, name) or name == "nobody":
            rows.append(run_siege(name))
            print_row(rows[-1])
    least = KEPT_SHARE * rows[0].steps
    free = [row for row in rows if not SIEGES[row.name].delivers]
    return int(any(row.steps < least or row.newcomer_s is None or row.over for row in free))


if __name__ == "__main__":
    sys.exit(main())
