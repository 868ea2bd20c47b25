"""The raw client: sockets, multistream-select, Noise and Yamux by hand, for attacks and for tests.

It shares no code with the node's transport. So it can leave out or overdo any step, and a mistake
of the transport is not repeated here. Every byte that leaves is counted.
"""

import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import trio
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from noise.connection import Keypair, NoiseConnection

from swarm.identity import Identity, public_key_of

MULTISTREAM = b"/multistream/1.0.0"
NOISE, YAMUX = b"/noise", b"/yamux/1.0.0"
NOISE_NAME = b"Noise_XX_25519_ChaChaPoly_SHA256"
STATIC_DOMAIN = b"noise-libp2p-static-key:"
KEY_HEAD = b"\x08\x01\x12\x20"  # protobuf of a public key: Ed25519, 32 bytes
DATA, UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
HEADER = struct.Struct("!BBHII")  # version, type, flags, stream, length
RECORD_PLAIN_BYTES_MAX = 65_519
READ_BYTES = 262_144
DIAL_TIMEOUT_S = 10.0
LINE_BYTES_MAX = 65_536  # of a line that is read here
WINDOW_BYTES = 262_144
PING_TIMEOUT_S, PING_VALUE = 8.0, 77

FAILURES = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)


class Ended(OSError):
    """The other end closed, or sent something that it should not have."""


@dataclass(slots=True)
class Spent:
    """The cost of an attack for the attacker, without processor time."""

    bytes_out: int = 0
    bytes_in: int = 0
    connections: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + number


@dataclass(frozen=True, slots=True)
class Door:
    """The address and the peer id of a node."""

    host: str
    port: int
    peer_id: str

    @classmethod
    def of(cls, address: str) -> "Door":
        """Parse a multiaddr such as `/ip4/127.0.0.1/tcp/4001/p2p/12D3…`."""
        _, _, host, _, port, _, peer = address.split("/")
        return cls(host, int(port), peer)


