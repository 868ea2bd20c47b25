"""Request slots of a served protocol. Pure, on trio's clock.

A slot is taken once the whole request has arrived. When all are taken, an answer that its reader
takes slowly is evicted for a newcomer with a smaller share. Otherwise the newcomer waits a moment,
and the smallest share gets the next slot. Those with the largest share are refused, else many keys
of one address would keep others out.

The bytes of arriving requests are bounded for all protocols together (`Arrivals`).
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio

from swarm.identity import PeerId
from swarm.limits.address_blocks import Block
from swarm.transport.base import Handler, Sent, ServeLimits, ignore_sent

REQUEST_STALL_S = 5.0  # for a request to arrive, plus:
REQUEST_BYTES_PER_S = 32_768.0
ANSWER_SLOW_S = 5.0  # a slower answer may be evicted
PLACE_WAIT_S = 2.0  # for a slot, if others hold more of them
WAITING_MAX = 64  # requests of one protocol that wait for a slot
REQUEST_BYTES_SMALL = 4_096  # smaller requests are not counted
ARRIVING_BYTES_MAX = 12_582_912  # of larger ones, from announcement to answer
ARRIVING_SHARE_MAX = ARRIVING_BYTES_MAX // 2  # likewise, per share

Share = PeerId | Block
"""Holder of a slot: a public address block, or else the peer."""


@dataclass(eq=False, slots=True)
class RequestSlot:
    share: Share
    answering_since_s: float | None = None  # trio's clock; None while the handler runs
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # around the answering


@dataclass(eq=False, slots=True)
class Arrival:
    share: Share
    size: int  # in bytes, as announced
    is_complete: bool = False  # complete, so never evicted
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # around its reading


class Arrivals:
    """Bytes of announced, arriving and answered requests. Beyond the limit, the oldest incomplete
    request of the largest share is evicted for a smaller share."""

    def __init__(self) -> None:
        self._known: dict[Arrival, None] = {}  # oldest first
        self._held: Counter[Share] = Counter()  # bytes

    @property
    def held_bytes(self) -> int:
        return self._held.total()

    def reserve(self, share: Share, size: int) -> Arrival | None:
        """Count an announced request until `release`. None: there is no room."""
        arrival = Arrival(share, size)
        if size <= REQUEST_BYTES_SMALL:
            return arrival
        if self._held[share] + size > ARRIVING_SHARE_MAX:
            return None
        while self.held_bytes + size > ARRIVING_BYTES_MAX:
            if not self._evict(self._held[share] + size):
                return None
        self._known[arrival] = None
        self._held[share] += size
        return arrival

    def release(self, arrival: Arrival) -> None:
        if arrival in self._known:
            del self._known[arrival]
            self._held[arrival.share] -= arrival.size
            if not self._held[arrival.share]:
                del self._held[arrival.share]

    def _evict(self, would_hold: int) -> bool:
        larger = [
            each
            for each in self._known
            if not each.is_complete and self._held[each.share] > would_hold
        ]
        if not larger:
            return False
        victim = max(larger, key=lambda each: self._held[each.share])  # the oldest if several
        victim.scope.cancel()
        self.release(victim)
        return True


@dataclass(eq=False, slots=True)
class Waiting:
    share: Share
    granted: trio.Event = field(default_factory=trio.Event)
    slot: RequestSlot | None = None  # once granted


@dataclass(slots=True)
class Served:
    """One served protocol: its requests in arrival, in slots, and waiting."""

    handler: Handler
    limits: ServeLimits
    sent: Sent = ignore_sent
    requests_by_peer: Counter[PeerId] = field(default_factory=Counter)  # arriving ones included
    slots: dict[RequestSlot, None] = field(default_factory=dict)  # oldest first
    waiting: list[Waiting] = field(default_factory=list)  # oldest first

    @property
    def read_timeout_s(self) -> float:
        """Longest time for a request to arrive."""
        needed_s = REQUEST_STALL_S + self.limits.request_bytes_max / REQUEST_BYTES_PER_S
        return min(self.limits.timeout_s, needed_s)

    @contextmanager
    def counted(self, peer: PeerId) -> Iterator[bool]:
        """Count a request of a peer. Yields False if the peer is at its limit."""
        has_room = self.requests_by_peer[peer] < self.limits.concurrent_per_peer_max
        self.requests_by_peer[peer] += has_room
        try:
            yield has_room
        finally:
            self.requests_by_peer[peer] -= has_room
            if not self.requests_by_peer[peer]:
                del self.requests_by_peer[peer]

    async def acquire(self, share: Share) -> RequestSlot | None:
        """Take a slot for a complete request, or wait for one. None: refused."""
        if len(self.slots) < self.limits.concurrent_max or self._make_room(share):
            return self._grant(share)
        held = Counter(slot.share for slot in self.slots)
        if held[share] >= max(held.values()) or len(self.waiting) >= WAITING_MAX:
            return None
        waiting = Waiting(share)
        self.waiting.append(waiting)
        try:
            with trio.move_on_after(PLACE_WAIT_S):
                await waiting.granted.wait()
        except trio.Cancelled:
            if waiting.slot is not None:
                self.release(waiting.slot)
            raise
        finally:
            if waiting in self.waiting:
                self.waiting.remove(waiting)
        return waiting.slot

    def release(self, slot: RequestSlot) -> None:
        """Free a slot for the waiting request with the smallest share."""
        if slot not in self.slots:
            return  # it was evicted
        del self.slots[slot]
        if self.waiting:
            held = Counter(each.share for each in self.slots)
            waiting = min(self.waiting, key=lambda each: held[each.share])  # the oldest if several
            self.waiting.remove(waiting)
            waiting.slot = self._grant(waiting.share)
            waiting.granted.set()

    def _grant(self, share: Share) -> RequestSlot:
        slot = RequestSlot(share)
        self.slots[slot] = None
        return slot

    def _make_room(self, share: Share) -> bool:
        """Evict the oldest slow answer of the largest share, if that is fairer."""
        held = Counter(slot.share for slot in self.slots)
        slow_s = trio.current_time() - ANSWER_SLOW_S
        slow = [
            slot
            for slot in self.slots
            if slot.answering_since_s is not None
            and slot.answering_since_s <= slow_s
            and held[slot.share] > held[share] + 1
        ]
        if not slow:
            return False
        victim = max(slow, key=lambda slot: held[slot.share])  # the oldest if several
        victim.scope.cancel()
        del self.slots[victim]
        return True
