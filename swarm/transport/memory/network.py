"""A transport within one process, over simulated links and the clock that trio has.

The network above runs on it unchanged; under a virtual clock, hours pass in seconds and a seed
replays a run. What is simulated: handshakes of several round trips, latency, bandwidth, loss,
partitions, pauses, crashes, and every limit on serving. What is simpler than on a real network: who
subscribes to what is known at once, and both ends see the end of a connection at the same moment.

A partition is a black hole: connections over it stay, requests over it stall until it heals or
they time out, gossip over it is lost. What is sent to a paused host, which computes nothing, waits.
"""

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import TracebackType
from typing import Any, Protocol, Self

import trio

from swarm.errors import (
    ConfigError,
    LocalProtocolError,
    PeerUnreachable,
    Reject,
    RemoteProtocolError,
    RequestRefused,
    RequestTimeout,
    SwarmError,
)
from swarm.identity import PeerId, public_key_of
from swarm.limits.bounded_table import OriginLimits
from swarm.transport.base import (
    GOSSIP_BYTES_MAX,
    GOSSIP_QUEUE_MAX,
    REFUSED_CONNECTIONS,
    Admit,
    Asks,
    Gate,
    GossipMessage,
    Handler,
    Report,
    Sent,
    ServeLimits,
    TransportCounters,
    Validator,
    admit_all,
    ask_always,
    untold,
)
from swarm.transport.memory.calendar import Post
from swarm.transport.memory.gossip import Flight, GossipEnd, MemoryGossip, Subscription
from swarm.transport.memory.service import MemoryService
from swarm.transport.places import Place, PlaceFigures, Places

RUNS_ON: ContextVar[PeerId | None] = ContextVar("RUNS_ON", default=None)
"""The host whose code the current task runs; None where it is the network's own."""

HANDSHAKE_ROUND_TRIPS = 6  # TCP, two to agree on Noise, Noise, two to agree on Yamux
HANDSHAKE_BYTES = 200
KNOCK_AGAIN_S = 1.0  # after which TCP asks again where nothing answers; twice as long each time
REFUSAL_BYTES = 16
HANDSHAKE = "handshake"  # under this name its bytes are counted

_ADDRESS = re.compile(r"/memory/([0-9]{1,9})/p2p/([1-9A-HJ-NP-Za-km-z]{1,64})")


class LinkModel(Protocol):
    """How messages travel. It is stateful: what one message occupies, the next has to wait for."""

    def send(
        self,
        source: PeerId,
        target: PeerId,
        payload_bytes: int,
        now_s: float,
        rng: Random,
        *,
        reliable: bool,
    ) -> Flight:
        """Put a message on its way. A reliable one is always one copy, but may be late."""
        ...

    def receive(self, target: PeerId, flight: Flight, now_s: float) -> float:
        """When a message is there in full; called when its last byte reaches the downlink."""
        ...


Observer = Callable[[str, PeerId, PeerId, str, bytes], None]
"""Told of each event in the network: (what, source, target, protocol or topic, payload)."""


def _ignore(what: str, source: PeerId, target: PeerId, about: str, payload: bytes) -> None:
    pass


@dataclass(eq=False, slots=True)
class Cut:
    """A partition: nothing comes through from `sources` to `targets`, nor back unless one-way."""

    sources: frozenset[PeerId]
    targets: frozenset[PeerId]
    one_way: bool

    def severs(self, source: PeerId, target: PeerId) -> bool:
        if source in self.sources and target in self.targets:
            return True
        return not self.one_way and source in self.targets and target in self.sources


