"""The least time and the estimated time of a broadcast. Rates are bytes/s, times seconds. Pure.

The bound is Kumar and Ross (2006): the publisher sends everything once, the slowest downlink takes
everything, and all uplinks together carry all copies. It ignores latency, so small versions cannot
come near it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.identity import PeerId

OVERHEAD = 1.04  # of a broadcast's transfer time over the bound; measured, see BENCHMARKS.md
LAST_CHUNKS = 2.0  # times what one chunk takes to all peers from an ordinary uplink; measured
ROUND_TRIPS = 3.0  # before a broadcast is under way, and at its end


@dataclass(frozen=True, slots=True)
class PeerLink:
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
    """Estimated seconds until the last peer has everything.

    Each chunk passes through one peer that relays it to all others, most often on a fast uplink.
    """
    if not peers:
        return 0.0
    ups = [peer.up_bytes_per_s for peer in peers]
    relaying = sum(up * up for up in ups) / sum(ups)
    last_s = LAST_CHUNKS * len(peers) * chunk_bytes / relaying
    fluid_s = OVERHEAD * bound_s(size_bytes, up_bytes_per_s, peers)
    return fluid_s + last_s + ROUND_TRIPS * 2.0 * latency_s
