"""The real transport: one libp2p host over TCP, Noise and Yamux, and GossipSub 1.1.

A request is one stream. After multistream-select, which the requester does not wait for:

    request    u32 length, payload
    response   u8 status (0 answered, 1 refused), u32 length, payload or the reason as text

All integers are big-endian. A refusal may come before the request has been read. libp2p is
imported by the `libp2p_*` modules of this package and by nothing else.
"""

import logging
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NoReturn

import ifaddr
import trio
from libp2p.abc import INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.tools.anyio_service import background_trio_service
from libp2p.utils import encode_delim
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from swarm.errors import (
    ConfigError,
    LocalProtocolError,
    PeerUnreachable,
    Reject,
    RemoteProtocolError,
    RequestRefused,
    RequestTimeout,
)
from swarm.identity import Identity, PeerId, public_key_of
from swarm.transport.base import (
    GOSSIP_BYTES_MAX,
    GOSSIP_QUEUE_MAX,
    GossipMessage,
    Handler,
    ServeLimits,
    TransportCounters,
    Validator,
)
from swarm.transport.libp2p_gossip import Gossip, Router
from swarm.transport.libp2p_workarounds import (
    ALL_WORKAROUNDS,
    HardHost,
    HardSwarm,
    HardYamux,
    Workarounds,
    require_version,
)

ANSWERED, REFUSED = 0, 1
LENGTH = struct.Struct("!I")
STATUS = struct.Struct("!BI")
REASON_BYTES_MAX = 200
INLINE_BYTES_MAX = 65_536  # a request up to this fits any window, so it is written before reading
READ_BYTES = 262_144
STREAMS_PER_CONNECTION_MAX = 256  # inbound; over it new streams are reset
NEGOTIATION_BYTES_MAX = 1_024
NEGOTIATION_TIMEOUT_S = 10
RESET_TIMEOUT_S = 5.0
DRAIN_BYTES_MAX = 4_194_304  # of a refused request that are read so that the refusal arrives
DRAIN_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 5.0
LISTEN_MAX = 16

MULTISTREAM = "/multistream/1.0.0"
NOT_SERVED = "na"

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Served:
    """One served protocol and the requests that run on it now."""

    handler: Handler
    limits: ServeLimits
    running: Counter[PeerId] = field(default_factory=Counter)

    def enter(self, peer: PeerId) -> bool:
        """Take a place; whether there was one."""
        if (
            self.running.total() >= self.limits.concurrent_max
            or self.running[peer] >= self.limits.concurrent_per_peer_max
        ):
            return False
        self.running[peer] += 1
        return True

    def leave(self, peer: PeerId) -> None:
        self.running[peer] -= 1
        if not self.running[peer]:
            del self.running[peer]


@dataclass(slots=True)
class _Subscription:
    validate: Validator
    send: trio.MemorySendChannel[GossipMessage]


class _Reader:
    """Exact reads from a stream, through a buffer."""

    def __init__(self, stream: INetStream) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            self._buffer += await self._stream.read(READ_BYTES)
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    async def line(self) -> str:
        """One multistream-select message."""
        length = 0
        for shift in (0, 7):
            (byte,) = await self.exactly(1)
            length |= (byte & 0x7F) << shift
            if not byte & 0x80:
                break
        if not 0 < length <= NEGOTIATION_BYTES_MAX:
            raise RemoteProtocolError(Reject.MALFORMED, "bad multistream-select message")
        return (await self.exactly(length)).decode(errors="replace").removesuffix("\n")


