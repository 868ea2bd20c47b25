"""The long adversarial search: one simulated swarm for each seed, every one with faults of its own.

    make chaos SEEDS=1000 FIRST_SEED=0

Prints each seed whose run broke a rule of `swarm/simulation/invariants.py` or fell short of
the floor of `swarm/simulation/delivery.py`, with the line that replays it. Where a seed
failed, it belongs into tests/simulation/chaos_cases.toml once its cause is found.
"""

import argparse
import multiprocessing
import sys
import time
from typing import NamedTuple


class Outcome(NamedTuple):
    """What one seed came to."""

    seed: int
    failure: str  # the broken rules and the replay line; empty: all held
    delivery: float  # of what was due during the faults
    due: int
    reach_pairs: int  # judged after healing
    bans: int
    faults: int
    virtual_s: float
    real_s: float


def run_seed(seed: int) -> Outcome:
    """Simulate one seed."""
    from node.simulation.scenario import CHAOS
    from node.simulation.simulate import replay_of, simulate

    replay = replay_of(CHAOS, seed)
    try:
        report = simulate(replay)
    except Exception as error:  # noqa: BLE001 - a run that ends by itself is a finding like any other
        return Outcome(seed, f"  ended by {error!r}\n  replay: {replay.line}", *[0] * 7)
    told = [str(violation) for violation in report.violations[:5]] + report.shortfalls
    failure = ""
    if told:
        count = report.violation_count + len(report.shortfalls)
        failure = "\n".join(["", *told, f"{count} in all; replay: {replay.line}"])
    return Outcome(
        seed,
        failure.replace("\n", "\n  ").strip("\n"),
        report.deliveries.ratio,
        report.deliveries.due,
        report.reach_pairs,
        report.bans.total(),
        report.faults.total() + report.lies.total(),
        report.virtual_s,
        report.real_s,
    )


def main() -> int:
    """Parse, run, print; 1 if any seed failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    if options.seeds < 1 or options.first_seed < 0 or options.processes < 1:
        parser.error("--seeds and --processes must be at least 1, --first-seed at least 0")
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    started, outcomes = time.monotonic(), []
    with multiprocessing.Pool(options.processes) as pool:
        for outcome in pool.imap_unordered(run_seed, seeds):
            outcomes.append(outcome)
            if outcome.failure:
                print(f"seed {outcome.seed} broke rules:\n{outcome.failure}", flush=True)
            if len(outcomes) % 10 == 0 or len(outcomes) == len(seeds):
                minutes = (time.monotonic() - started) / 60
                print(f"{len(outcomes)} of {len(seeds)} seeds, {minutes:.1f} min", flush=True)
    failed = sorted(outcome.seed for outcome in outcomes if outcome.failure)
    virtual_h = sum(outcome.virtual_s for outcome in outcomes) / 3600
    due = sum(outcome.due for outcome in outcomes)
    idle = sum(not outcome.due for outcome in outcomes)
    worst = min(outcomes, key=lambda outcome: outcome.delivery)
    print(f"\nseeds            {len(seeds)} from {seeds[0]}")
    print(f"virtual hours    {virtual_h:.1f} of swarms")
    print(f"faults and lies  {sum(outcome.faults for outcome in outcomes)}")
    print(f"bans             {sum(outcome.bans for outcome in outcomes)}")
    print(f"judged           {due} deliveries during faults; none in {idle} seeds")
    print(f"                 {sum(outcome.reach_pairs for outcome in outcomes)} after healing")
    print(f"worst delivery   {100 * worst.delivery:.1f} % (seed {worst.seed})")
    print(f"failed           {', '.join(map(str, failed)) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
