"""Connection admission: all steps between a socket and an admitted connection, in both directions.

  accept or dial -> multistream-select and Noise -> multistream-select and muxer -> gate -> slot

One deadline covers all steps. Until admission, a stranger may send a few short lines and three
handshake messages, charged to its address (`metering.py`). The connection holds a slot
(`connection_slots.py`) until its socket is closed.

Upstream accepts lines of any length and any number of protocols, counts dead connections for ever,
and keeps one task for each connection that ever came in.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import trio
from libp2p.abc import IMuxedConn, INetStream, IRawConnection, ISecureConn, ITransport
from libp2p.crypto.keys import KeyPair
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.host.basic_host import BasicHost
from libp2p.host.exceptions import StreamFailure
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.trio import TrioTCPStream
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.stream_muxer.yamux import yamux
from libp2p.transport.exceptions import (
    MuxerUpgradeFailure,
    SecurityUpgradeFailure,
    UpgradeFailure,
)
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr

from swarm.errors import RemoteProtocolError, RequestRefused
from swarm.identity import PeerId
from swarm.limits.address_blocks import canonical_ip
from swarm.transport.base import Gate
from swarm.transport.connection_slots import ConnectionSlot, ConnectionSlots, origin_of
from swarm.transport.libp2p.negotiation import Reader, Responder, agree, proposal
from swarm.transport.libp2p.noise import SOCKET_READ_BYTES, Noise
from swarm.transport.libp2p.yamux import MuxedConnection, OnEnd
from swarm.transport.metering import ADMISSION_S, HANDSHAKE_S, Payer, WorkMeter

log = logging.getLogger(__name__)

ADMISSION_TIMEOUT_S = 15.0  # from accept, or from the end of the dial, to admission
CLOSE_TIMEOUT_S = 5.0
STREAM_TIMEOUT_S = 10.0  # for a peer to accept the protocol of our stream
AHEAD_BYTES = 4_096  # read at a time before the handshake
TRIES_MAX = 8  # protocols that a stranger may ask for
NO_LIMIT = 2**31  # disables upstream's counts, which go wrong


class BoundedRawConnection(RawConnection):
    """A socket or circuit with bounded reads, whose address is looked up once.

    Upstream allocates any length that a stranger names. It cannot tell the address of a socket that
    was reset, and none of IPv6.
    """

    def __init__(self, stream: ReadWriteCloser, initiator: bool) -> None:
        super().__init__(stream, initiator)
        self._remote = _far_end(stream)

    @property
    def is_gone(self) -> bool:
        """True if the socket was reset before its address was looked up."""
        return self._remote is None and isinstance(self.stream, TrioTCPStream)

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._remote

    async def read(self, n: int | None = None) -> bytes:
        return await super().read(SOCKET_READ_BYTES if n is None else min(n, SOCKET_READ_BYTES))


class HardUpgrader(TransportUpgrader):
    """Noise and Yamux only. All errors from a stranger's bytes come out as `UpgradeFailure`."""

    def __init__(
        self, keys: KeyPair, network_key: bytes | None, on_end: OnEnd, meter: WorkMeter
    ) -> None:
        self._noise = Noise(keys, network_key)
        super().__init__({NOISE_PROTOCOL: self._noise}, {})
        self._on_end = on_end
        self._meter = meter

    async def upgrade_security(
        self, raw_conn: IRawConnection, is_initiator: bool, peer_id: ID | None = None
    ) -> ISecureConn:
        """Agree on Noise and run the handshake. SecurityUpgradeFailure: anything goes wrong."""
        if type(raw_conn) is RawConnection:  # an outbound one, whose reads upstream does not bound
            raw_conn = BoundedRawConnection(raw_conn.stream, raw_conn.is_initiator)
            if raw_conn.is_gone:
                raise SecurityUpgradeFailure("the connection was reset")
        try:
            rest = await _negotiate(raw_conn, str(NOISE_PROTOCOL), is_initiator, AHEAD_BYTES)
            await self._meter.settle(origin_of(_ip_of(raw_conn)), "", HANDSHAKE_S)
            return await self._noise.secure(raw_conn, peer_id if is_initiator else None, rest)
        except UpgradeFailure:
            raise
        except Exception as error:  # boundary: libp2p's parsers on foreign bytes
            raise SecurityUpgradeFailure("the handshake failed") from error

    async def upgrade_connection(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        """Agree on Yamux. MuxerUpgradeFailure: anything goes wrong."""
        try:
            await _negotiate(conn, yamux.PROTOCOL_ID, conn.is_initiator, 0)
        except Exception as error:  # boundary: libp2p's parsers on foreign bytes
            raise MuxerUpgradeFailure("no common stream muxer") from error
        origin = origin_of(_ip_of(conn))
        return MuxedConnection(
            conn, peer_id, self._on_end, Payer(self._meter, origin, str(peer_id))
        )


async def _negotiate(
    conn: IRawConnection | ISecureConn, protocol: str, is_initiator: bool, ahead_bytes: int
) -> bytes:
    """Agree on a protocol. Returns the bytes read beyond that. RequestRefused: the peer does not
    speak it. RemoteProtocolError: it breaks the rules. BaseLibp2pError: it is gone."""
    reader = Reader(conn, ahead_bytes)
    if is_initiator:
        await conn.write(proposal(protocol))
        await agree(reader, protocol)
    else:
        offer = Responder(reader, conn.write)
        if await offer.choice({protocol}, TRIES_MAX) is None:
            raise RequestRefused(f"{protocol} is not spoken")
        await offer.flush()
    return reader.rest


def _far_end(stream: ReadWriteCloser) -> tuple[str, int] | None:
    """Address and port of the peer, mapped IPv4 as IPv4. None: relayed, or gone."""
    if not isinstance(stream, TrioTCPStream):
        return stream.get_remote_address()
    try:
        ip, port = stream.stream.socket.getpeername()[:2]
    except OSError:
        return None
    return canonical_ip(ip) or ip, port


def _ip_of(conn: IRawConnection | ISecureConn) -> str | None:
    """The peer's IP address without zone."""
    remote = conn.get_remote_address()
    return None if remote is None else remote[0].partition("%")[0]


def remote_ip(muxed: IMuxedConn) -> str | None:
    """The peer's IP address. None: relayed."""
    return _ip_of(muxed.secured_conn) if isinstance(muxed, MuxedConnection) else None


def is_live(conn: SwarmConn) -> bool:
    assert isinstance(conn.muxed_conn, MuxedConnection)
    return conn.muxed_conn.alive and not conn.is_closed


class NoAutoConnector(AutoConnector):
    """Dials nobody: discovery decides whom to dial."""

    async def maybe_connect(self) -> None:
        await trio.lowlevel.checkpoint()

    def record_disconnect(self, peer_id: ID) -> None:
        """Upstream keeps a record of every peer that ever left."""


class HardSwarm(Swarm):
    """Upstream's swarm with our admission and without its own dialling.

    Upstream dials known peers by itself. Its `dial_peer` waits 250 ms after success, prefers other
    addresses, and blocks a failed peer for a minute.
    """

    def __init__(
        self,
        keys: KeyPair,
        self_id: ID,
        admits: Gate,
        network_key: bytes | None,
        on_end: OnEnd,
        slots: ConnectionSlots,
    ) -> None:
        peerstore = PeerStore()
        peerstore.add_key_pair(self_id, keys)
        transports: list[ITransport] = [TCP()]
        self.meter = WorkMeter()
        self.slots = slots
        super().__init__(
            self_id,
            peerstore,
            HardUpgrader(keys, network_key, on_end, self.meter),
            transports,
            retry_config=RetryConfig(max_retries=0),
            connection_config=ConnectionConfig(
                max_connections=NO_LIMIT,
                high_watermark=NO_LIMIT,
                low_watermark=0,
                min_connections=0,
            ),
        )
        self._admits = admits

    def live(self, peer: ID, *, relayed: bool | None = None) -> SwarmConn | None:
        """The newest live connection to a peer. `relayed` None: of either kind."""
        for conn in reversed(self.connections.get(peer, [])):
            assert isinstance(conn, SwarmConn)
            if is_live(conn) and relayed in (None, remote_ip(conn.muxed_conn) is None):
                return conn
        return None

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.meter.run)
            await super().run()
            nursery.cancel_scope.cancel()

    async def _handle_inbound_connection(
        self, read_write_closer: ReadWriteCloser, maddr: Multiaddr
    ) -> None:
        """Admit one accepted socket and wait for its end; the listener then closes it."""
        raw = BoundedRawConnection(read_write_closer, False)
        if raw.is_gone:
            self.slots.failed["reset"] += 1
            return
        try:
            muxed = await self.upgrade_inbound_raw_conn(raw, maddr)
            assert isinstance(muxed, MuxedConnection)
            await muxed.event_closed.wait()
        except SwarmException as error:
            log.debug("inbound connection refused: %r", error)
        finally:
            with trio.CancelScope(shield=True):
                await raw.close()

    async def upgrade_inbound_raw_conn(
        self, raw_conn: IRawConnection, maddr: Multiaddr
    ) -> IMuxedConn:
        """Admit an inbound connection. SwarmException: no slot is free, or it is refused."""
        slot = self.slots.begin_handshake(_ip_of(raw_conn))
        conn: SwarmConn | None = None
        if slot is not None:
            try:
                with slot.scope:
                    conn = await self._admit(raw_conn, None)
            finally:
                self.slots.release(slot)
        if conn is None:
            await _close(raw_conn)
            raise SwarmException("no slot for one more handshake")
        return conn.muxed_conn

    async def _dial_addr_single_attempt(
        self, addr: Multiaddr, peer_id: ID, source: tuple[str, int] | None = None
    ) -> SwarmConn:
        """Upstream refuses to dial once its own count, which only grows, is full."""
        transport: Any = self.transport_manager.transport_for_dialing(addr)
        if transport is None:
            raise SwarmException(f"nothing here dials {addr}")
        try:
            if source is None:
                raw = await transport.dial(addr)
            else:
                raw = await transport.dial_with_source(addr, source)
        except Exception as error:  # boundary: resolvers and parsers of addresses that peers name
            raise SwarmException(f"cannot connect to {addr}") from error
        return await self.upgrade_outbound_raw_conn(raw, peer_id)

    async def upgrade_outbound_raw_conn(
        self, raw_conn: IRawConnection, peer_id: ID, pre_scope: Any = None
    ) -> SwarmConn:
        """Admit a connection to the dialled peer. SwarmException: another peer answered, it breaks
        the rules, or takes too long."""
        return await self._admit(raw_conn, peer_id)

    async def _admit(self, raw_conn: IRawConnection, expected: ID | None) -> SwarmConn:
        direction = "inbound" if expected is None else "outbound"
        try:
            with trio.fail_after(ADMISSION_TIMEOUT_S):
                secured = await self.upgrader.upgrade_security(
                    raw_conn, expected is not None, expected
                )
                peer = secured.get_remote_peer()
                await self.meter.settle(origin_of(_ip_of(secured)), str(peer), ADMISSION_S)
                muxed = await self.upgrader.upgrade_connection(secured, peer)
                return await self.add_conn(muxed, direction)
        except BaseException as error:
            if expected is None:
                self.slots.failed[_step_of(error)] += 1
            await _close(raw_conn)
            if isinstance(error, trio.TooSlowError):
                text = f"not admitted within {ADMISSION_TIMEOUT_S:.0f} s"
                raise SwarmException(text) from None
            if isinstance(error, BaseLibp2pError) and not isinstance(error, SwarmException):
                raise SwarmException(str(error)) from error
            raise

    async def add_conn(self, muxed_conn: IMuxedConn, direction: str = "unknown") -> SwarmConn:
        """Give a connection a slot and run it.

        Upstream lists a connection after its start, so one that ends first stays listed.
        SwarmException: it is refused, or is over already."""
        assert isinstance(muxed_conn, MuxedConnection)
        peer, ip, slot = PeerId(str(muxed_conn.peer_id)), remote_ip(muxed_conn), None
        objection = "all slots for connections are taken"
        if muxed_conn.peer_id == self.self_id:
            objection = "the peer runs under our own key"
        elif not self._admits(peer, ip):
            objection = "the connection is refused"
        else:
            slot = self.slots.admit(peer, ip, inbound=not muxed_conn.is_initiator)
        if slot is None:
            with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await muxed_conn.close()
            raise SwarmException(objection)
        conn = SwarmConn(muxed_conn, self, direction=direction)
        conn.set_transport_info(
            muxed_conn.get_transport_addresses(), muxed_conn.get_connection_type()
        )
        self.connections.setdefault(muxed_conn.peer_id, []).append(conn)
        self.manager.run_task(self._live, conn, muxed_conn, slot)
        try:
            await muxed_conn.event_started.wait()
        except trio.Cancelled:
            slot.scope.cancel()
            raise
        if not muxed_conn.alive:
            raise SwarmException("the connection ended while it was admitted")
        await self.notify_connected(conn)
        return conn

    async def _live(self, conn: SwarmConn, muxed: MuxedConnection, slot: ConnectionSlot) -> None:
        """Run a connection and clean up after it."""
        try:
            with slot.scope:
                self.manager.run_task(conn.start)
                await muxed.start()
        finally:
            muxed.event_started.set()  # wakes those that wait for the start
            with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await conn.close()
            with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await muxed.secured_conn.close()
            muxed.event_closed.set()
            self.remove_conn(conn)
            self.slots.release(slot)

    async def notify_opened_stream(self, stream: INetStream) -> None:
        await trio.lowlevel.checkpoint()

    async def notify_closed_stream(self, stream: INetStream) -> None:
        await trio.lowlevel.checkpoint()

    def _init_connection_management(self) -> None:
        super()._init_connection_management()
        self.auto_connector = NoAutoConnector(swarm=self)


