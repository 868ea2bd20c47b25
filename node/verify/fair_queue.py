"""A fair queue of producers' groups for one server; some producers are hostile. Pure: time, in
seconds of any clock, is passed in. `add` groups, `pop` a batch, then `charge` or `put_back` each.

Next is the group whose producer has used least; use fades by half every `HALF_LIFE_S`. Producers
with fewer than `PROVEN_GROUPS` good groups share one account, so that new keys gain nothing: they
wait behind everybody whose own account is lower. An overrun costs `OVERRUN_FACTOR` times its use,
and its producer counts as new. `last` tickets are served when no other waits. Only groups of proven
producers share a batch.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Generic, TypeVar

from swarm.identity import PeerId

HALF_LIFE_S: Final = 60.0
PROVEN_GROUPS: Final = 8
OVERRUN_FACTOR: Final = 10.0
WAITING_MAX: Final = 256  # groups; a learner verifies 64 at once, the exchange 16
WAITING_UNPROVEN_MAX: Final = 128  # groups of producers that share an account
WAITING_PER_PRODUCER_MAX: Final = 16
WAITING_LAST_MAX: Final = 32  # groups that may take long, and leave room for others
BATCH_GROUPS_MAX: Final = 16
BATCH_SIZE_MAX: Final = 2**18  # in the unit of `add`
# Accounts of each kind; the least recently charged is forgotten. New keys push out no proven one.
PROVEN_MAX: Final = 2048
UNPROVEN_MAX: Final = 2048

Item = TypeVar("Item")


class End(Enum):
    DONE = auto()
    FAILED = auto()
    OVERRUN = auto()  # it used up its limit
    DOUBTFUL = auto()  # it took long, and its reward is undecided


class QueueFull(Exception):
    pass


@dataclass(eq=False, slots=True)
class Ticket(Generic[Item]):
    producer: PeerId
    item: Item
    number: int  # in the order of arrival
    last: bool
    size: int
    alone: bool = False  # it shares no batch
    discarded: bool = False


@dataclass(slots=True)
class _Account:
    used_s: float = 0.0  # as it was at `at`
    at: float = 0.0
    groups: int = 0  # done since the last overrun
    doubtful: int = 0  # since it was last proven

    def level(self, now: float) -> float:
        """Seconds used that have not faded."""
        return float(self.used_s * 0.5 ** (max(0.0, now - self.at) / HALF_LIFE_S))

    def add(self, seconds: float, now: float) -> None:
        self.used_s, self.at = self.level(now) + seconds, now


class FairQueue(Generic[Item]):
    def __init__(self) -> None:
        self._waiting: list[Ticket[Item]] = []
        self._number = 0
        self._proven: OrderedDict[PeerId, _Account] = OrderedDict()
        self._unproven: OrderedDict[PeerId, _Account] = OrderedDict()
        self._shared = _Account()

    def __len__(self) -> int:
        return len(self._waiting)

    def is_proven(self, producer: PeerId) -> bool:
        """True if the producer has an account of its own."""
        return producer in self._proven

    def add(
        self,
        producer: PeerId,
        item: Item,
        *,
        last: bool = False,
        size: int = 0,
        alone: bool = False,
    ) -> Ticket[Item]:
        """Let an item wait. `last`: until no other waits; `size`: counts against a batch's bound;
        `alone`: it shares no batch.

        Raises:
            QueueFull: a bound was met.
        """
        self._check_room(producer, last)
        self._number += 1
        ticket = Ticket(producer, item, self._number, last, size, alone)
        self._waiting.append(ticket)
        return ticket

    def put_back(self, ticket: Ticket[Item], *, alone: bool = False) -> None:
        """Let an unserved ticket wait at its former place, unless it was discarded."""
        ticket.alone = ticket.alone or alone
        if not ticket.discarded:
            self._waiting.append(ticket)

    def _check_room(self, producer: PeerId, last: bool) -> None:
        whose = [ticket.producer for ticket in self._waiting]
        bounds = [
            ("of all", len(whose), WAITING_MAX),
            ("of one producer", whose.count(producer), WAITING_PER_PRODUCER_MAX),
        ]
        if not self.is_proven(producer):
            unproven = sum(not self.is_proven(each) for each in whose)
            bounds.append(("of unproven producers", unproven, WAITING_UNPROVEN_MAX))
        if last:
            those = sum(ticket.last for ticket in self._waiting)
            bounds.append(("for last", those, WAITING_LAST_MAX))
        for what, waiting, most in bounds:
            if waiting >= most:
                raise QueueFull(f"{waiting} groups {what} wait")

    def discard(self, ticket: Ticket[Item]) -> bool:
        """Let a ticket wait no longer, also if it is put back. Returns True if it waited."""
        ticket.discarded = True
        is_waiting = ticket in self._waiting
        if is_waiting:
            self._waiting.remove(ticket)
        return is_waiting

    def pop(self, now: float) -> list[Ticket[Item]]:
        """The next batch; empty: nothing waits."""
        shared = self._shared.level(now)
        self._waiting.sort(
            key=lambda each: (each.last, self._levels(each.producer, shared, now), each.number),
        )
        batch: list[Ticket[Item]] = []
        size = 0
        for ticket in self._waiting[:BATCH_GROUPS_MAX]:
            size += ticket.size
            may_share = size <= BATCH_SIZE_MAX and self._may_share(ticket)
            if batch and not (may_share and self._may_share(batch[0])):
                break
            batch.append(ticket)
        del self._waiting[: len(batch)]
        return batch

    def _may_share(self, ticket: Ticket[Item]) -> bool:
        return self.is_proven(ticket.producer) and not ticket.last and not ticket.alone

    def _levels(self, producer: PeerId, shared: float, now: float) -> tuple[float, float]:
        """Levels of the account that decides a producer's turn, and of its own account."""
        account = self._proven.get(producer)
        if account is not None:
            own = account.level(now)
            return own, own
        account = self._unproven.get(producer)
        own = 0.0 if account is None else account.level(now)
        return max(shared, own), own

    def doubtful(self, producer: PeerId) -> int:
        """The number of remembered doubtful groups of a producer."""
        account = self._proven.get(producer) or self._unproven.get(producer)
        return 0 if account is None else account.doubtful

    def charge(self, producer: PeerId, seconds: float, now: float, end: End) -> None:
        account = self._proven.pop(producer, None)
        if account is None:
            account = self._unproven.pop(producer, None) or _Account(at=now)
            self._shared.add(seconds, now)  # the factor of an overrun is its producer's alone
        if end in (End.OVERRUN, End.DOUBTFUL):
            account.groups = 0
        if end is End.OVERRUN:
            seconds *= OVERRUN_FACTOR
        account.groups += end is End.DONE
        account.doubtful += end is End.DOUBTFUL
        if account.groups >= PROVEN_GROUPS:
            account.doubtful = 0
        account.add(seconds, now)
        is_proven = account.groups >= PROVEN_GROUPS
        kept, most = (self._proven, PROVEN_MAX) if is_proven else (self._unproven, UNPROVEN_MAX)
        kept[producer] = account
        while len(kept) > most:
            kept.popitem(last=False)
