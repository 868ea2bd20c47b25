"""The capacity model against figures worked out by hand, and what it refuses."""

import math
from dataclasses import astuple, replace

import pytest

from coordinator.model.capacity import (
    WORKERS_MAX,
    Capacity,
    Form,
    Infeasible,
    Obstacle,
    Run,
    Worker,
    assess,
    default_period,
    predicted_broadcast,
)
from swarm.errors import ConfigError
from tests.coordinator_samples import MB, run_of, worker

INSTANT = {"latency_s": 0.0, "up_bytes_per_s": 1e15}


def instant(load_s: float, staleness_max: int = 6, groups: int = 100, **changes) -> Run:
    """A broadcast takes exactly `load_s`, near enough."""
    return run_of(
        groups, 100.0, staleness_max, load_s=load_s, weights_bytes=1, **INSTANT, **changes
    )


def fast(share: float, run: Run, generation_s: float = 40.0, count: int = 2) -> list[Worker]:
    return [
        worker(
            f"w{n}",
            share / count,
            run=run,
            generation_s=generation_s,
            up_bytes_per_s=1e15,
            down_bytes_per_s=1e15,
        )
        for n in range(count)
    ]


def found(run: Run, workers: list[Worker], form: Form, period: int | None = None) -> Capacity:
    capacity = assess(run, workers, form, period)
    assert isinstance(capacity, Capacity), capacity
    return capacity


def refused(run: Run, workers: list[Worker], form: Form, period: int | None = None) -> Infeasible:
    answer = assess(run, workers, form, period)
    assert isinstance(answer, Infeasible), answer
    return answer


@pytest.mark.parametrize(
    ("period", "over"), [(2, 2.0), (5, 1.25), (10, 10 / 9)]
)  # T_bcast = T: 1 / (1 - 1/κ)
def test_the_papers_form_asks_for_what_a_pause_costs(period: int, over: float) -> None:
    run = instant(100.0, 20)
    capacity = found(run, fast(3.0, run), Form.PAUSED, period)
    assert capacity.required_per_s == pytest.approx(over)  # R/T is 1
    assert capacity.utilisation == 1.0


def test_the_overlapped_form_asks_for_the_learners_own_rate() -> None:
    run = instant(100.0, 20)
    assert found(run, fast(3.0, run), Form.OVERLAPPED, 2).required_per_s == pytest.approx(1.0)


def test_with_too_few_workers_the_learner_waits_and_a_step_is_longer() -> None:
    run = instant(100.0, 20)
    paused = found(run, fast(0.8, run), Form.PAUSED, 4)  # 100/0.8 + 100/4
    assert paused.step_s == pytest.approx(150.0)
    assert paused.utilisation == pytest.approx(2 / 3)
    assert not paused.suffices
    overlapped = found(run, fast(0.8, run), Form.OVERLAPPED, 4)
    assert overlapped.utilisation == pytest.approx(0.8)


def test_failures_and_short_lives_are_no_supply() -> None:
    run = instant(10.0)
    one = replace(fast(1.0, run, count=1)[0], failed_share=0.1, start_s=100.0, lifetime_s=1000.0)
    assert one.survival == pytest.approx(math.exp(-0.1))
    capacity = found(run, [one], Form.OVERLAPPED, 2)
    assert capacity.offered_per_s == pytest.approx(0.9 * math.exp(-0.1))


def test_staleness_by_hand() -> None:
    """T_gen = 0.4 T and a slack of a tenth: 1.44 R in flight, so two steps; a broadcast of 0.5 T
    makes 2.5, so κ - 1 + 3."""
    run = instant(50.0, 10)
    capacity = found(run, fast(1.1, run), Form.OVERLAPPED, 4)
    assert (capacity.inflight_groups, capacity.staleness_worst) == (144, 6)
    more = replace(run, inflight_groups_max=301)  # a fourth step until the last of them goes
    assert found(more, fast(1.1, run), Form.OVERLAPPED, 4).staleness_worst == 8


def test_a_whole_number_of_steps_is_not_one_more() -> None:
    run = instant(100.0, 10)
    assert found(run, fast(1.1, run), Form.OVERLAPPED, 3).staleness_worst == 2 + 3


def test_the_longest_period_that_wastes_nothing() -> None:
    run = instant(50.0, 6)
    workers = fast(1.1, run)
    best = found(run, workers, Form.OVERLAPPED)
    assert best.period_steps == 4  # 4 - 1 + 3 = S
    assert not best.wastes
    assert found(run, workers, Form.OVERLAPPED, default_period(run)).wastes
    longer = found(run, workers, Form.OVERLAPPED, best.period_steps + 1)
    assert longer.staleness_worst > run.staleness_max


def test_cost_of_a_step_by_hand() -> None:
    run = instant(10.0, price_per_h=36.0, egress_price_per_gb=0.1, group_bytes=10**7)
    run = replace(run, weights_bytes=10**9, latency_s=0.05)
    workers = [replace(each, egress_price_per_gb=0.05) for each in fast(1.1, run)]
    capacity = found(run, workers, Form.OVERLAPPED, 2)
    assert capacity.cost.learner == pytest.approx(1.0)
    assert capacity.cost.workers == pytest.approx(2 * 100 / 3600)
    published = 1.0 * (2 * 0.1 + 2 * 0.05) / 2  # GB, prices, every second step
    assert capacity.cost.egress == pytest.approx(published + 100 * 0.01 * 0.05)
    assert sum(astuple(capacity.cost)) == pytest.approx(1.0 + 200 / 3600 + published + 0.05)


