"""What the network above needs from a transport, and nothing more.

Two implementations pass one contract suite (`tests/contract`): `libp2p` is real, `memory`
simulates links under trio's virtual clock. Everything above this file runs unchanged on both.

A transport is opened as an async context manager and owns its tasks. Requests are one stream each:
request bytes, end, response bytes, end. Gossip delivers each published payload at most once to
each subscriber, its own publishes excluded.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

import trio

from swarm.errors import Reject
from swarm.identity import PeerId
from swarm.limits.bounded_table import BoundedTable, OriginLimits
from swarm.transport.places import PlaceFigures

Handler = Callable[[PeerId, bytes], Awaitable[bytes]]
"""Serves one request: (who asks, request bytes) -> response bytes.

Raising `RemoteProtocolError` or `RequestRefused` refuses the request: the requester gets
`RequestRefused`. Any other exception is a bug of ours and propagates.
"""

Sent = Callable[[PeerId, int], None]
"""Told that an answer has left this node: (who asked, size in bytes).

Called once for each response that a handler returned, also where the requester is gone or the
answer was given up; what it occupied is free again. It must be quick and must not raise.
"""

Validator = Callable[[PeerId, bytes], bool]
"""Judges one gossip payload: (who forwarded it, payload) -> whether to deliver and forward it.

Called on the event loop for every payload, so it must be quick; it must not raise.
"""

Admit = Callable[[PeerId], bool]
"""Whether to hear a gossip message of this forwarder at all, such as for its quota.

Asked for each message that is new, before it costs anything. A message that is turned away so is
not known from then on: another peer may bring it.
"""

Asks = Callable[[], bool]
"""Whether to ask for messages of a topic that peers offer, having heard them before us."""

Gate = Callable[[PeerId, str | None], bool]
"""Whether to have a connection: (peer id that the handshake proved, its IP address) -> bool.

The address is text such as `203.0.113.7`, and None where it is unknown, as on a relayed
connection. Called on the event loop once for each connection, in both directions; it must be
quick and must not raise.
"""

Report = Callable[[PeerId, Reject], None]
"""Counts a broken rule against the peer that broke it."""


def admit_all(forwarder: PeerId) -> bool:
    """For topics without a quota."""
    return True


def ask_always() -> bool:
    """For topics of which all is wanted."""
    return True


def untold(peer: PeerId, size_bytes: int) -> None:
    """For protocols that need not know when an answer has left."""


TRAFFIC_PEERS_MAX = 1024  # accounts of bytes by peer
REFUSED_CONNECTIONS = "connection"  # the key in `TransportCounters.refused`


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """Bounds on one served protocol. Of the requests over `concurrent_max` those are refused whose
    peers have as many places as anybody; others may wait a moment for one."""

    request_bytes_max: int
    response_bytes_max: int
    concurrent_max: int = 32
    concurrent_per_peer_max: int = 4
    timeout_s: float = 20.0  # from the request's arrival to the last response byte


@dataclass(frozen=True, slots=True)
class GossipMessage:
    """One delivered gossip payload. `received_from` forwarded it; who made it, the payload says."""

    received_from: PeerId
    payload: bytes


@dataclass(slots=True)
class PeerBytes:
    """Payload bytes of one peer."""

    bytes_in: int = 0
    bytes_out: int = 0


class TrafficByPeer:
    """Payload bytes by peer, those of the peer that was quiet longest forgotten first.

    Requests and answers both ways, and gossip inwards, by who forwarded it. Gossip outwards is in
    the totals alone: it is published once, and the mesh carries it.
    """

    def __init__(self, peers_max: int = TRAFFIC_PEERS_MAX) -> None:
        self._peers: BoundedTable[PeerId, PeerBytes] = BoundedTable(peers_max)
        self.forgotten = 0  # peers, with what was counted of them

    def touch(self, peer: PeerId) -> PeerBytes:
        """The peer's account, to count in."""
        account = self._peers.use(peer)
        if account is None:
            account = PeerBytes()
            self.forgotten += self._peers.put(peer, account) is not None
        return account

    def of(self, peer: PeerId) -> PeerBytes:
        """What was counted of a peer; zeros where there is nothing."""
        return self._peers.get(peer) or PeerBytes()

    def busiest(self, count: int) -> list[tuple[PeerId, PeerBytes]]:
        """Those with the most bytes, first."""
        return sorted(
            self._peers.items(), key=lambda item: (-item[1].bytes_in - item[1].bytes_out, item[0])
        )[:count]


