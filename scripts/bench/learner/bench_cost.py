"""Cost of a step: training and generating on one machine in turns, or rollouts by rented workers.

The run is that of ECHO-2 (arXiv 2602.02192) as far as it is known: Qwen3-8B, R = 128, 1508 s a
step on 8 A100s that generate and train in turns. Where the learner stays on these and workers
generate, the coordinator chooses the cheapest that suffice from a market of 96, and a queue of
events says how long a step then takes. The same number of steps either way. Everything that is
rented and every byte that leaves is paid for. What is not measured but assumed stands in `Assumed`.

    python bench_cost.py                     # two tables, a minute
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from learner_queue import Queue, QueuedWorker, simulate

from coordinator.model.activation import Choice, cheapest_set
from coordinator.model.capacity import Capacity, Form, Run, Worker, assess

MBIT = 1e6 / 8
GOAL = 0.33


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars an hour and a GB sent, and where that is written."""

    per_h: float
    egress_per_gb: float
    source: str


EGRESS_AWS = 0.09  # first 10 TB a month: egresscost.com/aws; usage.ai, updated 2 June 2026
PRICES = {
    "AWS 8xA100": Price(
        27.44705, EGRESS_AWS, "p4de.24xlarge, us-east-1, on demand: tsaol/aws-gpu, 21 January 2026"
    ),
    "RunPod 8xA100": Price(
        15.12, 0.0, "8x A100 SXM, secure: skypilot-catalog v7/runpod/vms.csv at 0727c2b"
    ),
    "RunPod 5090 spot": Price(
        0.69, 0.0, "deploybase.ai/articles/runpod-gpu-pricing, 10 March 2026"
    ),
    "RunPod 5090": Price(1.22, 0.0, "on demand: same page, 10 March 2026"),
    "RunPod A100 spot": Price(
        1.19, 0.0, "A100 PCIe: skypilot-catalog v7/runpod/vms.csv at 0727c2b"
    ),
    "Vast 5090": Price(0.53, 0.02, "skypilot-catalog v7/vast/vms.csv at 00690e7; egress assumed"),
}  # RunPod takes nothing for bytes either way: docs.runpod.io/pods/pricing


@dataclass(frozen=True, slots=True)
class Assumed:
    """What no price list says.

    The step is a secondary reading of the paper. That 70 % of it is generation is RollPacker's
    figure for synchronous training (arXiv 2509.21009); APRIL's is over 90 % (2509.18521). An RTX
    5090 generates 3802 tokens a second where an A100 generates 3748 (Llama 3.1 8B, vLLM, heavy
    load: compute.hivenet.com). Workers get no credit for not waiting for the longest answer of a
    batch, which machines that take turns do. Deltas are those of BENCHMARKS.md at a rate of 1e-5,
    of a small model. Links, lives on the spot market, starts and failures are guesses of ours.
    """

    step_s: float = 1508.0
    generation_share: float = 0.7
    gpus: int = 8
    groups: int = 128
    of_an_a100: float = 3802 / 3748
    weights_bytes: int = 16_400_000_000
    delta_bytes: tuple[tuple[int, int], ...] = (
        (1, 683_000_000),
        (2, 1_031_000_000),
        (4, 1_492_000_000),
        (8, 2_021_000_000),
    )
    group_bytes: int = 500_000  # 16 completions of a few thousand tokens with log-probs
    learner_up_mbit: float = 1000.0
    up_mbit: float = 300.0
    down_mbit: float = 800.0
    load_s: float = 20.0
    slots: int = 4  # groups at once on one GPU
    failed_share: float = 0.02
    start_s: float = 300.0
    lifetime_s: float = 4 * 3600.0
    staleness_max: int = 6
    margin: float = 1.1
    market: int = 96


def run_of(assumed: Assumed, learner: Price, whole: bool = False) -> Run:
    """The learner when others generate for it."""
    return Run(
        groups_per_step=assumed.groups,
        train_s=(1.0 - assumed.generation_share) * assumed.step_s,
        staleness_max=assumed.staleness_max,
        weights_bytes=assumed.weights_bytes,
        delta_bytes=() if whole else assumed.delta_bytes,
        up_bytes_per_s=assumed.learner_up_mbit * MBIT,
        load_s=assumed.load_s,
        group_bytes=assumed.group_bytes,
        price_per_h=learner.per_h,
        egress_price_per_gb=learner.egress_per_gb,
    )