def test_who_passes_nothing_on_pays_no_egress_for_it() -> None:
    run = replace(instant(10.0), weights_bytes=10**9)
    open_ones = [replace(each, egress_price_per_gb=0.05) for each in fast(1.1, run)]
    relayed = [replace(each, relayed=True) for each in open_ones]
    assert found(run, relayed, Form.OVERLAPPED, 2).cost.egress == 0.0
    assert found(run, open_ones, Form.OVERLAPPED, 2).cost.egress > 0.0


def test_a_broadcast_depends_on_who_takes_part() -> None:
    run = run_of()
    two = [worker("a", 0.6), worker("b", 0.6)]
    slow = worker("slow", 0.1, down_bytes_per_s=1.0 * MB)
    without = predicted_broadcast(run, two, run.weights_bytes)
    assert predicted_broadcast(run, [*two, slow], run.weights_bytes) > 5 * without


@pytest.mark.parametrize(
    ("steps", "size"),
    [(1, 10 * MB), (2, 14_142_136), (4, 20 * MB), (8, 40 * MB), (100, 100 * MB)],
)
def test_sizes_of_deltas_between_those_that_are_known(steps: int, size: int) -> None:
    run = run_of(delta_bytes=((1, 10 * MB), (4, 20 * MB)))
    assert run.published_bytes(steps) == size


def test_without_known_deltas_whole_versions_are_sent() -> None:
    assert run_of().published_bytes(3) == 100 * MB
    assert run_of(delta_bytes=((4, 20 * MB),)).published_bytes(1) == 5 * MB


@pytest.mark.parametrize(
    ("obstacle", "words", "run", "workers", "period"),
    [
        (Obstacle.NO_WORKERS, "no workers", instant(10.0), [], None),
        (Obstacle.PERIOD, "κ = 0", instant(10.0, 1), fast(1.1, instant(10.0)), 0),
        (Obstacle.BROADCAST, "take 250.0 s", instant(250.0), fast(1.1, instant(250.0)), 2),
        (Obstacle.BROADCAST, "a little late", instant(195.0), fast(1.1, instant(195.0)), 2),
        (Obstacle.STALENESS, "S = 1", instant(50.0, 1), fast(1.1, instant(50.0)), None),
        (Obstacle.STALENESS, "S = 0", instant(50.0, 0), fast(1.1, instant(50.0)), None),
        (
            Obstacle.CREDITS,
            "90 groups",
            instant(10.0, inflight_groups_max=90),
            fast(1.1, instant(10.0)),
            None,
        ),
        (
            Obstacle.SUPPLY,
            "lives long enough",
            instant(10.0),
            [replace(fast(1.1, instant(10.0))[0], start_s=1e6, lifetime_s=1.0)],
            None,
        ),
    ],
)
@pytest.mark.parametrize("form", list(Form))
def test_what_cannot_be_says_why(
    form: Form, obstacle: Obstacle, words: str, run: Run, workers: list[Worker], period: int | None
) -> None:
    answer = refused(run, workers, form, period)
    assert answer.obstacle is obstacle
    assert words in answer.why
    assert "\n" not in answer.why


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_s": 0.0}, "train_s = 0.0: must be a number above 0"),
        ({"train_s": math.nan}, "train_s = nan"),
        ({"train_s": math.inf}, "train_s = inf"),
        ({"staleness_max": -1}, "staleness_max = -1"),
        ({"staleness_max": 65}, "staleness_max = 65: must be from 0 to 64"),
        ({"groups_per_step": 0}, "groups_per_step = 0"),
        ({"inflight_groups_max": 0}, "inflight_groups_max = 0"),
        ({"delta_bytes": ((2, 5), (1, 9))}, "delta_bytes: [1, 9] after [2, 5] does not rise"),
        ({"delta_bytes": tuple((n, n) for n in range(1, 30))}, "at most 16"),
        ({"price_per_h": -1.0}, "price_per_h = -1.0"),
    ],
)
def test_bad_runs_are_refused_in_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(run_of(), **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "name: must not be empty"),
        ({"groups_per_s": 0.0}, "groups_per_s = 0.0"),
        ({"down_bytes_per_s": -1.0}, "down_bytes_per_s = -1.0"),
        ({"failed_share": 1.0}, "failed_share = 1.0: must be below 1"),
        ({"lifetime_s": 0.0}, "lifetime_s = 0.0"),
        ({"generation_s": math.nan}, "generation_s = nan"),
        ({"up_bytes_per_s": 1e300}, "up_bytes_per_s = 1e+300"),
    ],
)
def test_bad_workers_are_refused_in_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(worker("a", 1.0), **changes)
    assert message in str(caught.value)


def test_two_of_one_name_and_too_many_are_refused() -> None:
    with pytest.raises(ConfigError, match="name = a: two workers have it"):
        assess(run_of(), [worker("a", 1.0), worker("a", 1.0)], Form.PAUSED)
    many = [worker(f"w{n}", 1.0) for n in range(WORKERS_MAX + 1)]
    with pytest.raises(ConfigError, match="513 workers: a plan has up to 512"):
        assess(run_of(), many, Form.PAUSED)
