"""The least time that a broadcast can take, and what one takes.

Pure. All rates are bytes a second, all times seconds. The bound is that of Kumar and Ross (2006)
for a fluid in a network whose only limits are the hosts' own up- and downlinks: the publisher has
to send everything once, the slowest downlink has to take everything, and all uplinks together have
to carry all copies. Latency is in none of the three, so small versions cannot come near it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.identity import PeerId

OVERHEAD = 1.04  # of a broadcast's transfer time over the bound; measured, see BENCHMARKS.md
LAST_CHUNKS = 2.0  # times what one chunk takes to all peers from an ordinary uplink; measured
ROUND_TRIPS = 3.0  # before a broadcast is under way, and at its end


@dataclass(frozen=True, slots=True)
class PeerLink:
    """A peer's access to the network, as far as it is known."""

    peer: PeerId
    up_bytes_per_s: float
    down_bytes_per_s: float


def bound_s(size_bytes: int, up_bytes_per_s: float, peers: Sequence[PeerLink]) -> float:
    """The least time in which all peers can have it, with the publisher's uplink as given."""
    if not peers:
        return 0.0
    all_up = up_bytes_per_s + sum(peer.up_bytes_per_s for peer in peers)
    return max(
        size_bytes / up_bytes_per_s,
        size_bytes / min(peer.down_bytes_per_s for peer in peers),
        len(peers) * size_bytes / all_up,
    )


def broadcast_s(
    size_bytes: int,
    chunk_bytes: int,
    up_bytes_per_s: float,
    peers: Sequence[PeerLink],
    latency_s: float,
) -> float:
    """Seconds until the last peer has everything: the bound and what was measured to come on top.

    Each chunk passes through one peer that sends it to all others, most often one with a fast
    uplink. The last one to be handed out needs the time of that many chunks on such an uplink.
    """
    if not peers:
        return 0.0
    ups = [peer.up_bytes_per_s for peer in peers]
    relaying = sum(up * up for up in ups) / sum(ups)
    last_s = LAST_CHUNKS * len(peers) * chunk_bytes / relaying
    fluid_s = OVERHEAD * bound_s(size_bytes, up_bytes_per_s, peers)
    return fluid_s + last_s + ROUND_TRIPS * 2.0 * latency_s
