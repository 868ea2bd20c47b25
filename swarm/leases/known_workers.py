"""A learner's account of one worker, and the queue of workers on trial. Pure.

The rate is admitted groups over the time of leases and of the breaks between them. The credit limit
bounds the groups that a worker may hold. Keys cost nothing, so credit is earned: one for each
admitted group. A lease that comes to nothing takes most of it back.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from swarm.plain_records import Moment

RATE_EWMA_SHARE: Final = 0.3  # of earlier measurements, forgotten with each lease
BREAK_S_MAX: Final = 60.0  # longest break that counts as slowness
FORGIVEN_EVERY: Final = 10  # leases, of which one may be lost without effect on the rate
TURNAROUND_EWMA_SHARE: Final = 0.2  # of the newest group
LOST_SHARE: Final = 0.75  # of a worker's credit, lost with a lease that brought nothing
CREDIT_LASTS_S: Final = 14_400.0  # after the last admitted group
ESTABLISHED: Final = 64.0  # credits from which a worker gets long leases


@dataclass(slots=True)
class CreditLimit:
    credits: float = 0.0  # that it may hold; below 1 it is on trial
    wasted_s: float = 0.0  # duration of its last lease on trial, if that came to nothing
    at: Moment | None = None  # of its last admitted group

    @property
    def is_on_trial(self) -> bool:
        """True for a worker that delivered nothing, or not lately."""
        return self.credits < 1.0

    @property
    def is_established(self) -> bool:
        return self.credits >= ESTABLISHED

    def asks(self, now: float) -> None:
        """Forget credit that was earned too long ago."""
        if self.at is not None and now - self.at >= CREDIT_LASTS_S:
            self.credits, self.at = 0.0, None

    def delivered(self, most: int, now: float) -> None:
        """Count an admitted group; `most`: the largest limit of a worker."""
        self.credits = min(float(most), self.credits + 1.0)
        self.wasted_s, self.at = 0.0, now

    def lost(self, share: float) -> None:
        """Take credit for the share of a lease's groups that came to nothing."""
        self.credits *= 1.0 - LOST_SHARE * share


@dataclass(slots=True)
class KnownWorker:
    """The account of a worker. `done` and `busy_s` forget alike, whichever of two leases ends
    first."""

    done: float = 0.0  # admitted groups
    failed: float = 0.0  # granted groups that were not admitted
    busy_s: float = 0.0  # with at least one lease, or away before the next
    measured_at: Moment | None = None  # when its last lease ended
    whole: int = FORGIVEN_EVERY  # leases with all groups in since the last one without
    has_died: bool = False  # assumed reason of the last loss
    break_s: float | None = None  # between that lease and the next request; None: none yet
    turnaround_s: float = 0.0  # from grant to admission, in the mean
    admitted: int = 0
    refused: int = 0
    version: int = 0  # by its own word
    heard_at: Moment | None = None  # None: not since the restart
    limit: CreditLimit = field(default_factory=CreditLimit)

    @property
    def rate(self) -> float | None:
        """Admitted groups/s of work; None before a lease ended."""
        return self.done / self.busy_s if self.busy_s > 0.0 else None

    @property
    def failed_share(self) -> float:
        """The share of failed groups, of those that were granted."""
        return self.failed / max(self.failed + self.done, 1e-9)

    def asks(self, version: int, now: float) -> None:
        """Record a request; its wait from here on is not a break."""
        self.version, self.heard_at = version, now
        self.limit.asks(now)
        if self.break_s is None and self.measured_at is not None:
            away_s = min(BREAK_S_MAX, max(0.0, now - self.measured_at))
            self.break_s = 0.0 if self.has_died else away_s

    def delivers(self, took_s: float, credits_max: int, now: float) -> None:
        """Record a group that was admitted `took_s` after its grant."""
        self.admitted += 1
        self.limit.delivered(credits_max, now)
        share = TURNAROUND_EWMA_SHARE if self.turnaround_s else 1.0
        self.turnaround_s += share * (took_s - self.turnaround_s)

    def lease_ends(
        self,
        *,
        admitted: int,
        groups: int,
        unanswered: int,
        busy_from: float,
        answered_at: float | None,
        now: float,
    ) -> None:
        """Count a lease that ended into the rate: its admitted groups, and the time since the break
        before it, or since the lease before ended.

        A worker with missing groups died or is slow. Now and then it is assumed to have died after
        its last answer, which leaves its rate alone; if that were often, losing leases would pay.
        """
        since = busy_from if self.measured_at is None else max(busy_from, self.measured_at)
        self.measured_at, self.break_s = now, None
        often = self.whole < FORGIVEN_EVERY or self.rate is None
        self.has_died = unanswered > 0 and not often
        self.whole = 0 if unanswered else self.whole + 1
        if self.has_died:
            now = answered_at or since
        self.done += admitted - RATE_EWMA_SHARE * self.done
        self.failed += groups - admitted - RATE_EWMA_SHARE * self.failed
        self.busy_s += max(0.0, now - since) - RATE_EWMA_SHARE * self.busy_s

    def restarted(self) -> None:
        """Forget the time in which the learner was away."""
        self.break_s, self.heard_at, self.version = 0.0, None, 0