def workers_of(
    assumed: Assumed, price: Price, speed: float, spot: bool, count: int
) -> list[Worker]:
    """`speed` is how many A100s one is worth."""
    gpu_s = assumed.generation_share * assumed.step_s * assumed.gpus / assumed.groups
    rate = speed / gpu_s
    return [
        Worker(
            f"w{number}",
            groups_per_s=rate,
            generation_s=assumed.slots / rate,
            up_bytes_per_s=assumed.up_mbit * MBIT,
            down_bytes_per_s=assumed.down_mbit * MBIT,
            price_per_h=price.per_h,
            egress_price_per_gb=price.egress_per_gb,
            failed_share=assumed.failed_share,
            start_s=assumed.start_s,
            lifetime_s=assumed.lifetime_s if spot else None,
        )
        for number in range(count)
    ]


def simulated_step_s(run: Run, workers: Sequence[Worker], said: Capacity, slots: int) -> float:
    """What a step takes in the queue. Failures and lives are there as slower generation."""
    queued = [
        QueuedWorker(
            slots,
            each.generation_s * each.groups_per_s / each.admitted_per_s,
            said.broadcast_s,
        )
        for each in workers
    ]
    seen = simulate(
        Queue(
            groups_per_step=run.groups_per_step,
            train_s=run.train_s,
            period_steps=said.period_steps,
            workers=queued,
            inflight_max=said.inflight_groups,
            staleness_max=run.staleness_max,
            jitter=0.2,
            steps=120,
            warm_up_steps=20,
        )
    )
    return seen.step_s


@dataclass(frozen=True, slots=True)
class Compared:
    """Dollars a step, and seconds."""

    label: str
    workers: int
    together: float
    apart: float
    egress: float
    step_s: float
    said: Capacity

    @property
    def saving(self) -> float:
        return 1.0 - self.apart / self.together


def compare(
    label: str,
    assumed: Assumed,
    learner: str,
    rented: str,
    whole: bool = False,
    speed: float | None = None,
) -> Compared:
    """One learner with the cheapest workers of one kind, against the same machine alone."""
    run = run_of(assumed, PRICES[learner], whole)
    speed = assumed.of_an_a100 if speed is None else speed
    market = workers_of(assumed, PRICES[rented], speed, "spot" in rented, assumed.market)
    chosen = cheapest_set(run, market, Form.OVERLAPPED, assumed.margin)
    if not isinstance(chosen, Choice):
        raise SystemExit(f"{label}: {chosen.why}")
    members = market[: len(chosen.names)]  # all are alike
    step_s = simulated_step_s(run, members, chosen.capacity, assumed.slots)
    cost = chosen.capacity.cost
    rent = (cost.learner + cost.workers) * step_s / chosen.capacity.step_s
    together = PRICES[learner].per_h / 3600.0 * assumed.step_s
    apart = rent + cost.egress
    return Compared(label, len(members), together, apart, cost.egress, step_s, chosen.capacity)


def comparisons(assumed: Assumed) -> list[Compared]:
    """The table's rows."""
    a100 = 1.0
    rows = [
        compare("AWS learner, RunPod 5090 spot", assumed, "AWS 8xA100", "RunPod 5090 spot"),
        compare("AWS learner, Vast 5090", assumed, "AWS 8xA100", "Vast 5090"),
        compare("RunPod learner, RunPod 5090 spot", assumed, "RunPod 8xA100", "RunPod 5090 spot"),
        compare("  5090 on demand", assumed, "RunPod 8xA100", "RunPod 5090"),
        compare("  A100 spot", assumed, "RunPod 8xA100", "RunPod A100 spot", speed=a100),
        compare(
            "AWS learner, whole versions", assumed, "AWS 8xA100", "RunPod 5090 spot", whole=True
        ),
    ]
    for share in (0.5, 0.9):
        other = replace(assumed, generation_share=share)
        label = f"RunPod 5090 spot, {share:.0%} generation"
        rows.append(compare(label, other, "RunPod 8xA100", "RunPod 5090 spot"))
    slow = compare(
        "RunPod 5090 spot, half as fast",
        assumed,
        "RunPod 8xA100",
        "RunPod 5090 spot",
        speed=assumed.of_an_a100 / 2,
    )
    return [*rows, slow]


