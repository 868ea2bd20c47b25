"""Who has the places in which a protocol's requests are answered. Pure, but for trio's clock.

A place is taken once a request is there, so that nobody holds one by sending half of it. Where all
are taken, an answer that its reader takes slowly gives way to a newcomer whose share is smaller:
else few peers that read nothing would keep all others out. Where none is slow, the newcomer waits a
moment, and whoever has least has the next place; those who have as much as anybody are refused.
Else the many keys of one address, which ask as often as each may, would be answered in its stead.

What has a place has a bound; what is on its way to one has another, in bytes, of all protocols
together (`Arrivals`): a hundred keys would send sixteen halves of a megabyte each.
"""

from collections import Counter
from dataclasses import dataclass, field

import trio

from swarm.identity import PeerId
from swarm.limits.address_blocks import Block
from swarm.transport.base import Handler, Sent, ServeLimits, untold

REQUEST_STALL_S = 5.0  # for a request that is announced, and what its bytes take:
REQUEST_BYTES_PER_S = 32_768.0
ANSWER_SLOW_S = 5.0  # an answer that takes longer than this may have to give way
PLACE_WAIT_S = 2.0  # for a place, where all are taken and others have more of them
WAITING_MAX = 64  # requests of one protocol that wait for a place
REQUEST_BYTES_SMALL = 4_096  # a request up to so long is not worth counting
ARRIVING_BYTES_MAX = 12_582_912  # of the larger ones, from their announcement to their answer
ARRIVING_SHARE_MAX = ARRIVING_BYTES_MAX // 2  # likewise, in one name

Share = PeerId | Block
"""In whose name a place is held: a public address block, or else the peer."""


@dataclass(eq=False, slots=True)
class RequestSlot:
    """One request that is being answered."""

    share: Share
    answering_since_s: float | None = None  # by trio's clock; None while its handler runs
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # around the answering


@dataclass(eq=False, slots=True)
class Arrival:
    """One request whose bytes are counted."""

    share: Share
    size: int  # in bytes, as announced
    is_here: bool = False  # all of it; it is answered then, and gives way to nobody
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # around its reading


class Arrivals:
    """The bytes of requests that are announced, arrive or are answered. Pure, but for cancelling.

    Where they are too many, the oldest request of the largest share that is not here yet gives way
    to a share that would still be smaller.
    """

    def __init__(self) -> None:
        self._known: dict[Arrival, None] = {}  # oldest first
        self._held: Counter[Share] = Counter()  # bytes

    @property
    def held_bytes(self) -> int:
        """The bytes that all requests hold."""
        return self._held.total()

    def enter(self, share: Share, size: int) -> Arrival | None:
        """Count an announced request, until it leaves. None: there is no room for it."""
        arrival = Arrival(share, size)
        if size <= REQUEST_BYTES_SMALL:
            return arrival
        if self._held[share] + size > ARRIVING_SHARE_MAX:
            return None
        while self.held_bytes + size > ARRIVING_BYTES_MAX:
            if not self._gives_way(self._held[share] + size):
                return None
        self._known[arrival] = None
        self._held[share] += size
        return arrival

    def leave(self, arrival: Arrival) -> None:
        """Once it is answered, or given up."""
        if arrival in self._known:
            del self._known[arrival]
            self._held[arrival.share] -= arrival.size
            if not self._held[arrival.share]:
                del self._held[arrival.share]

    def _gives_way(self, would_hold: int) -> bool:
        larger = [
            each for each in self._known if not each.is_here and self._held[each.share] > would_hold
        ]
        if not larger:
            return False
        victim = max(larger, key=lambda each: self._held[each.share])  # the first of several
        victim.scope.cancel()
        self.leave(victim)
        return True


@dataclass(eq=False, slots=True)
class Waiting:
    """One request that would be answered next."""

    share: Share
    come: trio.Event = field(default_factory=trio.Event)
    place: RequestSlot | None = None  # once it has come


@dataclass(slots=True)
class Served:
    """One served protocol, the requests that are being read, and those that have places."""

    handler: Handler
    limits: ServeLimits
    sent: Sent = untold
    of_peers: Counter[PeerId] = field(default_factory=Counter)  # read ones included
    places: dict[RequestSlot, None] = field(default_factory=dict)  # oldest first
    waiting: list[Waiting] = field(default_factory=list)  # oldest first

    @property
    def read_timeout_s(self) -> float:
        """How long a request may take to arrive."""
        needed_s = REQUEST_STALL_S + self.limits.request_bytes_max / REQUEST_BYTES_PER_S
        return min(self.limits.timeout_s, needed_s)

    def enter(self, peer: PeerId) -> bool:
        """Count a request of a peer in; whether it may have one more."""
        if self.of_peers[peer] >= self.limits.concurrent_per_peer_max:
            return False
        self.of_peers[peer] += 1
        return True

    def leave(self, peer: PeerId) -> None:
        self.of_peers[peer] -= 1
        if not self.of_peers[peer]:
            del self.of_peers[peer]

    async def take(self, share: Share) -> RequestSlot | None:
        """A place for a request that is there; None if there is none, and will be none soon."""
        if len(self.places) < self.limits.concurrent_max or self._make_room(share):
            return self._placed(share)
        held = Counter(place.share for place in self.places)
        if held[share] >= max(held.values()) or len(self.waiting) >= WAITING_MAX:
            return None
        waiting = Waiting(share)
        self.waiting.append(waiting)
        try:
            with trio.move_on_after(PLACE_WAIT_S):
                await waiting.come.wait()
        except trio.Cancelled:
            if waiting.place is not None:
                self.give_back(waiting.place)
            raise
        finally:
            if waiting in self.waiting:
                self.waiting.remove(waiting)
        return waiting.place

    def give_back(self, place: RequestSlot) -> None:
        """Free a place, for whoever waits and has least."""
        if place not in self.places:
            return  # it was taken away, and somebody else has it
        del self.places[place]
        if self.waiting:
            held = Counter(each.share for each in self.places)
            waiting = min(self.waiting, key=lambda each: held[each.share])  # the first of several
            self.waiting.remove(waiting)
            waiting.place = self._placed(waiting.share)
            waiting.come.set()

    def _placed(self, share: Share) -> RequestSlot:
        place = RequestSlot(share)
        self.places[place] = None
        return place

    def _make_room(self, share: Share) -> bool:
        """Give up the oldest slow answer of the largest share, if that is fairer."""
        held = Counter(place.share for place in self.places)
        slow_s = trio.current_time() - ANSWER_SLOW_S
        slow = [
            place
            for place in self.places
            if place.answering_since_s is not None
            and place.answering_since_s <= slow_s
            and held[place.share] > held[share] + 1
        ]
        if not slow:
            return False
        victim = max(slow, key=lambda place: held[place.share])  # the first of several
        victim.scope.cancel()
        del self.places[victim]
        return True
