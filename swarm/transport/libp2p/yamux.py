"""Yamux, compatible with upstream, with bounds on what a peer sends.

Upstream writes each frame in the task that made it, polls for window, fails streams whose reader
pauses, and stores all that a peer sends beyond its window.
"""

import struct
from collections.abc import Callable

import trio
from libp2p.abc import ISecureConn
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError, MuxedStreamReset
from libp2p.stream_muxer.yamux.yamux import (
    DEFAULT_WINDOW_SIZE,
    FLAG_ACK,
    FLAG_FIN,
    FLAG_RST,
    FLAG_SYN,
    GO_AWAY_NORMAL,
    HEADER_SIZE,
    MAX_WINDOW_SIZE,
    TYPE_DATA,
    TYPE_GO_AWAY,
    TYPE_PING,
    TYPE_WINDOW_UPDATE,
    Yamux,
    YamuxStream,
)

from swarm.transport.libp2p.frames import (
    FRAME_BYTES_SMALL,
    Ended,
    FrameError,
    FrameRates,
    Outbox,
    Piece,
    ReceiveBuffer,
)
from swarm.transport.libp2p.noise import RECORD_PLAIN_BYTES_MAX, NoiseSession
from swarm.transport.metering import FRAME_S, RECORD_S, STREAM_S, Payer

FRAME_BYTES_MAX = 4 * RECORD_PLAIN_BYTES_MAX  # fills whole records, fits any window
INBOUND_STREAMS_MAX = 512  # open at a time on one connection; more are reset
WINDOWS_BYTES_MAX = 33_554_432  # per connection, beyond each stream's first window
FRAME_BYTES_METERED = 8_192  # less payload is charged to the peer as work
FRAMES_PER_TURN = 256  # processed before other tasks run
WINDOW_WAIT_MAX_S = 120.0  # a receiver that pauses longer loses the stream
WRITE_STALL_MAX_S = 60.0  # a socket that accepts nothing for so long is dead
WRITE_STEP_BYTES = 16_384  # granularity of progress on relayed connections
PING_INTERVAL_S = 10.0
PING_TIMEOUT_S = 30.0  # generous: a peer that trains on one core answers late
CLOSE_FLUSH_S = 0.5
RTT_DEFAULT_S = 0.001

HEADER = struct.Struct("!BBHII")  # version, type, flags, stream, length

Stream = YamuxStream

OnEnd = Callable[[ID, Ended], None]


# --- streams -------------------------------------------------------------------------------


