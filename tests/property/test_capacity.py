"""What holds of the capacity model and of the choice of workers for all inputs."""

import math
from dataclasses import astuple, replace
from itertools import product
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coordinator.model.activation import (
    ActivationState,
    Choice,
    Seen,
    Settings,
    cheapest_set,
    decide,
)
from coordinator.model.capacity import Capacity, Form, Infeasible, Run, Worker, assess
from tests.coordinator_samples import MB, fleet, run_of, worker
from tests.property import exact_activation

FORMS = st.sampled_from(list(Form))


@st.composite
def workers(draw: st.DrawFn, least: int = 1, most: int = 6) -> list[Worker]:
    count = draw(st.integers(least, most))
    rate, price = st.floats(0.01, 2.0), st.floats(0.0, 10.0)
    return [
        Worker(
            f"w{number}",
            groups_per_s=draw(rate),
            generation_s=draw(st.floats(1.0, 150.0)),
            up_bytes_per_s=draw(st.floats(0.1, 100.0)) * MB,
            down_bytes_per_s=draw(st.floats(0.5, 100.0)) * MB,
            price_per_h=draw(price),
            failed_share=draw(st.floats(0.0, 0.5)),
            start_s=draw(st.floats(0.0, 600.0)),
            lifetime_s=draw(st.none() | st.floats(600.0, 1e5)),
            relayed=draw(st.booleans()),
        )
        for number in range(count)
    ]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    return run_of(
        draw(st.integers(1, 200)),
        draw(st.floats(10.0, 500.0)),
        draw(st.integers(0, 12)),
        weights_bytes=draw(st.integers(1, 2000)) * MB,
        load_s=draw(st.floats(0.0, 60.0)),
        egress_price_per_gb=draw(st.floats(0.0, 0.2)),
    )


@given(runs(), workers(), FORMS, st.none() | st.integers(-1, 12))
def test_every_answer_is_finite_or_says_why(
    run: Run, fleet: list[Worker], form: Form, period: int | None
) -> None:
    found = assess(run, fleet, form, period)
    if isinstance(found, Infeasible):
        assert found.why
        return
    figures = (found.broadcast_s, found.required_per_s, found.step_s, *astuple(found.cost))
    assert all(math.isfinite(each) and each >= 0.0 for each in figures)
    assert 0.0 < found.utilisation <= 1.0
    assert found.staleness_worst >= found.period_steps
    assert found.inflight_groups >= run.groups_per_step
    if period is None:
        assert not found.wastes


@given(runs(), workers(), FORMS, st.integers(1, 12), st.floats(1.01, 5.0))
def test_faster_workers_never_lower_utilisation(
    run: Run, fleet: list[Worker], form: Form, period: int, factor: float
) -> None:
    before = assess(run, fleet, form, period)
    quick = [replace(each, groups_per_s=each.groups_per_s * factor) for each in fleet]
    after = assess(run, quick, form, period)
    if isinstance(before, Capacity) and isinstance(after, Capacity):
        assert after.utilisation >= before.utilisation


@given(runs(), workers(2), st.integers(1, 12))
def test_more_workers_never_lower_utilisation_where_they_need_not_pause(
    run: Run, fleet: list[Worker], period: int
) -> None:
    before = assess(run, fleet[:-1], Form.OVERLAPPED, period)
    after = assess(run, fleet, Form.OVERLAPPED, period)
    if isinstance(before, Capacity) and isinstance(after, Capacity):
        assert after.utilisation >= before.utilisation


def test_where_they_pause_one_with_a_slow_link_can_lower_it() -> None:
    """So that the above is no accident of the form: here more is less."""
    run = run_of(staleness_max=12)
    few = [replace(each, groups_per_s=0.2) for each in fleet(0, 3)]
    slow = replace(few[0], name="slow", groups_per_s=0.001, down_bytes_per_s=0.3 * MB)
    before, after = (assess(run, each, Form.PAUSED, 5) for each in (few, [*few, slow]))
    assert isinstance(before, Capacity)
    assert isinstance(after, Capacity)
    assert after.utilisation < before.utilisation


def linear_bound(run: Run, fleet: list[Worker], margin: float) -> float:
    """Dollars an hour for a rate of `margin` R/T, if workers could be hired by the fraction."""
    left, cost = margin * run.groups_per_step / run.train_s, 0.0
    for each in sorted(fleet, key=lambda one: one.price_per_h / one.admitted_per_s):
        share = min(1.0, left / each.admitted_per_s)
        left, cost = left - share * each.admitted_per_s, cost + share * each.price_per_h
        if left <= 0.0:
            break
    return cost


