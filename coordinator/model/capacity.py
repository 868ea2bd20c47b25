"""The capacity model of ECHO-2: a learner's need of rollout workers, and its supply. Pure.

Also the ranges of settings and their errors.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from swarm.errors import ConfigError
from swarm.identity import PeerId
from swarm.weights.artifacts import suggested_chunk_bytes
from swarm.weights.broadcast_time import PeerLink, broadcast_s

VALUE_MIN, VALUE_MAX = 1e-12, 1e18  # range of all inputs: their quotients stay finite
MBIT = 1e6 / 8  # bytes

_IN_MBIT = AfterValidator(lambda mbit_per_s: mbit_per_s * MBIT)  # the unit of links in files
Uplink = Annotated[float, Field(alias="up_mbit_per_s", gt=0, le=1e9), _IN_MBIT]
Downlink = Annotated[float, Field(alias="down_mbit_per_s", gt=0, le=1e9), _IN_MBIT]


class WrongSetting(ConfigError, ValueError):
    """A setting is out of range. As a ValueError, pydantic adds its place in a file."""


def require_range(owner: object, low: float, high: float, *names: str) -> None:
    """
    Raises:
        WrongSetting: a field is neither None nor a number in the range.
    """
    for name in names:
        value = getattr(owner, name)
        if value is not None and not low <= value <= high:
            least = "a number above 0, up" if low == VALUE_MIN else f"from {low:g}"
            raise WrongSetting(f"{name} = {value}: must be {least} to {high:g}")


def require_above_0(owner: object, *names: str) -> None:
    require_range(owner, VALUE_MIN, VALUE_MAX, *names)


def require_not_negative(owner: object, *names: str) -> None:
    require_range(owner, 0.0, VALUE_MAX, *names)


def require_unlike(names: Sequence[str]) -> None:
    """
    Raises:
        WrongSetting: two workers have one name.
    """
    for name, count in Counter(names).items():
        if count > 1:
            raise WrongSetting(f"name = {name}: two workers have it")


WORKERS_MAX = 512  # in one plan
STALENESS_MAX = 64  # steps
DELTA_SIZES_MAX = 16
INFLIGHT_SLACK = 1.1  # factor on the mean number of groups that are being generated
BROADCAST_MARGIN = 1.05  # least period over broadcast: workers drop a version that is overtaken
ROUNDING = 1e-9  # steps; rounding errors below this do not add a step
SECONDS_PER_H = 3600.0
BYTES_PER_GB = 1e9


class Form(StrEnum):
    """Generation while weights arrive."""

    PAUSED = "paused"
    OVERLAPPED = "overlapped"


class Obstacle(StrEnum):
    """Why there is no plan."""

    NO_WORKERS = "no_workers"
    PERIOD = "period"  # below 1 step
    BROADCAST = "broadcast"  # takes longer than a period
    STALENESS = "staleness"  # groups are too old even if every step is published
    CREDITS = "credits"  # fewer groups in flight than needed are allowed
    SUPPLY = "supply"  # all workers together are too slow


@dataclass(frozen=True, slots=True)
class Infeasible:
    """There is no plan; `why` is one line with numbers."""

    obstacle: Obstacle
    why: str

    def __str__(self) -> str:
        return f"{self.obstacle}: {self.why}"


@dataclass(frozen=True, slots=True)
class Worker:
    """One machine that generates, active or not."""

    name: str
    """The worker's name; with a count, name-1 and so on."""
    groups_per_s: float
    """The groups that it generates in a second, with all its slots busy."""
    generation_s: float
    """The seconds from the first token of a group to its last, of all but the slowest groups."""
    up_bytes_per_s: Uplink
    """Its uplink."""
    down_bytes_per_s: Downlink
    """Its downlink."""
    price_per_h: float = 0.0
    """Dollars an hour."""
    egress_price_per_gb: float = 0.0
    """Dollars for each GB that it sends."""
    failed_share: float = 0.0
    """The share of its groups that the learner never admits."""
    start_s: float = 0.0
    """The seconds that are paid for before it generates."""
    lifetime_s: float | None = None
    """The mean seconds until a spot market takes it back. Left out: it stays until it is
    released."""
    relayed: bool = False
    """True if it is behind a router and passes no weights on."""

    def __post_init__(self) -> None:
        if not self.name:
            raise WrongSetting("name: must not be empty")
        require_above_0(self, "groups_per_s", "generation_s", "up_bytes_per_s", "down_bytes_per_s")
        require_not_negative(self, "price_per_h", "egress_price_per_gb", "failed_share", "start_s")
        require_above_0(self, "lifetime_s")
        if self.failed_share >= 1.0:
            raise WrongSetting(f"failed_share = {self.failed_share}: must be below 1")

    @property
    def survival(self) -> float:
        """The chance to outlive the start. Also the share of paid time in which it generates,
        because lifetimes are exponential."""
        return 1.0 if self.lifetime_s is None else math.exp(-self.start_s / self.lifetime_s)

    @property
    def admitted_per_s(self) -> float:
        """Mean rate of groups that the learner admits."""
        return self.groups_per_s * (1.0 - self.failed_share) * self.survival


