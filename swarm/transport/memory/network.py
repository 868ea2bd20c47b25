"""A transport within one process, over simulated links and trio's clock.

Under a virtual clock, hours pass in seconds and a seed replays a run. Simulated are handshakes,
latency, bandwidth, loss, partitions, pauses, crashes, and all limits on serving. Simpler than real:
subscriptions are known at once, and both ends see the end of a connection at the same moment.

Over a partition, connections stay, requests stall, and gossip is lost. Messages to a paused host
wait.
"""

import heapq
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from random import Random
from typing import Any, NoReturn, Protocol, Self

import trio

from swarm.errors import (
    ConfigError,
    LocalProtocolError,
    NotServed,
    PeerUnreachable,
    Reject,
    RemoteProtocolError,
    RequestRefused,
    RequestTimeout,
    SwarmError,
)
from swarm.identity import PeerId, public_key_of
from swarm.transport.base import (
    Handler,
    Sent,
    ServeLimits,
    Transport,
    ignore_sent,
)
from swarm.transport.connection_slots import ConnectionSlot
from swarm.transport.memory.memory_gossip import Flight, GossipEnd, MemoryGossip, MeshSubscription
from swarm.transport.request_slots import Served

RUNS_ON: ContextVar[PeerId | None] = ContextVar("RUNS_ON", default=None)
"""The host whose code the current task runs. None: the network itself."""

HANDSHAKE_ROUND_TRIPS = 6  # TCP, two to agree on Noise, Noise, two to agree on Yamux
HANDSHAKE_BYTES = 200
CONNECT_RETRY_S = 1.0  # first retry of TCP; doubles each time
REFUSAL_BYTES = 16
HANDSHAKE = "handshake"  # counter name

_ADDRESS = re.compile(r"/memory/([0-9]{1,9})/p2p/([1-9A-HJ-NP-Za-km-z]{1,64})")


class LinkModel(Protocol):
    """Delay and loss of messages. Stateful: messages queue behind each other."""

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
        """Send a message. A reliable one arrives exactly once, perhaps late."""
        ...

    def receive(self, target: PeerId, flight: Flight, now_s: float) -> float:
        """Time at which a message has arrived in full; called when its last byte reaches the
        downlink."""
        ...


Observer = Callable[[str, PeerId, PeerId, str, bytes], object]
"""Called with each event: (event, source, target, protocol or topic, payload)."""


@dataclass(eq=False, slots=True)
class Cut:
    """A partition from `sources` to `targets`, and back unless one-way."""

    sources: frozenset[PeerId]
    targets: frozenset[PeerId]
    one_way: bool

    def severs(self, source: PeerId, target: PeerId) -> bool:
        back = not self.one_way and source in self.targets and target in self.sources
        return back or (source in self.sources and target in self.targets)


