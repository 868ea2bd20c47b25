"""The choice of workers: the cheapest set that suffices, changed only for a lasting reason. Pure.

`cheapest_set` is a heuristic: greedy by price per admissible group, from pools that leave out ever
more of the slow links and generators, then trimmed and improved by exchanges. Each set is assessed
with its own broadcast.

`decide` moves from one set to the next. Rates and prices are noisy, so:

- A failed worker is replaced at once; its back-off doubles with each failure in a row.
- A lasting shortage only adds workers.
- A cheaper set is taken after it was cheaper by a share for a while, and repays its starts.
- Each worker stays for a minimum time. Joining workers do not count before their weights are fresh.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from coordinator.model.capacity import (
    SECONDS_PER_H,
    Capacity,
    Form,
    Infeasible,
    Obstacle,
    Run,
    Worker,
    WrongSetting,
    assess,
    check_workers,
    require_range,
    worker_cost_per_s,
)
from swarm.limits.backoff import Backoff

WEIGHED_MAX = 400_000  # workers in all assessed sets of one choice: some seconds
ENLARGED_MAX = 8  # times that a set with enough supply, but too old groups, gets one worker more
IMPROVED_MAX = 24  # workers; in larger fleets exchanges move one worker at a time
IMPROVED_STARTS = 2  # best greedy sets that are improved


@dataclass(frozen=True, slots=True)
class Choice:
    """A set of workers, by name."""

    names: tuple[str, ...]
    capacity: Capacity
    cost_per_h: float


@dataclass(frozen=True, slots=True)
class Settings:
    """The margins and delays of decisions."""

    margin: float = 1.1
    """The supply that is planned for, over the supply that is required."""
    shortage_s: float = 60.0
    """Seconds that too little supply has to last before the plan changes."""
    saving_s: float = 600.0
    """Seconds that a cheaper set has to be available before the plan changes."""
    saving_share: float = 0.1
    """Saving that a cheaper set needs, as a share of the price."""
    dwell_s: float = 1800.0
    """The least seconds that a worker stays, and in which a change has to repay the starts
    that it takes."""
    cooldown_s: float = 120.0
    """The seconds that a worker is left alone after a failure; twice as long after each
    further one in a row."""
    cooldown_max_s: float = 7200.0
    """The longest that a worker is left alone. A row of failures ends when the worker has
    worked for so long."""
    join_s_max: float = 1200.0
    """Seconds after its expected start by which a worker needs fresh weights; else it failed."""

    def __post_init__(self) -> None:
        require_range(self, 1.0, 10.0, "margin")
        if not 0.0 <= self.saving_share < 1.0:
            raise WrongSetting(f"saving_share = {self.saving_share}: must be from 0 to below 1")
        require_range(self, 0.0, 1e9, "shortage_s", "saving_s", "dwell_s", "join_s_max")
        require_range(self, 0.0, 1e9, "cooldown_s", "cooldown_max_s")


class Phase(StrEnum):
    """The phase of a worker's life."""

    STANDBY = "standby"
    JOINING = "joining"  # started, without fresh weights
    ACTIVE = "active"
    COOLING = "cooling"  # in back-off after a failure


@dataclass(frozen=True, slots=True)
class Standing:
    phase: Phase = Phase.STANDBY
    since_s: float = 0.0
    failures: int = 0  # in a row
    until_s: float = 0.0  # end of the back-off

    @property
    def runs(self) -> bool:
        return self.phase in (Phase.JOINING, Phase.ACTIVE)


@dataclass(frozen=True, slots=True)
class ActivationState:
    """The state of `decide`."""

    standings: Mapping[str, Standing] = field(default_factory=dict)
    wanted: frozenset[str] = frozenset()  # the set that is moved to
    short_since_s: float | None = None
    offer: frozenset[str] = frozenset()  # a cheaper set that is watched
    offer_since_s: float = 0.0

    def of(self, name: str) -> Standing:
        return self.standings.get(name, Standing())


@dataclass(frozen=True, slots=True)
class Seen:
    """The observations of one moment."""

    workers: Sequence[Worker]
    fresh: frozenset[str]  # those with fresh weights
    failed: frozenset[str] = frozenset()  # lost, or not started, since the last decision


@dataclass(frozen=True, slots=True)
class Decision:
    """The workers to start and release. `problem`: why no set suffices."""

    state: ActivationState
    activate: tuple[str, ...] = ()
    release: tuple[str, ...] = ()
    why: str = ""
    problem: Infeasible | None = None


def is_fresh_enough(
    version: int | None, learner_version: int, period_steps: int, staleness_max: int
) -> bool:
    """True if a group begun at once can still be consumed when the next version is published."""
    return version is not None and version >= learner_version - staleness_max + period_steps


