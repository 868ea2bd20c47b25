"""Who has a place: connections that are being admitted, and those that are. Pure, but for trio's
clock.

This is the one count of live connections. A connection is counted from the moment it is accepted
or dialled until its socket is closed or it has to give way, whatever happens between.

Whoever opens a TCP connection and says nothing costs a place until it times out, before anything is
known of it but its address. So each origin has few places among those that are being admitted, and
where they or all are taken, the oldest of who has most of them gives way: an honest handshake takes
a few round trips.

Where a block of addresses or the whole has no place left for a connection, the newest of who has
most of it gives way: nobody fills a node, or his neighbours' part of it, from a few addresses.
Connections that this node makes itself are counted apart.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from swarm.identity import PeerId
from swarm.limits.address_blocks import RELAYED_PATH, Block, OriginPath, path_of
from swarm.limits.bounded_table import BoundedTable, OriginLimits
from swarm.limits.quotas import RELAYED, shared_block

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
    """The account to which work for a connection is put. None: the connection is relayed."""
    return shared_block(ip) or ip or RELAYED


def _nothing() -> None:
    pass


@dataclass(eq=False, slots=True)
class Place:
    """One connection, or what may become one."""

    ip: str | None
    since_s: float
    inbound: bool = True
    peer: PeerId | None = None  # None: not proved yet
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    on_end: Callable[[], None] = field(default=_nothing, repr=False)  # called as it gives way
    origin: Origin = field(init=False)

    def __post_init__(self) -> None:
        self.origin = origin_of(self.ip)

    def give_way(self) -> None:
        """End what holds it."""
        self.scope.cancel()
        self.on_end()


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


_HANDSHAKE_LIMITS = OriginLimits(
    block=OF_BLOCK_MAX, private_address=OF_PRIVATE_MAX, relayed=OF_PRIVATE_MAX
)
_Slots = BoundedTable[Place, Place]


class Places:
    """All places of one node."""

    def __init__(self) -> None:
        self.limits = OriginLimits()  # of admitted connections, for each direction
        self._handshakes = _Slots(HANDSHAKES_MAX, limit_of=_HANDSHAKE_LIMITS, newest_first=True)
        self._inbound = _Slots(INBOUND_MAX, limit_of=self._limit_of, newest_first=True)
        self._own = _Slots(CONNECTIONS_MAX, limit_of=self._limit_of, newest_first=True)
        self.turned_away: Counter[str] = Counter()  # newcomers, by why
        self.gave_way: Counter[str] = Counter()  # places that were taken back, by why
        self.failed: Counter[str] = Counter()  # newcomers that did not get through, by the step

    def _limit_of(self, path: OriginPath) -> int | None:
        return self.limits(path)

    @property
    def handshakes(self) -> int:
        """How many connections are being admitted."""
        return len(self._handshakes)

    def _admitted(self) -> list[Place]:
        return [*self._inbound, *self._own]

    # --- before anything is known ---------------------------------------------------------------

    def enter(self, ip: str | None) -> Place | None:
        """A place to be admitted from; None if there is none. `leave` gives it back."""
        place = Place(ip, trio.current_time())
        gone = self._handshakes.put(place, place, path_of(ip))
        if gone is None:
            return place
        ended, oldest = gone.key, self._handshakes.oldest(gone.path)
        if trio.current_time() - oldest.since_s >= PATIENCE_S:
            self._handshakes.pop(oldest)
            self._handshakes.put(ended, ended, path_of(ended.ip))
            ended = oldest
        if ended is place:
            self.turned_away["handshakes"] += 1
            return None
        ended.give_way()
        self.gave_way["handshakes"] += 1
        return place

    # --- once a peer is proved ------------------------------------------------------------------

    def admit(self, peer: PeerId, ip: str | None, *, inbound: bool) -> Place | None:
        """A place for a connection whose peer is proved; None if there is none. Whoever holds it
        runs the connection in its scope, which is cancelled where it has to give way."""
        place = Place(ip, trio.current_time(), inbound, peer)
        same = [each for each in self._admitted() if each.peer == peer]
        if len(same) >= OF_PEER_MAX:
            oldest = min(same, key=lambda each: each.since_s)
            self._forget(oldest)
            self._end(oldest, "peer")
        table = self._inbound if inbound else self._own
        gone = table.put(place, place, (*path_of(ip), peer))
        if gone is None and len(self._inbound) + len(self._own) > CONNECTIONS_MAX:
            gone = self._inbound.evict()
        if gone is not None and gone.key is place:
            self.turned_away[_why(gone.path)] += 1
            return None
        if gone is not None:
            self._end(gone.key, _why(gone.path))
        return place

    def _end(self, place: Place, why: str) -> None:
        place.give_way()
        self.gave_way[why] += 1

    # --- the end ----------------------------------------------------------------------------------

    def leave(self, place: Place | None) -> None:
        """The connection is over, one way or another."""
        if place is not None:
            self._handshakes.pop(place)
            self._forget(place)

    def _forget(self, place: Place) -> None:
        self._inbound.pop(place)
        self._own.pop(place)

    def figures(self) -> PlaceFigures:
        """What is taken, and by whom most."""
        held = Counter(each.origin for each in self._admitted())
        largest, count = held.most_common(1)[0] if held else ("", 0)
        return PlaceFigures(
            connections=len(self._inbound) + len(self._own),
            connections_max=CONNECTIONS_MAX,
            inbound=len(self._inbound),
            inbound_max=INBOUND_MAX,
            handshakes=len(self._handshakes),
            handshakes_max=HANDSHAKES_MAX,
            largest_origin=largest,
            of_largest=count,
            turned_away=dict(self.turned_away),
            gave_way=dict(self.gave_way),
            failed=dict(self.failed),
        )


def _why(path: OriginPath) -> str:
    """What there was too much of."""
    return "relayed" if path == RELAYED_PATH else ("full", "network", "block", "address")[len(path)]
