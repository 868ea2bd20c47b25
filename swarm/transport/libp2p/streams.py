"""One request on one stream, both ends.

After multistream-select, whose answer the requester does not wait for (integers are big-endian):

  request   u32 length, payload
  response  u8 status (0 answered, 1 refused), u32 length, payload or reason as text

A refusal may come before the request has been read.
"""

import logging
import struct
from dataclasses import dataclass, field

import trio
from libp2p.exceptions import BaseLibp2pError

from swarm.errors import Reject, RemoteProtocolError, RequestRefused
from swarm.transport.libp2p.negotiation import Reader, Responder, agree, proposal
from swarm.transport.libp2p.yamux import EventStream, MuxedConnection, Stream, put_back
from swarm.transport.metering import STREAM_S

ANSWERED, REFUSED = 0, 1
LENGTH = struct.Struct("!I")
STATUS = struct.Struct("!BI")
REASON_BYTES_MAX = 200
INLINE_BYTES_MAX = 65_536  # fits any window: one write before reading
READ_BYTES = 262_144
RESET_TIMEOUT_S = 5.0
DRAIN_BYTES_MAX = 4_194_304  # read of a refused request so that the refusal arrives
DRAIN_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class InboundStream:
    """The serving end of a stream. The answer to multistream-select leaves together with the
    response, unless the peer waits for it."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.reader = Reader(stream, READ_BYTES)
        self.offer = Responder(self.reader, stream.write)

    async def hand_over(self) -> None:
        """Undo the read-ahead, so that another handler can use the stream."""
        await self.offer.flush()
        put_back(self.stream, self.reader.rest)

    async def announced(self) -> int:
        """Read the length of the request in bytes."""
        (length,) = LENGTH.unpack(await self.reader.exactly(LENGTH.size))
        return int(length)

    async def answer(self, response: bytes) -> None:
        head = self.offer.reply + STATUS.pack(ANSWERED, len(response))
        await _write(self.stream, head, response)
        await self.stream.close()

    @property
    def alive(self) -> bool:
        conn = self.stream.conn
        return not isinstance(conn, MuxedConnection) or conn.alive

    def refund(self) -> None:
        """Take the stream's cost off the peer's account: its answer was large enough."""
        if isinstance(self.stream, EventStream):
            self.stream.conn.payer.refund(STREAM_S)

    async def written(self) -> None:
        """Wait until the socket has taken the answer, or the connection is gone."""
        if isinstance(self.stream, EventStream):
            await self.stream.conn.outbox.wait_written()

    async def refuse(self, reason: str) -> None:
        """Refuse, then read on for a while: a reset at once could overtake the answer."""
        text = reason.encode()[:REASON_BYTES_MAX]
        with trio.move_on_after(DRAIN_TIMEOUT_S):
            try:
                await _write(self.stream, self.offer.reply + STATUS.pack(REFUSED, len(text)), text)
                await self.stream.close()
                drained = 0
                while drained < DRAIN_BYTES_MAX:
                    drained += len(await self.stream.read(READ_BYTES))
            except BaseLibp2pError:
                pass  # the peer has read it, or is gone
        await reset(self.stream)


async def finish(stream: Stream) -> None:
    """Wait for the peer to close its end, then forget the stream."""
    if stream.recv_closed:
        return
    with trio.move_on_after(RESET_TIMEOUT_S) as scope:
        try:
            while True:
                await stream.read(READ_BYTES)
        except BaseLibp2pError:
            pass  # the peer has closed or reset it
    if scope.cancelled_caught:
        await reset(stream)


async def reset(stream: Stream) -> None:
    with trio.move_on_after(RESET_TIMEOUT_S):
        await stream.reset()


async def _write(stream: Stream, head: bytes, payload: bytes) -> None:
    if len(payload) <= INLINE_BYTES_MAX:
        await stream.write(head + payload)
    else:
        await stream.write(head)
        await stream.write(payload)


@dataclass(slots=True)
class Sending:
    stream: Stream
    protocol: str
    payload: bytes
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    done: bool = False

    async def run(self) -> None:
        """Send the request, then half-close. The receiving half reports failures."""
        head = proposal(self.protocol) + LENGTH.pack(len(self.payload))
        with self.scope:
            try:
                await _write(self.stream, head, self.payload)
                await self.stream.close()
                self.done = True
            except BaseLibp2pError as error:
                log.debug("request on %s not sent: %r", self.protocol, error)


async def receive(stream: Stream, protocol: str, response_bytes_max: int) -> bytes:
    """Read one answer. RequestRefused: the peer refused, or does not serve the protocol.
    RemoteProtocolError: the answer is too large or malformed."""
    reader = Reader(stream, READ_BYTES)
    await agree(reader, protocol)
    status, length = STATUS.unpack(await reader.exactly(STATUS.size))
    if status == REFUSED:
        reason = await reader.exactly(min(length, REASON_BYTES_MAX))
        raise RequestRefused(ascii(reason.decode(errors="replace")))  # it may be shown
    if status != ANSWERED:
        raise RemoteProtocolError(Reject.MALFORMED, f"status {status}")
    if length > response_bytes_max:
        raise RemoteProtocolError(Reject.OVERSIZE, f"answer of {length} bytes")
    return await reader.exactly(length)