class _Search:
    """The sets of one fleet, assessed at most once each."""

    def __init__(self, run: Run, workers: Sequence[Worker], form: Form, margin: float) -> None:
        self.run, self.form, self.margin = run, form, margin
        self.workers = tuple(workers)
        self.rates = [each.admitted_per_s for each in self.workers]
        self.least_per_s = margin * run.groups_per_step / run.train_s
        period = max(run.staleness_max - 1, 1)  # only for the order of workers
        size_bytes = run.published_bytes(period)
        self.costs = [
            worker_cost_per_s(run, each, period, size_bytes) * SECONDS_PER_H
            for each in self.workers
        ]
        self.known: dict[frozenset[int], Choice | Infeasible | None] = {}
        self.weighed = 0

    @property
    def exhausted(self) -> bool:
        return self.weighed >= WEIGHED_MAX

    def weigh(self, chosen: frozenset[int]) -> Choice | Infeasible | None:
        """A choice if the set suffices. None: it is too slow."""
        if sum(self.rates[index] for index in chosen) < self.least_per_s:
            return None
        if chosen not in self.known:
            self.weighed += len(chosen)
            self.known[chosen] = self._weigh(chosen)
        return self.known[chosen]

    def cost(self, chosen: frozenset[int]) -> float:
        """Dollars an hour; infinite if the set does not suffice."""
        found = self.weigh(chosen)
        return found.cost_per_h if isinstance(found, Choice) else float("inf")

    def rank(self, chosen: frozenset[int]) -> tuple[float, list[int]]:
        return self.cost(chosen), sorted(chosen)

    def _weigh(self, chosen: frozenset[int]) -> Choice | Infeasible | None:
        members = [self.workers[index] for index in sorted(chosen)]
        found = assess(self.run, members, self.form)
        if isinstance(found, Infeasible):
            return found
        if found.offered_per_s < self.margin * found.required_per_s:
            return None
        names = tuple(sorted(each.name for each in members))
        return Choice(names, found, hourly(self.run, found))


def hourly(run: Run, capacity: Capacity) -> float:
    """Dollars an hour without the learner's rent, with its egress."""
    spent = capacity.cost.workers + capacity.cost.egress
    return spent / capacity.step_s * SECONDS_PER_H


def cheapest_set(
    run: Run,
    workers: Sequence[Worker],
    form: Form = Form.OVERLAPPED,
    margin: float = 1.0,
    keep: Iterable[str] = (),
) -> Choice | Infeasible:
    """The cheapest set found, of those that contain `keep`.

    Raises:
        ConfigError: too many workers, or two of one name.
    """
    check_workers(workers)
    search = _Search(run, workers, form, margin)
    named = frozenset(keep)
    kept = frozenset(i for i, each in enumerate(search.workers) if each.name in named)
    found = {_trimmed(search, each, kept) for each in _greedy(search, kept)}
    starts = sorted(found, key=search.rank)[:IMPROVED_STARTS]
    improved = [_improved(search, each, kept) for each in starts]
    best = search.weigh(min(improved, key=search.rank)) if improved else None
    return best if isinstance(best, Choice) else _obstacle(search)


def _greedy(search: _Search, kept: frozenset[int]) -> Iterable[frozenset[int]]:
    """Sets of the workers that are cheapest for each admissible group, from `_pools`. Each also
    with its last worker exchanged for the cheapest that suffices."""

    def group_price(index: int) -> tuple[float, int]:
        return search.costs[index] / max(search.rates[index], 1e-30), index

    def price(index: int) -> tuple[float, int]:
        return search.costs[index], index

    for pool in _pools(search.workers):
        for order in (group_price, price):
            chosen = kept
            ranked = sorted(pool - kept, key=order)
            if chosen and search.cost(chosen) < float("inf"):
                yield chosen
                break
            too_old = 0  # sets that were large enough
            for index in ranked:
                if search.exhausted:
                    return
                chosen |= {index}
                too_old += isinstance(search.weigh(chosen), Infeasible)
                if too_old > ENLARGED_MAX:
                    break
                if search.cost(chosen) < float("inf"):
                    yield chosen
                    others = [each for each in ranked if each not in chosen] + [index]
                    before = chosen - {index}
                    yield min((before | {each} for each in others), key=search.rank)
                    break


