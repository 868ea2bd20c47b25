"""Who sends a version to whom: the least time it can take, what each shape takes, and a choice.

Pure. All rates are bytes a second, all times seconds. The bound is that of Kumar and Ross (2006)
for a fluid in a network whose only limits are the hosts' own up- and downlinks: the publisher has
to send everything once, the slowest downlink has to take everything, and all uplinks together have
to carry all copies. Latency is in none of the three, so small versions cannot come near it.

Four shapes behind one interface. In a star, a chain and a tree (ECHO-2's) each peer has one parent
and asks it for the chunks in order; a *swarm* has none: peers take from whoever has what they lack.
A peer whose uplink is slow or that is reached through a relay never has children.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from swarm.identity import PeerId

FANOUTS = (2, 3, 4, 6, 8)  # of trees that are tried
PLANNED_PEERS_MAX = 512  # in one plan; those beyond take part as a swarm does
SLOW_SHARE = 0.5  # an uplink is slow if it carries less than this of what its place asks of it
HOP_LATENCIES = 2.5  # before a chunk is at the next hop: connections start slowly
SWARM_OVERHEAD = 1.04  # of its transfer time over the bound; measured, see BENCHMARKS.md
SWARM_LAST_CHUNKS = 2.0  # times what one chunk takes to all from an ordinary uplink
SWARM_ROUND_TRIPS = 3.0  # before it is under way, and at its end
RELAY_COST = 0.05  # by which a plan counts as longer for each peer in it that others depend on
FROM_PUBLISHER = -1


class Strategy(StrEnum):
    """The shape of a broadcast."""

    STAR = "star"
    CHAIN = "chain"
    TREE = "tree"
    SWARM = "swarm"


@dataclass(frozen=True, slots=True)
class PeerLink:
    """What is known of a peer's access to the network."""

    peer: PeerId
    up_bytes_per_s: float
    down_bytes_per_s: float
    relayed: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A shape, and who is where in it.

    `parents[i]` is the place of the parent of `order[i]` in `order`, always an earlier one, or -1
    for the publisher. Both are empty for a swarm. A peer that is not named takes part as in one.
    """

    strategy: Strategy
    order: tuple[PeerId, ...] = ()
    parents: tuple[int, ...] = ()

    def parent_of(self, peer: PeerId, publisher: PeerId) -> PeerId | None:
        """Whom a peer takes its chunks from; None: from anybody."""
        if peer not in self.order:
            return None
        parent = self.parents[self.order.index(peer)]
        return publisher if parent == FROM_PUBLISHER else self.order[parent]


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan and the seconds until the last peer has everything."""

    plan: Plan
    time_s: float


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


def tree_s(
    plan: Plan,
    size_bytes: int,
    chunk_bytes: int,
    up_bytes_per_s: float,
    peers: Sequence[PeerLink],
    latency_s: float,
) -> float:
    """How long a plan with parents takes, chunks being passed on as they come.

    A parent shares its uplink evenly among its children, so a path is as fast as the least of these
    shares and of the downlinks on it; its first chunk needs, at each hop, the time of one chunk to
    all children of that parent, and a few latencies. `latency_s` is one way, of one hop.
    """
    links = {link.peer: link for link in peers}
    children = [0] * len(plan.order)
    of_publisher = 0
    for parent in plan.parents:
        if parent == FROM_PUBLISHER:
            of_publisher += 1
        else:
            children[parent] += 1
    rates: list[float] = []
    delays: list[float] = []
    for peer, parent in zip(plan.order, plan.parents, strict=True):
        if parent == FROM_PUBLISHER:
            share, rate, delay = up_bytes_per_s / of_publisher, math.inf, 0.0
        else:
            share = links[plan.order[parent]].up_bytes_per_s / children[parent]
            rate, delay = rates[parent], delays[parent]
        rates.append(min(rate, share, links[peer].down_bytes_per_s))
        delays.append(delay + HOP_LATENCIES * latency_s + chunk_bytes / share)
    return max(
        (size_bytes / rate + delay for rate, delay in zip(rates, delays, strict=True)), default=0.0
    )