class Libp2pTransport:
    """`swarm.transport.base.Transport` over a libp2p host. Made by `open_libp2p`."""

    def __init__(
        self, identity: Identity, workarounds: Workarounds, announce: Sequence[str]
    ) -> None:
        keys = create_new_key_pair(identity.seed)
        self._id = ID.from_pubkey(keys.public_key)
        assert str(self._id) == identity.peer_id, "libp2p derives another peer id from this key"
        self._peer_id = identity.peer_id
        self._announce = tuple(announce)
        self._counters = TransportCounters()
        self._served: dict[str, _Served] = {}
        self._subscriptions: dict[str, _Subscription] = {}
        self._dials: dict[PeerId, trio.Lock] = {}
        self._network = HardSwarm(keys, self._id, workarounds)
        self._host = HardHost(self._network, [])
        self._network.set_stream_handler(self._on_stream)
        self._router = Router(workarounds)
        self._gossip = Gossip(self._host, self._router, self._deliver, workarounds)
        self._nursery: trio.Nursery

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    @property
    def counters(self) -> TransportCounters:
        return self._counters

    def addresses(self) -> tuple[str, ...]:
        texts = [*self._announce]
        for listener in self._network.listeners.values():
            for address in listener.get_addrs():
                texts.extend(_expand(address))
        unique = dict.fromkeys(text.partition("/p2p/")[0] for text in texts)
        ordered = sorted(unique, key=_is_loopback)
        return tuple(f"{text}/p2p/{self._peer_id}" for text in ordered)

    def peers(self) -> tuple[PeerId, ...]:
        found = {str(peer) for peer in self._network.connections if self._connection(peer)}
        return tuple(PeerId(peer) for peer in sorted(found))

    def _connection(self, peer: ID) -> SwarmConn | None:
        """The newest live connection to a peer."""
        for conn in reversed(self._network.connections.get(peer, [])):
            assert isinstance(conn, SwarmConn)
            assert isinstance(conn.muxed_conn, HardYamux)
            if conn.muxed_conn.alive and not conn.is_closed:
                return conn
        return None

    async def connect(self, address: str, *, timeout_s: float = 15.0) -> PeerId:
        target, peer = _parse_peer_address(address)
        if peer == self._peer_id:
            raise PeerUnreachable(f"{address} is this node's own address")
        peer_key = ID.from_base58(peer)
        lock = self._dials.setdefault(peer, trio.Lock())
        try:
            with trio.fail_after(timeout_s):
                async with lock:
                    if self._connection(peer_key) is None:
                        await self._network.dial_addr(target, peer_key)
        except trio.TooSlowError:
            raise PeerUnreachable(f"{address} did not answer within {timeout_s} s") from None
        except (BaseLibp2pError, OSError) as error:
            raise PeerUnreachable(f"{address}: {_reason(error)}") from error
        finally:
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._dials.pop(peer, None)
        return peer

    async def disconnect(self, peer: PeerId) -> None:
        await self._close_all(list(self._network.connections.get(ID.from_base58(peer), [])))

    async def _close_all(self, connections: Sequence[object]) -> None:
        with trio.move_on_after(CLOSE_TIMEOUT_S):
            async with trio.open_nursery() as nursery:
                for conn in connections:
                    assert isinstance(conn, SwarmConn)
                    nursery.start_soon(conn.close)

    # --- serving ---

    def serve(self, protocol: str, handler: Handler, limits: ServeLimits) -> None:
        if protocol in self._served:
            raise LocalProtocolError(f"{protocol} is served already")
        self._served[protocol] = _Served(handler, limits)
        self._host.set_stream_handler(TProtocol(protocol), _never_called)

    async def _on_stream(self, stream: INetStream) -> None:
        """Answer one inbound stream.

        What a peer sends ends at most its stream; upstream lets it end the host. What our own
        handlers raise propagates.
        """
        assert isinstance(stream, NetStream)
        if stream.swarm_conn is None or len(stream.swarm_conn.streams) > STREAMS_PER_CONNECTION_MAX:
            await stream.reset()
            return
        peer = PeerId(str(stream.muxed_conn.peer_id))
        protocol, handler = None, None
        try:
            protocol, handler = await self._host.multiselect.negotiate(
                MultiselectCommunicator(stream), NEGOTIATION_TIMEOUT_S
            )
            if protocol not in self._served and handler is not None:
                stream.set_protocol(TProtocol(protocol or ""))
                await handler(stream)
        except Exception as error:  # noqa: BLE001  boundary: libp2p's parsers on foreign bytes
            log.debug("stream of %s reset: %r", peer, error)
            await stream.reset()
            return
        if protocol in self._served:
            await self._serve_stream(stream, peer, protocol)

    async def _serve_stream(self, stream: NetStream, peer: PeerId, protocol: str) -> None:
        served = self._served[protocol]
        try:
            if not served.enter(peer):
                self._counters.refused[protocol] += 1
                await _refuse(stream, "busy")
                return
            try:
                refusal = await self._serve_in_time(stream, peer, protocol, served)
            finally:
                served.leave(peer)
            if refusal is not None:
                await _refuse(stream, refusal)
        except BaseLibp2pError as error:
            log.debug("request of %s on %s ended: %r", peer, protocol, error)
            await stream.reset()

    async def _serve_in_time(
        self, stream: NetStream, peer: PeerId, protocol: str, served: _Served
    ) -> str | None:
        """Serve one request. Returns the reason if it is to be refused."""
        response: bytes | None = None
        try:
            with trio.fail_after(served.limits.timeout_s) as scope:
                request = await self._read_request(stream, protocol, served.limits)
                if request is None:
                    return "request is over the limit"
                try:
                    response = await served.handler(peer, request)
                except (RemoteProtocolError, RequestRefused) as error:
                    return str(error)
                await self._write_response(stream, protocol, served.limits, response)
        except trio.TooSlowError:
            if not scope.cancelled_caught:
                raise  # the handler's own, so a bug of ours
            self._counters.refused[protocol] += 1
            if response is None:
                return "took too long"
            await _reset(stream)  # in the middle of the answer
        return None

    async def _read_request(
        self, stream: NetStream, protocol: str, limits: ServeLimits
    ) -> bytes | None:
        """The request's payload, or `None` if it is over the limit."""
        reader = _Reader(stream)
        (length,) = LENGTH.unpack(await reader.exactly(LENGTH.size))
        if length > limits.request_bytes_max:
            self._counters.refused[protocol] += 1
            return None
        payload = await reader.exactly(length)
        self._counters.messages_in[protocol] += 1
        self._counters.bytes_in[protocol] += length
        return payload

    async def _write_response(
        self, stream: NetStream, protocol: str, limits: ServeLimits, response: bytes
    ) -> None:
        if len(response) > limits.response_bytes_max:
            raise LocalProtocolError(f"{protocol}: response of {len(response)} bytes")
        await stream.write(STATUS.pack(ANSWERED, len(response)) + response)
        await stream.close()
        self._counters.messages_out[protocol] += 1
        self._counters.bytes_out[protocol] += len(response)

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
        conn = self._connection(ID.from_base58(peer))
        if conn is None:
            raise PeerUnreachable(f"not connected to {peer}")
        try:
            with trio.fail_after(timeout_s):
                response = await self._exchange(conn, protocol, payload, response_bytes_max)
        except trio.TooSlowError:
            raise RequestTimeout(f"{peer} did not answer {protocol} within {timeout_s} s") from None
        except BaseLibp2pError as error:
            _raise_lost(conn, peer, error)
        self._counters.messages_in[protocol] += 1
        self._counters.bytes_in[protocol] += len(response)
        return response

    async def _exchange(
        self, conn: SwarmConn, protocol: str, payload: bytes, response_bytes_max: int
    ) -> bytes:
        stream = await conn.new_stream()
        sending = _Sending(stream, protocol, payload)
        answered = False
        try:
            if len(payload) <= INLINE_BYTES_MAX:
                await sending.run()
            else:  # beside the reading, so that an early refusal is heard
                self._nursery.start_soon(sending.run)
            response = await _receive(_Reader(stream), protocol, response_bytes_max)
            answered = True
        finally:
            sending.scope.cancel()
            if answered and sending.done:
                self._counters.messages_out[protocol] += 1
                self._counters.bytes_out[protocol] += len(payload)
                await stream.close()
            else:
                self._nursery.start_soon(_reset, stream)
        return response

    # --- gossip ---

    async def publish(self, topic: str, payload: bytes) -> None:
        if len(payload) > GOSSIP_BYTES_MAX:
            raise LocalProtocolError(f"gossip of {len(payload)} bytes is over {GOSSIP_BYTES_MAX}")
        self._counters.messages_out[topic] += 1
        self._counters.bytes_out[topic] += len(payload)
        await self._gossip.publish(topic, payload)

    async def subscribe(
        self, topic: str, validate: Validator
    ) -> trio.MemoryReceiveChannel[GossipMessage]:
        if topic in self._subscriptions:
            raise LocalProtocolError(f"{topic} is subscribed to already")
        send, receive = trio.open_memory_channel[GossipMessage](GOSSIP_QUEUE_MAX)
        self._subscriptions[topic] = _Subscription(validate, send)
        await self._gossip.subscribe(topic)
        return receive

    def _deliver(self, forwarder: ID, topic: str, payload: bytes) -> bool:
        peer = PeerId(str(forwarder))
        subscription = self._subscriptions[topic]
        self._counters.messages_in[topic] += 1
        self._counters.bytes_in[topic] += len(payload)
        if not subscription.validate(peer, payload):
            return False
        try:
            subscription.send.send_nowait(GossipMessage(peer, payload))
        except (trio.WouldBlock, trio.BrokenResourceError):
            self._counters.dropped[topic] += 1
        return True

    # --- life ---

    @asynccontextmanager
    async def _running(self, listen: Sequence[Multiaddr]) -> AsyncIterator[None]:
        async with background_trio_service(self._network):
            failed = await self._listen(listen)
            if failed is None:
                async with self._gossiping():
                    yield
        if failed is not None:  # outside the services, which would wrap it in exception groups
            raise ConfigError(f"cannot listen on {failed}: choose another address or port")

    @asynccontextmanager
    async def _gossiping(self) -> AsyncIterator[None]:
        async with (
            background_trio_service(self._gossip),
            background_trio_service(self._router),
            trio.open_nursery() as self._nursery,
        ):
            await self._gossip.wait_until_ready()
            try:
                yield
            finally:
                with trio.CancelScope(shield=True):
                    conns = [c for group in self._network.connections.values() for c in group]
                    await self._close_all(conns)
                self._nursery.cancel_scope.cancel()

    async def _listen(self, listen: Sequence[Multiaddr]) -> Multiaddr | None:
        """Listen on all addresses; returns the first that fails."""
        for address in listen:
            if not await self._network.listen(address):
                return address
        return None


