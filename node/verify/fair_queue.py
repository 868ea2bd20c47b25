"""A fair queue of producers' groups for one server; some producers are hostile. Pure: time, in
seconds of any clock, is passed in.

    queue.add(producer, item)                   it waits, or QueueFull
    tickets = queue.pop(now)                    the next batch; each of it is served until
    queue.charge(producer, seconds, now, end)   what serving it took, and how it ended
    queue.put_back(ticket)                      or waits again, where it was

Next is the group whose producer has used least; what was used fades by half every `HALF_LIFE_S`.
Producers of whom fewer than `PROVEN_GROUPS` groups were done share one account, so that a new key
for each group gains nothing: they wait behind everybody whose own account is lower, among
themselves the one that used least first, and are served when there is nobody such. An overrun
costs `OVERRUN_FACTOR` times what it used, and its producer is as good as new again.

`last` tickets are served only when no other one waits.

A batch is what comes next, in this order. Only groups of proven producers share one: the last
`PROVEN_GROUPS` of each went well.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Generic, TypeVar

from swarm.identity import PeerId

HALF_LIFE_S: Final = 60.0
PROVEN_GROUPS: Final = 8
OVERRUN_FACTOR: Final = 10.0
WAITING_MAX: Final = 256  # groups; a learner looks at 64 at once, the exchange at 16
WAITING_UNPROVEN_MAX: Final = 128  # of them, those of producers that share an account
WAITING_PER_PRODUCER_MAX: Final = 16
WAITING_LAST_MAX: Final = 32  # which may take long, and leave room for others
BATCH_GROUPS_MAX: Final = 16
BATCH_SIZE_MAX: Final = 2**18  # in the unit of `add`
# Accounts of each kind; the least recently charged is forgotten. Keys that nobody has proven
# cannot push out those that are.
PROVEN_MAX: Final = 2048
UNPROVEN_MAX: Final = 2048

Item = TypeVar("Item")


class End(Enum):
    """Results of serving a group."""

    DONE = auto()
    FAILED = auto()
    OVERRUN = auto()  # it used up what it may use
    DOUBTFUL = auto()  # it took long, and nobody can say what it is worth


class QueueFull(Exception):
    """No room for one more; which bound was met."""


@dataclass(eq=False, slots=True)
class Ticket(Generic[Item]):
    """A waiting item and its producer. `number`: its place in the order of arrival."""

    producer: PeerId
    item: Item
    number: int
    last: bool
    size: int
    alone: bool = False  # it shares no batch
    discarded: bool = False


@dataclass(slots=True)
class _Account:
    used_s: float = 0.0  # as it was at `at`
    at: float = 0.0
    groups: int = 0  # that were done, since the last overrun
    doubtful: int = 0  # since it was proven last

    def level(self, now: float) -> float:
        """Seconds used that have not faded."""
        return float(self.used_s * 0.5 ** (max(0.0, now - self.at) / HALF_LIFE_S))

    def add(self, seconds: float, now: float) -> None:
        self.used_s, self.at = self.level(now) + seconds, now


class FairQueue(Generic[Item]):
    """Waiting groups and their producers' accounts; all of it bounded."""

    def __init__(self) -> None:
        self._waiting: list[Ticket[Item]] = []
        self._number = 0
        self._proven: OrderedDict[PeerId, _Account] = OrderedDict()
        self._unproven: OrderedDict[PeerId, _Account] = OrderedDict()
        self._shared = _Account()
        self.refused: Counter[str] = Counter()  # by the bound that was met

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
        """Let an item wait. `last`: until nothing else does. `size` is for the bound of a batch,
        and `alone`: it shares none.

        Raises:
            QueueFull: it may not.
        """
        self._check_room(producer, last)
        self._number += 1
        ticket = Ticket(producer, item, self._number, last, size, alone)
        self._waiting.append(ticket)
        return ticket

    def put_back(self, ticket: Ticket[Item], *, alone: bool = False) -> None:
        """Let a ticket that was not served wait where it waited before, unless it was discarded.
        `alone`: it shares no batch from now on."""
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
                self.refused[what] += 1
                raise QueueFull(f"{waiting} groups {what} wait")

    def discard(self, ticket: Ticket[Item]) -> bool:
        """Let a ticket wait no longer, now or when it is put back; whether it did."""
        ticket.discarded = True
        is_waiting = ticket in self._waiting
        if is_waiting:
            self._waiting.remove(ticket)
        return is_waiting

    def pop(self, now: float) -> list[Ticket[Item]]:
        """The next batch, in the order of turns; empty: nothing waits."""
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
        """The levels of the account that a producer waits on and of the producer itself."""
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
        """Note what serving a producer took, and how it ended."""
        account = self._proven.pop(producer, None)
        if account is None:
            account = self._unproven.pop(producer, None) or _Account(at=now)
            self._shared.add(seconds, now)  # what was used; only its producer pays for an overrun
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
