"""How many unfinished inbound handshakes there may be, and of whom. Pure, but for trio's clock.

Whoever opens a TCP connection and says nothing costs a place until it times out, before anything is
known of it but its address. So each address block has few places, and where they or all are taken,
what has waited for longest gives way: an honest handshake takes a few round trips.
"""

from collections import Counter
from dataclasses import dataclass, field

import trio

from swarm.blocks import block_of, is_public

HANDSHAKES_MAX = 128
OF_BLOCK_MAX = 8  # of one public address block
OF_PRIVATE_MAX = 64  # of one private or loopback address: there may be a whole swarm behind it
PATIENCE_S = 2.0  # so much every handshake gets


@dataclass(eq=False, slots=True)
class Handshake:
    """One inbound connection whose peer is not proved yet."""

    origin: str  # a block, or a private address
    since_s: float
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # around the handshake


class Handshakes:
    """Those that are not finished."""

    def __init__(self) -> None:
        self._running: dict[Handshake, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._running)

    def enter(self, ip: str | None) -> Handshake | None:
        """A place for a connection from an address; None if there is none."""
        public = is_public(ip)
        origin = (block_of(ip) if public else None) or ip or ""
        held = Counter(each.origin for each in self._running)
        if held[origin] >= (OF_BLOCK_MAX if public else OF_PRIVATE_MAX):
            roomy = self._end_oldest(origin)
        elif len(self._running) >= HANDSHAKES_MAX:
            roomy = self._end_oldest(held.most_common(1)[0][0])
        else:
            roomy = True
        if not roomy:
            return None
        handshake = Handshake(origin, trio.current_time())
        self._running[handshake] = None
        return handshake

    def leave(self, handshake: Handshake) -> None:
        """The handshake is over, one way or another."""
        self._running.pop(handshake, None)

    def _end_oldest(self, origin: str) -> bool:
        oldest = next(each for each in self._running if each.origin == origin)
        if trio.current_time() - oldest.since_s < PATIENCE_S:
            return False
        oldest.scope.cancel()
        del self._running[oldest]
        return True