@dataclass(frozen=True, slots=True)
class WorkerAccount:
    """A worker's name and figures."""

    worker: str
    known: KnownWorker
    leased: int  # groups in its open leases


# The queue of workers on trial, and the credits that they share. Pure.

LONG_SHARE: Final = 0.5  # credits for longer leases, over those for short ones
WAITING_MAX: Final = 512  # workers in the queue; more are told to ask again
WAITS_S: Final = 10.0  # after its last request a worker leaves the queue
BEHIND_S: Final = 30.0  # penalty in the queue for each credit that the worker's place holds


@dataclass(frozen=True, slots=True)
class WorkerOrigin:
    """The origin of a worker's requests, to tell persons apart."""

    name: str
    part: float = 1.0  # of all credits on trial, at most


@dataclass(frozen=True, slots=True)
class Trial:
    """The kind of a lease on trial."""

    place: WorkerOrigin
    is_long: bool  # longer than a first lease


@dataclass(slots=True)
class TrialsOut:
    """Credits on trial that are out."""

    by_place: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[bool] = field(default_factory=Counter)

    @classmethod
    def of(cls, held: Iterable[tuple[Trial, int]]) -> "TrialsOut":
        """The credits out in leases, given with their numbers of missing groups."""
        out = cls()
        for trial, groups in held:
            out.by_place[trial.place.name] += groups
            out.by_kind[trial.is_long] += groups
        return out


@dataclass(frozen=True, slots=True)
class Allowance:
    """The credits that workers on trial may hold."""

    short: int  # in leases as long as a first one
    least: int  # in each part, where its share gives fewer

    @property
    def long(self) -> int:
        """In longer leases, besides `short`."""
        return max(self.least, int(LONG_SHARE * self.short))

    @property
    def total(self) -> int:
        return self.short + self.long

    def left(self, trial: Trial, out: TrialsOut) -> int:
        """The credits left for such a lease, without regard to the queue."""
        of_place = max(self.least, int(trial.place.part * self.total))
        return min(self._left_of_kind(trial, out), of_place - out.by_place[trial.place.name])

    def left_after(self, others: int, trial: Trial, out: TrialsOut) -> int:
        """The credits left once so many others of its kind have got the least."""
        after = self._left_of_kind(trial, out) - others * self.least
        return min(self.left(trial, out), after)

    def _left_of_kind(self, trial: Trial, out: TrialsOut) -> int:
        return (self.long if trial.is_long else self.short) - out.by_kind[trial.is_long]


@dataclass(slots=True)
class _Waiting:
    trial: Trial
    wasted_s: float
    came_at: float
    asked_at: float


class TrialQueue:
    """Workers on trial that asked and got nothing yet."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()  # in the order of coming

    def ask(self, worker: str, trial: Trial, wasted_s: float, now: float) -> None:
        """Queue a worker, or renew its request."""
        found = self._waiting.get(worker)
        if found is not None and self._is_there(found, now):
            found.trial, found.wasted_s, found.asked_at = trial, wasted_s, now
            return
        self._waiting.pop(worker, None)
        if len(self._waiting) >= WAITING_MAX:
            for name, each in list(self._waiting.items()):
                if not self._is_there(each, now):
                    del self._waiting[name]
        if len(self._waiting) >= WAITING_MAX:
            self._make_room(trial.place.name)
        if len(self._waiting) < WAITING_MAX:
            self._waiting[worker] = _Waiting(trial, wasted_s, now, now)

    def leave(self, worker: str) -> None:
        self._waiting.pop(worker, None)

    def ahead_of(self, worker: str, allowance: Allowance, out: TrialsOut, now: float) -> int:
        """The number of waiting workers of the same kind ahead of this one."""
        own = self._waiting.get(worker)
        if own is None:  # the queue is full
            return len(self._waiting)
        turn = self._turn(own, out)
        return sum(
            other.trial.is_long == own.trial.is_long
            and self._is_there(other, now)
            and self._turn(other, out) < turn
            and allowance.left(other.trial, out) > 0
            for other in self._waiting.values()
        )

    def count(self, now: float) -> int:
        return sum(self._is_there(each, now) for each in self._waiting.values())

    def _turn(self, waiting: _Waiting, out: TrialsOut) -> float:
        """The worker's rank in seconds, lower first, so that all get their turn in the end."""
        behind_s = BEHIND_S * out.by_place[waiting.trial.place.name]
        return waiting.came_at + behind_s + waiting.wasted_s

    def _is_there(self, waiting: _Waiting, now: float) -> bool:
        return now - waiting.asked_at < WAITS_S

    def _make_room(self, place: str) -> None:
        """Drop the last worker of the fullest place, for one of another place."""
        held = Counter(each.trial.place.name for each in self._waiting.values())
        largest, count = held.most_common(1)[0]
        if count > held[place] + 1:
            places = {name: each.trial.place.name for name, each in self._waiting.items()}
            del self._waiting[[name for name in places if places[name] == largest][-1]]