# Long: every link's delay, loss and cut act on one clock.
class MemoryNetwork:
    """All hosts and what lies between them. Its tasks run in `nursery`; a bug in a handler ends it.

    `rng` draws jitter, loss and duplication, and seeds the choices of gossip.
    `traffic_out` and `traffic_in` hold the bytes on the wire by host and by protocol or topic.
    """

    def __init__(
        self,
        rng: Random,
        links: LinkModel,
        nursery: trio.Nursery,
        observe: Observer = _ignore,
    ) -> None:
        self._rng = rng
        self._links = links
        self._nursery = nursery
        self.observe = observe
        self._hosts: dict[int, MemoryTransport] = {}  # by the number in their address
        self.piece_bytes: int | None = None  # in which a host's connections take turns, if they do
        self._numbers: dict[PeerId, int] = {}
        self._ips: dict[int, str] = {}  # by the same number
        self._cuts: list[Cut] = []
        self._healed = trio.Event()
        self._paused: dict[PeerId, _Pause] = {}
        self._post = Post(Random(rng.random()))
        self.gossip = MemoryGossip(self, Random(rng.random()))
        self.traffic_out: dict[PeerId, Counter[str]] = {}
        self.traffic_in: dict[PeerId, Counter[str]] = {}
        self._spawn(self._post.run)

    def join(
        self, peer_id: PeerId, ip: str | None = None, network_key: bytes | None = None
    ) -> "MemoryTransport":
        """Put a host on the network. It keeps its addresses over crash and restart.

        `ip` is what others see of it; it needs not be its own alone, as behind one router. None
        draws the next free one of 10.0.0.0/8, each in a block of its own. Only hosts with the same
        `network_key`, or none, get through each other's handshake.

        Raises:
            LocalProtocolError: it is on the network already.
        """
        number = self._numbers.setdefault(peer_id, len(self._numbers))
        own_ip = f"10.{number >> 8 & 255}.{number & 255}.{1 + (number >> 16)}"
        self._ips.setdefault(number, own_ip if ip is None else ip)
        if (host := self._hosts.get(number)) is not None and host.is_open:
            raise LocalProtocolError(f"{peer_id} is on the network already")
        self.traffic_out.setdefault(peer_id, Counter())
        self.traffic_in.setdefault(peer_id, Counter())
        self._hosts[number] = MemoryTransport(self, peer_id, number, network_key)
        self.observe("join", peer_id, peer_id, "", b"")
        return self._hosts[number]

    def crash(self, peer_id: PeerId) -> None:
        """Take a host off the network at once, as when its process is killed."""
        self._host(peer_id).close()

    def restart(self, peer_id: PeerId) -> "MemoryTransport":
        """Put a host that crashed or left on the network again, with the same address and key.

        Raises:
            LocalProtocolError: it was never on the network, or still is.
        """
        return self.join(peer_id, network_key=self._host(peer_id).network_key)

    def partition(
        self, sources: Collection[PeerId], targets: Collection[PeerId], *, one_way: bool = False
    ) -> Cut:
        """Let nothing through from `sources` to `targets`, nor back unless `one_way`."""
        cut = Cut(frozenset(sources), frozenset(targets), one_way)
        self._cuts.append(cut)
        return cut

    def heal(self, cut: Cut | None = None) -> None:
        """End a partition, or all of them."""
        self._cuts = [each for each in self._cuts if cut is not None and each is not cut]
        self._healed.set()
        self._healed = trio.Event()

    def pause(self, peer_id: PeerId) -> None:
        """Let nothing be delivered to a host, nor its answers leave it, until it goes on. Holding
        up the tasks that run its code is the caller's part."""
        self._paused.setdefault(peer_id, _Pause())

    def resume(self, peer_id: PeerId) -> None:
        """Deliver what has waited for a paused host."""
        pause = self._paused.pop(peer_id, None)
        if pause is not None:
            pause.over.set()
            for do in pause.waiting:
                self.at(trio.current_time(), do)

    def address(self, peer_id: PeerId) -> str:
        """The address that a host has or, if it never was on the network, will have."""
        number = self._numbers.setdefault(peer_id, len(self._numbers))
        return f"/memory/{number}/p2p/{peer_id}"

    def _host(self, peer_id: PeerId) -> "MemoryTransport":
        host = self._hosts.get(self._numbers.get(peer_id, -1))
        if host is None:
            raise LocalProtocolError(f"{peer_id} was never on the network")
        return host

    def is_cut(self, source: PeerId, target: PeerId) -> bool:
        """Whether a partition lies between two hosts, in this direction."""
        return any(cut.severs(source, target) for cut in self._cuts)

    def at(self, time_s: float, do: Callable[[], object]) -> None:
        """Call `do` at that time, as the network."""
        self._post.at(time_s, do)

    def when_awake(self, host: PeerId, do: Callable[[], None]) -> None:
        """Call `do` at once or, if the host is paused, when it goes on."""
        if (pause := self._paused.get(host)) is not None:
            pause.waiting.append(do)
        else:
            do()

    def send(
        self, source: PeerId, target: PeerId, size_bytes: int, about: str, *, reliable: bool
    ) -> Flight:
        """Put a message on its way."""
        now_s = trio.current_time()
        flight = self._links.send(source, target, size_bytes, now_s, self._rng, reliable=reliable)
        self.traffic_out[source][about] += flight.wire_bytes
        self.traffic_in[target][about] += flight.wire_bytes * flight.copies
        return flight

    def receive(self, target: PeerId, flight: Flight) -> float:
        """When a message whose last byte reaches the target's downlink now is there in full."""
        return self._links.receive(target, flight, trio.current_time())

    def _spawn(self, async_fn: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Start a task that is the network's, whoever asks for it."""
        token = RUNS_ON.set(None)
        try:
            self._nursery.start_soon(async_fn, *args)
        finally:
            RUNS_ON.reset(token)

    async def _pass_cuts(self, source: PeerId, target: PeerId) -> None:
        while self.is_cut(source, target):
            await self._healed.wait()

    async def _awake(self, host: PeerId) -> None:
        while (pause := self._paused.get(host)) is not None:
            await pause.over.wait()

    async def _land(self, source: PeerId, target: PeerId, flight: Flight) -> None:
        """Wait until a reliable message is there in full."""
        await trio.sleep_until(flight.last_s)
        await self._pass_cuts(source, target)
        await trio.sleep_until(self.receive(target, flight))
        await self._awake(target)

    async def _send_in_turns(
        self, exchange: "_Exchange", size: int, left: Callable[[], None]
    ) -> Flight:
        """Have an answer leave in pieces of `piece_bytes`; returns the flight of the last.

        One connection carries one answer after another, and those to several peers share the
        uplink, as over TCP: what began together ends together.
        """
        source, target, about = exchange.server.peer_id, exchange.client.peer_id, exchange.protocol
        assert self.piece_bytes is not None
        async with exchange.connection.turns[source]:
            while size > self.piece_bytes:
                flight = self.send(source, target, self.piece_bytes, about, reliable=True)
                size -= self.piece_bytes
                self.at(flight.last_s, partial(self.receive, target, flight))
                # a path that starts slowly holds back what follows
                await trio.sleep_until(flight.left_s + flight.slow_s)
            flight = self.send(source, target, size, about, reliable=True)
            await trio.sleep_until(flight.left_s)
        left()
        return flight

    async def _carry(self, source: PeerId, target: PeerId, size: int, about: str) -> None:
        await self._awake(source)
        await self._land(source, target, self.send(source, target, size, about, reliable=True))

    async def _dial(self, source: "MemoryTransport", number: int, peer_id: PeerId) -> None:
        wait_s = KNOCK_AGAIN_S
        while (host := self._hosts.get(number)) is None:  # nobody is there to refuse
            await trio.sleep(wait_s)
            wait_s *= 2
        for _ in range(HANDSHAKE_ROUND_TRIPS):
            await self._carry(source.peer_id, host.peer_id, HANDSHAKE_BYTES, HANDSHAKE)
            await self._carry(host.peer_id, source.peer_id, HANDSHAKE_BYTES, HANDSHAKE)
            host = self._hosts[number]
            if not host.is_open:
                raise PeerUnreachable(f"nobody answers at /memory/{number}")
            if not source.is_open:
                raise PeerUnreachable("this host is off the network")
            if host.network_key != source.network_key:
                raise PeerUnreachable(f"the handshake with /memory/{number} failed")
            if host.peer_id != peer_id:
                raise PeerUnreachable(f"{host.peer_id} answers at /memory/{number}")
        for here, there in ((host, source), (source, host)):
            if not here._admits(there):
                raise PeerUnreachable(f"{here.peer_id} refuses {there.peer_id}")
        if peer_id not in source._connections:
            self._connect(source, host)

    def _connect(self, source: "MemoryTransport", host: "MemoryTransport") -> None:
        near = source.places.admit(host.peer_id, self._ips[host._number], inbound=False)
        far = near and host.places.admit(source.peer_id, self._ips[source._number], inbound=True)
        if near is None or far is None:
            source.places.leave(near)
            raise PeerUnreachable(f"{source.peer_id} or {host.peer_id} has no place for the other")
        connection = _Connection(source, host, (near, far))
        for place in connection.places:
            place.on_end = partial(self._hang_up, connection)
        source._connections[host.peer_id] = host._connections[source.peer_id] = connection
        self.gossip.connect(source.gossip, host.gossip)
        self.observe("connect", source.peer_id, host.peer_id, "", b"")

    def part(self, one: PeerId, other: PeerId) -> None:
        """End the connection between two hosts, if there is one."""
        host = self._hosts.get(self._numbers.get(one, -1))
        if host is not None and other in host._connections:
            self._hang_up(host._connections[other])

    def _hang_up(self, connection: "_Connection") -> None:
        one, other = connection.one, connection.other
        del one._connections[other.peer_id], other._connections[one.peer_id]
        for end, place in zip((one, other), connection.places, strict=True):
            end.places.leave(place)
        self.gossip.disconnect(one.gossip, other.gossip)
        self.observe("disconnect", one.peer_id, other.peer_id, "", b"")
        for exchange in list(connection.exchanges):
            exchange.scope.cancel()

    async def _run_exchange(self, exchange: "_Exchange") -> None:
        """One request on its way to the server, through its handler, and back."""
        client, server = exchange.client.peer_id, exchange.server.peer_id
        try:
            with exchange.scope:
                try:
                    response = await self._serve(exchange)
                except RequestRefused as refusal:
                    if exchange.abandoned:
                        return
                    await self._carry(server, client, REFUSAL_BYTES, exchange.protocol)
                    self.observe("refusal", server, client, exchange.protocol, b"")
                    exchange.settle(RequestRefused(str(refusal)))
                else:
                    self.observe("response", server, client, exchange.protocol, response)
                    exchange.settle(response)
        finally:
            del exchange.connection.exchanges[exchange]
            exchange.settle(PeerUnreachable(f"the connection to {server} was lost"))

    async def _serve(self, exchange: "_Exchange") -> bytes:
        client, server = exchange.client.peer_id, exchange.server
        size = len(exchange.payload)
        if self.piece_bytes is not None:
            async with exchange.connection.turns[client]:
                pass  # behind the answers that were begun before
        flight = self.send(client, server.peer_id, size, exchange.protocol, reliable=True)
        await trio.sleep_until(flight.first_s)
        await self._pass_cuts(client, server.peer_id)
        service = server._services.get(exchange.protocol)
        if service is None:
            raise RequestRefused(f"{server.peer_id} does not serve {exchange.protocol}")
        with service.place(client):
            exchange.held = True
            try:
                return await self._serve_in_time(exchange, service, flight)
            finally:
                exchange.held = False

    async def _answer(
        self, exchange: "_Exchange", service: "MemoryService", size: int, told_bytes: int
    ) -> None:
        client, server = exchange.client.peer_id, exchange.server.peer_id
        left = False

        def leave() -> None:
            nonlocal left
            if not left:
                left = True
                service.sent(client, told_bytes)

        try:
            await self._awake(server)
            if self.piece_bytes is not None:
                flight = await self._send_in_turns(exchange, size, leave)
            else:
                flight = self.send(server, client, size, exchange.protocol, reliable=True)
                if service.sent is not untold:
                    self.at(flight.left_s, leave)
            await self._land(server, client, flight)
        finally:
            leave()

    async def _serve_in_time(
        self, exchange: "_Exchange", service: "MemoryService", flight: Flight
    ) -> bytes:
        client, server = exchange.client.peer_id, exchange.server.peer_id
        service.check_request(exchange.payload)
        response = b""
        with trio.move_on_after(service.limits.timeout_s) as patience:
            await self._land(client, server, flight)
            self.observe("request", client, server, exchange.protocol, exchange.payload)
            token = RUNS_ON.set(server)
            try:
                response = await service.handle(client, exchange.payload)
            finally:
                RUNS_ON.reset(token)
            # the client stops to read where its own limit is
            size = min(len(response), exchange.response_bytes_max + 1)
            await self._answer(exchange, service, size, len(response))
        if patience.cancelled_caught:
            service.count_refused()
            raise RequestRefused(f"{exchange.protocol}: over {service.limits.timeout_s} s")
        return response


@dataclass(eq=False, slots=True)
class _Pause:
    """What waits for a paused host; bounded by what may be in flight to it."""

    over: trio.Event = field(default_factory=trio.Event)
    waiting: list[Callable[[], None]] = field(default_factory=list)


class MemoryTransport:
    """One host's end of a `MemoryNetwork`; made by its `join`. Leaves when its context ends."""

    def __init__(
        self,
        network: MemoryNetwork,
        peer_id: PeerId,
        number: int,
        network_key: bytes | None = None,
    ) -> None:
        self._network = network
        self._peer_id = peer_id
        self._number = number
        self.network_key = network_key
        self._counters = TransportCounters()
        self._connections: dict[PeerId, _Connection] = {}
        self._services: dict[str, MemoryService] = {}
        self.gossip = GossipEnd(peer_id, self._counters)
        self._gate: Gate | None = None
        self.places = Places()
        self.is_open = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the network: connections, requests being served and subscriptions end."""
        if not self.is_open:
            return
        self.is_open = False
        self._network.observe("leave", self._peer_id, self._peer_id, "", b"")
        for connection in list(self._connections.values()):
            self._network._hang_up(connection)
        self._network.gossip.leave(self.gossip)

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    @property
    def counters(self) -> TransportCounters:
        return self._counters

    def addresses(self) -> tuple[str, ...]:
        return (f"/memory/{self._number}/p2p/{self._peer_id}",)

    def peers(self) -> tuple[PeerId, ...]:
        return tuple(sorted(self._connections))

    @property
    def door(self) -> PlaceFigures | None:
        return None  # a simulated host has no door that strangers wait at

    def ip_of(self, peer: PeerId) -> str | None:
        """The address that a connected peer was given when it joined."""
        here = peer in self._connections
        return self._network._ips[self._network._numbers[peer]] if here else None

    def set_gate(self, gate: Gate, limits: OriginLimits | None = None) -> None:
        self._gate = gate
        self.places.limits = limits or OriginLimits()

    def report_to(self, report: Report) -> None:
        """Simulated links carry no messages of their own, so that there is nothing to report."""

    def _admits(self, other: "MemoryTransport") -> bool:
        if self._gate is None or self._gate(other.peer_id, self._network._ips[other._number]):
            return True
        self._counters.refused[REFUSED_CONNECTIONS] += 1
        return False

    async def connect(self, address: str, *, timeout_s: float = 15.0) -> PeerId:
        """Dial `/memory/<number>/p2p/<peer id>`."""
        number, peer_id = _parse_address(address)
        await trio.lowlevel.checkpoint()
        if peer_id == self._peer_id:
            raise PeerUnreachable(f"{address} is this node's own address")
        if peer_id in self._connections:
            return peer_id
        with trio.move_on_after(timeout_s):
            await self._network._dial(self, number, peer_id)
            return peer_id
        raise PeerUnreachable(f"no answer from {address} within {timeout_s} s")

    async def disconnect(self, peer: PeerId) -> None:
        """Close the connection to a peer, if there is one."""
        await trio.lowlevel.checkpoint()
        if (connection := self._connections.get(peer)) is not None:
            self._network._hang_up(connection)

    def serve(
        self, protocol: str, handler: Handler, limits: ServeLimits, sent: Sent = untold
    ) -> None:
        """Answer requests of a protocol."""
        if protocol in self._services:
            raise LocalProtocolError(f"{protocol} is served already")
        self._services[protocol] = MemoryService(protocol, handler, limits, sent, self._counters)

    async def request(
        self,
        peer: PeerId,
        protocol: str,
        payload: bytes,
        *,
        timeout_s: float,
        response_bytes_max: int,
    ) -> bytes:
        """Send one request and wait for the answer. A server works on when its client gives up."""
        await trio.lowlevel.checkpoint()
        connection = self._connections.get(peer)
        if connection is None:
            raise PeerUnreachable(f"not connected to {peer}")
        exchange = _Exchange(connection, self, protocol, payload, response_bytes_max)
        connection.exchanges[exchange] = None
        self._counters.count_out(protocol, len(payload), peer)
        self._network._spawn(self._network._run_exchange, exchange)
        try:
            with trio.move_on_after(timeout_s):
                await exchange.done.wait()
        finally:
            exchange.abandon()
        result = exchange.result
        if result is None:
            raise RequestTimeout(f"no answer from {peer} within {timeout_s} s")
        if isinstance(result, SwarmError):
            self._counters.answered += isinstance(result, RequestRefused)
            raise result
        if len(result) > response_bytes_max:
            raise RemoteProtocolError(Reject.OVERSIZE, f"answer over {response_bytes_max} bytes")
        self._counters.count_in(protocol, len(result), peer)
        self._counters.answered += 1
        return result

    async def publish(self, topic: str, payload: bytes) -> None:
        """Gossip a payload to the subscribers of a topic."""
        await trio.lowlevel.checkpoint()
        if len(payload) > GOSSIP_BYTES_MAX:
            raise LocalProtocolError(f"gossip of {len(payload)} bytes: at most {GOSSIP_BYTES_MAX}")
        self._counters.count_out(topic, len(payload), None)
        self._network.gossip.publish(self.gossip, topic, payload)

    async def subscribe(
        self, topic: str, validate: Validator, admit: Admit = admit_all, asks: Asks = ask_always
    ) -> trio.MemoryReceiveChannel[GossipMessage]:
        """Start to receive a topic, and to forward it."""
        await trio.lowlevel.checkpoint()
        if topic in self.gossip.subscriptions:
            raise LocalProtocolError(f"{topic} is subscribed to already")
        send, receive = trio.open_memory_channel[GossipMessage](GOSSIP_QUEUE_MAX)
        if self.is_open:
            subscription = Subscription(validate, admit, asks, send)
            self._network.gossip.subscribe(self.gossip, topic, subscription)
        else:
            send.close()
        return receive


@dataclass(eq=False, slots=True)
class _Connection:
    one: MemoryTransport
    other: MemoryTransport
    places: tuple[Place, Place]  # in this order
    exchanges: "dict[_Exchange, None]" = field(default_factory=dict)
    turns: dict[PeerId, trio.Lock] = field(init=False)  # of what each side sends

    def __post_init__(self) -> None:
        self.turns = {end.peer_id: trio.Lock() for end in (self.one, self.other)}

    def far(self, near: MemoryTransport) -> MemoryTransport:
        return self.other if near is self.one else self.one


@dataclass(eq=False, slots=True)
class _Exchange:
    """One request and what becomes of it; `result` is None until it is settled."""

    connection: _Connection
    client: MemoryTransport
    protocol: str
    payload: bytes
    response_bytes_max: int
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    done: trio.Event = field(default_factory=trio.Event)
    result: bytes | SwarmError | None = None
    held: bool = False  # it has a place at the server, and with it a time limit there
    abandoned: bool = False  # nobody waits for the result any more

    @property
    def server(self) -> MemoryTransport:
        return self.connection.far(self.client)

    def settle(self, result: bytes | SwarmError) -> None:
        if self.result is None:
            self.result = result
            self.done.set()

    def abandon(self) -> None:
        self.abandoned = True
        if not self.held:
            self.scope.cancel()


def _parse_address(address: str) -> tuple[int, PeerId]:
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise ConfigError(f"address {address!r}: must be /memory/<number>/p2p/<peer id>")
    try:
        public_key_of(match[2])
    except RemoteProtocolError as error:
        raise ConfigError(f"address {address!r}: {error.detail}") from None
    return int(match[1]), PeerId(match[2])