@dataclass(slots=True)
class _Sending:
    """The sending half of one request."""

    stream: NetStream
    protocol: str
    payload: bytes
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    done: bool = False

    async def run(self) -> None:
        """Send everything, then half-close. A failure shows at the receiving half."""
        head = (
            encode_delim(MULTISTREAM.encode())
            + encode_delim(self.protocol.encode())
            + LENGTH.pack(len(self.payload))
        )
        with self.scope:
            try:
                await self.stream.write(head + self.payload)
                await self.stream.close_write()
                self.done = True
            except BaseLibp2pError as error:
                log.debug("request on %s not sent: %r", self.protocol, error)


async def _receive(reader: _Reader, protocol: str, response_bytes_max: int) -> bytes:
    """Read one answer.

    Raises:
        RequestRefused: the peer said so, or does not serve the protocol.
        RemoteProtocolError: the answer is too large or malformed.
    """
    if await reader.line() != MULTISTREAM:
        raise RemoteProtocolError(Reject.MALFORMED, "no multistream-select")
    chosen = await reader.line()
    if chosen == NOT_SERVED:
        raise RequestRefused(f"the peer does not serve {protocol}")
    if chosen != protocol:
        raise RemoteProtocolError(Reject.MALFORMED, "another protocol was chosen")
    status, length = STATUS.unpack(await reader.exactly(STATUS.size))
    if status == REFUSED:
        reason = await reader.exactly(min(length, REASON_BYTES_MAX))
        raise RequestRefused(reason.decode(errors="replace"))
    if status != ANSWERED:
        raise RemoteProtocolError(Reject.MALFORMED, f"status {status}")
    if length > response_bytes_max:
        raise RemoteProtocolError(Reject.OVERSIZE, f"answer of {length} bytes")
    return await reader.exactly(length)


