"""The real transport: libp2p over TCP, Noise, Yamux and GossipSub 1.1. Only this package imports
libp2p."""

import errno
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import metadata
from random import Random
from typing import NoReturn

import trio
from libp2p.abc import INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedStreamEOF
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from swarm.errors import (
    ConfigError,
    LocalProtocolError,
    PeerUnreachable,
    Reject,
    RemoteProtocolError,
    RequestRefused,
    RequestTimeout,
)
from swarm.identity import Identity, PeerId
from swarm.limits.dial_backoff import CIRCUIT
from swarm.limits.quotas import Kind, Quotas, Verdict, shared_block
from swarm.transport.base import (
    Handler,
    Sent,
    ServeLimits,
    Subscription,
    Transport,
    ignore_sent,
)
from swarm.transport.connection_slots import SlotFigures
from swarm.transport.libp2p.addresses import (
    dial_in_turn,
    own_addresses,
    parse_listen,
    parse_peer_address,
    parse_tcp_address,
    port_of,
    probe_port,
    usable,
)
from swarm.transport.libp2p.admission import (
    BoundedRawConnection,
    HardHost,
    HardSwarm,
    remote_ip,
)
from swarm.transport.libp2p.frames import FLOODS, Ended
from swarm.transport.libp2p.gossipsub import Gossip, Router
from swarm.transport.libp2p.reachability import Reachability, ReachRules, ReachSummary
from swarm.transport.libp2p.relay import dial_through
from swarm.transport.libp2p.streams import (
    INLINE_BYTES_MAX,
    InboundStream,
    Sending,
    finish,
    receive,
    reset,
)
from swarm.transport.libp2p.yamux import MuxedConnection, Stream
from swarm.transport.request_slots import Arrivals, RequestSlot, Served, Share

LIBP2P_VERSION = "0.8.1"
STREAMS_PER_CONNECTION_MAX = 256  # inbound; further ones are reset
NEGOTIATION_TIMEOUT_S = 10.0
CHOICES_MAX = 16  # protocols a peer may ask for on one stream
CLOSE_TIMEOUT_S = 5.0
IDS_KEPT_MAX = 1_024
ANSWER_BYTES_LARGE = 16_384  # the cost of a stream is refunded for larger answers
PLAIN_PROTOCOLS = frozenset(("/ipfs/id/1.0.0", "/ipfs/ping/1.0.0"))

log = logging.getLogger(__name__)


@lru_cache(IDS_KEPT_MAX)
def id_of(peer: str) -> ID:
    """Upstream's form of a peer id. Decoding takes longer than all lookups with it."""
    return ID.from_base58(peer)


@dataclass(frozen=True, slots=True)
class _Request:
    """One inbound request, before it is read."""

    inbound: InboundStream
    peer: PeerId
    protocol: str
    served: Served
    share: Share