class Post:
    """Calls functions at their time in one task. The seed orders those due at the same time."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._numbers = count()
        self._due: list[tuple[float, float, int, Callable[[], object]]] = []
        self._sooner = trio.Event()

    def at(self, time_s: float, do: Callable[[], object]) -> None:
        if not self._due or time_s < self._due[0][0]:
            self._sooner.set()
        heapq.heappush(self._due, (time_s, self._rng.random(), next(self._numbers), do))

    async def run(self) -> None:
        while True:
            while self._due and self._due[0][0] <= trio.current_time():
                heapq.heappop(self._due)[-1]()
            self._sooner = trio.Event()
            with trio.move_on_at(self._due[0][0] if self._due else inf):
                await self._sooner.wait()


# Long: every link's delay, loss and cut act on one clock.
class MemoryNetwork:
    """All hosts and the links between them. Tasks run in `nursery`; a bug in a handler ends it.

    `traffic_out` and `traffic_in` are bytes on the wire by host and by protocol or topic.
    """

    def __init__(
        self,
        rng: Random,
        links: LinkModel,
        nursery: trio.Nursery,
        observe: Observer = lambda *_: None,
    ) -> None:
        self._rng = rng
        self._links = links
        self._nursery = nursery
        self.observe = observe
        self._hosts: dict[int, MemoryTransport] = {}  # by number in the address
        self.piece_bytes: int | None = None  # connections of a host take turns after so much
        self._numbers: dict[PeerId, int] = {}
        self._ips: dict[int, str] = {}  # by number
        self._cuts: list[Cut] = []
        self._healed = trio.Event()
        # for each paused host: the end of its pause, and messages held back
        self._paused: dict[PeerId, tuple[trio.Event, list[Callable[[], None]]]] = {}
        post = Post(Random(rng.random()))
        self.at = post.at  # (time, function): call it then
        self.gossip = MemoryGossip(self, Random(rng.random()))
        self.traffic_out: dict[PeerId, Counter[str]] = {}
        self.traffic_in: dict[PeerId, Counter[str]] = {}
        self._spawn(post.run)

    def join(
        self, peer_id: PeerId, ip: str | None = None, network_key: bytes | None = None
    ) -> "MemoryTransport":
        """Put a host on the network. It keeps its addresses over crash and restart.

        `ip` is the address that others see; hosts may share it. None: an own address in an own
        block of 10.0.0.0/8. Only hosts with the same `network_key` connect. LocalProtocolError: it
        is on the network already."""
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
        """Take a host off the network at once, like a killed process."""
        self._host(peer_id).close()

    def restart(self, peer_id: PeerId) -> "MemoryTransport":
        """Put a host that crashed or left back, with its address and key. LocalProtocolError: it
        was never on the network, or still is."""
        return self.join(peer_id, network_key=self._host(peer_id).network_key)

    def partition(
        self, sources: Collection[PeerId], targets: Collection[PeerId], *, one_way: bool = False
    ) -> Cut:
        """Block traffic from `sources` to `targets`, and back unless `one_way`."""
        cut = Cut(frozenset(sources), frozenset(targets), one_way)
        self._cuts.append(cut)
        return cut

    def heal(self, cut: Cut | None = None) -> None:
        """End one partition, or all."""
        self._cuts = [each for each in self._cuts if cut is not None and each is not cut]
        self._healed.set()
        self._healed = trio.Event()

    def pause(self, peer_id: PeerId) -> None:
        """Hold back all messages to and from a host. The caller pauses the host's own tasks."""
        self._paused.setdefault(peer_id, (trio.Event(), []))

    def resume(self, peer_id: PeerId) -> None:
        """Deliver the messages held back."""
        if peer_id in self._paused:
            over, waiting = self._paused.pop(peer_id)
            over.set()
            for do in waiting:
                self.at(trio.current_time(), do)

    def address(self, peer_id: PeerId) -> str:
        """The address of a host that has joined or will join."""
        number = self._numbers.setdefault(peer_id, len(self._numbers))
        return f"/memory/{number}/p2p/{peer_id}"

    def _host(self, peer_id: PeerId) -> "MemoryTransport":
        host = self._hosts.get(self._numbers.get(peer_id, -1))
        if host is None:
            raise LocalProtocolError(f"{peer_id} was never on the network")
        return host

    def is_cut(self, source: PeerId, target: PeerId) -> bool:
        return any(cut.severs(source, target) for cut in self._cuts)

    def when_awake(self, host: PeerId, do: Callable[[], None]) -> None:
        """Call `do` at once, or when the paused host resumes."""
        if host in self._paused:
            self._paused[host][1].append(do)
        else:
            do()

    def send(
        self, source: PeerId, target: PeerId, size_bytes: int, about: str, *, reliable: bool
    ) -> Flight:
        now_s = trio.current_time()
        flight = self._links.send(source, target, size_bytes, now_s, self._rng, reliable=reliable)
        self.traffic_out[source][about] += flight.wire_bytes
        self.traffic_in[target][about] += flight.wire_bytes * flight.copies
        return flight

    def receive(self, target: PeerId, flight: Flight) -> float:
        """Time at which a message is complete whose last byte is at the target's downlink now."""
        return self._links.receive(target, flight, trio.current_time())

    def _spawn(self, async_fn: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Start a task of the network, whichever host asks for it."""
        token = RUNS_ON.set(None)
        self._nursery.start_soon(async_fn, *args)
        RUNS_ON.reset(token)

    async def _pass_cuts(self, source: PeerId, target: PeerId) -> None:
        while self.is_cut(source, target):
            await self._healed.wait()

    async def _awake(self, host: PeerId) -> None:
        while host in self._paused:
            await self._paused[host][0].wait()

    async def _land(self, source: PeerId, target: PeerId, flight: Flight) -> None:
        """Wait until a reliable message has arrived in full."""
        await trio.sleep_until(flight.last_s)
        await self._pass_cuts(source, target)
        await trio.sleep_until(self.receive(target, flight))
        await self._awake(target)

    async def _carry(self, source: PeerId, target: PeerId, size: int, about: str) -> None:
        await self._awake(source)
        await self._land(source, target, self.send(source, target, size, about, reliable=True))

    async def _dial(self, source: "MemoryTransport", number: int, peer_id: PeerId) -> None:
        wait_s = CONNECT_RETRY_S
        while (host := self._hosts.get(number)) is None:  # no host answers
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
            if not here._admits(there.peer_id, self._ips[there._number]):
                raise PeerUnreachable(f"{here.peer_id} refuses {there.peer_id}")
        if peer_id not in source._connections:
            self._connect(source, host)

    def _connect(self, source: "MemoryTransport", host: "MemoryTransport") -> None:
        near = source.slots.admit(host.peer_id, self._ips[host._number], inbound=False)
        far = near and host.slots.admit(source.peer_id, self._ips[source._number], inbound=True)
        if near is None or far is None:
            source.slots.release(near)
            raise PeerUnreachable(f"{source.peer_id} or {host.peer_id} has no slot for the other")
        connection = _Connection(source, host, (near, far))
        for slot in connection.slots:
            slot.on_end = partial(self._hang_up, connection)
        source._connections[host.peer_id] = host._connections[source.peer_id] = connection
        self.gossip.connect(source.gossip, host.gossip)
        self.observe("connect", source.peer_id, host.peer_id, "", b"")

    def part(self, one: PeerId, other: PeerId) -> None:
        """Close the connection between two hosts, if any."""
        host = self._hosts.get(self._numbers.get(one, -1))
        if host is not None and other in host._connections:
            self._hang_up(host._connections[other])

    def _hang_up(self, connection: "_Connection") -> None:
        one, other = connection.one, connection.other
        del one._connections[other.peer_id], other._connections[one.peer_id]
        for end, slot in zip((one, other), connection.slots, strict=True):
            end.slots.release(slot)
        self.gossip.disconnect(one.gossip, other.gossip)
        self.observe("disconnect", one.peer_id, other.peer_id, "", b"")
        for exchange in list(connection.exchanges):
            exchange.scope.cancel()

    async def _run_exchange(self, exchange: "_Exchange") -> None:
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
                    exchange.settle(type(refusal)(str(refusal)))
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
                pass  # after the earlier answers
        flight = self.send(client, server.peer_id, size, exchange.protocol, reliable=True)
        await trio.sleep_until(flight.first_s)
        await self._pass_cuts(client, server.peer_id)
        service = server._services.get(exchange.protocol)
        if service is None:
            raise NotServed(f"{server.peer_id} does not serve {exchange.protocol}")
        is_full = service.requests_by_peer.total() >= service.limits.concurrent_max
        with service.counted(client) as has_room:
            if is_full or not has_room:
                exchange.refuse("too many requests at a time")
            exchange.held = True
            try:
                return await self._serve_in_time(exchange, service, flight)
            finally:
                exchange.held = False

    async def _answer(
        self, exchange: "_Exchange", service: Served, size: int, told_bytes: int
    ) -> None:
        """Send an answer; with `piece_bytes` in pieces: as over TCP, one connection sends its
        answers in order, and several connections share the uplink."""
        client, server, about = exchange.client.peer_id, exchange.server.peer_id, exchange.protocol
        left = False

        def leave() -> None:
            nonlocal left
            if not left:
                left = True
                service.sent(client, told_bytes)

        try:
            await self._awake(server)
            if self.piece_bytes is None:
                flight = self.send(server, client, size, about, reliable=True)
                if service.sent is not ignore_sent:
                    self.at(flight.left_s, leave)
            else:
                async with exchange.connection.turns[server]:
                    while size > self.piece_bytes:
                        flight = self.send(server, client, self.piece_bytes, about, reliable=True)
                        size -= self.piece_bytes
                        self.at(flight.last_s, partial(self.receive, client, flight))
                        # slow start delays the next piece
                        await trio.sleep_until(flight.left_s + flight.slow_s)
                    flight = self.send(server, client, size, about, reliable=True)
                    await trio.sleep_until(flight.left_s)
                leave()
            await self._land(server, client, flight)
        finally:
            leave()

    async def _serve_in_time(self, exchange: "_Exchange", service: Served, flight: Flight) -> bytes:
        client, server = exchange.client.peer_id, exchange.server.peer_id
        if len(exchange.payload) > service.limits.request_bytes_max:
            exchange.refuse(f"over {service.limits.request_bytes_max} bytes")
        payload, counters, protocol = exchange.payload, exchange.server.counters, exchange.protocol
        response = b""
        with trio.move_on_after(service.limits.timeout_s) as patience:
            await self._land(client, server, flight)
            self.observe("request", client, server, protocol, payload)
            counters.count_in(protocol, len(payload), client)
            token = RUNS_ON.set(server)
            try:
                response = await service.handler(client, payload)
            except RemoteProtocolError as error:
                raise RequestRefused(str(error)) from error
            finally:
                RUNS_ON.reset(token)
            if len(response) > service.limits.response_bytes_max:
                raise LocalProtocolError(f"{protocol}: answer of {len(response)} bytes")
            counters.count_out(protocol, len(response), client)
            # the client reads up to its own limit
            size = min(len(response), exchange.response_bytes_max + 1)
            await self._answer(exchange, service, size, len(response))
        if patience.cancelled_caught:
            exchange.refuse(f"over {service.limits.timeout_s} s")
        return response


class MemoryTransport(Transport):
    """One host's end of a `MemoryNetwork`, made by `join`. Leaves when its context ends."""

    _subscription_kind = MeshSubscription

    def __init__(
        self,
        network: MemoryNetwork,
        peer_id: PeerId,
        number: int,
        network_key: bytes | None = None,
    ) -> None:
        super().__init__(peer_id)
        self._network = network
        self._number = number
        self.network_key = network_key
        self._connections: dict[PeerId, _Connection] = {}
        self._services: dict[str, Served] = {}
        self.gossip = GossipEnd(peer_id, self.counters)
        self._subscriptions = self.gossip.subscriptions
        self.is_open = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the network: connections, requests and subscriptions end."""
        if not self.is_open:
            return
        self.is_open = False
        self._network.observe("leave", self.peer_id, self.peer_id, "", b"")
        for connection in list(self._connections.values()):
            self._network._hang_up(connection)
        self._network.gossip.leave(self.gossip)

    def addresses(self) -> tuple[str, ...]:
        return (f"/memory/{self._number}/p2p/{self.peer_id}",)

    def peers(self) -> tuple[PeerId, ...]:
        return tuple(sorted(self._connections))

    def ip_of(self, peer: PeerId) -> str | None:
        here = peer in self._connections
        return self._network._ips[self._network._numbers[peer]] if here else None

    async def connect(self, address: str, *, timeout_s: float = 15.0) -> PeerId:
        """Dial `/memory/<number>/p2p/<peer id>`."""
        number, peer_id = _parse_address(address)
        await trio.lowlevel.checkpoint()
        if peer_id == self.peer_id:
            raise PeerUnreachable(f"{address} is this node's own address")
        if peer_id in self._connections:
            return peer_id
        with trio.move_on_after(timeout_s):
            await self._network._dial(self, number, peer_id)
            return peer_id
        raise PeerUnreachable(f"no answer from {address} within {timeout_s} s")

    async def disconnect(self, peer: PeerId) -> None:
        await trio.lowlevel.checkpoint()
        if (connection := self._connections.get(peer)) is not None:
            self._network._hang_up(connection)

    def serve(
        self, protocol: str, handler: Handler, limits: ServeLimits, sent: Sent = ignore_sent
    ) -> None:
        if protocol in self._services:
            raise LocalProtocolError(f"{protocol} is served already")
        self._services[protocol] = Served(handler, limits, sent)

    async def request(
        self,
        peer: PeerId,
        protocol: str,
        payload: bytes,
        *,
        timeout_s: float,
        response_bytes_max: int,
    ) -> bytes:
        """Send one request and wait for the answer. The server goes on if the client gives up."""
        await trio.lowlevel.checkpoint()
        connection = self._connections.get(peer)
        if connection is None:
            raise PeerUnreachable(f"not connected to {peer}")
        exchange = _Exchange(connection, self, protocol, payload, response_bytes_max)
        connection.exchanges[exchange] = None
        self.counters.count_out(protocol, len(payload), peer)
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
            self.counters.answered += isinstance(result, RequestRefused)
            raise result
        if len(result) > response_bytes_max:
            raise RemoteProtocolError(Reject.OVERSIZE, f"answer over {response_bytes_max} bytes")
        self.counters.count_in(protocol, len(result), peer)
        self.counters.answered += 1
        return result

    async def _send_gossip(self, topic: str, payload: bytes) -> None:
        self._network.gossip.publish(self.gossip, topic, payload)

    async def _join_topic(self, topic: str, subscription: MeshSubscription) -> None:
        if self.is_open:
            self._network.gossip.subscribe(self.gossip, topic, subscription)
        else:
            subscription.channel.close()


@dataclass(eq=False, slots=True)
class _Connection:
    one: MemoryTransport
    other: MemoryTransport
    slots: tuple[ConnectionSlot, ConnectionSlot]  # in this order
    exchanges: "dict[_Exchange, None]" = field(default_factory=dict)
    turns: dict[PeerId, trio.Lock] = field(init=False)  # send order of each side

    def __post_init__(self) -> None:
        self.turns = {end.peer_id: trio.Lock() for end in (self.one, self.other)}


@dataclass(eq=False, slots=True)
class _Exchange:
    """One request. `result` is None until it is settled."""

    connection: _Connection
    client: MemoryTransport
    protocol: str
    payload: bytes
    response_bytes_max: int
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    done: trio.Event = field(default_factory=trio.Event)
    result: bytes | SwarmError | None = None
    held: bool = False  # holds a slot at the server, with a deadline
    abandoned: bool = False  # the client has given up

    @property
    def server(self) -> MemoryTransport:
        ends = self.connection
        return ends.other if self.client is ends.one else ends.one

    def refuse(self, why: str) -> NoReturn:
        self.server.counters.refused[self.protocol] += 1
        raise RequestRefused(f"{self.protocol}: {why}")

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