def _raise_lost(conn: SwarmConn, peer: PeerId, error: BaseLibp2pError) -> NoReturn:
    """What the end of a stream without a full answer means."""
    assert isinstance(conn.muxed_conn, HardYamux)
    if not conn.muxed_conn.alive:
        raise PeerUnreachable(f"connection to {peer} was lost") from error
    if isinstance(error, StreamEOF):
        raise RemoteProtocolError(Reject.MALFORMED, "the answer is cut short") from error
    raise RequestRefused(f"{peer} reset the stream") from error


async def _refuse(stream: NetStream, reason: str) -> None:
    """Say no, then read on for a while: a reset at once could overtake the answer."""
    text = reason.encode()[:REASON_BYTES_MAX]
    with trio.move_on_after(DRAIN_TIMEOUT_S):
        try:
            await stream.write(STATUS.pack(REFUSED, len(text)) + text)
            await stream.close_write()
            drained = 0
            while drained < DRAIN_BYTES_MAX:
                drained += len(await stream.read(READ_BYTES))
        except BaseLibp2pError:
            pass
    await _reset(stream)


async def _reset(stream: INetStream) -> None:
    with trio.move_on_after(RESET_TIMEOUT_S):
        await stream.reset()


async def _never_called(stream: INetStream) -> None:
    """Stands in upstream's table of handlers: `_on_stream` serves our protocols itself."""
    raise AssertionError