# Long: the whole of `Transport`, over one host.
class Libp2pTransport(Transport):
    """A libp2p host, made by `open_libp2p`."""

    def __init__(
        self,
        identity: Identity,
        announce: Sequence[str],
        network_key: bytes | None,
        reach: ReachRules | None,
        rng: Random,
    ) -> None:
        keys = create_new_key_pair(identity.seed)
        self._id = ID.from_pubkey(keys.public_key)
        assert str(self._id) == identity.peer_id, "libp2p derives another peer id from this key"
        super().__init__(identity.peer_id)
        self._announce = tuple(announce)
        self._arrivals = Arrivals()
        self._served: dict[str, Served] = {}
        self._dials: dict[PeerId, trio.Lock] = {}
        self._plain_quotas = Quotas()  # of what libp2p serves by itself
        self._network = HardSwarm(
            keys, self._id, self._admits, network_key, self._on_end, self.slots
        )
        self._reach = None if reach is None else Reachability(self, self._network, reach, rng)
        self._host = HardHost(self._network, self.addresses)
        self._network.set_stream_handler(self._on_stream)
        self._router = Router(lambda topic: self._subscriptions[topic].asks())
        self._gossip = Gossip(
            self._host, self._router, self._admits_gossip, self._deliver, self.blame
        )
        self._nursery: trio.Nursery

    def addresses(self) -> tuple[str, ...]:
        outside, relayed = [*self._announce], []
        if self._reach is not None:
            outside += self._reach.summary.addresses
            relayed = self._reach.relayed_addresses()
        return usable(self.own_addresses(), outside, relayed, self.peer_id)

    def ports(self) -> tuple[int, ...]:
        """Ports that this machine listens on, in the order of the listen addresses."""
        listeners = self._network.listeners.values()
        return tuple(port_of(listener.get_addrs()[0]) for listener in listeners)

    def own_addresses(self) -> list[str]:
        """Addresses that this machine listens on, without peer id."""
        listeners = self._network.listeners.values()
        return own_addresses(a for listener in listeners for a in listener.get_addrs())

    @property
    def reach(self) -> ReachSummary | None:
        """Reachability of this node. None: it is not checked."""
        return None if self._reach is None else self._reach.summary

    @property
    def door(self) -> SlotFigures | None:
        return self.slots.figures()

    def peers(self) -> tuple[PeerId, ...]:
        found = {str(peer) for peer in self._network.connections if self._network.live(peer)}
        return tuple(PeerId(peer) for peer in sorted(found))

    def ip_of(self, peer: PeerId) -> str | None:
        conn = self._network.live(id_of(peer))
        return None if conn is None else remote_ip(conn.muxed_conn)

    def blame(self, peer: ID, reason: Reject) -> None:
        """Report the peer at the other end of a connection."""
        if self._report is not None:
            self._report(PeerId(str(peer)), reason)

    def _on_end(self, peer: ID, reason: Ended) -> None:
        """Count why we ended a connection; floods are offences."""
        self.counters.ended[reason] += 1
        if reason in FLOODS:
            self.blame(peer, Reject.FLOOD)

    def check_reach(self) -> None:
        if self._reach is not None:
            self._reach.ask_again()

    async def connect(self, address: str, *, timeout_s: float = 15.0) -> PeerId:
        dial, peer = self._dialler(address)
        if peer == self.peer_id:
            raise PeerUnreachable(f"{address} is this node's own address")
        lock = self._dials.setdefault(peer, trio.Lock())
        try:
            with trio.fail_after(timeout_s):
                async with lock:
                    if self._network.live(id_of(peer)) is None:
                        await dial()
        except trio.TooSlowError:
            raise PeerUnreachable(f"{address} did not answer within {timeout_s} s") from None
        except (BaseLibp2pError, OSError) as error:
            raise PeerUnreachable(f"{address}: {_reason(error)}") from error
        finally:
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._dials.pop(peer, None)
        return peer

    def _dialler(self, address: str) -> tuple[Callable[[], Awaitable[object]], PeerId]:
        """Return the function that dials an address, and the peer expected there. ConfigError: it
        is no address."""
        relay, is_relayed, rest = address.partition(CIRCUIT)
        if not is_relayed:
            target, peer = parse_peer_address(address)
            dial = partial(self._network.dial_addr, peer_id=id_of(peer))
            return lambda: dial_in_turn(target, dial), peer
        parse_peer_address(relay)
        _, peer = parse_peer_address(f"{relay.partition('/p2p/')[0]}/p2p/{rest}")
        return lambda: self._dial_through(relay, id_of(peer)), peer

    async def _dial_through(self, relay_address: str, target: ID) -> None:
        relay = await self.connect(relay_address)
        conn = self._network.live(id_of(relay))
        if conn is None:
            raise PeerUnreachable(f"the relay {relay} is gone")
        try:
            circuit = await dial_through(conn, target)
        except RemoteProtocolError as error:
            self.blame(conn.muxed_conn.peer_id, error.reason)
            raise PeerUnreachable(f"the relay {relay} answers nonsense") from error
        raw = BoundedRawConnection(circuit, True)
        await self._network.upgrade_outbound_raw_conn(raw, target)

    async def disconnect(self, peer: PeerId) -> None:
        await self._close_all(list(self._network.connections.get(id_of(peer), [])))

    async def _close_all(self, connections: Sequence[object]) -> None:
        with trio.move_on_after(CLOSE_TIMEOUT_S):
            async with trio.open_nursery() as nursery:
                for conn in connections:
                    assert isinstance(conn, SwarmConn)
                    nursery.start_soon(conn.close)

    # --- serving ---

    def serve(
        self, protocol: str, handler: Handler, limits: ServeLimits, sent: Sent = ignore_sent
    ) -> None:
        if protocol in self._served:
            raise LocalProtocolError(f"{protocol} is served already")
        self._served[protocol] = Served(handler, limits, sent)
        self._host.set_stream_handler(TProtocol(protocol), _never_called)

    def handle(self, protocol: str, handler: Callable[[INetStream], Awaitable[None]]) -> None:
        """Serve a protocol that is not request and answer."""
        self._host.set_stream_handler(TProtocol(protocol), handler)

    async def _on_stream(self, stream: INetStream) -> None:
        """Answer one inbound stream. A peer's fault ends only its stream; upstream ends the host.
        Errors of our own handlers propagate."""
        assert isinstance(stream, NetStream)
        assert isinstance(stream.muxed_stream, Stream)
        inbound = InboundStream(stream.muxed_stream)
        peer = PeerId(str(stream.muxed_conn.peer_id))
        handlers = self._host.multiselect.handlers
        protocol = None
        try:
            if stream.swarm_conn and len(stream.swarm_conn.streams) <= STREAMS_PER_CONNECTION_MAX:
                with trio.fail_after(NEGOTIATION_TIMEOUT_S):
                    protocol = await inbound.offer.choice(handlers, CHOICES_MAX)  # type: ignore[arg-type]
            if protocol is not None and protocol not in self._served:
                if self._serves_plain(peer, protocol, remote_ip(stream.muxed_conn)):
                    stream.set_protocol(TProtocol(protocol))
                    handler = handlers[TProtocol(protocol)]
                    assert handler is not None
                    await inbound.hand_over()
                    await handler(stream)
                    return
                protocol = None
        except Exception as error:  # noqa: BLE001  boundary: libp2p's parsers on foreign bytes
            log.debug("stream of %s reset: %r", peer, error)
            if isinstance(error, RemoteProtocolError):
                self.blame(stream.muxed_conn.peer_id, error.reason)
            protocol = None
        if protocol is None:
            await reset(inbound.stream)
        else:
            try:
                # by this connection: the peer's others may have other addresses
                share = shared_block(remote_ip(stream.muxed_conn)) or peer
                served = self._served[protocol]
                await self._serve_request(_Request(inbound, peer, protocol, served, share))
            except Exception as error:  # noqa: BLE001  upstream would swallow some, OSError for one
                self._nursery.start_soon(_raise, error)

    def _serves_plain(self, peer: PeerId, protocol: str, ip: str | None) -> bool:
        """True if the peer is within its quota for libp2p's own protocols."""
        if protocol not in PLAIN_PROTOCOLS:
            return True
        verdict = self._plain_quotas.spend(
            Kind.IDENTIFY, peer, shared_block(ip), trio.current_time()
        )
        if verdict is Verdict.GRANTED:
            return True
        self.counters.refused[protocol] += 1
        return False

    async def _serve_request(self, request: _Request) -> None:
        inbound = request.inbound
        try:
            try:
                with request.served.counted(request.peer) as is_counted:
                    if not is_counted:
                        self._refuse(request, "busy")
                    await self._read_and_answer(request)
            except (RemoteProtocolError, RequestRefused) as error:
                await inbound.refuse(str(error))
            else:
                await finish(inbound.stream)
        except BaseLibp2pError as error:
            log.debug("request of %s on %s ended: %r", request.peer, request.protocol, error)
            await reset(inbound.stream)

    def _refuse(self, request: _Request, why: str) -> NoReturn:
        self.counters.refused[request.protocol] += 1
        raise RequestRefused(why)

    async def _read_and_answer(self, request: _Request) -> None:
        inbound, served = request.inbound, request.served
        deadline = trio.current_time() + served.read_timeout_s
        arrival = None
        with trio.move_on_at(deadline):
            length = await inbound.announced()
            if length > served.limits.request_bytes_max:
                self._refuse(request, "request is over the limit")
            arrival = self._arrivals.reserve(request.share, length)
            if arrival is None:
                self._refuse(request, "busy")
        if arrival is None:
            self._refuse(request, "took too long")
        try:
            arrival.scope.deadline = deadline
            with arrival.scope:
                payload = await inbound.reader.exactly(length)
                arrival.is_complete = True
            if arrival.scope.cancelled_caught:
                self._refuse(request, "took too long")
            self.counters.count_in(request.protocol, len(payload), request.peer)
            slot = await served.acquire(request.share) if inbound.alive else None
            if slot is None:
                self._refuse(request, "busy")
            try:
                await self._answer(request, payload, slot)
            finally:
                served.release(slot)
        finally:
            self._arrivals.release(arrival)

    async def _answer(self, request: _Request, payload: bytes, slot: RequestSlot) -> None:
        inbound, served, peer = request.inbound, request.served, request.peer
        slot.scope.deadline = trio.current_time() + served.limits.timeout_s
        with slot.scope:
            response = await served.handler(peer, payload)
            if len(response) > served.limits.response_bytes_max:
                raise LocalProtocolError(f"{request.protocol}: response of {len(response)} bytes")
            slot.answering_since_s = trio.current_time()
            try:
                await inbound.answer(response)
                if served.sent is not ignore_sent:
                    await inbound.written()
            finally:
                served.sent(peer, len(response))
            self.counters.count_out(request.protocol, len(response), peer)
            if len(response) >= ANSWER_BYTES_LARGE:
                inbound.refund()
        if slot.scope.cancelled_caught:
            if slot.answering_since_s is None:
                self._refuse(request, "took too long")
            self.counters.refused[request.protocol] += 1
            await reset(inbound.stream)  # in the middle of the answer

    # --- asking ---

    async def request(
        self,
        peer: PeerId,
        protocol: str,
        payload: bytes,
        *,
        timeout_s: float,
        response_bytes_max: int,
    ) -> bytes:
        conn = self._network.live(id_of(peer))
        if conn is None:
            raise PeerUnreachable(f"not connected to {peer}")
        assert isinstance(conn.muxed_conn, MuxedConnection)
        try:
            with trio.fail_after(timeout_s):
                sending = Sending(await conn.muxed_conn.open_stream(), protocol, payload)
                response = await self._exchange(sending, peer, response_bytes_max)
        except trio.TooSlowError:
            raise RequestTimeout(f"{peer} did not answer {protocol} within {timeout_s} s") from None
        except RequestRefused:
            self.counters.answered += 1
            raise
        except BaseLibp2pError as error:
            _raise_lost(conn, peer, error)
        self.counters.count_in(protocol, len(response), peer)
        self.counters.answered += 1
        return response

    async def _exchange(self, sending: Sending, peer: PeerId, response_bytes_max: int) -> bytes:
        stream, protocol, answered = sending.stream, sending.protocol, False
        try:
            if len(sending.payload) <= INLINE_BYTES_MAX:
                await sending.run()
            else:  # while reading, to see an early refusal
                self._nursery.start_soon(sending.run)
            response = await receive(stream, protocol, response_bytes_max)
            answered = True
        finally:
            sending.scope.cancel()
            if answered and sending.done:
                self.counters.count_out(protocol, len(sending.payload), peer)
                if not stream.recv_closed:
                    self._nursery.start_soon(finish, stream)
            else:  # in the background: must not delay the caller
                self._nursery.start_soon(reset, stream)
        return response

    # --- gossip ---

    async def _send_gossip(self, topic: str, payload: bytes) -> None:
        await self._gossip.publish(topic, payload)

    async def _join_topic(self, topic: str, subscription: Subscription) -> None:
        self._subscriptions[topic] = subscription
        await self._gossip.subscribe(topic)

    def _admits_gossip(self, forwarder: ID, topic: str) -> bool:
        if self._subscriptions[topic].admit(PeerId(str(forwarder))):
            return True
        self.counters.refused[topic] += 1
        return False

    def _deliver(self, forwarder: ID, topic: str, payload: bytes) -> bool:
        peer = PeerId(str(forwarder))
        subscription: Subscription = self._subscriptions[topic]
        return subscription.deliver(topic, peer, payload, self.counters)

    # --- life ---

    @asynccontextmanager
    async def _running(self, listen: Sequence[Multiaddr]) -> AsyncIterator[None]:
        async with background_trio_service(self._network):
            failed = [each for each in listen if not await self._network.listen(each)]
            if not failed:
                async with (
                    background_trio_service(self._gossip),
                    background_trio_service(self._router),
                    trio.open_nursery() as self._nursery,
                ):
                    await self._gossip.wait_until_ready()
                    if self._reach is not None:
                        self._reach.start()
                        self._nursery.start_soon(self._reach.run)
                    try:
                        yield
                    finally:
                        with trio.CancelScope(shield=True):
                            conns = [c for cs in self._network.connections.values() for c in cs]
                            await self._close_all(conns)
                        self._nursery.cancel_scope.cancel()
        if failed:  # outside the services, which wrap it in exception groups
            raise ConfigError(f"cannot listen on {failed[0]}: choose another address or port")


