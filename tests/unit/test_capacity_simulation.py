"""The capacity model against a queue of events that knows nothing of it.

Utilisation within three points, the worst staleness exact or one above: where workers suffice in
both forms, where they do not in the overlapped one. Planted wrong formulas do not get through.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest

from coordinator.model.capacity import Capacity, Form, Run, Worker, assess
from tests.unit import learner_queue

GROUPS, TRAIN_S = 24, 100.0
CASES = 30
UTILISATION_WITHIN = 0.03
PAUSED_SHARE_MAX = 0.8  # of a period; where pauses are nearly all of it, steps come in bursts


@dataclass(frozen=True)
class Case:
    run: Run
    workers: tuple[Worker, ...]
    queued: tuple[object, ...]
    said: Capacity


def case(seed: int, form: Form, supply: float, spread: float = 0.4) -> Case | None:
    """A random setting with `supply` times the required rate; None where it is infeasible.

    Links are so fast that a broadcast takes `load_s`; in the queue the last worker has its weights
    then, and others up to `spread` of that earlier.
    """
    rng = Random(f"{seed}/{form}")
    period_steps = rng.choice((1, 2, 3, 5, 8))
    load_s = rng.uniform(0.1, 2.0) * TRAIN_S
    if load_s >= PAUSED_SHARE_MAX * period_steps * TRAIN_S:
        return None
    count, generation_s = rng.choice((4, 8)), rng.uniform(0.1, 1.8) * TRAIN_S
    paused_s = load_s if form is Form.PAUSED else 0.0
    required = period_steps * GROUPS / (period_steps * TRAIN_S - paused_s)
    slots = math.ceil(supply * required * generation_s / count)
    if supply < 1:
        slots = max(1, math.floor(supply * required * generation_s / count))
    times = [generation_s * rng.uniform(0.8, 1.0) for _ in range(count)]
    workers = tuple(
        Worker(f"w{number}", slots / time_s, time_s, 1e12, 1e12)
        for number, time_s in enumerate(times)
    )
    run = Run(GROUPS, TRAIN_S, 60, 1000, 1e12, latency_s=0.0, load_s=load_s)
    said = assess(run, workers, form, period_steps)
    assert isinstance(said, Capacity)
    arrivals = [load_s * (1.0 - spread * rng.random()) for _ in range(count - 1)] + [load_s]
    queued = tuple(
        learner_queue.QueuedWorker(slots, time_s, arrival_s)
        for time_s, arrival_s in zip(times, arrivals, strict=True)
    )
    return Case(run, workers, queued, said)


def simulate(found: Case, jitter: float = 0.0, steps: int = 200):
    return learner_queue.simulate(
        learner_queue.Queue(
            groups_per_step=GROUPS,
            train_s=TRAIN_S,
            period_steps=found.said.period_steps,
            workers=found.queued,
            inflight_max=found.said.inflight_groups,
            paused=found.said.form is Form.PAUSED,
            jitter=jitter,
            steps=steps,
        )
    )


def cases(form: Form, supply: float, spread: float = 0.4) -> list[Case]:
    found = [case(seed, form, supply, spread) for seed in range(CASES)]
    return [each for each in found if each is not None]


Formula = Callable[[Case], int]


def as_said(found: Case) -> int:
    return found.said.staleness_worst


def without_last_wait(found: Case) -> int:
    """Planted: a finished group is consumed at once, so nothing waits for the next step."""
    generation_s = max(each.generation_s for each in found.workers)
    steps = (found.said.broadcast_s + generation_s) / found.said.step_s
    return found.said.period_steps - 1 + math.ceil(steps)


def rounded_down(found: Case) -> int:
    """Planted: part of a step does not count."""
    turns = found.said.inflight_groups / GROUPS
    return found.said.period_steps - 1 + math.floor(found.said.broadcast_s / TRAIN_S + turns)


def misses(found: list[Case], formula: Formula) -> int:
    """In how many cases a formula is neither exact nor one above."""
    return sum(formula(each) - simulate(each).staleness_worst not in (0, 1) for each in found)


@pytest.mark.parametrize(
    ("form", "supply"),
    [(Form.OVERLAPPED, 1.1), (Form.PAUSED, 1.1), (Form.OVERLAPPED, 2.0), (Form.OVERLAPPED, 0.6)],
)
def test_the_worst_staleness_is_exact_or_one_above(form: Form, supply: float) -> None:
    found = cases(form, supply)
    assert len(found) > CASES // 2
    assert misses(found, as_said) == 0


@pytest.mark.parametrize("formula", [without_last_wait, rounded_down])
def test_wrong_formulas_for_staleness_are_noticed(formula: Formula) -> None:
    assert misses(cases(Form.OVERLAPPED, 1.1), formula) > 3


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("supply", [0.6, 1.1])
def test_utilisation_is_as_said(form: Form, supply: float) -> None:
    for each in cases(form, supply, spread=0.0):
        seen = simulate(each)
        assert seen.utilisation == pytest.approx(each.said.utilisation, abs=UTILISATION_WITHIN)


def test_a_model_that_forgets_the_pause_is_noticed() -> None:
    wrong = [
        abs(min(1.0, each.said.offered_per_s * TRAIN_S / GROUPS) - simulate(each).utilisation)
        for each in cases(Form.PAUSED, 0.6)
    ]
    assert max(wrong) > 2 * UTILISATION_WITHIN


def test_groups_that_take_longer_than_others_do_not_break_the_bound() -> None:
    """`generation_s` is of the slowest; most take less."""
    for each in cases(Form.OVERLAPPED, 1.2):
        mean = Case(
            each.run,
            each.workers,
            tuple(
                learner_queue.QueuedWorker(w.slots, w.generation_s / 1.3, w.transfer_s)
                for w in each.queued
            ),
            each.said,
        )
        assert simulate(mean, jitter=0.3).staleness_worst <= each.said.staleness_worst


def test_the_period_that_is_chosen_wastes_nothing_and_the_next_may() -> None:
    """Of the longest period nothing is refused; that of the paper costs samples here."""
    run = Run(GROUPS, TRAIN_S, 6, 1000, 1e12, latency_s=0.0, load_s=90.0)
    slots = 8
    workers = [Worker(f"w{n}", slots / 90.0, 90.0, 1e12, 1e12) for n in range(4)]
    best = assess(run, workers, Form.OVERLAPPED)
    paper = assess(run, workers, Form.OVERLAPPED, 5)
    assert isinstance(best, Capacity)
    assert isinstance(paper, Capacity)
    assert (best.wastes, paper.wastes) == (False, True)
    queued = [learner_queue.QueuedWorker(slots, 90.0, 90.0) for _ in workers]
    seen = [
        learner_queue.simulate(
            learner_queue.Queue(
                GROUPS, TRAIN_S, each.period_steps, queued, each.inflight_groups, staleness_max=6
            )
        )
        for each in (best, paper)
    ]
    assert seen[0].refused == 0
    assert seen[1].refused_share > 0.02
    assert all(each.staleness_worst <= 6 for each in seen)


def test_with_fewer_groups_in_flight_than_said_the_learner_waits() -> None:
    found = next(each for each in cases(Form.OVERLAPPED, 1.1) if each.workers[0].generation_s > 120)
    queue = learner_queue.Queue(
        GROUPS,
        TRAIN_S,
        found.said.period_steps,
        found.queued,
        found.said.inflight_groups,
        steps=200,
    )
    few = learner_queue.Queue(
        GROUPS, TRAIN_S, found.said.period_steps, found.queued, int(1.1 * GROUPS), steps=200
    )
    assert learner_queue.simulate(queue).utilisation > 0.98
    assert learner_queue.simulate(few).utilisation < 0.9