def varint(number: int) -> bytes:
    """A length as protobuf and multistream-select write it."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def line(text: bytes) -> bytes:
    """One message of multistream-select."""
    return varint(len(text) + 1) + text + b"\n"


def frame(kind: int, flags: int, stream: int, length: int, data: bytes = b"") -> bytes:
    """One Yamux frame."""
    return HEADER.pack(0, kind, flags, stream, length) + data


def framed(payload: bytes) -> bytes:
    """A request as the node reads it: four bytes of length, then the payload."""
    return len(payload).to_bytes(4, "big") + payload


def delimited(*fields: tuple[int, bytes]) -> bytes:
    """A protobuf message of length-delimited fields."""
    return b"".join(varint(n << 3 | 2) + varint(len(data)) + data for n, data in fields)


class Reader:
    """Reads by count from anything that delivers bytes by `_more`."""

    def __init__(self) -> None:
        self._rest = bytearray()

    async def _more(self) -> bytes:
        raise NotImplementedError

    async def exactly(self, count: int) -> bytes:
        """Read so many bytes.

        Raises:
            Ended: the other end closed before.
        """
        while len(self._rest) < count:
            self._rest += await self._more()
        data = bytes(self._rest[:count])
        del self._rest[:count]
        return data

    async def some(self) -> bytes:
        """Read at least one byte."""
        data = bytes(self._rest) or await self._more()
        self._rest.clear()
        return data

    async def line(self) -> bytes:
        """Read one message of multistream-select, without its newline."""
        length = shift = 0
        while True:
            (byte,) = await self.exactly(1)
            length |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                break
        if not 0 < length <= LINE_BYTES_MAX:
            raise Ended("a line of odd length")
        return (await self.exactly(length)).removesuffix(b"\n")


class Wire(Reader):
    """One TCP connection of an attacker."""

    def __init__(self, stream: trio.SocketStream, spent: Spent) -> None:
        super().__init__()
        self.stream = stream
        self.spent = spent
        spent.connections += 1

    async def send(self, data: bytes) -> None:
        with memoryview(data) as view:
            for at in range(0, len(view), READ_BYTES):  # so that what was not taken is not counted
                await self.stream.send_all(view[at : at + READ_BYTES])
                self.spent.bytes_out += len(view[at : at + READ_BYTES])

    async def _more(self) -> bytes:
        data = bytes(await self.stream.receive_some(READ_BYTES))
        self.spent.bytes_in += len(data)
        if not data:
            raise Ended("closed by the other end")
        return data

    async def discard(self) -> None:
        """Read until the other end closes."""
        with suppress(*FAILURES):
            while True:
                await self.some()

    def reset(self) -> None:
        """End the connection with a RST."""
        with suppress(OSError):
            self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.stream.socket.close()


async def choose(end: Any, protocol: bytes) -> None:
    """Agree on a protocol by multistream-select.

    Raises:
        Ended: the other end does not.
    """
    await end.send(line(MULTISTREAM) + line(protocol))
    if await end.line() != MULTISTREAM or await end.line() != protocol:
        raise Ended("no agreement")


@asynccontextmanager
async def dialled(door: Door, source: str | None, spent: Spent) -> AsyncIterator[Wire]:
    """A TCP connection from a local address; closed at the end."""
    with trio.fail_after(DIAL_TIMEOUT_S):
        stream = await trio.open_tcp_stream(door.host, door.port, local_address=source)
    try:
        yield Wire(stream, spent)
    finally:
        await trio.aclose_forcefully(stream)


# --- Noise ---------------------------------------------------------------------------------


class Session(Reader):
    """Records after a Noise handshake."""

    def __init__(self, wire: Wire, sealer: bytes, opener: bytes) -> None:
        super().__init__()
        self.wire = wire
        self._sealer, self._opener = ChaCha20Poly1305(sealer), ChaCha20Poly1305(opener)
        self._sent = self._received = 0

    def seal(self, data: bytes) -> bytes:
        """Encrypt one record; it may be empty."""
        nonce = b"\0\0\0\0" + self._sent.to_bytes(8, "little")
        self._sent += 1
        sealed = self._sealer.encrypt(nonce, data, None)
        return len(sealed).to_bytes(2, "big") + sealed

    async def send(self, data: bytes) -> None:
        """Send in records as large as can be."""
        step = RECORD_PLAIN_BYTES_MAX
        await self.wire.send(
            b"".join(self.seal(data[at : at + step]) for at in range(0, len(data), step))
        )

    async def _more(self) -> bytes:
        sealed = await self.wire.exactly(int.from_bytes(await self.wire.exactly(2), "big"))
        nonce = b"\0\0\0\0" + self._received.to_bytes(8, "little")
        self._received += 1
        return self._opener.decrypt(nonce, sealed, None)


class Handshake:
    """A Noise handshake of the side that dials, message by message."""

    def __init__(self, wire: Wire, identity: Identity, noise_key: bytes | None = None) -> None:
        self.wire = wire
        drawn = noise_key or os.urandom(32)
        static = X25519PrivateKey.from_private_bytes(drawn)
        public = static.public_key().public_bytes_raw()
        key = KEY_HEAD + public_key_of(identity.peer_id)
        self.payload = delimited((1, key), (2, identity.sign(STATIC_DOMAIN, public)))
        self.noise: Any = NoiseConnection.from_name(NOISE_NAME)
        self.noise.set_keypair_from_private_bytes(Keypair.STATIC, static.private_bytes_raw())
        self.noise.set_as_initiator()
        self.noise.start_handshake()

    def message(self, payload: bytes = b"") -> bytes:
        """The next message, with its length."""
        data = bytes(self.noise.write_message(payload))
        return len(data).to_bytes(2, "big") + data

    async def answer(self) -> bytes:
        """The payload of the other end's message."""
        data = await self.wire.exactly(int.from_bytes(await self.wire.exactly(2), "big"))
        return bytes(self.noise.read_message(data))

    async def run(self) -> Session:
        """All messages, as an honest peer sends them."""
        await self.wire.send(self.message())
        await self.answer()
        await self.wire.send(self.message(self.payload))
        protocol = self.noise.noise_protocol
        return Session(self.wire, protocol.cipher_state_encrypt.k, protocol.cipher_state_decrypt.k)