def _raise_lost(conn: SwarmConn, peer: PeerId, error: BaseLibp2pError) -> NoReturn:
    """Raise the error that the end of a stream without a full answer stands for."""
    assert isinstance(conn.muxed_conn, MuxedConnection)
    if not conn.muxed_conn.alive:
        raise PeerUnreachable(f"connection to {peer} was lost") from error
    if isinstance(error, MuxedStreamEOF):
        raise RemoteProtocolError(Reject.MALFORMED, "the answer is cut short") from error
    raise RequestRefused(f"{peer} reset the stream") from error


def require_version(found: str | None = None) -> None:
    """Refuse any libp2p but the one whose internals this package replaces. ConfigError: another
    version is installed."""
    found = found or metadata.version("libp2p")
    if found != LIBP2P_VERSION:
        raise ConfigError(
            f"needs libp2p {LIBP2P_VERSION}, found {found}: "
            f"run pip install libp2p=={LIBP2P_VERSION}"
        )


async def _raise(error: Exception) -> None:
    raise error


async def _never_called(stream: INetStream) -> None:
    """Entry in upstream's table of handlers; `_on_stream` serves our protocols."""
    raise AssertionError


def _reason(error: BaseException) -> str:
    """The innermost cause of a failed dial, on one line."""
    cause: BaseException | None = error
    while cause is not None:
        error = cause
        cause = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__
    if isinstance(error, OSError) and error.errno and error.errno in errno.errorcode:
        return os.strerror(error.errno)  # its own text repeats the address
    return str(error).replace("\n", " ") or type(error).__name__


@asynccontextmanager
async def open_libp2p(
    identity: Identity,
    listen: Sequence[str],
    announce: Sequence[str] = (),
    network_key: bytes | None = None,
    reach: ReachRules | None = None,
) -> AsyncIterator[Libp2pTransport]:
    """Run a libp2p host under `identity` until the block ends.

    `listen` are multiaddrs such as `/ip4/0.0.0.0/tcp/0`; `announce` are further addresses of this
    node, for example at a router. With a `network_key` of 32 bytes only holders of the same key can
    connect. With `reach` the node checks whether it can be reached, and uses relays. ConfigError:
    another libp2p is installed, an address is malformed, or a port is taken."""
    require_version()
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    addresses = parse_listen(listen)
    announced = [str(parse_tcp_address(text.partition("/p2p/")[0])) for text in announce]
    rng = Random(identity.peer_id)
    transport = Libp2pTransport(identity, announced, network_key, reach, rng)
    for address in addresses:
        probe_port(address)
    failure: Exception | None = None
    async with transport._running(addresses):
        try:
            yield transport
        except Exception as error:  # noqa: BLE001  raised again below, outside the nurseries
            failure = error
    if failure is not None:
        raise failure