@dataclass(frozen=True, slots=True)
class Run:
    """The learner's run: R, T and S of the paper, and its published versions."""

    groups_per_step: int
    """R: how many groups one update consumes."""
    train_s: float
    """T: the seconds of one update."""
    staleness_max: int
    """S: how many steps old a group may be when it is consumed."""
    weights_bytes: int
    """The bytes of a whole version."""
    up_bytes_per_s: Uplink
    """The learner's uplink."""
    delta_bytes: tuple[tuple[int, int], ...] = ()
    """Pairs of steps and bytes, rising: what a version differs by from one so many steps
    before. Left out: whole versions are sent."""
    latency_s: float = 0.05
    """The seconds one way between two machines."""
    load_s: float = 0.0
    """The seconds that encoding, patching and loading a version takes."""
    group_bytes: int = 0
    """The bytes of one group on its way to the learner."""
    price_per_h: float = 0.0
    """Dollars an hour for the learner's machine."""
    egress_price_per_gb: float = 0.0
    """Dollars for each GB that the learner sends."""
    inflight_groups_max: int | None = None
    """Limit of groups being generated or waiting. Left out: as many as are needed."""

    def __post_init__(self) -> None:
        require_above_0(self, "groups_per_step", "train_s", "weights_bytes", "up_bytes_per_s")
        require_above_0(self, "inflight_groups_max")
        require_not_negative(self, "latency_s", "load_s", "group_bytes")
        require_not_negative(self, "price_per_h", "egress_price_per_gb")
        require_range(self, 0, STALENESS_MAX, "staleness_max")
        if len(self.delta_bytes) > DELTA_SIZES_MAX:
            raise WrongSetting(f"delta_bytes: must be at most {DELTA_SIZES_MAX} sizes")
        before = (0, 0)
        for entry in self.delta_bytes:
            if not (entry[0] > before[0] and entry[1] > before[1]):
                raise WrongSetting(f"delta_bytes: {list(entry)} after {list(before)} does not rise")
            before = entry

    def published_bytes(self, period_steps: int) -> int:
        """Bytes of a version for a peer that has the version of a period before.

        Between two known sizes a power of the steps; outside of them proportional to the steps,
        as single deltas would take. Never more than a whole version.
        """
        if not self.delta_bytes:
            return self.weights_bytes
        lower = (0, 0)
        for upper in self.delta_bytes:
            if period_steps <= upper[0]:
                break
            lower = upper
        else:
            upper = lower
            lower = (0, 0)
        if lower == (0, 0):
            size_bytes = upper[1] * period_steps / upper[0]
        else:
            share = math.log(period_steps / lower[0]) / math.log(upper[0] / lower[0])
            size_bytes = lower[1] * (upper[1] / lower[1]) ** share
        return min(self.weights_bytes, max(1, round(size_bytes)))


@dataclass(frozen=True, slots=True)
class Cost:
    """Dollars per step."""

    learner: float
    workers: float
    egress: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """A learner's supply from a set of workers."""

    form: Form
    period_steps: int
    published_bytes: int
    broadcast_s: float
    required_per_s: float  # admissible groups
    offered_per_s: float  # admissible groups, Σμ
    step_s: float  # from the beginning of a step to that of the next
    utilisation: float  # share of it that the learner trains
    staleness_worst: int
    staleness_max: int
    inflight_groups: int
    cost: Cost

    @property
    def suffices(self) -> bool:
        """True if the learner does not wait."""
        return self.offered_per_s >= self.required_per_s

    @property
    def wastes(self) -> bool:
        """True if some groups are too old when their turn comes, and are dropped."""
        return self.staleness_worst > self.staleness_max


def default_period(run: Run) -> int:
    """The paper's κ = S - 1. 0 where S is 1 or 0: it has none for these."""
    return max(run.staleness_max - 1, 0)


