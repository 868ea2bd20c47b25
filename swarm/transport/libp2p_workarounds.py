"""What py-libp2p 0.8.1 does that a busy node cannot live with, and what is done instead.

Each piece below names the upstream behaviour it replaces. Each can be switched off through
`Workarounds`, so that a test can show that it is still needed. They reach into internals, so the
host refuses to start on any other version of libp2p.
"""

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import trio
from libp2p.abc import IMuxedConn, INetStream, ISecureConn, ISecureTransport, ITransport
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.host.basic_host import BasicHost
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.protocol_muxer.exceptions import MultiselectClientError, MultiselectError
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError, MuxedStreamReset
from libp2p.stream_muxer.yamux import yamux
from libp2p.stream_muxer.yamux.yamux import Yamux, YamuxStream
from libp2p.transport.exceptions import MuxerUpgradeFailure
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr

from swarm.errors import ConfigError
from swarm.transport.libp2p_noise import RECORD_PLAIN_BYTES_MAX, SOCKET_READ_BYTES, Noise

LIBP2P_VERSION = "0.8.1"

FRAME_BYTES_MAX = 4 * RECORD_PLAIN_BYTES_MAX  # fills whole records beside its header
OUTBOX_BYTES_MAX = 262_144  # frames of one connection that wait for the socket
OUTBOX_CONTROL_MAX = 4_096  # control frames that wait; a peer that causes more is cut off
WINDOW_WAIT_MAX_S = 120.0  # how long a receiver may pause before its stream is given up
WRITE_STALL_MAX_S = 60.0  # without progress on the socket the connection counts as dead
PING_INTERVAL_S = 10.0
PING_TIMEOUT_S = 30.0  # generous: a peer that trains on one core answers late
BODY_TIMEOUT_S = 60.0  # for the rest of a frame whose header has come
CLOSE_FLUSH_S = 0.5
UPGRADE_TIMEOUT_S = 10.0
CONNECTIONS_MAX = 256


@dataclass(frozen=True, slots=True)
class Workarounds:
    """Which upstream behaviours are replaced. All of them, except in tests."""

    shield_writes: bool = True
    event_window: bool = True
    reap_inbound: bool = True
    gossip_limits: bool = True
    fast_noise: bool = True


ALL_WORKAROUNDS = Workarounds()


def require_version(found: str | None = None) -> None:
    """Refuse any libp2p but the one whose internals this module replaces.

    Raises:
        ConfigError: another version is installed.
    """
    found = found or metadata.version("libp2p")
    if found != LIBP2P_VERSION:
        raise ConfigError(
            f"needs libp2p {LIBP2P_VERSION}, found {found}: "
            f"run pip install libp2p=={LIBP2P_VERSION}"
        )


# --- raw connections ----------------------------------------------------------------------


class BoundedRawConnection(RawConnection):
    """Upstream passes lengths that a stranger chose on to the socket, which allocates them."""

    async def read(self, n: int | None = None) -> bytes:
        return await super().read(SOCKET_READ_BYTES if n is None else min(n, SOCKET_READ_BYTES))


# --- Yamux ---------------------------------------------------------------------------------