@dataclass(slots=True)
class TransportCounters:
    """Payload bytes and events since the start; keys are protocol IDs and topics."""

    bytes_in: Counter[str] = field(default_factory=Counter)
    bytes_out: Counter[str] = field(default_factory=Counter)
    messages_in: Counter[str] = field(default_factory=Counter)
    messages_out: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  # what is over a limit of ours
    dropped: Counter[str] = field(default_factory=Counter)  # gossip lost to a full queue of ours
    ended: Counter[str] = field(default_factory=Counter)  # connections, by our reason for it
    answered: int = 0  # requests of ours, refusals included: while it grows, our own link works
    by_peer: TrafficByPeer = field(default_factory=TrafficByPeer)

    def count_in(self, key: str, size_bytes: int, peer: PeerId) -> None:
        """One message of a peer has come."""
        self.messages_in[key] += 1
        self.bytes_in[key] += size_bytes
        self.by_peer.touch(peer).bytes_in += size_bytes

    def count_out(self, key: str, size_bytes: int, peer: PeerId | None) -> None:
        """One message has left, to `peer`, or to whoever listens."""
        self.messages_out[key] += 1
        self.bytes_out[key] += size_bytes
        if peer is not None:
            self.by_peer.touch(peer).bytes_out += size_bytes


class Transport(Protocol):
    """One node's end of the network."""

    @property
    def peer_id(self) -> PeerId:
        """This node's own id."""
        ...

    @property
    def counters(self) -> TransportCounters:
        """Live counters; read, never written, by others."""
        ...

    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs under which others may dial this node, each ending in `/p2p/<peer id>`."""
        ...

    def peers(self) -> tuple[PeerId, ...]:
        """Peers with a live connection, in order of their ids."""
        ...

    @property
    def door(self) -> PlaceFigures | None:
        """Who has the places for connections; None where they are not bounded."""
        ...

    def ip_of(self, peer: PeerId) -> str | None:
        """The IP address at the other end of the connection to a peer, as text.

        None where there is no connection, or none that shows one, as through a relay.
        """
        ...

    def set_gate(self, gate: Gate, limits: OriginLimits | None = None) -> None:
        """Ask `gate` about each new connection, before anything is served on it. `limits` bound
        the connections of one origin, inbound and outbound ones apart.

        A refused one ends at once and is counted; a dial that either end refuses raises
        `PeerUnreachable` or makes a connection that ends at once. Connections that exist stay.
        """
        ...

    def report_to(self, report: Report) -> None:
        """Tell `report` of what peers do wrong in messages of the transport's own. What is wrong
        with the answer to a request is raised there, and counted by whoever asked."""
        ...

    async def connect(self, address: str, *, timeout_s: float = 15.0) -> PeerId:
        """Dial a multiaddr that ends in `/p2p/<peer id>`; returns at once if connected already.

        Raises:
            PeerUnreachable: nobody answered there, or somebody else did.
            ConfigError: the text is no such multiaddr.
        """
        ...

    async def disconnect(self, peer: PeerId) -> None:
        """Close all connections to a peer. Does nothing if there are none."""
        ...

    def serve(
        self, protocol: str, handler: Handler, limits: ServeLimits, sent: Sent = untold
    ) -> None:
        """Answer requests of a protocol. At most once for each protocol."""
        ...

    async def request(
        self,
        peer: PeerId,
        protocol: str,
        payload: bytes,
        *,
        timeout_s: float,
        response_bytes_max: int,
    ) -> bytes:
        """Send one request to a connected peer and wait for the answer.

        May be cancelled at any point without harm to the connection.

        Raises:
            PeerUnreachable: not connected, or the connection was lost.
            RequestTimeout: no full answer within `timeout_s`.
            RequestRefused: the peer is at its limit or does not serve the protocol.
            RemoteProtocolError: the answer is larger than `response_bytes_max`.
        """
        ...

    async def publish(self, topic: str, payload: bytes) -> None:
        """Gossip a payload to the subscribers of a topic. Delivery is best effort.

        Raises:
            LocalProtocolError: the payload is over `GOSSIP_BYTES_MAX`.
        """
        ...

    async def subscribe(
        self, topic: str, validate: Validator, admit: Admit = admit_all, asks: Asks = ask_always
    ) -> trio.MemoryReceiveChannel[GossipMessage]:
        """Start to receive a topic. The channel is bounded: when full, new messages are dropped
        and counted. While `asks` says no, messages that peers offer are not asked for; those that
        they send are heard all the same. Where the channel is closed, what is heard goes to
        `validate` alone. At most once for each topic."""
        ...


GOSSIP_BYTES_MAX = 65_536
GOSSIP_QUEUE_MAX = 1024