def swarm_s(
    size_bytes: int,
    chunk_bytes: int,
    up_bytes_per_s: float,
    peers: Sequence[PeerLink],
    latency_s: float,
) -> float:
    """How long a swarm takes: the bound and what it was measured to add to it.

    Each chunk passes through one peer that sends it to all others, most often one with a fast
    uplink. The last one to be handed out needs the time of that many chunks on such an uplink.
    """
    if not peers:
        return 0.0
    ups = [peer.up_bytes_per_s for peer in peers]
    relaying = sum(up * up for up in ups) / sum(ups)
    last_s = SWARM_LAST_CHUNKS * len(peers) * chunk_bytes / relaying
    fluid_s = SWARM_OVERHEAD * bound_s(size_bytes, up_bytes_per_s, peers)
    return fluid_s + last_s + SWARM_ROUND_TRIPS * 2.0 * latency_s


def star(peers: Sequence[PeerLink]) -> Plan:
    """Everybody takes from the publisher."""
    order = _by_uplink(peers)
    return Plan(Strategy.STAR, order, (FROM_PUBLISHER,) * len(order))


def tree(peers: Sequence[PeerLink], fanout: int, rate_bytes_per_s: float) -> Plan | None:
    """Each parent has at most `fanout` children; a fanout of 1 is a chain.

    Fast uplinks come first. `rate_bytes_per_s` is what should flow down each branch: a peer whose
    uplink carries less than half of that to each child is a leaf. In a chain, those that must be
    leaves hang side by side from the peers in it, fastest first. None if there is no room for all.
    """
    links = {link.peer: link for link in peers}
    order = _by_uplink(peers)
    needed = SLOW_SHARE * fanout * rate_bytes_per_s
    inner = [
        peer for peer in order if not links[peer].relayed and links[peer].up_bytes_per_s >= needed
    ]
    leaves = [peer for peer in order if peer not in set(inner)]
    parents = [index // fanout - 1 for index in range(len(inner))]
    strategy = Strategy.CHAIN if fanout == 1 else Strategy.TREE
    if not leaves:
        return Plan(strategy, tuple(inner), tuple(parents))
    used = [parents.count(index) for index in range(len(inner))]
    for _ in leaves:
        free = [index for index in range(len(inner)) if used[index] < max(fanout, 2)]
        if not free:
            return None
        # where the most uplink is left for each child
        best = max(free, key=lambda i: links[inner[i]].up_bytes_per_s / (used[i] + 1))
        used[best] += 1
        parents.append(best)
    return Plan(strategy, tuple(inner + leaves), tuple(parents))


def predictions(
    size_bytes: int,
    chunk_bytes: int,
    up_bytes_per_s: float,
    peers: Sequence[PeerLink],
    latency_s: float,
) -> list[Prediction]:
    """Every shape that is possible here, fastest first."""
    considered = list(peers)[:PLANNED_PEERS_MAX]
    if not considered:
        return [Prediction(Plan(Strategy.SWARM), 0.0)]
    rate = size_bytes / max(bound_s(size_bytes, up_bytes_per_s, considered), 1e-9)
    plans = [star(considered)]
    for fanout in (1, *FANOUTS):
        plan = tree(considered, fanout, rate)
        if plan is not None and (fanout == 1 or fanout < len(considered)):
            plans.append(plan)
    found = [
        Prediction(
            plan, tree_s(plan, size_bytes, chunk_bytes, up_bytes_per_s, considered, latency_s)
        )
        for plan in plans
    ]
    time_s = swarm_s(size_bytes, chunk_bytes, up_bytes_per_s, considered, latency_s)
    found.append(Prediction(Plan(Strategy.SWARM), time_s))
    return sorted(found, key=lambda each: each.time_s)


def choose(
    size_bytes: int,
    chunk_bytes: int,
    up_bytes_per_s: float,
    peers: Sequence[PeerLink],
    latency_s: float,
) -> Prediction:
    """The fastest shape, where what depends on more peers has to be faster by more: one that
    leaves, or that sends garbage, costs all below it several times what the shape saves.

    A swarm needs no rates, so it is what is taken where none are known.
    """
    found = predictions(size_bytes, chunk_bytes, up_bytes_per_s, peers, latency_s)
    return min(found, key=lambda each: each.time_s * (1.0 + RELAY_COST * len(relays(each.plan))))


def relays(plan: Plan) -> frozenset[PeerId]:
    """The peers that others depend on; none in a swarm."""
    return frozenset(plan.order[parent] for parent in plan.parents if parent != FROM_PUBLISHER)


def _by_uplink(peers: Sequence[PeerLink]) -> tuple[PeerId, ...]:
    """Fastest uplinks first, relayed peers last."""
    ranked = sorted(peers, key=lambda each: (each.relayed, -each.up_bytes_per_s, each.peer))
    return tuple(each.peer for each in ranked)