def _pools(workers: Sequence[Worker]) -> Iterable[frozenset[int]]:
    """All workers, and all but some of the slowest downlinks, uplinks and generators, few at first.
    One slow worker makes the groups of a whole set too old."""
    everyone = frozenset(range(len(workers)))
    by_slowness: list[list[int]] = [
        sorted(everyone, key=lambda index: workers[index].down_bytes_per_s),
        sorted(
            everyone, key=lambda index: workers[index].up_bytes_per_s * (not workers[index].relayed)
        ),
        sorted(everyone, key=lambda index: -workers[index].generation_s),
    ]
    counts = [0]
    while counts[-1] < len(workers):
        counts.append(counts[-1] + max(1, counts[-1] // 4))
    ways = sorted(itertools.product(counts, repeat=len(by_slowness)), key=sum)
    pools = (
        everyone.difference(
            *(ranked[:count] for ranked, count in zip(by_slowness, way, strict=True))
        )
        for way in ways
    )
    return dict.fromkeys(pool for pool in pools if pool)


def _trimmed(search: _Search, chosen: frozenset[int], kept: frozenset[int]) -> frozenset[int]:
    """Drop workers that are not needed, the dearest first."""
    for index in sorted(chosen - kept, key=lambda each: (-search.costs[each], each)):
        without = chosen - {index}
        if without and search.cost(without) <= search.cost(chosen):
            chosen = without
    return chosen


def _improved(search: _Search, chosen: frozenset[int], kept: frozenset[int]) -> frozenset[int]:
    """Exchange up to two workers for up to two others, as long as that saves."""
    while not search.exhausted:
        cost = search.cost(chosen) * (1.0 - 1e-9)  # rounding is no saving
        exchanges = _exchanges(search, chosen, kept)
        better = next((each for each in exchanges if search.cost(each) < cost), None)
        if better is None:
            break
        chosen = _trimmed(search, better, kept)
    return chosen


def _exchanges(
    search: _Search, chosen: frozenset[int], kept: frozenset[int]
) -> Iterable[frozenset[int]]:
    """Neighbours of a set with lower prices."""
    inside, outside = sorted(chosen - kept), sorted(set(range(len(search.workers))) - chosen)
    sizes = (1, 2) if len(inside) + len(outside) <= IMPROVED_MAX else (1,)
    leaving = [group for size in sizes for group in itertools.combinations(inside, size)]
    joining = [group for size in (0, *sizes) for group in itertools.combinations(outside, size)]
    for out in leaving:
        saved = sum(search.costs[index] for index in out)
        for into in joining:
            if search.exhausted:
                return
            if sum(search.costs[index] for index in into) < saved:
                yield (chosen - set(out)) | set(into)


def _obstacle(search: _Search) -> Infeasible:
    """Why all workers together do not suffice."""
    found = assess(search.run, search.workers, search.form)
    if isinstance(found, Infeasible):
        return found
    return Infeasible(
        Obstacle.SUPPLY,
        f"all {len(search.workers)} workers together bring {found.offered_per_s:.4g} admissible "
        f"groups a second, and {search.margin * found.required_per_s:.4g} are required",
    )


@dataclass(frozen=True, slots=True)
class _Moment:
    """The facts of one decision."""

    by_name: Mapping[str, Worker]
    fresh: frozenset[str]
    lost: bool  # a wanted worker has just failed
    run: Run
    settings: Settings
    now_s: float

    def capacity(self, names: frozenset[str]) -> Capacity | None:
        """The run's capacity with a set. None: infeasible."""
        found = assess(self.run, [self.by_name[name] for name in sorted(names)], Form.OVERLAPPED)
        return found if isinstance(found, Capacity) else None

    def cheapest(self, usable: frozenset[str], keep: Iterable[str] = ()) -> Choice | Infeasible:
        members = [self.by_name[name] for name in sorted(usable)]
        return cheapest_set(self.run, members, Form.OVERLAPPED, self.settings.margin, keep)


def decide(
    state: ActivationState, seen: Seen, run: Run, now_s: float, settings: Settings
) -> Decision:
    """Decide on the workers to start and release.

    Raises:
        ConfigError: too many workers, or two of one name.
    """
    check_workers(seen.workers)
    late = frozenset(  # without fresh weights after the longest time allowed
        each.name
        for each in seen.workers
        if state.of(each.name).phase is Phase.JOINING
        and each.name not in seen.fresh
        and now_s - state.of(each.name).since_s >= settings.join_s_max + each.start_s
    )
    failed = seen.failed | late
    standings = {
        each.name: _standing(
            state.of(each.name), each.name in failed, each.name in seen.fresh, now_s, settings
        )
        for each in seen.workers
    }
    moment = _Moment(
        by_name={each.name: each for each in seen.workers},
        fresh=seen.fresh,
        lost=bool(failed & state.wanted),
        run=run,
        settings=settings,
        now_s=now_s,
    )
    usable = frozenset(n for n, each in standings.items() if each.phase is not Phase.COOLING)
    moved = replace(state, standings=standings, wanted=state.wanted & usable)
    moved, why, problem = _wanted(moved, usable, moment)
    running = {name for name, each in standings.items() if each.runs}
    activate = tuple(sorted(moved.wanted - running))
    release = _released(moved, moment)
    for name in activate:
        standings[name] = replace(standings[name], phase=Phase.JOINING, since_s=now_s)
    for name in release:
        standings[name] = replace(standings[name], phase=Phase.STANDBY, since_s=now_s)
    return Decision(moved, activate, tuple(sorted({*release, *late})), why, problem)


def _standing(
    old: Standing, failed: bool, fresh: bool, now_s: float, settings: Settings
) -> Standing:
    """A worker's standing after the latest observation."""
    if old.phase is Phase.ACTIVE and now_s - old.since_s >= settings.cooldown_max_s:
        old = replace(old, failures=0)
    if failed:
        failures = old.failures + 1
        pause_s = Backoff(settings.cooldown_s, settings.cooldown_max_s).after(failures - 1)
        return Standing(Phase.COOLING, now_s, failures, now_s + pause_s)
    if old.phase is Phase.JOINING and fresh:
        return replace(old, phase=Phase.ACTIVE)
    if old.phase is Phase.COOLING and now_s >= old.until_s:
        return replace(old, phase=Phase.STANDBY, since_s=now_s)
    return old


def _wanted(
    state: ActivationState, usable: frozenset[str], moment: _Moment
) -> tuple[ActivationState, str, Infeasible | None]:
    """The state with the set to move to, and why."""
    now = moment.capacity(state.wanted)
    if now is not None and now.suffices:
        return _cheaper(replace(state, short_since_s=None), usable, now, moment)
    since_s = moment.now_s if state.short_since_s is None else state.short_since_s
    state = replace(state, short_since_s=since_s, offer=frozenset())
    waited_s = moment.now_s - since_s
    if state.wanted and not moment.lost and waited_s < moment.settings.shortage_s:
        return state, "too little supply, not yet for long", None
    added = moment.cheapest(usable, keep=state.wanted)
    if isinstance(added, Infeasible):  # a running worker may be the obstacle
        added = moment.cheapest(usable)
    if isinstance(added, Choice):
        wanted = frozenset(added.names)
        return replace(state, wanted=wanted, short_since_s=None), "too little supply", None
    if added.obstacle is Obstacle.SUPPLY:
        return replace(state, wanted=usable), "all there are, and they are too few", added
    return state, "no set suffices", added


def _cheaper(
    state: ActivationState, usable: frozenset[str], now: Capacity, moment: _Moment
) -> tuple[ActivationState, str, Infeasible | None]:
    """Watch a cheaper set; move to it after `saving_s`."""
    if state.offer and state.offer <= usable:
        offered = moment.capacity(state.offer)
        if offered is not None and _saves(state, offered, now, moment):
            if moment.now_s - state.offer_since_s < moment.settings.saving_s:
                return state, "a cheaper set is being watched", None
            return replace(state, wanted=state.offer, offer=frozenset()), "a cheaper set", None
    state = replace(state, offer=frozenset())
    best = moment.cheapest(usable)
    if isinstance(best, Infeasible) or frozenset(best.names) == state.wanted:
        return state, "nothing cheaper", None
    watched = replace(state, offer=frozenset(best.names), offer_since_s=moment.now_s)
    if not _saves(watched, best.capacity, now, moment):
        return state, "nothing cheaper by enough", None
    if moment.settings.saving_s > 0.0:
        return watched, "a cheaper set is being watched", None
    return replace(watched, wanted=watched.offer, offer=frozenset()), "a cheaper set", None


def _saves(state: ActivationState, offered: Capacity, now: Capacity, moment: _Moment) -> bool:
    """True if the watched set suffices, costs less by the share, and repays its starts."""
    if not offered.suffices:
        return False
    settings, before = moment.settings, hourly(moment.run, now)
    saved = before - hourly(moment.run, offered)
    starting = [moment.by_name[name] for name in state.offer - state.wanted]
    starts = sum(each.price_per_h * each.start_s for each in starting)
    repaid = saved * max(settings.dwell_s, settings.saving_s) >= starts
    return saved > 0.0 and saved >= settings.saving_share * before and repaid


def _released(state: ActivationState, moment: _Moment) -> tuple[str, ...]:
    """Workers that run unwanted, have stayed their time, and are not needed for the supply."""
    counted = frozenset(
        name
        for name, each in state.standings.items()
        if each.phase is Phase.ACTIVE and name in moment.fresh
    )
    leaving = [
        name
        for name, each in state.standings.items()
        if each.runs
        and name not in state.wanted
        and moment.now_s - each.since_s >= moment.settings.dwell_s
    ]
    replaced = bool(state.wanted) and state.wanted <= counted
    released: list[str] = []
    for name in sorted(leaving, key=lambda each: (-moment.by_name[each].price_per_h, each)):
        capacity = None if replaced else moment.capacity(counted - {name})
        if replaced or name not in counted or (capacity is not None and capacity.suffices):
            released.append(name)
            counted -= {name}
    return tuple(sorted(released))