async def secured(wire: Wire, identity: Identity) -> Session:
    """Agree on Noise and shake hands."""
    with trio.fail_after(DIAL_TIMEOUT_S):
        await choose(wire, NOISE)
        return await Handshake(wire, identity).run()


# --- Yamux ---------------------------------------------------------------------------------

Serve = Callable[[bytes], bytes]
Handle = Callable[["Stream"], Awaitable[None]]


class Stream(Reader):
    """A stream that either end opened."""

    def __init__(self, mux: "Mux", number: int) -> None:
        super().__init__()
        self.mux = mux
        self.number = number
        self.buffer = bytearray()
        self.changed = trio.Event()
        self.ended = False
        self.window = WINDOW_BYTES

    def wake(self) -> None:
        """Let those that wait look again."""
        self.changed.set()
        self.changed = trio.Event()

    async def _until(self, condition: Callable[[], object]) -> None:
        while not condition():
            if self.ended:
                raise Ended("the stream is over")
            await self.changed.wait()

    async def send(self, data: bytes) -> None:
        """Send as the window allows."""
        at = 0
        while at < len(data):
            await self._until(lambda: self.window > 0 and not self.ended)
            piece = data[at : at + min(self.window, 65_536)]
            self.window -= len(piece)
            at += len(piece)
            await self.mux.send(frame(DATA, 0, self.number, len(piece), piece))

    async def _more(self) -> bytes:
        await self._until(lambda: self.buffer)
        data = bytes(self.buffer)
        self.buffer.clear()
        return data

    async def reset(self) -> None:
        """End the stream at once."""
        self.mux.streams.pop(self.number, None)
        await self.mux.send(frame(UPDATE, RST, self.number, 0))


