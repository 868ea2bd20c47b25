"""Connection slots: the one count of connections in their handshake and of admitted ones. Pure, on
trio's clock.

A slot is held from accept or dial until the socket is closed or the connection is evicted.

A silent TCP connection holds a handshake slot until it times out, so each origin has few of them.
When none is free, the oldest handshake of the origin with the most is evicted: an honest one takes
a few round trips.

When a block or the whole has no free connection slot, the newest connection of the largest origin
is evicted, so nobody fills a node from a few addresses. Outbound connections are counted apart.
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
HANDSHAKES_PER_BLOCK_MAX: Final = 8  # per public address block
HANDSHAKES_PER_PRIVATE_IP_MAX: Final = 64  # per private address, behind which there may be a swarm
HANDSHAKE_PATIENCE_S: Final = 2.0  # guaranteed to each handshake, unless its origin has too many
CONNECTIONS_MAX: Final = 256
INBOUND_MAX: Final = 224  # of these; the rest is for outbound ones
CONNECTIONS_PER_PEER_MAX: Final = 3  # two made at once, and one that is closing

Origin = Block | str
"""A public address block, a private address, or all relayed connections: what one person easily
has."""


def origin_of(ip: str | None) -> Origin:
    """The account to which work for a connection is put. None: the connection is relayed."""
    return shared_block(ip) or ip or RELAYED


@dataclass(eq=False, slots=True)
class ConnectionSlot:
    ip: str | None
    since_s: float
    inbound: bool = True
    peer: PeerId | None = None  # None: in the handshake
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    on_end: Callable[[], object] = field(default=lambda: None, repr=False)  # called on eviction
    origin: Origin = field(init=False)

    def __post_init__(self) -> None:
        self.origin = origin_of(self.ip)

    def evict(self) -> None:
        self.scope.cancel()
        self.on_end()


@dataclass(frozen=True, slots=True)
class SlotFigures:
    """Slot use, as `status` shows it."""

    connections: int
    connections_max: int
    inbound: int
    handshakes: int
    handshakes_max: int
    largest_origin: str  # "" if nobody is connected
    of_largest: int
    turned_away: dict[str, int]  # refused connections since the start, by reason
    evicted: dict[str, int]  # evicted connections since the start, by reason
    failed: dict[str, int]  # failed handshakes since the start, by step


_HANDSHAKE_LIMITS = OriginLimits(
    block=HANDSHAKES_PER_BLOCK_MAX,
    private_address=HANDSHAKES_PER_PRIVATE_IP_MAX,
    relayed=HANDSHAKES_PER_PRIVATE_IP_MAX,
)
_Slots = BoundedTable[ConnectionSlot, ConnectionSlot]


class ConnectionSlots:
    def __init__(self) -> None:
        self.limits = OriginLimits()  # of admitted connections, for each direction
        self._handshakes = _Slots(HANDSHAKES_MAX, limit_of=_HANDSHAKE_LIMITS, newest_first=True)
        self._inbound, self._own = (
            _Slots(most, limit_of=lambda path: self.limits(path), newest_first=True)
            for most in (INBOUND_MAX, CONNECTIONS_MAX)
        )
        self.turned_away: Counter[str] = Counter()  # by reason
        self.evicted: Counter[str] = Counter()  # evictions, by reason
        self.failed: Counter[str] = Counter()  # handshakes, by step

    @property
    def handshakes(self) -> int:
        return len(self._handshakes)

    def _admitted(self) -> list[ConnectionSlot]:
        return [*self._inbound, *self._own]

    def begin_handshake(self, ip: str | None) -> ConnectionSlot | None:
        """Take a handshake slot; give it back with `release`. None: no slot is free."""
        slot = ConnectionSlot(ip, trio.current_time())
        gone = self._handshakes.put(slot, slot, path_of(ip))
        if gone is None:
            return slot
        ended, oldest = gone.key, self._handshakes.oldest(gone.path)
        if trio.current_time() - oldest.since_s >= HANDSHAKE_PATIENCE_S:
            self._handshakes.pop(oldest)
            self._handshakes.put(ended, ended, path_of(ended.ip))
            ended = oldest
        if ended is slot:
            self.turned_away["handshakes"] += 1
            return None
        ended.evict()
        self.evicted["handshakes"] += 1
        return slot

    def admit(self, peer: PeerId, ip: str | None, *, inbound: bool) -> ConnectionSlot | None:
        """Take a connection slot for a proven peer; give it back with `release`. None: no slot is
        free. The connection must run in the slot's scope, which eviction cancels."""
        slot = ConnectionSlot(ip, trio.current_time(), inbound, peer)
        same = [each for each in self._admitted() if each.peer == peer]
        if len(same) >= CONNECTIONS_PER_PEER_MAX:
            oldest = min(same, key=lambda each: each.since_s)
            self._drop(oldest)
            self._end(oldest, "peer")
        table = self._inbound if inbound else self._own
        gone = table.put(slot, slot, (*path_of(ip), peer))
        if gone is None and len(self._inbound) + len(self._own) > CONNECTIONS_MAX:
            gone = self._inbound.evict()
        if gone is not None and gone.key is slot:
            self.turned_away[_why(gone.path)] += 1
            return None
        if gone is not None:
            self._end(gone.key, _why(gone.path))
        return slot

    def _end(self, slot: ConnectionSlot, why: str) -> None:
        slot.evict()
        self.evicted[why] += 1

    def release(self, slot: ConnectionSlot | None) -> None:
        if slot is not None:
            self._handshakes.pop(slot)
            self._drop(slot)

    def _drop(self, slot: ConnectionSlot) -> None:
        self._inbound.pop(slot)
        self._own.pop(slot)

    def figures(self) -> SlotFigures:
        held = Counter(each.origin for each in self._admitted())
        largest, count = held.most_common(1)[0] if held else ("", 0)
        return SlotFigures(
            connections=len(self._inbound) + len(self._own),
            connections_max=CONNECTIONS_MAX,
            inbound=len(self._inbound),
            handshakes=len(self._handshakes),
            handshakes_max=HANDSHAKES_MAX,
            largest_origin=largest,
            of_largest=count,
            turned_away=dict(self.turned_away),
            evicted=dict(self.evicted),
            failed=dict(self.failed),
        )


def _why(path: OriginPath) -> str:
    """Reason for an eviction: the kind of origin that was full."""
    return "relayed" if path == RELAYED_PATH else ("full", "network", "block", "address")[len(path)]
