"""The queue of workers on trial, and the credits that they share. Pure.

A worker is on trial until a group of it was admitted (`known_worker`). A key costs nothing, so all
workers on trial together hold a small part of a learner's credits, whatever their number. Those of
one place (an address block, all relayed peers) hold a part of that. Credits held on trial keep
nobody else waiting (`staleness`).

A worker that finds no credit left waits in a queue, first come first served. For each credit that a
place holds, its workers are put back. Asking more often gains nothing, and neither does a new key,
which starts at the end. First leases are short, so that undelivered groups are soon free again.
Workers that need longer leases have credits of their own and keep no new worker waiting: their
first lease came to nothing, or they were measured to be slow.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

LONG_SHARE: Final = 0.5  # for longer leases, over what may be out in short ones
WAITING_MAX: Final = 512  # workers in the queue; more are told to ask again
WAITS_S: Final = 10.0  # after a worker's last request, it is taken to have gone
BEHIND_S: Final = 30.0  # penalty in the queue for each credit that the worker's place holds


# --- who is on trial -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerOrigin:
    """The origin of a worker's requests, as far as that tells persons apart."""

    name: str
    part: float = 1.0  # of all credits on trial, at most


@dataclass(frozen=True, slots=True)
class Trial:
    """As what a lease on trial counts: from where, and whether it is longer than a first one."""

    place: WorkerOrigin
    is_long: bool


@dataclass(slots=True)
class TrialsOut:
    """Credits on trial that are out."""

    by_place: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[bool] = field(default_factory=Counter)

    @classmethod
    def of(cls, held: Iterable[tuple[Trial, int]]) -> "TrialsOut":
        """The credits out in leases on trial, given with their numbers of missing groups."""
        out = cls()
        for trial, groups in held:
            out.by_place[trial.place.name] += groups
            out.by_kind[trial.is_long] += groups
        return out


@dataclass(frozen=True, slots=True)
class Allowance:
    """The credits that workers on trial may hold; `short`: in leases as long as a first one.
    `least`: what each part is at least, whatever its share comes to."""

    short: int
    least: int

    @property
    def long(self) -> int:
        """In longer ones, on top of that."""
        return max(self.least, int(LONG_SHARE * self.short))

    @property
    def total(self) -> int:
        """For all workers on trial."""
        return self.short + self.long

    def left(self, trial: Trial, out: TrialsOut) -> int:
        """For such a worker, whoever waits."""
        of_place = max(self.least, int(trial.place.part * self.total))
        return min(self._left_of_kind(trial, out), of_place - out.by_place[trial.place.name])

    def left_after(self, others: int, trial: Trial, out: TrialsOut) -> int:
        """For such a worker, once so many others of its kind have got the least."""
        after = self._left_of_kind(trial, out) - others * self.least
        return min(self.left(trial, out), after)

    def _left_of_kind(self, trial: Trial, out: TrialsOut) -> int:
        return (self.long if trial.is_long else self.short) - out.by_kind[trial.is_long]


# --- who comes first -----------------------------------------------------------------------------


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
        """A worker waits from now on, or goes on waiting."""
        found = self._waiting.get(worker)
        if found is not None and self._is_there(found, now):
            found.trial, found.wasted_s, found.asked_at = trial, wasted_s, now
            return
        self._waiting.pop(worker, None)
        if len(self._waiting) >= WAITING_MAX:
            self._drop_gone(now)
        if len(self._waiting) >= WAITING_MAX:
            self._make_room(trial.place.name)
        if len(self._waiting) < WAITING_MAX:
            self._waiting[worker] = _Waiting(trial, wasted_s, now, now)

    def leave(self, worker: str) -> None:
        """A worker has got what it waited for, or cannot use it."""
        self._waiting.pop(worker, None)

    def ahead_of(self, worker: str, allowance: Allowance, out: TrialsOut, now: float) -> int:
        """The number of waiting workers, served from the same part, that come before this one."""
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
        """The number of workers that wait."""
        return sum(self._is_there(each, now) for each in self._waiting.values())

    def _turn(self, waiting: _Waiting, out: TrialsOut) -> float:
        """The lower, the sooner. In seconds, so that whoever waits comes first in the end."""
        behind_s = BEHIND_S * out.by_place[waiting.trial.place.name]
        return waiting.came_at + behind_s + waiting.wasted_s

    def _is_there(self, waiting: _Waiting, now: float) -> bool:
        return now - waiting.asked_at < WAITS_S

    def _make_room(self, place: str) -> None:
        """Drop the last worker of the place with most in the queue, for one of another place."""
        held = Counter(each.trial.place.name for each in self._waiting.values())
        largest, count = held.most_common(1)[0]
        if count > held[place] + 1:
            last = next(
                name
                for name, each in reversed(self._waiting.items())
                if each.trial.place.name == largest
            )
            del self._waiting[last]

    def _drop_gone(self, now: float) -> None:
        gone = [name for name, each in self._waiting.items() if not self._is_there(each, now)]
        for name in gone:
            del self._waiting[name]
