"""The interface of a transport: requests, gossip, connections.

`libp2p` implements it on real sockets, `memory` on simulated links under trio's virtual clock; both
pass `tests/contract`. A transport is an async context manager that owns its tasks. Each request
uses one stream. Gossip delivers a payload at most once to each subscriber, own publishes excluded.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import trio

from swarm.errors import LocalProtocolError, Reject
from swarm.identity import PeerId
from swarm.limits.bounded_table import BoundedTable, OriginLimits
from swarm.transport.connection_slots import ConnectionSlots, SlotFigures

Handler = Callable[[PeerId, bytes], Awaitable[bytes]]
"""(peer, request bytes) -> response bytes.

`RemoteProtocolError` and `RequestRefused` refuse the request. Any other exception is a bug and
propagates.
"""

Sent = Callable[[PeerId, int], None]
"""(peer, bytes): an answer has left this node, or was given up; its memory is free.

Called once for each response of a handler. Must be quick and must not raise.
"""

Validator = Callable[[PeerId, bytes], bool]
"""(forwarder, payload) -> deliver and forward this gossip? Must be quick and must not raise."""

Admit = Callable[[PeerId], bool]
"""forwarder -> accept a new gossip message, such as by its quota?

A refused message is not marked as seen: another peer may bring it.
"""

Asks = Callable[[], bool]
"""True: ask for messages of a topic that peers offer."""

Gate = Callable[[PeerId, str | None], bool]
"""(proven peer id, its IP address) -> allow the connection?

The address is None on a relayed connection. Called once for each connection in both directions;
must be quick and must not raise.
"""

Report = Callable[[PeerId, Reject], None]
"""Counts an offence of a peer."""


def admit_all(forwarder: PeerId) -> bool:
    return True


def ask_always() -> bool:
    return True


def ignore_sent(peer: PeerId, size_bytes: int) -> None:
    """Default of `Sent`."""


GOSSIP_BYTES_MAX = 65_536
GOSSIP_QUEUE_MAX = 1024
TRAFFIC_PEERS_MAX = 1024  # with byte counts
REFUSED_CONNECTIONS = "connection"  # the key in `TransportCounters.refused`


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """Bounds of one served protocol. Beyond `concurrent_max`, requests of peers that hold few slots
    wait a moment; others are refused."""

    request_bytes_max: int
    response_bytes_max: int
    concurrent_max: int = 32
    concurrent_per_peer_max: int = 4
    timeout_s: float = 20.0  # from request to last response byte


@dataclass(frozen=True, slots=True)
class GossipMessage:
    """One delivered payload. `received_from` forwarded it; the payload names its author."""

    received_from: PeerId
    payload: bytes


@dataclass(slots=True)
class PeerBytes:
    bytes_in: int = 0
    bytes_out: int = 0


class TrafficByPeer:
    """Payload bytes by peer; the peer quiet for longest is forgotten first. Outbound gossip is
    counted in the totals only."""

    def __init__(self, peers_max: int = TRAFFIC_PEERS_MAX) -> None:
        self._peers: BoundedTable[PeerId, PeerBytes] = BoundedTable(peers_max)
        self.forgotten = 0  # peers whose counts were dropped

    def touch(self, peer: PeerId) -> PeerBytes:
        account = self._peers.use(peer)
        if account is None:
            account = PeerBytes()
            self.forgotten += self._peers.put(peer, account) is not None
        return account

    def of(self, peer: PeerId) -> PeerBytes:
        return self._peers.get(peer) or PeerBytes()

    def busiest(self, count: int) -> list[tuple[PeerId, PeerBytes]]:
        """Peers with the most bytes, in descending order."""
        return sorted(
            self._peers.items(), key=lambda item: (-item[1].bytes_in - item[1].bytes_out, item[0])
        )[:count]


@dataclass(slots=True)
class TransportCounters:
    """Payload bytes and events since the start, by protocol ID or topic."""

    bytes_in: Counter[str] = field(default_factory=Counter)
    bytes_out: Counter[str] = field(default_factory=Counter)
    messages_in: Counter[str] = field(default_factory=Counter)
    messages_out: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  # beyond a limit of this node
    dropped: Counter[str] = field(default_factory=Counter)  # gossip lost to a full queue
    ended: Counter[str] = field(default_factory=Counter)  # connections we ended, by reason
    answered: int = 0  # own requests, refusals included; growth shows that our link works
    by_peer: TrafficByPeer = field(default_factory=TrafficByPeer)

    def count_in(self, key: str, size_bytes: int, peer: PeerId) -> None:
        self.messages_in[key] += 1
        self.bytes_in[key] += size_bytes
        self.by_peer.touch(peer).bytes_in += size_bytes

    def count_out(self, key: str, size_bytes: int, peer: PeerId | None) -> None:
        """Count a sent message. `peer` None: gossip."""
        self.messages_out[key] += 1
        self.bytes_out[key] += size_bytes
        if peer is not None:
            self.by_peer.touch(peer).bytes_out += size_bytes


@dataclass(eq=False, slots=True)
class Subscription:
    """A node's subscription to a topic."""

    validate: Validator
    admit: Admit
    asks: Asks
    channel: trio.MemorySendChannel[GossipMessage]

    def deliver(
        self, topic: str, forwarder: PeerId, payload: bytes, counters: TransportCounters
    ) -> bool:
        """Validate a new message and hand it to the reader. True: forward it."""
        counters.count_in(topic, len(payload), forwarder)
        if not self.validate(forwarder, payload):
            return False
        try:
            self.channel.send_nowait(GossipMessage(forwarder, payload))
        except trio.BrokenResourceError:  # the reader has closed it
            pass
        except trio.WouldBlock:
            counters.dropped[topic] += 1
        return True


