"""Which workers are chosen, and that nothing but a lasting reason changes them."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from coordinator.model.activation import (
    ActivationState,
    Choice,
    Decision,
    Phase,
    Seen,
    Settings,
    cheapest_set,
    decide,
    is_fresh_enough,
)
from coordinator.model.capacity import Capacity, Form, Infeasible, Obstacle, Worker, assess
from swarm.errors import ConfigError
from tests.coordinator_samples import MB, fleet, run_of, worker

RUN = run_of()
TICK_S = 30.0
SETTINGS = Settings(
    shortage_s=60.0, saving_s=300.0, dwell_s=600.0, cooldown_s=120.0, cooldown_max_s=1920.0
)
RESTLESS = Settings(shortage_s=0.0, saving_s=0.0, saving_share=0.0, dwell_s=0.0)


def choose(workers: list[Worker], **options) -> Choice:
    found = cheapest_set(RUN, workers, **options)
    assert isinstance(found, Choice), found
    return found


def test_the_cheapest_that_suffice_are_chosen() -> None:
    workers = [worker("a", 0.5, 1.0), worker("b", 0.6, 1.0), worker("dear", 2.0, 5.0)]
    assert choose(workers).names == ("a", "b")
    assert choose(workers, margin=1.2).names == ("dear",)  # a and b bring 1.1


def test_what_greedy_leaves_too_much_is_trimmed() -> None:
    """By price for a group small comes first; with big it is not needed any more."""
    workers = [worker("small", 0.2, 0.1), worker("big", 1.0, 1.0)]
    assert choose(workers).names == ("big",)


@pytest.mark.parametrize(
    "worse",
    [
        {"failed_share": 0.4},
        {"start_s": 600.0, "lifetime_s": 900.0},  # half die before they have repaid their start
        {"egress_price_per_gb": 2.0},
    ],
)
def test_a_worker_at_the_same_price_that_brings_less_is_left_out(worse: dict[str, float]) -> None:
    good, bad = worker("z", 1.2), worker("a", 1.2)
    assert choose([bad, good]).names == ("a",)  # all else equal, the first name
    assert choose([replace(bad, **worse), good]).names == ("z",)


def test_failures_and_lives_count_for_what_is_required() -> None:
    shaky = worker("shaky", 1.2, failed_share=0.3)
    assert isinstance(cheapest_set(RUN, [shaky]), Infeasible)
    assert choose([shaky, worker("help", 0.3, 3.0)]).names == ("help", "shaky")


def test_a_link_that_would_make_groups_too_old_is_left_out() -> None:
    run = run_of(staleness_max=3)
    slow = worker("slow", 0.6, 0.01, down_bytes_per_s=0.3 * MB)
    others = [worker("a", 0.6), worker("b", 0.6)]
    found = cheapest_set(run, [slow, *others])
    assert isinstance(found, Choice)
    assert found.names == ("a", "b")
    quick = replace(slow, down_bytes_per_s=60.0 * MB)
    again = cheapest_set(run, [quick, *others])
    assert isinstance(again, Choice)
    assert "slow" in again.names


def test_no_set_suffices_says_why() -> None:
    found = cheapest_set(RUN, [worker("a", 0.4), worker("b", 0.4)])
    assert isinstance(found, Infeasible)
    assert found.obstacle is Obstacle.SUPPLY
    assert "all 2 workers together" in found.why
    none = cheapest_set(RUN, [])
    assert isinstance(none, Infeasible)
    assert none.obstacle is Obstacle.NO_WORKERS


def test_what_is_kept_stays_in_the_set() -> None:
    workers = [worker("a", 0.6), worker("b", 0.6), worker("dear", 0.5, 9.0)]
    assert "dear" in choose(workers, keep=("dear",)).names


@pytest.mark.parametrize(("version", "fresh"), [(None, False), (5, False), (6, True), (9, True)])
def test_a_worker_is_fresh_when_what_it_makes_can_still_be_used(
    version: int | None, fresh: bool
) -> None:
    assert is_fresh_enough(version, 10, period_steps=2, staleness_max=6) is fresh


def test_bad_settings_are_refused() -> None:
    for changes in ({"margin": 0.9}, {"saving_share": 1.0}, {"dwell_s": float("nan")}):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            Settings(**changes)


# what is done about it, from moment to moment


@dataclass
class World:
    """Workers that become fresh `join_ticks` after they were started; the rest is `decide`."""

    workers: list[Worker]
    settings: Settings = SETTINGS
    join_ticks: int = 3
    state: ActivationState = field(default_factory=ActivationState)
    now_s: float = 0.0
    started_s: dict[str, float] = field(default_factory=dict)
    log: list[Decision] = field(default_factory=list)
    never: frozenset[str] = frozenset()  # becomes fresh

    def tick(
        self, failed: Iterable[str] = (), noise: float = 0.0, rng: Random | None = None
    ) -> Decision:
        lost = frozenset(failed)
        for name in lost:
            self.started_s.pop(name, None)
        seen = [noisy(each, noise, rng) if rng else each for each in self.workers]
        decision = decide(self.state, Seen(seen, self.fresh, lost), RUN, self.now_s, self.settings)
        for name in decision.activate:
            assert name not in self.started_s, "started twice"
            self.started_s[name] = self.now_s
        for name in decision.release:
            self.started_s.pop(name, None)
        self.state = decision.state
        self.now_s += TICK_S
        self.log.append(decision)
        return decision

    @property
    def fresh(self) -> frozenset[str]:
        ready = self.now_s - self.join_ticks * TICK_S
        return frozenset(n for n, at in self.started_s.items() if at <= ready) - self.never

    @property
    def running(self) -> set[str]:
        return set(self.started_s)

    def ticks(self, count: int, **options) -> None:
        for _ in range(count):
            self.tick(**options)

    def switches(self, since: int = 0) -> int:
        return sum(len(each.activate) + len(each.release) for each in self.log[since:])


def noisy(each: Worker, noise: float, rng: Random) -> Worker:
    return replace(
        each,
        groups_per_s=each.groups_per_s * (1.0 + noise * (2.0 * rng.random() - 1.0)),
        price_per_h=each.price_per_h * (1.0 + noise * (2.0 * rng.random() - 1.0)),
    )


def four() -> list[Worker]:
    """Three suffice; the fourth is the dearest."""
    return [worker(name, 0.4, 1.0 + 0.01 * n) for n, name in enumerate("abc")] + [
        worker("dear", 0.4, 2.0)
    ]


def test_the_dearest_stays_off_comes_on_when_one_is_lost_and_goes_off_again() -> None:
    world = World(four())
    world.ticks(40)
    assert world.running == {"a", "b", "c"}
    lost = world.tick(failed=["b"])
    assert lost.activate == ("dear",)  # at once: that is no noise
    world.ticks(60)
    assert world.running == {"a", "b", "c"}
    assert world.switches() == 3 + 1 + 2


def test_nobody_is_released_before_what_replaces_it_is_fresh() -> None:
    """`late` is started in place of the dear one, and takes as long as it likes."""
    settings = replace(SETTINGS, join_s_max=1e6)
    world = World([*four()[:2], worker("dear", 0.4, 2.0)], settings, never=frozenset({"late"}))
    world.ticks(40)
    assert world.running == {"a", "b", "dear"}
    world.workers.append(worker("late", 0.4, 0.2))
    world.ticks(60)
    assert world.running == {"a", "b", "dear", "late"}
    world.never = frozenset()
    world.ticks(2)
    assert world.running == {"a", "b", "late"}


def test_a_worker_that_joins_does_not_count_before_it_is_fresh() -> None:
    world = World(four())
    world.ticks(2)
    assert {world.state.of(name).phase for name in "abc"} == {Phase.JOINING}
    world.ticks(3)
    assert {world.state.of(name).phase for name in "abc"} == {Phase.ACTIVE}


def test_who_never_gets_fresh_weights_is_released_and_left_alone() -> None:
    settings = replace(SETTINGS, join_s_max=300.0)
    world = World(four(), settings, never=frozenset({"a"}))
    world.ticks(12)
    assert world.running == {"b", "c", "dear"}
    assert world.state.of("a").phase is Phase.COOLING


def test_nobody_is_released_before_its_dwell() -> None:
    world = World([*four()[:2], worker("dear", 0.4, 2.0)], replace(SETTINGS, saving_s=0.0))
    world.tick()
    world.workers.append(worker("cheap", 0.4, 0.2))
    world.ticks(19)
    assert "dear" in world.running  # 570 s after its start
    world.ticks(3)
    assert "dear" not in world.running


def test_a_failure_is_left_alone_twice_as_long_each_time_up_to_a_limit() -> None:
    pauses, state, now_s = [], ActivationState(), 0.0
    seen = [worker("a", 1.5), worker("b", 1.5, 3.0)]
    for _ in range(6):
        state = decide(state, Seen(seen, frozenset(), frozenset({"a"})), RUN, now_s, SETTINGS).state
        pauses.append(state.of("a").until_s - now_s)
        now_s = state.of("a").until_s
        state = decide(state, Seen(seen, frozenset()), RUN, now_s, SETTINGS).state
        assert state.of("a").phase is not Phase.COOLING
    assert pauses == [120.0, 240.0, 480.0, 960.0, 1920.0, 1920.0]


def test_long_work_forgives_earlier_failures() -> None:
    world = World([worker("a", 1.5)])
    world.tick()
    world.tick(failed=["a"])
    world.tick()
    world.tick(failed=["a"])
    assert world.state.of("a").failures == 2
    world.ticks(80)
    assert world.state.of("a").phase is Phase.ACTIVE
    world.tick(failed=["a"])
    assert world.state.of("a").failures == 1


def test_long_work_forgives_earlier_failures_of_a_worker_that_was_released_since() -> None:
    world = World([worker("a", 1.5, 5.0)])
    world.tick()
    world.tick(failed=["a"])
    world.ticks(80)
    world.workers.append(worker("b", 1.5, 0.1))
    world.ticks(40)
    assert world.state.of("a").phase is Phase.STANDBY
    world.tick(failed=["a"])
    assert world.state.of("a").failures == 1


def test_a_change_has_to_repay_its_starts() -> None:
    """Half a dollar an hour saved does not repay a start of an hour at ten dollars."""
    settings = replace(SETTINGS, saving_share=0.0)
    world = World([worker("now", 1.5, 10.0)], settings)
    world.ticks(30)
    world.workers.append(worker("slow start", 1.5, 9.5, start_s=3600.0))
    world.ticks(60)
    assert world.running == {"now"}
    world.workers[1] = replace(world.workers[1], start_s=10.0)
    world.ticks(60)
    assert world.running == {"slow start"}


def test_too_little_supply_that_does_not_last_changes_nothing() -> None:
    world = World(four())
    world.ticks(20)
    good = world.workers
    world.workers = [replace(each, groups_per_s=0.7 * each.groups_per_s) for each in good]
    world.ticks(2)
    world.workers = good
    world.ticks(20)
    assert world.switches() == 3
    world.workers = [replace(each, groups_per_s=0.7 * each.groups_per_s) for each in good]
    world.ticks(4)
    assert world.running == {"a", "b", "c", "dear"}


def test_where_all_are_too_few_all_run_and_it_is_said() -> None:
    world = World([worker("a", 0.4), worker("b", 0.4)])
    world.ticks(5)
    assert world.running == {"a", "b"}
    problem = world.log[-1].problem
    assert problem is not None
    assert problem.obstacle is Obstacle.SUPPLY
    assert world.switches() == 2


def test_a_worker_that_is_gone_is_forgotten() -> None:
    world = World(four())
    world.ticks(10)
    world.workers = [each for each in world.workers if each.name != "a"]
    world.started_s.pop("a")
    world.ticks(5)
    assert "a" not in world.state.standings
    assert world.running == {"b", "c", "dear"}


@pytest.mark.parametrize(("seed", "noise"), [(1, 0.1), (2, 0.25), (3, 0.25)])
def test_noisy_prices_and_rates_do_not_flap(seed: int, noise: float) -> None:
    """Each of 100 decisions sees prices and rates up to so much off, anew each time. Without
    patience the same noise changes workers all the time."""
    counts = {}
    for name, settings in (("patient", SETTINGS), ("restless", RESTLESS)):
        workers = [worker(f"w{n}", 0.4 + 0.02 * n, 1.0 + 0.05 * n) for n in range(5)]
        world, rng = World(workers, settings), Random(seed)
        world.ticks(5)
        world.ticks(100, noise=noise, rng=rng)
        counts[name] = world.switches(since=5)
    assert counts["patient"] <= 2
    assert counts["restless"] > 20


def test_a_lasting_change_of_price_is_followed_once() -> None:
    world = World(four())
    world.ticks(30)
    world.workers[3] = replace(world.workers[3], price_per_h=0.3)
    world.ticks(60)
    assert "dear" in world.running
    assert len(world.running) == 3
    assert world.switches() == 3 + 2


@pytest.mark.parametrize("seed", range(2))
def test_what_runs_always_meets_the_requirement_once_it_did(seed: int) -> None:
    """Prices change for good every so often; at each moment those that are fresh suffice."""
    world, rng = World(fleet(seed, 5)), Random(seed)
    world.ticks(6)
    for _ in range(60):
        if rng.random() < 0.05:
            index = rng.randrange(len(world.workers))
            factor = rng.choice((0.3, 3.0))
            price = factor * world.workers[index].price_per_h
            world.workers[index] = replace(world.workers[index], price_per_h=price)
        world.tick()
        fresh = [each for each in world.workers if each.name in world.fresh & world.running]
        capacity = assess(RUN, fresh, Form.OVERLAPPED)
        assert isinstance(capacity, Capacity)
        assert capacity.suffices
