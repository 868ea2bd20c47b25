"""The choice of workers to run: the cheapest that suffice; no change without a lasting reason.

Pure. `cheapest_set` is the choice: least dollars an hour of all sets that it finds whose admissible
groups meet the requirement with a margin, and with whose links no group grows too old. What is
required depends on the broadcast, and that on who takes part, so each set that is weighed is
assessed with its own broadcast, and the fixed point needs no iteration. It is a heuristic: greedy
by price for each admissible group, from several pools that leave out ever more of the slow links,
then trimmed, then improved by exchanges.

`decide` is what is done about it from one moment to the next. Rates and prices are noisy, so:

- A worker that failed is replaced at once, and left alone for a while that doubles with each
  failure in a row.
- Too little supply brings more workers when it has lasted, and only adds to those that run.
- A cheaper set has to be the same one, cheaper by a share, for a while, and to repay the starts
  that it takes. Then its workers are started, and the others released once they are not needed.
- Nobody is released before its minimum dwell.

A worker that joins does not count until its weights are fresh enough, and nobody is released on its
account before.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    worker_cost_per_s,
)
from swarm.limits.backoff import Backoff

POOLS = (0.0, 0.25, 0.5, 0.75)  # of the workers, those with the slowest downlinks, are left out
WEIGHED_MAX = 40_000  # workers in all sets that are assessed for one choice
IMPROVED_MAX = 24  # with more workers than these in and out of a set, exchanges go one by one
IMPROVED_STARTS = 2


@dataclass(frozen=True, slots=True)
class Choice:
    """A set of workers, by name, and what comes of it."""

    names: tuple[str, ...]
    capacity: Capacity
    cost_per_h: float


@dataclass(frozen=True, slots=True)
class Settings:
    """The margins and delays of decisions.

    Raises:
        WrongSetting: a value is out of its range.
    """

    margin: float = 1.1
    """The supply that is planned for, over the supply that is required."""
    shortage_s: float = 60.0
    """How many seconds too little supply has to last before the plan changes."""
    saving_s: float = 600.0
    """How many seconds a cheaper set has to be there before the plan changes."""
    saving_share: float = 0.1
    """How much cheaper a set has to be, as a share."""
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
    """A worker that has no fresh weights so many seconds after its start should be over has
    failed."""

    def __post_init__(self) -> None:
        if not 1.0 <= self.margin <= 10.0:
            raise WrongSetting(f"margin = {self.margin}: must be from 1 to 10")
        if not 0.0 <= self.saving_share < 1.0:
            raise WrongSetting(f"saving_share = {self.saving_share}: must be from 0 to below 1")
        times = ("shortage_s", "saving_s", "dwell_s", "cooldown_s", "cooldown_max_s", "join_s_max")
        for name in times:
            value = getattr(self, name)
            if not 0.0 <= value <= 1e9:
                raise WrongSetting(f"{name} = {value}: must be from 0 to 1e9")


class Phase(StrEnum):
    """The phase of a worker's life."""

    STANDBY = "standby"
    JOINING = "joining"  # started, and its weights are not fresh enough yet
    ACTIVE = "active"
    COOLING = "cooling"  # it failed, and is left alone


@dataclass(frozen=True, slots=True)
class Standing:
    """The memory of one worker. `until_s`: the end of its cooling."""

    phase: Phase = Phase.STANDBY
    since_s: float = 0.0
    failures: int = 0
    until_s: float = 0.0

    @property
    def runs(self) -> bool:
        return self.phase in (Phase.JOINING, Phase.ACTIVE)


@dataclass(frozen=True, slots=True)
class ActivationState:
    """All that `decide` remembers. `wanted` is the set that is being moved to.

    `offer` is a cheaper set that is being watched.
    """

    standings: Mapping[str, Standing] = field(default_factory=dict)
    wanted: frozenset[str] = frozenset()
    short_since_s: float | None = None
    offer: frozenset[str] = frozenset()
    offer_since_s: float = 0.0

    def of(self, name: str) -> Standing:
        return self.standings.get(name, Standing())


