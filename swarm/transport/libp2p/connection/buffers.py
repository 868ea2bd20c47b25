"""What waits on either side of a muxed connection: frames to be written, data to be read."""

from collections import deque

import trio
from libp2p.io.exceptions import ConnectionClosedError

from swarm.transport.libp2p.connection.noise import RECORD_PLAIN_BYTES_MAX

OUTBOX_BYTES_MAX = 262_144  # data of one connection that waits for the socket
OUTBOX_CONTROL_MAX = 4_096  # control frames that wait; a peer that causes more is cut off
PIECE_BYTES_MIN = 4_096  # smaller pieces of received data are joined, so that each byte costs one

Piece = bytes | memoryview


class Outbox:
    """Frames of one connection on their way to its writer task.

    Upstream writes each frame from the task that made it. Cancelling that task in the middle of
    a frame leaves half of it on the wire: the connection looks alive and every later stream on
    it fails. Here a frame is handed over whole or not at all, and the writer is never cancelled
    in the middle of one. Control frames never wait, so that the reading task, which answers
    pings and opens, cannot block on a peer that reads nothing.
    """

    def __init__(self) -> None:
        self._control: deque[Piece] = deque()
        self._data: deque[Piece] = deque()
        self._data_bytes = 0
        self._writing = False
        self._taken = 0  # batches
        self._lot = trio.lowlevel.ParkingLot()
        self.closed = False

    def put_control(self, header: bytes) -> None:
        """Hand over a frame that may overtake data.

        Raises:
            ConnectionClosedError: the connection is gone.
        """
        if self.closed or len(self._control) >= OUTBOX_CONTROL_MAX:
            raise ConnectionClosedError("connection is closed", transport="tcp")
        self._control.append(header)
        self._lot.unpark_all()

    async def put(self, header: bytes, data: Piece = b"") -> None:
        """Hand over a frame that must stay in order, when there is room for it.

        Gives way to other tasks only where there is none: a task can fill the outbox, no more.

        Raises:
            ConnectionClosedError: the connection is gone.
        """
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

    async def take(self) -> list[Piece]:
        """Wait for frames and take all that wait, control frames first.

        Asking for more says that those taken before are written.
        """
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
        """Wait until what waits now is written or the connection is gone."""
        last = self._taken + bool(self._control or self._data)
        while not self.closed and (self._taken < last or (self._writing and self._taken == last)):
            await self._lot.park()

    async def flushed(self) -> None:
        """Wait until every frame is written or the connection is gone."""
        while (self._control or self._data or self._writing) and not self.closed:
            await self._lot.park()

    def close(self) -> None:
        self.closed = True
        self._lot.unpark_all()


class ReceiveBuffer:
    """What has come for a stream and is not read yet. Whole records are kept as they came."""

    def __init__(self) -> None:
        self._pieces: deque[bytes | bytearray | memoryview] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return self._bytes

    def append(self, piece: memoryview) -> None:
        """Keep a piece. One that is a part of something larger is copied, so as not to hold it."""
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

    def take(self, count: int) -> bytes:
        """Up to `count` bytes."""
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