class EventStream(YamuxStream):
    """A stream that waits for its window by an event and credits the sender in large steps.

    Upstream polls the window every 10 ms, fails the stream after a pause of 5 s, and lets two
    writers interleave their frames.
    """

    conn: "MuxedConnection"

    def __init__(self, stream_id: int, conn: "MuxedConnection", is_initiator: bool) -> None:
        self._lot = trio.lowlevel.ParkingLot()
        self._closed = False
        self._write_lock = trio.Lock()
        self.buffer = ReceiveBuffer()
        super().__init__(stream_id, conn, is_initiator)

    @property
    def closed(self) -> bool:
        return self._closed

    @closed.setter
    def closed(self, value: bool) -> None:
        self._closed = value
        self._lot.unpark_all()

    def credit(self, size: int) -> None:
        self.send_window += size
        self._lot.unpark_all()

    async def write(self, data: bytes) -> None:
        view = memoryview(data if isinstance(data, bytes) else bytes(data))
        try:
            self._write_lock.acquire_nowait()  # `acquire` would yield to other tasks
        except trio.WouldBlock:
            await self._write_lock.acquire()
        try:
            while view:
                await self._wait_for_window()
                size = min(len(view), self.send_window, FRAME_BYTES_MAX)
                self.send_window -= size
                header = HEADER.pack(0, TYPE_DATA, 0, self.stream_id, size)
                await self.conn.outbox.put(header, view[:size])
                view = view[size:]
        finally:
            self._write_lock.release()

    async def _wait_for_window(self) -> None:
        if self.send_window <= 0:
            with trio.move_on_after(WINDOW_WAIT_MAX_S):
                while self.send_window <= 0 and not (self._closed or self.send_closed):
                    await self._lot.park()
        if self._closed or self.send_closed:
            raise MuxedStreamError("stream is closed for sending")
        if self.send_window <= 0:
            raise MuxedStreamError(f"receiver took nothing for {WINDOW_WAIT_MAX_S:.0f} s")

    async def read(self, n: int | None = -1) -> bytes:
        """Up to `n` bytes, or all there are; waits for the first."""
        if self.buffer:
            await trio.lowlevel.checkpoint()
        while not self.buffer:
            if self.reset_received:
                raise MuxedStreamReset("stream was reset")
            if self.recv_closed or self.stream_id not in self.conn.streams:
                raise MuxedStreamEOF("stream is closed for receiving")
            if self._closed:
                raise MuxedStreamReset("stream is closed")
            await self.conn.stream_events[self.stream_id].wait()
            if self.stream_id in self.conn.stream_events:
                self.conn.stream_events[self.stream_id] = trio.Event()
        data = self.buffer.read(len(self.buffer) if n is None or n < 0 else n)
        if self._closed and not self.buffer:
            self.conn._finalize_stream_locked(self, fully_closed=True)
        elif not (self.recv_closed or self._closed):
            self._credit_sender()
        return data

    async def reset(self) -> None:
        """Upstream keeps unread data for one more minute."""
        try:
            await super().reset()
        finally:
            self.buffer.read(len(self.buffer))
            self.conn._finalize_stream_locked(self, fully_closed=True)

    def _credit_sender(self) -> None:
        """Reopen the window once half is used; widen it if that took under four round trips."""
        held = self.recv_window + len(self.buffer) + self.conn.missing_bytes(self)
        if self.target_recv_window - held < self.target_recv_window // 2:
            return
        now_s = trio.current_time()
        round_trips_s = 4 * (self.conn.rtt() or RTT_DEFAULT_S)
        if not self.epoch_start or now_s - self.epoch_start < round_trips_s:
            self.target_recv_window = self.conn.wider(self.target_recv_window)
        self.epoch_start = now_s
        increment = self.target_recv_window - held
        self.recv_window += increment
        header = HEADER.pack(0, TYPE_WINDOW_UPDATE, 0, self.stream_id, increment)
        self.conn.send_control(header)


# --- connections ---------------------------------------------------------------------------