@dataclass(frozen=True, slots=True)
class Seen:
    """The observations of one moment. `workers` are all that there are, and `fresh` those whose
    weights are fresh enough. `failed` were lost, or did not start, since the last decision."""

    workers: Sequence[Worker]
    fresh: frozenset[str]
    failed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Decision:
    """The workers to start and release now, and why. `problem`: there is no set that suffices."""

    state: ActivationState
    activate: tuple[str, ...]
    release: tuple[str, ...]
    why: str
    problem: Infeasible | None = None


def is_fresh_enough(
    version: int | None, learner_version: int, period_steps: int, staleness_max: int
) -> bool:
    """True if its groups begun now can still be consumed when the next version is published."""
    return version is not None and version >= learner_version - staleness_max + period_steps


class _Search:
    """Sets of one fleet, assessed at most once each."""

    def __init__(self, run: Run, workers: Sequence[Worker], form: Form, margin: float) -> None:
        self.run, self.form, self.margin = run, form, margin
        self.workers = tuple(workers)
        self.rates = [each.admitted_per_s for each in self.workers]
        self.least_per_s = margin * run.groups_per_step / run.train_s
        period = max(run.staleness_max - 1, 1)  # exact in the end; only orders workers before
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
        """A choice if the set suffices; None: it is too slow; else what stands in its way."""
        if sum(self.rates[index] for index in chosen) < self.least_per_s:
            return None
        if chosen not in self.known:
            self.weighed += len(chosen)
            self.known[chosen] = self._weigh(chosen)
        return self.known[chosen]

    def cost(self, chosen: frozenset[int]) -> float:
        """Dollars an hour; as if it cost everything where it does not suffice."""
        found = self.weigh(chosen)
        return found.cost_per_h if isinstance(found, Choice) else float("inf")

    def rank(self, chosen: frozenset[int]) -> tuple[float, list[int]]:
        """Ranks by cost, and equals always in the same order."""
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
    """Dollars an hour: the learner's rent is not in it, its egress is."""
    spent = capacity.cost.workers + capacity.cost.egress
    return spent / capacity.step_s * SECONDS_PER_H


def cheapest_set(
    run: Run,
    workers: Sequence[Worker],
    form: Form = Form.OVERLAPPED,
    margin: float = 1.0,
    keep: Iterable[str] = (),
) -> Choice | Infeasible:
    """The cheapest set that was found; with `keep`, of those that contain it.

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
    """Sets of the cheapest for each admissible group, from pools without the slowest links.
    Also each with its last worker exchanged for the cheapest that still suffices."""
    by_link = sorted(
        range(len(search.workers)), key=lambda index: search.workers[index].down_bytes_per_s
    )
    for share in POOLS:
        pool = set(by_link[int(share * len(by_link)) :]) | kept
        for order in (_by_price_of_a_group, _by_price):
            chosen = kept
            ranked = sorted(pool - kept, key=order(search))
            if chosen and search.cost(chosen) < float("inf"):
                yield chosen
                break
            for index in ranked:
                if search.exhausted:
                    return
                chosen |= {index}
                if search.cost(chosen) < float("inf"):
                    yield chosen
                    yield _last_exchanged(search, chosen, index, ranked)
                    break


def _by_price_of_a_group(search: _Search) -> Callable[[int], tuple[float, int]]:
    return lambda index: (search.costs[index] / max(search.rates[index], 1e-30), index)


def _by_price(search: _Search) -> Callable[[int], tuple[float, int]]:
    return lambda index: (search.costs[index], index)


def _last_exchanged(
    search: _Search, chosen: frozenset[int], last: int, ranked: Sequence[int]
) -> frozenset[int]:
    others = [index for index in ranked if index not in chosen] + [last]
    before = chosen - {last}
    return min((before | {index} for index in others), key=search.rank)


def _trimmed(search: _Search, chosen: frozenset[int], kept: frozenset[int]) -> frozenset[int]:
    """Without the dearest that it can do without."""
    for index in sorted(chosen - kept, key=lambda each: (-search.costs[each], each)):
        without = chosen - {index}
        if without and search.cost(without) <= search.cost(chosen):
            chosen = without
    return chosen


def _improved(search: _Search, chosen: frozenset[int], kept: frozenset[int]) -> frozenset[int]:
    """Exchanges of up to two workers for up to two others, as long as they save."""
    while not search.exhausted:
        better = next(
            (
                each
                for each in _exchanges(search, chosen, kept)
                if search.cost(each) < _now(search, chosen)
            ),
            None,
        )
        if better is None:
            break
        chosen = _trimmed(search, better, kept)
    return chosen


def _now(search: _Search, chosen: frozenset[int]) -> float:
    return search.cost(chosen) * (1.0 - 1e-9)  # rounding is no saving


def _exchanges(
    search: _Search, chosen: frozenset[int], kept: frozenset[int]
) -> Iterable[frozenset[int]]:
    """Neighbours of a set that cost less by their prices. Of two at once only in small fleets."""
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
    """Why no set was found that suffices, from all workers together."""
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
    """The facts that all parts of one decision look at."""

    by_name: Mapping[str, Worker]
    fresh: frozenset[str]
    lost: bool  # one that was wanted has just failed
    run: Run
    form: Form
    settings: Settings
    now_s: float

    def capacity(self, names: frozenset[str]) -> Capacity | None:
        """The run's capacity with a set; None: groups would be too old, or it is empty."""
        found = assess(self.run, [self.by_name[name] for name in sorted(names)], self.form)
        return found if isinstance(found, Capacity) else None

    def cheapest(self, usable: frozenset[str], keep: Iterable[str] = ()) -> Choice | Infeasible:
        members = [self.by_name[name] for name in sorted(usable)]
        return cheapest_set(self.run, members, self.form, self.settings.margin, keep)