def assess(
    run: Run, workers: Sequence[Worker], form: Form, period_steps: int | None = None
) -> Capacity | Infeasible:
    """The run's capacity with these workers active.

    `period_steps` None: the longest period in which no group grows too old; it pauses and sends
    least.

    Raises:
        ConfigError: more workers than `WORKERS_MAX`, or two of one name.
    """
    check_workers(workers)
    if not workers:
        return Infeasible(Obstacle.NO_WORKERS, "there are no workers")
    if period_steps is not None:
        return _assess(run, workers, form, period_steps)
    return _longest_period(run, workers, form)


def check_workers(workers: Sequence[Worker]) -> None:
    """
    Raises:
        ConfigError: more workers than `WORKERS_MAX`, or two of one name.
    """
    if len(workers) > WORKERS_MAX:
        raise ConfigError(f"{len(workers)} workers: a plan has up to {WORKERS_MAX}")
    require_unlike([each.name for each in workers])


def predicted_broadcast(run: Run, workers: Sequence[Worker], size_bytes: int) -> float:
    """Seconds until the last worker can use a version."""
    links = [
        PeerLink(PeerId(each.name), each.up_bytes_per_s, each.down_bytes_per_s) for each in workers
    ]
    chunk_bytes = min(suggested_chunk_bytes(size_bytes), size_bytes)
    sent_s = broadcast_s(size_bytes, chunk_bytes, run.up_bytes_per_s, links, run.latency_s)
    return sent_s + run.load_s


def worker_cost_per_s(run: Run, worker: Worker, period_steps: int, size_bytes: int) -> float:
    """Dollars a second of an active worker: rent, one copy of each version passed on, and the
    groups handed in. An upper bound: the learner's copies are counted as well."""
    passed_on = 0.0 if worker.relayed else size_bytes / (period_steps * run.train_s)
    bytes_per_s = passed_on + worker.groups_per_s * run.group_bytes
    egress_per_s = bytes_per_s * worker.egress_price_per_gb / BYTES_PER_GB
    return worker.price_per_h / SECONDS_PER_H + egress_per_s


def _longest_period(run: Run, workers: Sequence[Worker], form: Form) -> Capacity | Infeasible:
    refused: Infeasible | None = None
    oldest = 0
    for period_steps in range(max(run.staleness_max, 1), 0, -1):
        if _least_staleness(run, workers, form, period_steps) > run.staleness_max:
            continue
        found = _assess(run, workers, form, period_steps)
        if isinstance(found, Infeasible):
            refused = refused or found
        elif found.wastes:
            oldest = found.staleness_worst
        else:
            return found
    if refused is None and not oldest:
        found = _assess(run, workers, form, 1)
        if isinstance(found, Infeasible):
            return found
        oldest = found.staleness_worst
    if oldest:
        return Infeasible(
            Obstacle.STALENESS,
            f"published as often as broadcasts allow, groups are up to {oldest} steps old when "
            f"they are consumed, and S = {run.staleness_max}",
        )
    assert refused is not None
    return refused


def _least_staleness(run: Run, workers: Sequence[Worker], form: Form, period_steps: int) -> int:
    """The staleness if weights arrived at once, which spares predictions of slow broadcasts.

    0 if that gives no bound: with too few workers, or if they pause.
    """
    offered_per_s = sum(each.admitted_per_s for each in workers)
    if form is Form.PAUSED or offered_per_s * run.train_s < run.groups_per_step:
        return 0
    needed = _inflight_needed(run, workers, form, period_steps, 0.0, run.train_s)
    allowed = run.inflight_groups_max or needed
    return _staleness(run, workers, form, period_steps, 0.0, run.train_s, allowed)


