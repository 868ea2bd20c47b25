"""multistream-select with bounds: agreement on the next protocol.

Each message is a line after its length. It is used for the security protocol, the muxer, and each
stream. Upstream collects lines of any announced length and tries any number of protocols.
"""

from collections.abc import Awaitable, Callable, Container
from typing import Protocol

from libp2p.io.exceptions import ConnectionClosedError
from libp2p.utils import encode_delim

from swarm.errors import NotServed, Reject, RemoteProtocolError

LINE_BYTES_MAX = 1_024
LENGTH_SHIFTS = (0, 7)  # bit shifts of the two bytes of a length
MULTISTREAM = "/multistream/1.0.0"
NOT_SERVED = "na"

Write = Callable[[bytes], Awaitable[None]]


class Readable(Protocol):
    async def read(self, n: int | None = None) -> bytes: ...


class Reader:
    """Exact reads with an optional read-ahead."""

    def __init__(self, source: Readable, ahead_bytes: int = 0) -> None:
        """`ahead_bytes`: most bytes read at a time. 0: only what is asked for."""
        self._source = source
        self._ahead_bytes = ahead_bytes
        self.rest = b""  # read ahead and not used

    async def exactly(self, count: int) -> bytes:
        """ConnectionClosedError: the source ends first."""
        parts: list[bytes] = []
        while count > len(self.rest):
            parts.append(self.rest)
            count -= len(self.rest)
            self.rest = await self._source.read(self._ahead_bytes or count)
            if not self.rest:
                raise ConnectionClosedError("closed in the middle of a message", transport="tcp")
        parts.append(self.rest[:count])
        self.rest = self.rest[count:]
        return b"".join(parts)

    async def length(self, what: str) -> int:
        """Read the length of a message, a varint of at most two bytes. RemoteProtocolError: it is
        longer."""
        length = 0
        for shift in LENGTH_SHIFTS:
            (byte,) = await self.exactly(1)
            length |= (byte & 0x7F) << shift
            if not byte & 0x80:
                return length
        raise RemoteProtocolError(Reject.OVERSIZE, what)

    async def line(self) -> str:
        """Read one multistream-select message. RemoteProtocolError: it is malformed or too long.
        ConnectionClosedError: the source ends first."""
        length = await self.length("multistream-select message")
        if not 0 < length <= LINE_BYTES_MAX:
            raise RemoteProtocolError(Reject.MALFORMED, "bad multistream-select message")
        return (await self.exactly(length)).decode(errors="replace").removesuffix("\n")


class Responder:
    """The side that is asked. Replies are held back while more input is buffered, so that they
    leave together."""

    def __init__(self, reader: Reader, write: Write) -> None:
        self._reader = reader
        self._write = write
        self.reply = b""  # held back

    async def choice(self, served: Container[str], tries: int) -> str | None:
        """Return the protocol that the peer chose. None: no protocol that it asked for is served.
        RemoteProtocolError: the peer does not speak multistream-select. ConnectionClosedError: it
        is gone."""
        if await self._reader.line() != MULTISTREAM:
            raise RemoteProtocolError(Reject.MALFORMED, "no multistream-select")
        self.reply = encode_delim(MULTISTREAM.encode())
        for earlier in range(tries):
            await self._reply_unless_more()
            try:
                choice = await self._reader.line()
            except RemoteProtocolError:
                if earlier == 0:
                    raise
                break  # the peer sent its request along with a wrong guess
            known = choice in served
            self.reply += encode_delim(choice.encode() if known else NOT_SERVED.encode())
            if known:
                await self._reply_unless_more()
                return choice
        await self.flush()
        return None

    async def flush(self) -> None:
        if self.reply:
            reply, self.reply = self.reply, b""
            await self._write(reply)

    async def _reply_unless_more(self) -> None:
        if not self._reader.rest:
            await self.flush()


def proposal(protocol: str) -> bytes:
    """Bytes that ask for a protocol; the request may follow at once."""
    return encode_delim(MULTISTREAM.encode()) + encode_delim(protocol.encode())


async def agree(reader: Reader, protocol: str) -> None:
    """Read the answer to a proposal. NotServed: the peer does not serve the protocol.
    RemoteProtocolError: the answer is malformed. ConnectionClosedError: the peer is gone."""
    if await reader.line() != MULTISTREAM:
        raise RemoteProtocolError(Reject.MALFORMED, "no multistream-select")
    chosen = await reader.line()
    if chosen == NOT_SERVED:
        raise NotServed(f"the peer does not serve {protocol}")
    if chosen != protocol:
        raise RemoteProtocolError(Reject.MALFORMED, "another protocol was chosen")