@settings(max_examples=60, deadline=None)
@given(runs(), workers(1, 5), FORMS, st.floats(1.0, 1.5))
def test_a_choice_suffices_is_not_below_the_bounds_and_none_means_none(
    run: Run, fleet: list[Worker], form: Form, margin: float
) -> None:
    chosen = cheapest_set(run, fleet, form, margin)
    best = exact_activation.exact(run, fleet, form, margin)
    if isinstance(chosen, Infeasible):
        return  # of fleets with an answer, how many are missed is what the next test says
    members = [each for each in fleet if each.name in chosen.names]
    found = assess(run, members, form)
    assert isinstance(found, Capacity)
    assert found.offered_per_s >= margin * found.required_per_s
    assert found.utilisation == 1.0
    assert not found.wastes
    assert chosen.cost_per_h >= linear_bound(run, fleet, margin) * (1.0 - 1e-9)
    assert chosen.cost_per_h >= best.cost_per_h * (1.0 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), FORMS, st.integers(3, 7))
def test_where_there_is_a_set_one_is_found(seed: int, form: Form, count: int) -> None:
    run = run_of()
    some = fleet(seed, count)
    best = exact_activation.exact(run, some, form, 1.1)
    assume(best.names)
    chosen = cheapest_set(run, some, form, 1.1)
    assert isinstance(chosen, Choice)
    assert chosen.cost_per_h <= 1.25 * best.cost_per_h


def unlike(seed: int) -> tuple[Run, list[Worker]]:
    """A learner and 3 to 8 workers whose links and generation times differ a hundredfold."""
    rng = Random(seed)

    def spread(least: float, most: float) -> float:
        return math.exp(rng.uniform(math.log(least), math.log(most)))

    train_s = rng.choice((30.0, 60.0, 100.0))
    run = run_of(
        train_s=train_s, staleness_max=rng.choice((3, 4, 5, 6, 8)),
        weights_bytes=rng.choice((50, 100, 400)) * MB,
        up_bytes_per_s=rng.choice((12.5, 60.0, 125.0)) * MB,
        egress_price_per_gb=rng.choice((0.0, 0.1)), latency_s=0.05,
    )  # fmt: skip
    some = fleet(seed, rng.randint(3, 8), rng.uniform(1.2, 4.0), run)
    longest = rng.choice((1.0, 8.0))
    return run, [
        replace(
            each, generation_s=spread(0.05, longest) * train_s, up_bytes_per_s=spread(0.2, 60) * MB,
            down_bytes_per_s=spread(0.5, 120) * MB, relayed=rng.random() < 0.3,
            price_per_h=rng.choice((0.0, each.price_per_h)),
        )
        for each in some
    ]  # fmt: skip


def test_no_set_is_missed_where_one_worker_of_many_is_slow() -> None:
    """All sets of each fleet are looked at, in both forms."""
    solvable = optimal = 0
    for seed, form in product(range(130), Form):
        run, some = unlike(seed)
        best = exact_activation.exact(run, some, form, 1.1)
        chosen = cheapest_set(run, some, form, 1.1)
        assert isinstance(chosen, Choice) == bool(best.names), (seed, form)
        if isinstance(chosen, Choice):
            solvable += 1
            optimal += chosen.cost_per_h <= best.cost_per_h * (1.0 + 1e-6) + 1e-9
    assert solvable >= 160
    assert optimal >= 0.97 * solvable


@pytest.mark.parametrize(
    "slow",
    [{"generation_s": 400.0}, {"up_bytes_per_s": 0.1 * MB}, {"down_bytes_per_s": 0.3 * MB}],
    ids=str,
)
def test_a_slow_worker_for_nothing_spoils_no_set(slow: dict[str, float]) -> None:
    run = run_of(train_s=60.0, staleness_max=4, up_bytes_per_s=12.5 * MB)
    fast = [worker(f"gpu-{n}", 0.3, 3.0, run, generation_s=20.0) for n in range(4)]
    free = worker("volunteer", 0.3, 0.0, run, generation_s=20.0)
    some = [*fast, replace(free, **slow)]
    found = cheapest_set(run, some, margin=1.1)
    assert isinstance(found, Choice)
    decided = decide(ActivationState(), Seen(some, frozenset()), run, 0.0, Settings())
    assert set(decided.activate) == set(found.names)


def test_the_exact_solver_is_exact() -> None:
    """Against sets worked out by hand: 0.5 + 0.5 for 2.0 beats 1.0 for 2.5 and 0.9 for 1.0."""
    run = run_of(latency_s=0.0)
    one = fleet(0, 1)[0]
    plain = replace(one, failed_share=0.0, start_s=0.0, lifetime_s=None, generation_s=40.0)
    rate = run.groups_per_step / run.train_s
    options = {"half-1": (0.5, 1.0), "half-2": (0.5, 1.0), "whole": (1.0, 2.5), "short": (0.9, 1.0)}
    some = [
        replace(plain, name=name, groups_per_s=share * rate * 1.0001, price_per_h=price)
        for name, (share, price) in options.items()
    ]
    best = exact_activation.exact(run, some, Form.OVERLAPPED, 1.0)
    assert set(best.names) == {"half-1", "half-2"}
    assert best.cost_per_h == 2.0
    assert exact_activation.exact(run, some[:1], Form.OVERLAPPED, 1.0).names == ()