def _assess(
    run: Run, workers: Sequence[Worker], form: Form, period_steps: int
) -> Capacity | Infeasible:
    if period_steps < 1:
        return Infeasible(
            Obstacle.PERIOD, f"κ = {period_steps}: weights are published every 1 step or more"
        )
    size_bytes = run.published_bytes(period_steps)
    arrives_s = predicted_broadcast(run, workers, size_bytes)
    period_s = period_steps * run.train_s
    if arrives_s * BROADCAST_MARGIN >= period_s:
        return Infeasible(
            Obstacle.BROADCAST,
            f"weights take {arrives_s:.1f} s to the last worker, and κ = {period_steps} leaves "
            f"{period_s:.1f} s until the next, which overtakes them if they are a little late",
        )
    offered_per_s = sum(each.admitted_per_s for each in workers)
    if offered_per_s < VALUE_MIN:
        return Infeasible(Obstacle.SUPPLY, "no worker lives long enough to generate anything")
    required_per_s, step_s = _rates(run, form, period_steps, arrives_s, offered_per_s)
    needed = _inflight_needed(run, workers, form, period_steps, arrives_s, step_s)
    allowed = run.inflight_groups_max or needed
    if allowed < needed:
        return Infeasible(
            Obstacle.CREDITS,
            f"{allowed} groups may be in flight, and it takes {needed} to be sure that the learner "
            "does not wait for them",
        )
    if offered_per_s < required_per_s:  # none pile up: in flight are those generated and one step's
        slots = sum(each.groups_per_s * each.generation_s for each in workers)
        allowed = min(allowed, run.groups_per_step + math.ceil(slots))
    staleness_worst = _staleness(run, workers, form, period_steps, arrives_s, step_s, allowed)
    # at most as many copies as the learner's uplink carries until all workers have the version
    sent_s = max(arrives_s - run.load_s, 0.0)
    copies = min(float(len(workers)), max(1.0, sent_s * run.up_bytes_per_s / size_bytes))
    return Capacity(
        form=form,
        period_steps=period_steps,
        published_bytes=size_bytes,
        broadcast_s=arrives_s,
        required_per_s=required_per_s,
        offered_per_s=offered_per_s,
        step_s=step_s,
        utilisation=run.train_s / step_s,
        staleness_worst=staleness_worst,
        staleness_max=run.staleness_max,
        inflight_groups=needed if run.inflight_groups_max is None else run.inflight_groups_max,
        cost=_cost(run, workers, period_steps, size_bytes, step_s, copies),
    )


def _rates(
    run: Run, form: Form, period_steps: int, broadcast_s: float, offered_per_s: float
) -> tuple[float, float]:
    """Required Σμ, and seconds a step with the offered Σμ."""
    paused_s = broadcast_s if form is Form.PAUSED else 0.0
    groups, period_s = run.groups_per_step, period_steps * run.train_s
    required_per_s = period_steps * groups / (period_s - paused_s)
    step_s = max(run.train_s, groups / offered_per_s + paused_s / period_steps)
    return required_per_s, step_s


def _inflight_needed(
    run: Run,
    workers: Sequence[Worker],
    form: Form,
    period_steps: int,
    broadcast_s: float,
    step_s: float,
) -> int:
    """Groups that must generate or wait for the learner to find R at each step."""
    rate = sum(each.groups_per_s for each in workers)
    generation_s = sum(each.groups_per_s * each.generation_s for each in workers) / rate
    if form is Form.PAUSED:
        period_s = period_steps * step_s
        generation_s = generation_s * period_s / (period_s - broadcast_s) + broadcast_s
    steps = 1.0 + INFLIGHT_SLACK * generation_s / step_s
    return math.ceil(run.groups_per_step * steps - ROUNDING)


def _staleness(
    run: Run,
    workers: Sequence[Worker],
    form: Form,
    period_steps: int,
    broadcast_s: float,
    step_s: float,
    inflight: int,
) -> int:
    """The greatest age of a group when it is consumed, in steps."""
    generation_s = max(each.generation_s for each in workers)
    turns = math.ceil(inflight / run.groups_per_step - ROUNDING)
    if form is Form.OVERLAPPED:
        idle_s = step_s - run.train_s
        held_s = max(turns * step_s, generation_s + step_s)
        return period_steps - 1 + max(_steps((broadcast_s - idle_s + held_s) / step_s), 1)
    # A pause stops what is being generated, and a long group meets more than one.
    between_s = period_steps * run.train_s - broadcast_s
    pauses = math.ceil(generation_s / between_s - ROUNDING)
    ready_s = pauses * broadcast_s + generation_s + run.train_s
    return period_steps - 1 + max(turns, _steps(ready_s / run.train_s))


def _steps(share: float) -> int:
    return math.ceil(share - ROUNDING)


def _cost(
    run: Run,
    workers: Sequence[Worker],
    period_steps: int,
    size_bytes: int,
    step_s: float,
    copies: float,
) -> Cost:
    rent_per_s = sum(each.price_per_h for each in workers) / SECONDS_PER_H
    relayed_price = sum(each.egress_price_per_gb for each in workers if not each.relayed)
    published = size_bytes * (copies * run.egress_price_per_gb + relayed_price) / period_steps
    rate = sum(each.groups_per_s for each in workers)
    price = sum(each.groups_per_s * each.egress_price_per_gb for each in workers) / rate
    handed_in = run.groups_per_step * run.group_bytes * price
    return Cost(
        learner=run.price_per_h / SECONDS_PER_H * step_s,
        workers=rent_per_s * step_s,
        egress=(published + handed_in) / BYTES_PER_GB,
    )