def decide(
    state: ActivationState,
    seen: Seen,
    run: Run,
    now_s: float,
    settings: Settings,
    form: Form = Form.OVERLAPPED,
) -> Decision:
    """Decide on the workers to start and release. `state` is that of the last decision.

    Raises:
        ConfigError: too many workers, or two of one name.
    """
    check_workers(seen.workers)
    late = _late(state, seen, now_s, settings)
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
        form=form,
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


def _late(state: ActivationState, seen: Seen, now_s: float, settings: Settings) -> frozenset[str]:
    """Workers that were started and have no fresh weights after the longest time allowed."""
    return frozenset(
        each.name
        for each in seen.workers
        if state.of(each.name).phase is Phase.JOINING
        and each.name not in seen.fresh
        and now_s - state.of(each.name).since_s >= settings.join_s_max + each.start_s
    )


def _standing(
    old: Standing, failed: bool, fresh: bool, now_s: float, settings: Settings
) -> Standing:
    """A worker's standing after the latest observation."""
    if failed:
        return _cooled(old, now_s, settings)
    if old.phase is Phase.JOINING and fresh:
        return replace(old, phase=Phase.ACTIVE)
    if old.phase is Phase.COOLING and now_s >= old.until_s:
        return replace(old, phase=Phase.STANDBY, since_s=now_s)
    return old


def _cooled(old: Standing, now_s: float, settings: Settings) -> Standing:
    """Left alone, twice as long as the last time unless it had worked long since."""
    worked = old.phase is Phase.ACTIVE and now_s - old.since_s >= settings.cooldown_max_s
    failures = 1 if worked else old.failures + 1
    pause_s = Backoff(settings.cooldown_s, settings.cooldown_max_s).after(failures - 1)
    return Standing(Phase.COOLING, now_s, failures, now_s + pause_s)


def _wanted(
    state: ActivationState, usable: frozenset[str], moment: _Moment
) -> tuple[ActivationState, str, Infeasible | None]:
    """The set to move to, with what is remembered for it, and why."""
    now = moment.capacity(state.wanted)
    if now is not None and now.suffices:
        return _cheaper(replace(state, short_since_s=None), usable, now, moment)
    since_s = moment.now_s if state.short_since_s is None else state.short_since_s
    state = replace(state, short_since_s=since_s, offer=frozenset())
    waited_s = moment.now_s - since_s
    if state.wanted and not moment.lost and waited_s < moment.settings.shortage_s:
        return state, "too little supply, not yet for long", None
    added = moment.cheapest(usable, keep=state.wanted)
    if isinstance(added, Infeasible):  # what runs may be what stands in the way
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
    """Watch a cheaper set, and move to it when it has been cheaper for long enough."""
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
    """Workers that run unwanted, have stayed their time, and are not needed by those that stay."""
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