def _reason(error: BaseException) -> str:
    """The innermost cause of a failed dial, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).replace("\n", " ") or type(error).__name__


def _parse_peer_address(text: str) -> tuple[Multiaddr, PeerId]:
    """Split `/…/p2p/<peer id>` into where to dial and whom to expect.

    Raises:
        ConfigError: the text is no such multiaddr.
    """
    where, _, peer = text.rpartition("/p2p/")
    try:
        public_key_of(peer)
        return _parse_tcp_address(where), PeerId(peer)
    except RemoteProtocolError:
        raise ConfigError(f"{text!r}: give an address that ends in /p2p/<peer id>") from None


def _parse_tcp_address(text: str) -> Multiaddr:
    """A multiaddr of an IP address or DNS name and a TCP port.

    Raises:
        ConfigError: the text is something else.
    """
    try:
        address = Multiaddr(text)
        names = [protocol.name for protocol in address.protocols()]
    except (MultiaddrError, ValueError):
        names = []
    if len(names) != 2 or names[0] not in ("ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr"):
        raise ConfigError(f"{text!r}: give a multiaddr like /ip4/203.0.113.7/tcp/4001")
    if names[1] != "tcp":
        raise ConfigError(f"{text!r}: only TCP is supported, for example /ip4/0.0.0.0/tcp/4001")
    return address


def _parse_listen(listen: Sequence[str]) -> list[Multiaddr]:
    if not 0 < len(listen) <= LISTEN_MAX:
        raise ConfigError(f"listen: give 1 to {LISTEN_MAX} addresses like /ip4/0.0.0.0/tcp/0")
    addresses = [_parse_tcp_address(text) for text in listen]
    for address in addresses:
        if next(iter(address.protocols())).name not in ("ip4", "ip6"):
            raise ConfigError(f"listen {address}: give an IP address, not a name")
    return addresses


def _probe_port(address: Multiaddr) -> None:
    """Upstream shares a port that another program of the same user listens on, without a word.

    Raises:
        ConfigError: the port is taken, or the address is not ours.
    """
    protocols = [protocol.name for protocol in address.protocols()]
    family = socket.AF_INET6 if protocols[0] == "ip6" else socket.AF_INET
    host = address.value_for_protocol(protocols[0])
    port = int(address.value_for_protocol("tcp") or 0)
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address}: {error.strerror}: choose another address or port"
            ) from None


def _expand(address: Multiaddr) -> list[str]:
    """The address, or one for each interface where it means all of them."""
    text = str(address)
    for any_host, is_ip6 in (("/ip4/0.0.0.0/", False), ("/ip6/::/", True)):
        if text.startswith(any_host):
            port = text.removeprefix(any_host)
            hosts = _interface_hosts(is_ip6)
            return [f"/{'ip6' if is_ip6 else 'ip4'}/{host}/{port}" for host in hosts]
    return [text]


def _interface_hosts(is_ip6: bool) -> list[str]:
    """IP addresses of this machine; link-local ones need a zone and are left out."""
    found: list[str] = []
    for adapter in ifaddr.get_adapters():
        for ip in adapter.ips:
            host = ip.ip[0] if isinstance(ip.ip, tuple) else ip.ip
            if ip.is_IPv6 == is_ip6 and not host.startswith("fe80"):
                found.append(host)
    return found


def _is_loopback(text: str) -> bool:
    return text.startswith(("/ip4/127.", "/ip6/::1/"))


@asynccontextmanager
async def open_libp2p(
    identity: Identity,
    listen: Sequence[str],
    announce: Sequence[str] = (),
    workarounds: Workarounds = ALL_WORKAROUNDS,
) -> AsyncIterator[Libp2pTransport]:
    """Run a libp2p host under `identity` until the block ends.

    `listen` are multiaddrs such as `/ip4/0.0.0.0/tcp/0`; `announce` are further addresses under
    which others reach this node, for example through a router.

    Raises:
        ConfigError: another libp2p is installed, an address is malformed, or a port is taken.
    """
    require_version()
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    addresses = _parse_listen(listen)
    announced = [str(_parse_tcp_address(text.partition("/p2p/")[0])) for text in announce]
    transport = Libp2pTransport(identity, workarounds, announced)
    for address in addresses:
        _probe_port(address)
    async with transport._running(addresses):
        yield transport