def print_comparisons(rows: Sequence[Compared]) -> None:
    print(
        f"{'':<36}{'workers':>8}{'κ':>4}{'T_bcast':>9}{'oldest':>8}{'step s':>8}"
        f"{'together $':>12}{'apart $':>9}{'egress $':>10}{'saved':>8}"
    )
    for row in rows:
        print(
            f"{row.label:<36}{row.workers:>8}{row.said.period_steps:>4}{row.said.broadcast_s:>9.1f}"
            f"{row.said.staleness_worst:>8}{row.step_s:>8.1f}{row.together:>12.3f}{row.apart:>9.3f}"
            f"{row.egress:>10.4f}{row.saving:>8.1%}"
        )


def print_sizes(assumed: Assumed, counts: Sequence[int]) -> None:
    """What a step costs over the number of workers, in both forms, and where it is least."""
    run = run_of(assumed, PRICES["RunPod 8xA100"])
    price = PRICES["RunPod 5090 spot"]
    print(
        f"{'workers':>7}{'T_bcast':>9}{'learner':>9}{'in queue':>10}{'step s':>8}{'$/step':>9}",
        end="",
    )
    print(f"{'| paused: T_bcast':>20}{'learner':>9}{'$/step':>9}")
    costs: dict[int, float] = {}
    for count in counts:
        workers = workers_of(assumed, price, assumed.of_an_a100, True, count)
        found = assess(run, workers, Form.OVERLAPPED)
        whole = replace(run, delta_bytes=())
        paused = assess(whole, workers, Form.PAUSED)
        if not isinstance(found, Capacity):
            print(f"{count:>7}  {found.why}")
            continue
        step_s = simulated_step_s(run, workers, found, assumed.slots)
        rent = (found.cost.learner + found.cost.workers) * step_s / found.step_s
        costs[count] = rent + found.cost.egress
        print(
            f"{count:>7}{found.broadcast_s:>9.1f}{found.utilisation:>9.1%}"
            f"{run.train_s / step_s:>10.1%}{step_s:>8.1f}{costs[count]:>9.3f}",
            end="",
        )
        if isinstance(paused, Capacity):
            print(f"{paused.broadcast_s:>20.1f}{paused.utilisation:>9.1%}{paused.cost.total:>9.3f}")
        else:
            print(f"  {paused.obstacle}")
    best = min(costs, key=lambda count: costs[count])
    print(f"cheapest with {best}; one more costs ${price.per_h / 3600 * run.train_s:.3f} a step")


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--generation-share", type=float, default=Assumed().generation_share)
    options = parser.parse_args()
    assumed = replace(Assumed(), generation_share=options.generation_share)
    print("Prices")
    for name, price in PRICES.items():
        print(
            f"  {name:<18}{price.per_h:>8.2f} $/h{price.egress_per_gb:>6.2f} $/GB  {price.source}"
        )
    rows = comparisons(assumed)
    print("\nDollars a step: one machine in turns, or with workers; RunPod 5090s where not said")
    print_comparisons(rows)
    print("\nRunPod 5090 spot by number; at the right the paper's form with whole versions")
    needed = assumed.generation_share * assumed.gpus / (1.0 - assumed.generation_share)
    middle = math.ceil(needed / assumed.of_an_a100)
    print_sizes(assumed, sorted({*range(4, 44, 4), middle, middle + 1, middle + 2}))
    same = next(row for row in rows if row.label.startswith("RunPod learner"))
    print(f"\nGoal: {GOAL:.0%} cheaper. With one provider's list prices: {same.saving:.1%}.")
    return 0 if same.saving >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
