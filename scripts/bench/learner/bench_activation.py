"""Workers chosen by `swarm-coordinator` against the best of all sets, on random fleets.

Eight to fourteen workers of different speed, price, reliability, market and link; a learner with 64
to 256 groups a step; both forms of the capacity model. The optimum is found by looking at all sets,
with code of its own. Also whether a chosen set ever breaks the requirement, and what plain greedy
costs: by price for each admissible group until it suffices, and no more.

    python bench_activation.py               # 200 fleets
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from random import Random

from exact_activation import EXACT_WORKERS_MAX, exact, set_cost

from coordinator.model.activation import Choice, cheapest_set
from coordinator.model.capacity import Form, Run, Worker

MARGIN = 1.1
MBIT = 1e6 / 8
LINKS = ((1000, 1000), (300, 300), (100, 500), (20, 200), (12, 12))  # Mbit/s up and down


def fleet(seed: int) -> tuple[Run, list[Worker]]:
    """A random learner and its workers: together 1.2 to 4 times what it needs."""
    rng = Random(seed)
    train_s = rng.uniform(40.0, 400.0)
    groups = rng.choice((64, 128, 256))
    full_bytes = rng.choice((1, 8, 16)) * 10**9
    run = Run(
        groups_per_step=groups,
        train_s=train_s,
        staleness_max=rng.choice((3, 4, 6, 8)),
        weights_bytes=full_bytes,
        delta_bytes=((1, full_bytes // 40), (4, full_bytes // 18), (8, full_bytes // 13)),
        up_bytes_per_s=rng.choice((300, 1000)) * MBIT,
        load_s=rng.uniform(0.0, 10.0),
        group_bytes=rng.choice((20_000, 200_000)),
        price_per_h=15.0,
        egress_price_per_gb=rng.choice((0.0, 0.09)),
    )
    count = rng.randint(8, EXACT_WORKERS_MAX)
    supply = rng.uniform(1.2, 4.0) * groups / train_s
    parts = [rng.uniform(0.2, 1.8) for _ in range(count)]
    workers = []
    for number, part in enumerate(parts):
        up, down = rng.choice(LINKS)
        spot = rng.random() < 0.5
        rate = supply * part / sum(parts)
        workers.append(
            Worker(
                name=f"w{number:02d}",
                groups_per_s=rate,
                generation_s=rng.uniform(0.1, 0.8) * train_s,
                up_bytes_per_s=up * MBIT,
                down_bytes_per_s=down * MBIT,
                # dollars for a rate, as GPUs are; and then everybody asks something else
                price_per_h=rate / supply * count * 0.7 * rng.uniform(0.5, 2.0),
                egress_price_per_gb=rng.choice((0.0, 0.0, 0.02, 0.09)),
                failed_share=rng.choice((0.0, 0.02, 0.1)),
                start_s=rng.uniform(60.0, 600.0),
                lifetime_s=rng.uniform(1800.0, 36000.0) if spot else None,
                relayed=rng.random() < 0.2,
            )
        )
    return run, workers


def plain_greedy(run: Run, workers: Sequence[Worker], form: Form) -> float:
    """Dollars an hour of the first set, by price for each admissible group, that suffices."""
    ranked = sorted(workers, key=lambda each: each.price_per_h / each.admitted_per_s)
    for count in range(1, len(ranked) + 1):
        rate = sum(each.admitted_per_s for each in ranked[:count])
        if rate >= MARGIN * run.groups_per_step / run.train_s:
            cost = set_cost(run, ranked[:count], form, MARGIN, rate)
            if cost < float("inf"):
                return cost
    return float("inf")


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fleets", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{options.fleets} fleets of 8 to {EXACT_WORKERS_MAX} workers, supply {MARGIN} times R/T")
    print(
        f"{'form':<12}{'solvable':>9}{'mean':>9}{'p95':>9}{'max':>9}{'optimal':>9}"
        f"{'broken':>8}{'missed':>8}{'plain greedy: mean, failed':>30}"
    )
    good = True
    for form in Form:
        ratios, greedy, missed, broken = [], [], 0, 0
        for seed in range(options.first_seed, options.first_seed + options.fleets):
            run, workers = fleet(seed)
            best = exact(run, workers, form, MARGIN)
            chosen = cheapest_set(run, workers, form, MARGIN)
            if not best.names:
                broken += isinstance(chosen, Choice)  # there is none, and it says there is
                continue
            if not isinstance(chosen, Choice):
                missed += 1
                continue
            members = [each for each in workers if each.name in chosen.names]
            rate = sum(each.admitted_per_s for each in members)
            cost = set_cost(run, members, form, MARGIN, rate)
            broken += cost == float("inf")
            ratios.append(cost / best.cost_per_h)
            greedy.append(plain_greedy(run, workers, form) / best.cost_per_h)
        finite = [each for each in greedy if each < float("inf")]
        print(
            f"{form:<12}{len(ratios) + missed:>9}{statistics.mean(ratios):>9.4f}"
            f"{sorted(ratios)[int(0.95 * len(ratios))]:>9.4f}{max(ratios):>9.4f}"
            f"{sum(each < 1.0 + 1e-9 for each in ratios):>9}{broken:>8}{missed:>8}"
            f"{statistics.mean(finite):>22.4f}{len(greedy) - len(finite):>8}"
        )
        good = good and not broken and not missed and statistics.mean(ratios) <= 1.03
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