class Outbox:
    """Frames of one connection on their way to its writer task.

    Upstream writes each frame from the task that made it. Cancelling that task in the middle of
    a frame leaves half of it on the wire: the connection looks alive and every later stream on
    it fails. Here a frame is handed over whole or not at all, and the writer is never cancelled
    in the middle of one. Control frames never wait, so that the reading task, which answers
    pings and opens, cannot block on a peer that reads nothing.
    """

    def __init__(self) -> None:
        self._control: deque[bytes] = deque()
        self._data: deque[bytes] = deque()
        self._data_bytes = 0
        self._writing = False
        self._lot = trio.lowlevel.ParkingLot()
        self.closed = False

    async def put(self, frame: bytes) -> None:
        """Hand over one frame; waits for room if it carries data.

        Raises:
            ConnectionClosedError: the connection is gone.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if _in_order(frame):
            while self._data_bytes >= OUTBOX_BYTES_MAX and not self.closed:
                await self._lot.park()
        if self.closed or len(self._control) >= OUTBOX_CONTROL_MAX:
            raise ConnectionClosedError("connection is closed", transport="tcp")
        if _in_order(frame):
            self._data.append(frame)
            self._data_bytes += len(frame)
        else:
            self._control.append(frame)
        self._lot.unpark_all()
        await trio.lowlevel.cancel_shielded_checkpoint()

    async def take(self) -> bytes:
        """Wait for frames and take all that wait, control frames first.

        Asking for more says that those taken before are written.
        """
        self._writing = False
        self._lot.unpark_all()
        while not (self._control or self._data):
            await self._lot.park()
        batch = b"".join([*self._control, *self._data])
        self._control.clear()
        self._data.clear()
        self._data_bytes = 0
        self._writing = True
        self._lot.unpark_all()
        return batch

    async def flushed(self) -> None:
        """Wait until every frame is written or the connection is gone."""
        while (self._control or self._data or self._writing) and not self.closed:
            await self._lot.park()

    def close(self) -> None:
        self.closed = True
        self._lot.unpark_all()


def _in_order(frame: bytes) -> bool:
    """Whether a frame must not overtake data: it carries some, or ends its stream."""
    return len(frame) > yamux.HEADER_SIZE or bool(frame[3] & yamux.FLAG_FIN)


class EventStream(YamuxStream):
    """A stream that waits for its window by an event, and credits the sender in large steps.

    Upstream polls the window every 10 ms and fails the stream when the receiver pauses for 5 s;
    it sends a WINDOW_UPDATE for every partial read; and lets two writers interleave their frames
    within one message.
    """

    def __init__(self, stream_id: int, conn: Yamux, is_initiator: bool) -> None:
        self._lot = trio.lowlevel.ParkingLot()
        self._send_window = 0
        self._closed = False
        self._write_lock = trio.Lock()
        super().__init__(stream_id, conn, is_initiator)

    @property
    def send_window(self) -> int:
        return self._send_window

    @send_window.setter
    def send_window(self, value: int) -> None:
        self._send_window = value
        self._lot.unpark_all()

    @property
    def closed(self) -> bool:
        return self._closed

    @closed.setter
    def closed(self, value: bool) -> None:
        self._closed = value
        self._lot.unpark_all()

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        async with self._write_lock:
            while view:
                await self._wait_for_window()
                size = min(len(view), self._send_window, FRAME_BYTES_MAX)
                header = struct.pack(
                    yamux.YAMUX_HEADER_FORMAT, 0, yamux.TYPE_DATA, 0, self.stream_id, size
                )
                self._send_window -= size
                await self.conn._write_frame(header + view[:size])
                view = view[size:]

    async def _wait_for_window(self) -> None:
        with trio.move_on_after(WINDOW_WAIT_MAX_S):
            while self._send_window <= 0 and not (self._closed or self.send_closed):
                await self._lot.park()
        if self._closed or self.send_closed:
            raise MuxedStreamError("stream is closed for sending")
        if self._send_window <= 0:
            raise MuxedStreamError(f"receiver took nothing for {WINDOW_WAIT_MAX_S:.0f} s")

    async def read(self, n: int | None = -1) -> bytes:
        """Up to `n` bytes, or all there are; waits for the first.

        Upstream takes the lock of all streams several times for each read.
        """
        await trio.lowlevel.checkpoint()
        while not (buffer := self.conn.stream_buffers.get(self.stream_id)):
            if self.reset_received:
                raise MuxedStreamReset("stream was reset")
            if buffer is None or self.recv_closed:
                raise MuxedStreamEOF("stream is closed for receiving")
            if self._closed:
                raise MuxedStreamReset("stream is closed")
            await self.conn.stream_events[self.stream_id].wait()
            if self.stream_id in self.conn.stream_events:
                self.conn.stream_events[self.stream_id] = trio.Event()
        data = bytes(buffer if n is None or n < 0 or n >= len(buffer) else buffer[:n])
        del buffer[: len(data)]
        if self._closed and not buffer:
            self.conn._finalize_stream_locked(self, fully_closed=True)
        else:
            await self._auto_tune_and_send_window_update(bytes_read=len(data))
        return data

    async def reset(self) -> None:
        """Upstream keeps what nobody will read for a minute more."""
        try:
            await super().reset()
        finally:
            self.conn.stream_buffers.pop(self.stream_id, None)
            self.conn._finalize_stream_locked(self, fully_closed=True)

    async def _auto_tune_and_send_window_update(self, *, bytes_read: int = 0) -> None:
        buffered = len(self.conn.stream_buffers.get(self.stream_id, b""))
        slack = self.target_recv_window - (self.recv_window + buffered)
        if slack < self.target_recv_window // 2:
            return
        increment = self._grow_to_delta(buffered) + self._apply_autotune_epoch(buffered)
        await self.send_window_update(increment)


def _new_stream(stream_id: int, conn: Yamux, is_initiator: bool) -> YamuxStream:
    """Upstream names its stream class in the middle of long methods; this asks the connection."""
    kind = EventStream if isinstance(conn, HardYamux) and conn.event_window else YamuxStream
    return kind(stream_id, conn, is_initiator)


Stream = YamuxStream  # what others call it: the module's own name now makes streams
yamux.YamuxStream = _new_stream  # type: ignore[assignment, misc]


class HardYamux(Yamux):
    """Yamux with a writer task (`Outbox`), streams that wait by events, and a dead-peer check."""

    def __init__(self, conn: ISecureConn, peer_id: ID, workarounds: Workarounds) -> None:
        super().__init__(conn, peer_id, is_initiator=conn.is_initiator)
        self.event_window = workarounds.event_window
        self._outbox = Outbox() if workarounds.shield_writes else None

    @property
    def alive(self) -> bool:
        return not self.event_shutting_down.is_set()

    async def start(self) -> None:
        if self._outbox is None:
            await super().start()
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write_frames, self._outbox)
            await super().start()
            nursery.cancel_scope.cancel()

    async def _write_frame(self, data: bytes) -> None:
        if self._outbox is None:
            await super()._write_frame(data)
        else:
            await self._outbox.put(data)

    async def _read_data_body(self, length: int) -> bytes:
        """Upstream copies each body twice more than the session does."""
        with trio.fail_after(BODY_TIMEOUT_S):
            data = await self.secured_conn.read(length)
            while len(data) < length:
                data += await self.secured_conn.read(length - len(data))
        return data

    async def _write_frames(self, outbox: Outbox) -> None:
        try:
            while True:
                batch = await outbox.take()
                with trio.fail_after(WRITE_STALL_MAX_S):
                    await self.secured_conn.write(batch)
        except (BaseLibp2pError, OSError, trio.TooSlowError):
            await self._cleanup_on_error()

    async def _cleanup_on_error(self) -> None:
        if self._outbox is not None:
            self._outbox.close()
        with trio.CancelScope(shield=True):
            await super()._cleanup_on_error()

    async def close(self, error_code: int = yamux.GO_AWAY_NORMAL) -> None:
        """Say goodbye if the socket takes it quickly, then close.

        Upstream holds a lock over the goodbye, and so waits as long as a stalled peer likes.
        """
        if self.alive and self._outbox is not None:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_FLUSH_S):
                await self._say_goodbye(self._outbox, error_code)
            await self._cleanup_on_error()
        elif self._outbox is None:
            await super().close(error_code)

    async def _say_goodbye(self, outbox: Outbox, error_code: int) -> None:
        frame = struct.pack(yamux.YAMUX_HEADER_FORMAT, 0, yamux.TYPE_GO_AWAY, 0, 0, error_code)
        try:
            await outbox.flushed()
            await outbox.put(frame)
            await outbox.flushed()
        except ConnectionClosedError:
            pass  # the peer was faster

    async def open_stream(self) -> YamuxStream:
        """Upstream leaks the stream and its place if the opening task is cancelled."""
        if self._outbox is None:
            return await super().open_stream()
        await self.stream_backlog_semaphore.acquire()
        if not self.alive:
            self.stream_backlog_semaphore.release()
            raise MuxedStreamError("connection is shutting down")
        stream = _new_stream(self.next_stream_id, self, True)
        stream._owns_backlog_slot = True
        self.next_stream_id += 2
        self.streams[stream.stream_id] = stream
        self.stream_buffers[stream.stream_id] = bytearray()
        self.stream_events[stream.stream_id] = trio.Event()
        header = struct.pack(
            yamux.YAMUX_HEADER_FORMAT,
            0,
            yamux.TYPE_WINDOW_UPDATE,
            yamux.FLAG_SYN,
            stream.stream_id,
            0,
        )
        try:
            await self._write_frame(header)
        except BaseException:
            self._finalize_stream_locked(stream, fully_closed=True)
            raise
        return stream

    async def _measure_rtt_loop(self) -> None:
        """Upstream measures the round trip but keeps a peer that never answers."""
        while self.alive:
            self._ping_id += 1
            self._ping_event = trio.Event()
            header = struct.pack(
                yamux.YAMUX_HEADER_FORMAT, 0, yamux.TYPE_PING, yamux.FLAG_SYN, 0, self._ping_id
            )
            try:
                await self._write_frame(header)
                self._ping_sent_time = trio.current_time()
                with trio.fail_after(PING_TIMEOUT_S):
                    await self._ping_event.wait()
            except (BaseLibp2pError, OSError, trio.TooSlowError):
                await self._cleanup_on_error()
                return
            with trio.move_on_after(PING_INTERVAL_S):
                await self.event_shutting_down.wait()


class HardUpgrader(TransportUpgrader):
    """Noise and Yamux and nothing else; upstream hard-codes its own Yamux class."""

    def __init__(self, keys: KeyPair, workarounds: Workarounds, network_key: bytes | None) -> None:
        noise: ISecureTransport = Noise(keys, network_key)
        if not workarounds.fast_noise:
            assert network_key is None, "upstream has no private swarms"
            noise = NoiseTransport(keys, noise_privkey=create_x25519_key_pair().private_key)
        super().__init__(
            secure_transports_by_protocol={NOISE_PROTOCOL: noise},
            muxer_transports_by_protocol={TProtocol(yamux.PROTOCOL_ID): Yamux},
        )
        self._workarounds = workarounds

    async def upgrade_connection(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        try:
            await self.muxer_multistream.select_transport(conn)
        except (MultiselectError, MultiselectClientError) as error:
            raise MuxerUpgradeFailure("no common stream muxer") from error
        return HardYamux(conn, peer_id, self._workarounds)


# --- connections ---------------------------------------------------------------------------


class NoAutoConnector(AutoConnector):
    """Dials nobody: whom to know is decided above the transport."""

    async def maybe_connect(self) -> None:
        await trio.lowlevel.checkpoint()


def remote_ip(muxed: IMuxedConn) -> str | None:
    """The address at the far end, without the zone that link-local ones carry."""
    remote = muxed.secured_conn.get_remote_address() if isinstance(muxed, HardYamux) else None
    return None if remote is None else remote[0].partition("%")[0]


class HardSwarm(Swarm):
    """The swarm without its own ideas about whom to dial.

    Upstream keeps one task and one of its inbound places for every connection that ever came
    in; dials known peers by itself while it has few; and runs a nursery of callbacks for each
    stream. Addresses are dialled as given: upstream's `dial_peer` waits 250 ms after success,
    prefers other addresses than the one asked for, and blacklists a failed peer for a minute.
    """

    def __init__(
        self,
        keys: KeyPair,
        self_id: ID,
        workarounds: Workarounds,
        admits: Callable[[ID, str | None], bool],
        network_key: bytes | None,
    ) -> None:
        peerstore = PeerStore()
        peerstore.add_key_pair(self_id, keys)
        transports: list[ITransport] = [TCP()]
        super().__init__(
            self_id,
            peerstore,
            HardUpgrader(keys, workarounds, network_key),
            transports,
            retry_config=RetryConfig(max_retries=0),
            connection_config=ConnectionConfig(
                max_connections=CONNECTIONS_MAX,
                high_watermark=CONNECTIONS_MAX,
                low_watermark=0,
                min_connections=0,
                inbound_upgrade_timeout=UPGRADE_TIMEOUT_S,
                outbound_upgrade_timeout=UPGRADE_TIMEOUT_S,
            ),
        )
        self._workarounds = workarounds
        self._admits = admits

    async def _do_handle_inbound_connection(
        self, read_write_closer: ReadWriteCloser, maddr: Multiaddr, failure_event: Any
    ) -> None:
        if not self._workarounds.reap_inbound:
            await super()._do_handle_inbound_connection(read_write_closer, maddr, failure_event)
            return
        raw = BoundedRawConnection(read_write_closer, False)
        try:
            muxed = await self.upgrade_inbound_raw_conn(raw, maddr)
            assert isinstance(muxed, HardYamux)
            await muxed.event_closed.wait()
        finally:
            with trio.CancelScope(shield=True):
                await raw.close()

    async def add_conn(self, muxed_conn: IMuxedConn, direction: str = "unknown") -> Any:
        if muxed_conn.peer_id == self.self_id:
            await muxed_conn.close()
            raise SwarmException("the peer runs under our own key")
        if not self._admits(muxed_conn.peer_id, remote_ip(muxed_conn)):
            await muxed_conn.close()
            raise SwarmException("the connection is refused")
        return await super().add_conn(muxed_conn, direction)

    async def notify_opened_stream(self, stream: INetStream) -> None:
        await trio.lowlevel.checkpoint()

    async def notify_closed_stream(self, stream: INetStream) -> None:
        await trio.lowlevel.checkpoint()

    def _init_connection_management(self) -> None:
        super()._init_connection_management()
        self.auto_connector = NoAutoConnector(swarm=self)


class HardHost(BasicHost):
    """A host that does not ask every peer to identify itself, and that nobody pushes to.

    Upstream asks from a task outside every nursery, where an error in a peer's answer ends the
    whole program, and stores as many pushed addresses as a peer likes.
    """

    def __init__(self, network: HardSwarm, addresses: Callable[[], Sequence[str]]) -> None:
        super().__init__(
            network,
            addrs_factory=lambda _: [Multiaddr(text) for text in addresses()],
            disable_identify_address_discovery=True,
        )
        self.remove_stream_handler(TProtocol("/ipfs/id/push/1.0.0"))

    def _schedule_identify(self, peer_id: ID, *, reason: str) -> None:
        pass
