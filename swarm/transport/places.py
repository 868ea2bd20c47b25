"""Who has a place: connections that are being admitted, and those that are. Pure, but for trio's
clock.

This is the one count of live connections. A connection is counted from the moment it is accepted
or dialled until its socket is closed or it has to give way, whatever happens between.

Whoever opens a TCP connection and says nothing costs a place until it times out, before anything is
known of it but its address. So each origin has few places among those that are being admitted, and
where they or all are taken, the oldest gives way: an honest handshake takes a few round trips.

Where all places for admitted connections are taken, the newest connection of the origin that has
most gives way to a newcomer whose origin has fewer: nobody fills a node from a few addresses. A
part of the places is kept for connections that this node makes itself.
"""

import ipaddress
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

import trio

from swarm.identity import PeerId
from swarm.limits.address_blocks import Block, block_of, is_public
from swarm.limits.quotas import RELAYED

HANDSHAKES_MAX: Final = 128
OF_BLOCK_MAX: Final = 8  # of one public address block
OF_PRIVATE_MAX: Final = 64  # of one private address: there may be a whole swarm behind it
PATIENCE_S: Final = 2.0  # so much every handshake gets, unless its origin crowds others out
CONNECTIONS_MAX: Final = 256
INBOUND_MAX: Final = 224  # of these; the rest is for connections that we make
OF_PEER_MAX: Final = (
    3  # connections of one peer: two that were made at once, and one on its way out
)

Origin = Block | str
"""What one person has: a public address block, a private address, or all that relays hide."""


def origin_of(ip: str | None) -> Origin:
    """To whose account a connection from an address is put; None: it came through a relay."""
    if ip is None:
        return RELAYED
    return (block_of(ip) if is_public(ip) else None) or ip


@dataclass(eq=False, slots=True)
class Place:
    """One connection, or what may become one."""

    ip: str | None
    since_s: float
    inbound: bool = True
    peer: PeerId | None = None  # None: not proved yet
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    origin: Origin = field(init=False)
    block: Block | None = field(init=False)

    def __post_init__(self) -> None:
        self.origin = origin_of(self.ip)
        self.block = block_of(self.ip)


@dataclass(frozen=True, slots=True)
class PlaceFigures:
    """What `status` shows of the door."""

    connections: int
    connections_max: int
    inbound: int
    inbound_max: int
    handshakes: int
    handshakes_max: int
    largest_origin: str  # "" where nobody is connected
    of_largest: int
    turned_away: dict[str, int]  # newcomers since the start, by why
    gave_way: dict[str, int]  # connections since the start that were ended for others, by why
    failed: dict[str, int]  # newcomers since the start that did not get through, by the step


class Places:
    """All places of one node."""

    def __init__(self) -> None:
        self._handshakes: dict[Place, None] = {}  # oldest first
        self._admitted: dict[Place, None] = {}  # oldest first
        self.turned_away: Counter[str] = Counter()  # newcomers, by why
        self.gave_way: Counter[str] = Counter()  # places that were taken back, by why
        self.failed: Counter[str] = Counter()  # newcomers that did not get through, by the step

    @property
    def handshakes(self) -> int:
        """How many connections are being admitted."""
        return len(self._handshakes)

    def admitted(self) -> Iterator[tuple[PeerId, str | None]]:
        """The peer and the address of each connection."""
        for place in self._admitted:
            assert place.peer is not None
            yield place.peer, place.ip

    # --- before anything is known ---------------------------------------------------------------

    def enter(self, ip: str | None) -> Place | None:
        """A place to be admitted from; None if there is none. `leave` gives it back."""
        place = Place(ip, trio.current_time())
        held = Counter(each.origin for each in self._handshakes)
        roomy = True
        if held[place.origin] >= (OF_BLOCK_MAX if is_public(ip) else OF_PRIVATE_MAX):
            roomy = self._end_oldest(place.origin)
        elif len(self._handshakes) >= HANDSHAKES_MAX:
            roomy = self._end_oldest(held.most_common(1)[0][0])
            if not roomy and (crowding := _crowding(self._handshakes, place)) is not None:
                self._end_handshake(crowding)
                roomy = True
        if not roomy:
            self.turned_away["handshakes"] += 1
            return None
        self._handshakes[place] = None
        return place

    def _end_oldest(self, origin: Origin) -> bool:
        oldest = next(each for each in self._handshakes if each.origin == origin)
        if trio.current_time() - oldest.since_s < PATIENCE_S:
            return False
        self._end_handshake(oldest)
        return True

    def _end_handshake(self, place: Place) -> None:
        place.scope.cancel()
        del self._handshakes[place]
        self.gave_way["handshakes"] += 1

    # --- once a peer is proved ------------------------------------------------------------------

    def admit(self, peer: PeerId, ip: str | None, *, inbound: bool) -> Place | None:
        """A place for a connection whose peer is proved; None if there is none. Whoever holds it
        runs the connection in its scope, which is cancelled where it has to give way."""
        place = Place(ip, trio.current_time(), inbound, peer)
        same = [each for each in self._admitted if each.peer == peer]
        if len(same) >= OF_PEER_MAX:
            self._end(same[0], "peer")
        elif len(self._admitted) >= CONNECTIONS_MAX or (inbound and self._inbound() >= INBOUND_MAX):
            crowding = _crowding([each for each in self._admitted if each.inbound], place)
            if crowding is None:
                self.turned_away["full"] += 1
                return None
            self._end(crowding, "full")
        self._admitted[place] = None
        return place

    def _inbound(self) -> int:
        return sum(place.inbound for place in self._admitted)

    def _end(self, place: Place, why: str) -> None:
        place.scope.cancel()
        del self._admitted[place]
        self.gave_way[why] += 1

    # --- the end ----------------------------------------------------------------------------------

    def leave(self, place: Place) -> None:
        """The connection is over, one way or another."""
        self._handshakes.pop(place, None)
        self._admitted.pop(place, None)

    def figures(self) -> PlaceFigures:
        """What is taken, and by whom most."""
        held = Counter(each.origin for each in self._admitted)
        largest, count = held.most_common(1)[0] if held else ("", 0)
        return PlaceFigures(
            connections=len(self._admitted),
            connections_max=CONNECTIONS_MAX,
            inbound=self._inbound(),
            inbound_max=INBOUND_MAX,
            handshakes=len(self._handshakes),
            handshakes_max=HANDSHAKES_MAX,
            largest_origin=largest,
            of_largest=count,
            turned_away=dict(self.turned_away),
            gave_way=dict(self.gave_way),
            failed=dict(self.failed),
        )


def _crowding(places: Collection[Place], newcomer: Place) -> Place | None:
    """The newest place of the largest origin, if that has more than the newcomer's would have.
    Where none has, wider networks are asked: one contract may come with hundreds of blocks."""
    for place_of in (_origin, _network):
        held = Counter(map(place_of, places))
        if held:
            largest, count = held.most_common(1)[0]
            if count > held[place_of(newcomer)] + 1:
                return [each for each in places if place_of(each) == largest][-1]
    return None


def _origin(place: Place) -> str:
    return place.origin


def _network(place: Place) -> str:
    """The network around an address: a /16 of IPv4, a /32 of IPv6."""
    if place.block is None:
        return place.origin
    network = ipaddress.ip_network(place.block)
    return str(network.supernet(new_prefix=16 if network.version == 4 else 32))
