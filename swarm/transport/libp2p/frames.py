"""Buffers of a muxed connection: frames to be written and data to be read."""

from collections import deque
from enum import StrEnum
from typing import Final

import trio
from libp2p.io.exceptions import ConnectionClosedError

from swarm.limits.quotas import Rate, TokenBucket, Verdict
from swarm.transport.libp2p.noise import RECORD_PLAIN_BYTES_MAX

OUTBOX_BYTES_MAX = 262_144  # data waiting for the socket, per connection
OUTBOX_CONTROL_MAX = 4_096  # waiting control frames; beyond this the connection ends
PIECE_BYTES_MIN = 4_096  # smaller pieces of received data are joined, so that each byte costs one

Piece = bytes | memoryview


class Outbox:
    """Frames that wait for the connection's writer task.

    Upstream writes each frame in the task that made it; cancelling that task leaves half a frame on
    the wire, and every later stream fails. Here a frame is handed over whole or not at all. Control
    frames never wait, so the reading task cannot block on a peer that reads nothing.
    """

    def __init__(self) -> None:
        self._control: deque[Piece] = deque()
        self._data: deque[Piece] = deque()
        self._data_bytes = 0
        self._writing = False
        self._taken = 0  # batches handed to the writer
        self._lot = trio.lowlevel.ParkingLot()
        self.closed = False

    def put_control(self, header: bytes) -> None:
        """Queue a frame that may overtake data. ConnectionClosedError: the connection is gone."""
        if self.closed or len(self._control) >= OUTBOX_CONTROL_MAX:
            raise ConnectionClosedError("connection is closed", transport="tcp")
        self._control.append(header)
        self._lot.unpark_all()

    async def put(self, header: bytes, data: Piece = b"") -> None:
        """Queue a frame that must stay in order; waits only while the outbox is full.
        ConnectionClosedError: the connection is gone."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._data_bytes >= OUTBOX_BYTES_MAX and not self.closed:
            await self._lot.park()
        if self.closed:
            raise ConnectionClosedError("connection is closed", transport="tcp")
        self._data.append(header)
        if data:
            self._data.append(data)
        self._data_bytes += len(header) + len(data)
        self._lot.unpark_all()

    async def next_batch(self) -> list[Piece]:
        """Wait for frames and return all of them, control frames first. The call also confirms that
        the previous batch is written."""
        self._writing = False
        self._lot.unpark_all()
        while not (self._control or self._data):
            await self._lot.park()
        batch = [*self._control, *self._data]
        self._control.clear()
        self._data.clear()
        self._data_bytes = 0
        self._taken += 1
        self._writing = True
        self._lot.unpark_all()
        return batch

    async def wait_written(self) -> None:
        """Wait until everything queued so far is written or the connection is gone."""
        last = self._taken + bool(self._control or self._data)
        while not self.closed and (self._taken < last or (self._writing and self._taken == last)):
            await self._lot.park()

    async def flushed(self) -> None:
        while (self._control or self._data or self._writing) and not self.closed:
            await self._lot.park()

    def close(self) -> None:
        self.closed = True
        self._lot.unpark_all()


class ReceiveBuffer:
    """Received data of a stream that is not read yet."""

    def __init__(self) -> None:
        self._pieces: deque[bytes | bytearray | memoryview] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return self._bytes

    def append(self, piece: memoryview) -> None:
        """Keep a piece. A slice of a larger buffer is copied, so that the buffer can be freed."""
        self._bytes += len(piece)
        last = self._pieces[-1] if self._pieces else None
        if len(piece) == RECORD_PLAIN_BYTES_MAX:
            self._pieces.append(piece)
        elif isinstance(last, bytearray) and len(last) < PIECE_BYTES_MIN:
            last += piece
        else:
            self._pieces.append(bytearray(piece))

    def put_back(self, data: bytes) -> None:
        if data:
            self._pieces.appendleft(data)
            self._bytes += len(data)

    def read(self, count: int) -> bytes:
        parts: list[bytes | bytearray | memoryview] = []
        left = min(count, self._bytes)
        self._bytes -= left
        while left:
            piece = self._pieces.popleft()
            if len(piece) > left:
                view = memoryview(piece)
                self._pieces.appendleft(view[left:])
                piece = view[:left]
            parts.append(piece)
            left -= len(piece)
        return b"".join(parts)


# Rate limits for cheap frames that cost the receiver work, and reasons for ending connections.

STREAMS_PER_S_MAX: Final = 500  # opened by the peer on one connection
STREAMS_AT_ONCE_MAX: Final = 4_000
PINGS_PER_S_MAX: Final = 10
PINGS_AT_ONCE_MAX: Final = 200
SMALL_FRAMES_PER_S_MAX: Final = 5_000  # includes the two above, window updates and short data
SMALL_FRAMES_AT_ONCE_MAX: Final = 50_000
FRAME_BYTES_SMALL: Final = 1_024  # less payload makes a small frame


class Ended(StrEnum):
    """Reason why this node ended a connection."""

    STREAMS = "stream_flood"
    PINGS = "ping_flood"
    SMALL_FRAMES = "frame_flood"
    UNREAD = "answers_unread"  # the peer causes answers and does not read them
    RULES = "muxer_rules"  # the peer broke the rules of Yamux
    SILENT = "silent"  # no answer to a ping, and no other data
    STALLED = "stalled"  # the socket accepts no more data


FLOODS: Final = frozenset((Ended.STREAMS, Ended.PINGS, Ended.SMALL_FRAMES))


class FrameError(Exception):
    """The connection must end: the peer broke the rules, flooded, or left."""

    def __init__(self, text: str, reason: Ended | None = Ended.RULES) -> None:
        """`reason` None: the peer ended the connection."""
        super().__init__(text)
        self.reason = reason


class FrameRates:
    def __init__(self, now_s: float) -> None:
        limits = {
            Ended.STREAMS: (STREAMS_PER_S_MAX, STREAMS_AT_ONCE_MAX),
            Ended.PINGS: (PINGS_PER_S_MAX, PINGS_AT_ONCE_MAX),
            Ended.SMALL_FRAMES: (SMALL_FRAMES_PER_S_MAX, SMALL_FRAMES_AT_ONCE_MAX),
        }
        self._buckets = {
            flood: TokenBucket(Rate(per_s, at_once), at_once, now_s)
            for flood, (per_s, at_once) in limits.items()
        }

    def count(self, flood: Ended, now_s: float, frames: int = 1) -> None:
        """Count frames of the kind that `flood` is about. FrameError: too many."""
        if self._buckets[flood].spend(frames, now_s) is not Verdict.GRANTED:
            raise FrameError(f"too fast: {flood}", flood)
