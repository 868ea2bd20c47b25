"""Who has the places in which a protocol's requests are answered. Pure, but for trio's clock.

A place is taken once a request is there, so that nobody holds one by sending half of it. Where all
are taken, an answer that its reader takes slowly gives way to a newcomer whose share is smaller:
else few peers that read nothing would keep all others out. Where none is slow, the newcomer waits a
moment, and whoever has least has the next place; those who have as much as anybody are refused.
Else the many keys of one address, which ask as often as each may, would be answered in its stead.
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

Share = PeerId | Block
"""In whose name a place is held: a public address block, or else the peer."""


@dataclass(eq=False, slots=True)
class Place:
    """One request that is being answered."""

    share: Share
    answering_since_s: float | None = None  # by trio's clock; None while its handler runs
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # around the answering


@dataclass(eq=False, slots=True)
class Waiting:
    """One request that would be answered next."""

    share: Share
    come: trio.Event = field(default_factory=trio.Event)
    place: Place | None = None  # once it has come


@dataclass(slots=True)
class Served:
    """One served protocol, the requests that are being read, and those that have places."""

    handler: Handler
    limits: ServeLimits
    sent: Sent = untold
    of_peers: Counter[PeerId] = field(default_factory=Counter)  # read ones included
    places: dict[Place, None] = field(default_factory=dict)  # oldest first
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

    async def take(self, share: Share) -> Place | None:
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

    def give_back(self, place: Place) -> None:
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

    def _placed(self, share: Share) -> Place:
        place = Place(share)
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