def _step_of(error: BaseException) -> str:
    """The step at which a handshake failed."""
    steps = {
        trio.TooSlowError: "deadline",
        trio.Cancelled: "evicted",
        SecurityUpgradeFailure: "handshake",
        MuxerUpgradeFailure: "muxer",
    }
    return next((step for kind, step in steps.items() if isinstance(error, kind)), "admission")


async def _close(raw_conn: IRawConnection) -> None:
    with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
        await raw_conn.close()


class HardHost(BasicHost):
    """A host that neither asks peers to identify themselves nor accepts pushed addresses.
    Upstream's task for that can end the whole program."""

    def __init__(self, network: HardSwarm, addresses: Callable[[], Sequence[str]]) -> None:
        super().__init__(
            network,
            addrs_factory=lambda _: [Multiaddr(text) for text in addresses()],
            disable_identify_address_discovery=True,
        )
        self.remove_stream_handler(TProtocol("/ipfs/id/push/1.0.0"))

    async def new_stream(self, peer_id: ID, protocol_ids: Sequence[TProtocol]) -> INetStream:
        """Open a stream to a connected peer for the first of the protocols. SwarmException: the
        peer is not connected. StreamFailure: it does not speak the protocol, or breaks the rules.
        """
        protocol = protocol_ids[0]
        assert isinstance(self._network, HardSwarm)
        conn = self._network.live(peer_id)
        if conn is None:
            raise SwarmException(f"not connected to {peer_id}")
        stream = await conn.new_stream()
        try:
            with trio.fail_after(STREAM_TIMEOUT_S):
                await stream.muxed_stream.write(proposal(str(protocol)))
                await agree(Reader(stream.muxed_stream), str(protocol))
        except BaseException as error:
            with trio.move_on_after(STREAM_TIMEOUT_S, shield=True):
                await stream.reset()
            if isinstance(
                error, (BaseLibp2pError, RemoteProtocolError, RequestRefused, trio.TooSlowError)
            ):
                raise StreamFailure(f"{peer_id} does not speak {protocol}") from error
            raise
        stream.set_protocol(protocol)
        return stream

    def _schedule_identify(self, peer_id: ID, *, reason: str) -> None:
        pass