# Long: upstream's class, method by method.
class MuxedConnection(Yamux):
    """Yamux with a writer task (`Outbox`), a reader task, and a check for dead peers."""

    def __init__(
        self,
        conn: ISecureConn,
        peer_id: ID,
        on_end: OnEnd = lambda peer, reason: None,
        payer: Payer | None = None,
    ) -> None:
        """`on_end` is called once if this side ends the connection. `payer` is charged for the
        peer's work."""
        super().__init__(conn, peer_id, is_initiator=conn.is_initiator)
        self.payer = payer or Payer()
        self.outbox = Outbox()
        self._on_end = on_end
        self._why_ended: Ended | None = None
        self._cleaned = False
        self._last_data_s = trio.current_time()  # last data from the peer
        self._rates = FrameRates(self._last_data_s)
        self._frames = 0
        self._small_frames = 0  # not counted in the rates yet
        self._head = bytearray()  # incomplete header
        self._flags = 0  # of the frame whose data is being read
        self._stream: EventStream | None = None  # receives the frame's data; None if it is over
        self._data_left = 0

    @property
    def alive(self) -> bool:
        return not self.event_shutting_down.is_set()

    async def start(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write_frames)
            await super().start()
            nursery.cancel_scope.cancel()

    # --- writing ---

    async def _write_frame(self, data: bytes) -> None:
        """Write one of upstream's own frames (a header). One that ends a stream stays in order."""
        if data[3] & FLAG_FIN:
            await self.outbox.put(data)
        else:
            await trio.lowlevel.checkpoint()
            self.outbox.put_control(data)

    def send_control(self, header: bytes) -> None:
        if self.alive and not self.outbox.closed:
            try:
                self.outbox.put_control(header)
            except ConnectionClosedError:
                self._report_end(Ended.UNREAD)
                self._shut()

    async def _write_frames(self) -> None:
        try:
            while True:
                await self._write_batch(await self.outbox.next_batch())
        except trio.TooSlowError:
            self._report_end(Ended.STALLED)
            await self._cleanup_on_error()
        except (BaseLibp2pError, OSError):
            await self._cleanup_on_error()

    async def _write_batch(self, batch: list[Piece]) -> None:
        """Write for as long as the socket makes progress; trio.TooSlowError: none within
        `WRITE_STALL_MAX_S`."""
        with trio.fail_after(WRITE_STALL_MAX_S) as scope:

            def moved() -> None:
                scope.deadline = trio.current_time() + WRITE_STALL_MAX_S

            session = self.secured_conn
            if isinstance(session, NoiseSession):
                await session.write_pieces(batch, moved)
                return
            data = b"".join(batch)
            for at in range(0, len(data), WRITE_STEP_BYTES):
                await session.write(data[at : at + WRITE_STEP_BYTES])
                moved()

    # --- reading ---

    async def handle_incoming(self) -> None:
        """Read frames until the connection ends."""
        try:
            while self.alive:
                pieces, small_records = await self._receive()
                self._last_data_s = trio.current_time()
                for piece in pieces:
                    await self._process_piece(piece)
                if self.payer.owe(small_records * RECORD_S):
                    await self.payer.pay()
        except FrameError as error:
            if error.reason is not None:
                self._report_end(error.reason)
        except (BaseLibp2pError, OSError, trio.ClosedResourceError):
            pass
        finally:
            await self._cleanup_on_error()

    async def _receive(self) -> tuple[list[memoryview], int]:
        """Next data, and the number of small records in it."""
        if isinstance(self.secured_conn, NoiseSession):
            return await self.secured_conn.receive()
        data = await self.secured_conn.read()
        if not data:
            raise ConnectionClosedError("connection closed by peer", transport="tcp")
        return [memoryview(data)], 0

    async def _process_piece(self, piece: memoryview) -> None:
        at = 0
        while at < len(piece):
            if self._data_left:
                data = piece[at : at + self._data_left]
                at += len(data)
                self._process_data(data)
                continue
            missing = HEADER_SIZE - len(self._head)
            self._head += piece[at : at + missing]
            at += missing
            if len(self._head) == HEADER_SIZE:
                header = HEADER.unpack(self._head)
                self._head.clear()
                if self._count_frame(*header):
                    await self.payer.pay()  # one read may hold 20,000 frames
                opened = self._process_header(*header)
                if opened is not None:
                    await self.new_stream_send_channel.send(opened)

    def _count_frame(
        self, version: int, kind: int, flags: int, stream_id: int, length: int
    ) -> bool:
        """Count a frame. Returns True when other tasks should run."""
        self._frames += 1
        small = kind != TYPE_DATA or length < FRAME_BYTES_SMALL
        self._small_frames += small
        opens = kind in (TYPE_DATA, TYPE_WINDOW_UPDATE) and flags & FLAG_SYN
        metered = kind != TYPE_DATA or length < FRAME_BYTES_METERED
        due = self.payer.owe(FRAME_S * metered + (STREAM_S if opens else 0.0))
        if self._frames % FRAMES_PER_TURN:
            return due
        self._rates.count(Ended.SMALL_FRAMES, trio.current_time(), self._small_frames)
        self._small_frames = 0
        return True

    def _process_header(
        self, version: int, kind: int, flags: int, stream_id: int, length: int
    ) -> EventStream | None:
        """Process a frame's header. Returns the stream that it opens, if any."""
        if version != 0:
            raise FrameError("version")
        if kind == TYPE_PING:
            self._process_ping(flags, length)
            return None
        if kind not in (TYPE_DATA, TYPE_WINDOW_UPDATE):
            leaves = kind == TYPE_GO_AWAY
            raise FrameError("goodbye" if leaves else "kind", None if leaves else Ended.RULES)
        opened = self._accept(stream_id) if flags & FLAG_SYN else None
        stream = self.streams.get(stream_id)
        assert stream is None or isinstance(stream, EventStream)
        if kind == TYPE_WINDOW_UPDATE:
            if stream is not None:
                stream.credit(length)
                self._process_flags(stream, flags)
            return opened
        if length > (MAX_WINDOW_SIZE if stream is None else stream.recv_window):
            raise FrameError("more data than the window has room for")
        self._stream, self._flags, self._data_left = stream, flags, length
        if stream is not None:
            stream.recv_window -= length
            if not length:
                self._process_flags(stream, flags)
        return opened

    def _process_data(self, data: memoryview) -> None:
        self._data_left -= len(data)
        stream = self._stream
        if stream is None or stream.stream_id not in self.streams:
            return  # it is over
        stream.buffer.append(data)
        self.stream_events[stream.stream_id].set()
        if not self._data_left:
            self._process_flags(stream, self._flags)

    def _process_flags(self, stream: EventStream, flags: int) -> None:
        if not flags & (FLAG_FIN | FLAG_RST):
            return
        if flags & FLAG_FIN:
            stream.recv_closed = True
            stream.closed = stream.closed or stream.send_closed
        if flags & FLAG_RST:
            stream.reset_received = True
            stream.closed = True
        self.stream_events[stream.stream_id].set()
        if stream.closed:
            self._finalize_stream_locked(stream, fully_closed=True)

    def _accept(self, stream_id: int) -> EventStream | None:
        """Accept the stream that the peer opens. None: it has too many."""
        ours = stream_id % 2 == self.next_stream_id % 2
        if ours or not stream_id or stream_id in self.streams:
            raise FrameError("opens a stream under a wrong id")
        self._rates.count(Ended.STREAMS, trio.current_time())
        if sum(not s.is_initiator for s in self.streams.values()) >= INBOUND_STREAMS_MAX:
            self.send_control(HEADER.pack(0, TYPE_WINDOW_UPDATE, FLAG_RST, stream_id, 0))
            return None
        stream = self._add_stream(stream_id, is_initiator=False)
        self.send_control(HEADER.pack(0, TYPE_WINDOW_UPDATE, FLAG_ACK, stream_id, 0))
        return stream

    def _process_ping(self, flags: int, value: int) -> None:
        if flags & FLAG_SYN:
            self._rates.count(Ended.PINGS, trio.current_time())
            self.send_control(HEADER.pack(0, TYPE_PING, FLAG_ACK, 0, value))
        elif value == self._ping_id and not self._ping_event.is_set():
            rtt_s = trio.current_time() - self._ping_sent_time
            self._rtt = (self._rtt + rtt_s) / 2 if self._rtt else rtt_s
            self._ping_event.set()

    # --- streams ---

    def missing_bytes(self, stream: EventStream) -> int:
        """Bytes of the current frame still to come; the window counts them already."""
        return self._data_left if stream is self._stream else 0

    def wider(self, window_bytes: int) -> int:
        """Double a stream's window if the connection's budget for windows allows it."""
        used = sum(s.target_recv_window - DEFAULT_WINDOW_SIZE for s in self.streams.values())
        fits = used + window_bytes <= WINDOWS_BYTES_MAX and 2 * window_bytes <= MAX_WINDOW_SIZE
        return 2 * window_bytes if fits else window_bytes

    def _add_stream(self, stream_id: int, *, is_initiator: bool) -> EventStream:
        stream = EventStream(stream_id, self, is_initiator)
        self.streams[stream_id] = stream
        # Upstream asks only whether there is something in it.
        self.stream_buffers[stream_id] = stream.buffer  # type: ignore[assignment]
        self.stream_events[stream_id] = trio.Event()
        return stream

    async def open_stream(self) -> YamuxStream:
        """Upstream leaks the stream if the opening task is cancelled."""
        await self.stream_backlog_semaphore.acquire()
        if not self.alive:
            self.stream_backlog_semaphore.release()
            raise MuxedStreamError("connection is shutting down")
        stream = self._add_stream(self.next_stream_id, is_initiator=True)
        stream._owns_backlog_slot = True
        self.next_stream_id += 2
        header = HEADER.pack(0, TYPE_WINDOW_UPDATE, FLAG_SYN, stream.stream_id, 0)
        try:
            await self._write_frame(header)
        except BaseException:
            self._finalize_stream_locked(stream, fully_closed=True)
            raise
        return stream

    # --- the end ---

    def _report_end(self, reason: Ended) -> None:
        """Report why this side ends the connection, unless the end has begun."""
        if self._why_ended is None and not self._cleaned:
            self._why_ended = reason
            self._on_end(self.peer_id, reason)

    def _shut(self) -> None:
        self.event_shutting_down.set()
        self.outbox.close()
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    async def _cleanup_on_error(self) -> None:
        """Clean up once: upstream repeats it each time the end is noticed."""
        if not self._cleaned:
            self._cleaned = True
            self.outbox.close()
            with trio.CancelScope(shield=True):
                await super()._cleanup_on_error()

    async def close(self, error_code: int = GO_AWAY_NORMAL) -> None:
        """Send a goodbye if the socket takes it quickly, then close. Upstream can wait for a
        stalled peer for ever."""
        if self.alive:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_FLUSH_S):
                await self._send_go_away(error_code)
            await self._cleanup_on_error()

    async def _send_go_away(self, error_code: int) -> None:
        try:
            await self.outbox.flushed()
            self.outbox.put_control(HEADER.pack(0, TYPE_GO_AWAY, 0, 0, error_code))
            await self.outbox.flushed()
        except ConnectionClosedError:
            pass  # the peer was faster

    async def _measure_rtt_loop(self) -> None:
        """Upstream keeps a peer that never answers pings. A ping counts from when it has been
        written, because our own uplink may be slow."""
        while self.alive:
            self._ping_id += 1
            self._ping_event = trio.Event()
            self._ping_sent_time = trio.current_time()
            self.send_control(HEADER.pack(0, TYPE_PING, FLAG_SYN, 0, self._ping_id))
            await self.outbox.wait_written()
            if not await self._shows_life():
                self._report_end(Ended.SILENT)
                await self._cleanup_on_error()
                return
            with trio.move_on_after(PING_INTERVAL_S):
                await self.event_shutting_down.wait()

    async def _shows_life(self) -> bool:
        """Wait for the answer to our ping, for as long as any data comes. Over a slow link the
        answer may queue for minutes behind data."""
        asked_s = trio.current_time()
        while not self._ping_event.is_set():
            silent_since_s = max(asked_s, self._last_data_s)
            if trio.current_time() >= silent_since_s + PING_TIMEOUT_S:
                return False
            with trio.move_on_at(silent_since_s + PING_TIMEOUT_S):
                await self._ping_event.wait()
            await trio.lowlevel.checkpoint()  # read what came meanwhile first
        return True


def put_back(stream: Stream, data: bytes) -> None:
    if isinstance(stream, EventStream):
        stream.buffer.put_back(data)
    elif (buffer := stream.conn.stream_buffers.get(stream.stream_id)) is not None:
        buffer[:0] = data
    if (event := stream.conn.stream_events.get(stream.stream_id)) is not None:
        event.set()
