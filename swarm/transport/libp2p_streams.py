"""One request on one stream: what goes over the wire, from both ends.

After multistream-select, whose answer the requester does not wait for:

    request    u32 length, payload
    response   u8 status (0 answered, 1 refused), u32 length, payload or the reason as text

All integers are big-endian. A refusal may come before the request has been read.
"""

import logging
import struct
from collections.abc import Container
from dataclasses import dataclass, field

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.utils import encode_delim

from swarm.errors import Reject, RemoteProtocolError, RequestRefused
from swarm.transport.libp2p_yamux import EventStream, Stream, put_back

ANSWERED, REFUSED = 0, 1
LENGTH = struct.Struct("!I")
STATUS = struct.Struct("!BI")
REASON_BYTES_MAX = 200
INLINE_BYTES_MAX = 65_536  # up to here a message fits any window: one write, before any reading
READ_BYTES = 262_144
CHOICE_BYTES_MAX = 1_024  # one multistream-select message
CHOICES_MAX = 16  # protocols that a peer may ask for on one stream
RESET_TIMEOUT_S = 5.0
DRAIN_BYTES_MAX = 4_194_304  # of a refused request that are read so that the refusal arrives
DRAIN_TIMEOUT_S = 5.0

MULTISTREAM = "/multistream/1.0.0"
NOT_SERVED = "na"

log = logging.getLogger(__name__)


class Reader:
    """Exact reads from a stream, which it may read ahead of."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._rest = b""

    @property
    def rest(self) -> bytes:
        """What has been read ahead."""
        return self._rest

    async def exactly(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count > len(self._rest):
            parts.append(self._rest)
            count -= len(self._rest)
            self._rest = await self._stream.read(READ_BYTES)
        parts.append(self._rest[:count])
        self._rest = self._rest[count:]
        return b"".join(parts)

    async def choice(self) -> str:
        """One multistream-select message.

        Raises:
            RemoteProtocolError: it is malformed or too long.
        """
        length = 0
        for shift in (0, 7):
            (byte,) = await self.exactly(1)
            length |= (byte & 0x7F) << shift
            if not byte & 0x80:
                break
        if not 0 < length <= CHOICE_BYTES_MAX:
            raise RemoteProtocolError(Reject.MALFORMED, "bad multistream-select message")
        return (await self.exactly(length)).decode(errors="replace").removesuffix("\n")


# --- the serving end -------------------------------------------------------------------------


class InboundStream:
    """The serving end of a stream.

    Upstream negotiates with half a dozen one-byte reads. Here the answer to multistream-select
    leaves together with the response, unless the peer waits for it.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._reader = Reader(stream)
        self._reply = b""

    async def negotiate(self, served: Container[str]) -> str | None:
        """The protocol that the peer chose, or `None` if it found nothing that is served.

        Raises:
            RemoteProtocolError: the peer does not speak multistream-select.
        """
        if await self._reader.choice() != MULTISTREAM:
            raise RemoteProtocolError(Reject.MALFORMED, "no multistream-select")
        self._reply = encode_delim(MULTISTREAM.encode())
        for earlier in range(CHOICES_MAX):
            await self._reply_unless_more()
            try:
                choice = await self._reader.choice()
            except RemoteProtocolError:
                if earlier == 0:
                    raise
                break  # whoever is sure of its choice sends its request along: here it was wrong
            known = choice in served
            self._reply += encode_delim(choice.encode() if known else NOT_SERVED.encode())
            if known:
                await self._reply_unless_more()
                return choice
        await self._stream.write(self._reply)
        return None

    async def _reply_unless_more(self) -> None:
        if not self._reader.rest:
            reply, self._reply = self._reply, b""
            await self._stream.write(reply)

    async def hand_over(self) -> None:
        """Undo the reading ahead, so that another may go on with the stream."""
        if self._reply:
            await self._stream.write(self._reply)
        put_back(self._stream, self._reader.rest)

    async def read_request(self, bytes_max: int) -> bytes | None:
        """The payload, or `None` if it is over the limit."""
        (length,) = LENGTH.unpack(await self._reader.exactly(LENGTH.size))
        return await self._reader.exactly(length) if length <= bytes_max else None

    async def answer(self, response: bytes) -> None:
        head = self._reply + STATUS.pack(ANSWERED, len(response))
        await _write(self._stream, head, response)
        await self._stream.close()

    async def written(self) -> None:
        """Wait until the socket has taken what was said, or the connection is gone."""
        if isinstance(self._stream, EventStream):
            await self._stream.conn.outbox.wait_written()

    async def refuse(self, reason: str) -> None:
        """Say no, then read on for a while: a reset at once could overtake the answer."""
        text = reason.encode()[:REASON_BYTES_MAX]
        with trio.move_on_after(DRAIN_TIMEOUT_S):
            try:
                await _write(self._stream, self._reply + STATUS.pack(REFUSED, len(text)), text)
                await self._stream.close()
                drained = 0
                while drained < DRAIN_BYTES_MAX:
                    drained += len(await self._stream.read(READ_BYTES))
            except BaseLibp2pError:
                pass  # the peer has heard it, or is gone
        await self.reset()

    async def reset(self) -> None:
        await reset(self._stream)

    async def finish(self) -> None:
        await finish(self._stream)


async def finish(stream: Stream) -> None:
    """After our end is closed: wait for the peer's, and forget the stream either way."""
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
    """Give a stream up; the connection goes on."""
    with trio.move_on_after(RESET_TIMEOUT_S):
        await stream.reset()


async def _write(stream: Stream, head: bytes, payload: bytes) -> None:
    if len(payload) <= INLINE_BYTES_MAX:
        await stream.write(head + payload)
    else:
        await stream.write(head)
        await stream.write(payload)


# --- the asking end --------------------------------------------------------------------------


@dataclass(slots=True)
class Sending:
    """The sending half of one request."""

    stream: Stream
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
                await _write(self.stream, head, self.payload)
                await self.stream.close()
                self.done = True
            except BaseLibp2pError as error:
                log.debug("request on %s not sent: %r", self.protocol, error)


async def receive(stream: Stream, protocol: str, response_bytes_max: int) -> bytes:
    """Read one answer.

    Raises:
        RequestRefused: the peer said so, or does not serve the protocol.
        RemoteProtocolError: the answer is too large or malformed.
    """
    reader = Reader(stream)
    if await reader.choice() != MULTISTREAM:
        raise RemoteProtocolError(Reject.MALFORMED, "no multistream-select")
    chosen = await reader.choice()
    if chosen == NOT_SERVED:
        raise RequestRefused(f"the peer does not serve {protocol}")
    if chosen != protocol:
        raise RemoteProtocolError(Reject.MALFORMED, "another protocol was chosen")
    status, length = STATUS.unpack(await reader.exactly(STATUS.size))
    if status == REFUSED:
        reason = await reader.exactly(min(length, REASON_BYTES_MAX))
        raise RequestRefused(ascii(reason.decode(errors="replace")))  # it may be shown
    if status != ANSWERED:
        raise RemoteProtocolError(Reject.MALFORMED, f"status {status}")
    if length > response_bytes_max:
        raise RemoteProtocolError(Reject.OVERSIZE, f"answer of {length} bytes")
    return await reader.exactly(length)