class Mux:
    """A Yamux connection; `run` reads it.

    It answers pings and credits what it reads, unless `deaf`. Streams that the other end opens are
    served by `serving`, a request and an answer each, or by `handling`; others are reset.
    """

    def __init__(self, session: Session, key: Identity) -> None:
        self.session = session
        self.key = key  # of our end
        self.streams: dict[int, Stream] = {}
        self.serving: dict[str, Serve] = {}
        self.handling: dict[str, Handle] = {}
        self.over = trio.Event()
        self._pong = trio.Event()
        self._next = 1
        self._lock = trio.Lock()

    async def send(self, data: bytes) -> None:
        """Send frames."""
        async with self._lock:
            await self.session.send(data)

    async def answers(self, timeout_s: float = PING_TIMEOUT_S) -> bool:
        """Whether a ping is answered: only then has the node let us in."""
        with trio.move_on_after(timeout_s), suppress(*FAILURES):
            await self.send(frame(PING, SYN, 0, PING_VALUE))
            async with trio.open_nursery() as nursery:
                for event in (self._pong, self.over):
                    nursery.start_soon(_cancel_with, event, nursery.cancel_scope)
        return self._pong.is_set() and not self.over.is_set()

    async def send_records(self, data: bytes, count: int) -> None:
        """Send so many records with the same in each, however little it is."""
        async with self._lock:
            await self.session.wire.send(b"".join([self.session.seal(data) for _ in range(count)]))

    def number(self) -> int:
        """The number of a new stream of ours."""
        self._next += 2
        return self._next - 2

    async def open(self, protocol: str | None = None, more: bytes = b"") -> Stream:
        """Open a stream; with a protocol, ask for it and send `more` without waiting."""
        stream = Stream(self, self.number())
        self.streams[stream.number] = stream
        head = b"" if protocol is None else line(MULTISTREAM) + line(protocol.encode())
        data = head + more
        await self.send(
            frame(UPDATE, SYN, stream.number, 0)
            + (frame(DATA, 0, stream.number, len(data), data) if data else b"")
        )
        stream.window -= len(data)
        return stream

    async def request(self, protocol: str, payload: bytes, timeout_s: float = 10.0) -> bytes | None:
        """One request as the node's peers make it; None: it was refused.

        Raises:
            Ended, trio.TooSlowError: no answer.
        """
        stream = await self.open(protocol, framed(payload))
        try:
            with trio.fail_after(timeout_s):
                if await stream.line() != MULTISTREAM:
                    raise Ended("no multistream-select")
                if await stream.line() != protocol.encode():
                    return None
                status = await stream.exactly(1)
                answer = await stream.exactly(int.from_bytes(await stream.exactly(4), "big"))
            return answer if status == b"\0" else None
        finally:
            with trio.CancelScope(shield=True), suppress(*FAILURES):
                with trio.move_on_after(1.0):
                    await stream.reset()

    # --- reading ---

    async def run(self, deaf: bool = False) -> None:
        """Read until the connection ends."""
        async with trio.open_nursery() as nursery:
            with suppress(*FAILURES):
                while not deaf:
                    await self._take(nursery)
                await trio.sleep_forever()
            nursery.cancel_scope.cancel()
        self.over.set()
        for stream in list(self.streams.values()):
            stream.ended = True
            stream.wake()

    async def _take(self, nursery: trio.Nursery) -> None:
        try:
            head = await self.session.exactly(HEADER.size)
            _, kind, flags, number, length = HEADER.unpack(head)
            data = await self.session.exactly(length) if kind == DATA else b""
        except Exception:  # noqa: BLE001  boundary: the end, however it came
            nursery.cancel_scope.cancel()
            return
        if kind == PING and flags & SYN:
            await self.send(frame(PING, ACK, 0, length))
        if kind == PING and flags & ACK and length == PING_VALUE:
            self._pong.set()
        if kind == GO_AWAY:
            nursery.cancel_scope.cancel()
        if kind not in (DATA, UPDATE):
            return
        if flags & SYN:
            self.streams[number] = Stream(self, number)
            await self.send(frame(UPDATE, ACK, number, 0))
            nursery.start_soon(self._serve, self.streams[number])
        if number in self.streams:
            await self._on_stream(self.streams[number], kind, flags, length, data)

    async def _on_stream(
        self, stream: Stream, kind: int, flags: int, length: int, data: bytes
    ) -> None:
        if kind == UPDATE:
            stream.window += length
        elif data:
            stream.buffer += data
            await self.send(frame(UPDATE, 0, stream.number, len(data)))
        if flags & (FIN | RST):
            stream.ended = True
            self.streams.pop(stream.number, None)
        stream.wake()

    async def _serve(self, stream: Stream) -> None:
        with suppress(*FAILURES):
            if await stream.line() != MULTISTREAM:
                return
            protocol = (await stream.line()).decode(errors="replace")
            agreed = line(MULTISTREAM) + line(protocol.encode())
            if protocol in self.handling:
                await stream.send(agreed)
                await self.handling[protocol](stream)
            elif protocol in self.serving:
                request = await stream.exactly(int.from_bytes(await stream.exactly(4), "big"))
                await stream.send(agreed + b"\0" + framed(self.serving[protocol](request)))
                await self.send(frame(DATA, FIN, stream.number, 0))
            else:
                await stream.send(line(MULTISTREAM) + line(b"na"))
                await stream.reset()


async def _cancel_with(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


@asynccontextmanager
async def admitted(
    door: Door, identity: Identity, source: str | None, spent: Spent, *, deaf: bool = False
) -> AsyncIterator[Mux]:
    """A connection up to Yamux, as an honest peer has it, which is read meanwhile.

    Raises:
        OSError, trio.TooSlowError: the node did not take it.
    """
    async with dialled(door, source, spent) as wire:
        with trio.fail_after(DIAL_TIMEOUT_S):
            try:
                session = await secured(wire, identity)
                await choose(session, YAMUX)
            except FAILURES:
                raise
            except Exception as error:  # boundary: what the cipher raises on a cut connection
                raise Ended(str(error)) from error
        mux = Mux(session, identity)
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mux.run, deaf)
            try:
                yield mux
            except Exception as error:  # noqa: BLE001  raised again below, outside the nursery
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