class Transport(Protocol):
    """One node's end of the network, with what both implementations have in common."""

    peer_id: PeerId
    counters: TransportCounters  # live; read only
    slots: ConnectionSlots
    _gate: Gate | None = None
    _report: Report | None = None
    _subscriptions: dict[str, Any]
    _subscription_kind: type[Subscription] = Subscription

    def __init__(self, peer_id: PeerId) -> None:
        self.peer_id = peer_id
        self.counters = TransportCounters()
        self.slots = ConnectionSlots()
        self._subscriptions = {}

    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs for dialling this node, each ending in `/p2p/<peer id>`."""
        ...

    def peers(self) -> tuple[PeerId, ...]:
        """Connected peers, ordered by id."""
        ...

    @property
    def door(self) -> SlotFigures | None:
        """Use of the connection slots. None: they are not bounded."""
        return None

    def ip_of(self, peer: PeerId) -> str | None:
        """IP address of a connected peer. None: not connected, or relayed."""
        ...

    def set_gate(self, gate: Gate, limits: OriginLimits | None = None) -> None:
        """Ask `gate` about each new connection before anything is served on it. `limits` bound the
        connections of one origin, inbound and outbound ones apart.

        A refused connection ends at once and is counted; the dial raises `PeerUnreachable` or gives
        a connection that ends at once. Existing connections stay.
        """
        self._gate = gate
        self.slots.limits = limits or OriginLimits()

    def _admits(self, peer: PeerId, ip: str | None) -> bool:
        if self._gate is None or self._gate(peer, ip):
            return True
        self.counters.refused[REFUSED_CONNECTIONS] += 1
        return False

    def report_to(self, report: Report) -> None:
        """Report offences in the transport's own messages; requesters count bad answers."""
        self._report = report

    async def connect(self, address: str, *, timeout_s: float = 15.0) -> PeerId:
        """Dial a multiaddr that ends in `/p2p/<peer id>`; returns at once if connected.
        PeerUnreachable: no answer, or another peer answered. ConfigError: the text is no such
        multiaddr."""
        ...

    async def disconnect(self, peer: PeerId) -> None:
        """Close all connections to a peer, if any."""
        ...

    def serve(
        self, protocol: str, handler: Handler, limits: ServeLimits, sent: Sent = ignore_sent
    ) -> None:
        """Answer requests of a protocol. At most one handler each."""
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
        """Send one request to a connected peer and wait for the answer. Cancelling is safe.

        Raises:
            PeerUnreachable: not connected, or the connection was lost.
            RequestTimeout: no full answer within `timeout_s`.
            RequestRefused: the peer is at its limit; `NotServed`: it does not serve the protocol.
            RemoteProtocolError: the answer is larger than `response_bytes_max`.
        """
        ...

    async def publish(self, topic: str, payload: bytes) -> None:
        """Gossip a payload to the subscribers of a topic, best effort. LocalProtocolError: the
        payload is over `GOSSIP_BYTES_MAX`."""
        await trio.lowlevel.checkpoint()
        if len(payload) > GOSSIP_BYTES_MAX:
            raise LocalProtocolError(f"gossip of {len(payload)} bytes is over {GOSSIP_BYTES_MAX}")
        self.counters.count_out(topic, len(payload), None)
        await self._send_gossip(topic, payload)

    async def subscribe(
        self, topic: str, validate: Validator, admit: Admit = admit_all, asks: Asks = ask_always
    ) -> trio.MemoryReceiveChannel[GossipMessage]:
        """Receive a topic; at most once each. The channel is bounded: when it is full, new messages
        are dropped and counted. If it is closed, messages go to `validate` only. While `asks` is
        False, messages offered by peers are not fetched."""
        await trio.lowlevel.checkpoint()
        if topic in self._subscriptions:
            raise LocalProtocolError(f"{topic} is subscribed to already")
        send, receive = trio.open_memory_channel[GossipMessage](GOSSIP_QUEUE_MAX)
        await self._join_topic(topic, self._subscription_kind(validate, admit, asks, send))
        return receive

    async def _send_gossip(self, topic: str, payload: bytes) -> None: ...

    async def _join_topic(self, topic: str, subscription: Any) -> None: ...
