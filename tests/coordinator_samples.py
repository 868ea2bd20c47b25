"""Learners and workers for tests of the coordinator."""

from random import Random

from coordinator.model.capacity import Run, Worker

MB = 1_000_000


def run_of(groups: int = 64, train_s: float = 100.0, staleness_max: int = 6, **changes) -> Run:
    """A learner with a gigabit uplink and versions of 100 MB."""
    settings = {"weights_bytes": 100 * MB, "up_bytes_per_s": 125.0 * MB, "price_per_h": 10.0}
    return Run(groups, train_s, staleness_max, **{**settings, **changes})


def worker(
    name: str, share: float, price_per_h: float = 1.0, run: Run | None = None, **changes
) -> Worker:
    """One that generates `share` of what the run needs."""
    run = run or run_of()
    settings = {
        "groups_per_s": share * run.groups_per_step / run.train_s,
        "generation_s": 40.0,
        "up_bytes_per_s": 12.5 * MB,
        "down_bytes_per_s": 60.0 * MB,
        "price_per_h": price_per_h,
    }
    return Worker(name, **{**settings, **changes})


def fleet(seed: int, count: int, supply: float = 2.5, run: Run | None = None) -> list[Worker]:
    """Random workers that together bring `supply` times what the run needs."""
    rng = Random(seed)
    parts = [rng.uniform(0.3, 1.7) for _ in range(count)]
    return [
        worker(
            f"w{number}",
            supply * part / sum(parts),
            part * rng.uniform(0.5, 2.0),
            run,
            failed_share=rng.choice((0.0, 0.05)),
            start_s=rng.uniform(10.0, 300.0),
            lifetime_s=rng.choice((None, 7200.0)),
        )
        for number, part in enumerate(parts)
    ]
