"""The attackers' own end of a connection: sockets, multistream-select, Noise and Yamux, by hand.

It shares no code with the node's transport, so that it can leave out or overdo any step, and so
that a mistake over there is not repeated here. Every byte that leaves is counted.
"""

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
    """The other end closed, or said what it should not."""


@dataclass(slots=True)
class Spent:
    """What an attack has cost the attacker, its processor time apart."""

    bytes_out: int = 0
    bytes_in: int = 0
    connections: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, what: str, number: int = 1) -> None:
        """Count what was done, or what came of it."""
        self.counts[what] = self.counts.get(what, 0) + number


@dataclass(frozen=True, slots=True)
class Door:
    """Where a node listens, and who it is."""

    host: str
    port: int
    peer_id: str

    @classmethod
    def of(cls, address: str) -> "Door":
        """Of a multiaddr such as `/ip4/127.0.0.1/tcp/4001/p2p/12D3…`."""
        _, _, host, _, port, _, peer = address.split("/")
        return cls(host, int(port), peer)


def varint(number: int) -> bytes:
    """As protobuf and multistream-select write lengths."""
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


def delimited(*fields: tuple[int, bytes]) -> bytes:
    """A protobuf message of length-delimited fields."""
    return b"".join(varint(n << 3 | 2) + varint(len(data)) + data for n, data in fields)


class Wire:
    """One TCP connection of an attacker."""

    def __init__(self, stream: trio.SocketStream, spent: Spent) -> None:
        self.stream = stream
        self.spent = spent
        self._rest = bytearray()
        spent.connections += 1

    async def send(self, data: bytes) -> None:
        """Send all of it."""
        with memoryview(data) as view:
            for at in range(0, len(view), READ_BYTES):  # so that what was not taken is not counted
                await self.stream.send_all(view[at : at + READ_BYTES])
                self.spent.bytes_out += len(view[at : at + READ_BYTES])

    async def some(self) -> bytes:
        """What there is.

        Raises:
            Ended: it is over.
        """
        if self._rest:
            data = bytes(self._rest)
            self._rest.clear()
            return data
        data = bytes(await self.stream.receive_some(READ_BYTES))
        self.spent.bytes_in += len(data)
        if not data:
            raise Ended("closed by the other end")
        return data

    async def exactly(self, count: int) -> bytes:
        """So many bytes, and no more."""
        while len(self._rest) < count:
            self._rest += await self._more()
        data = bytes(self._rest[:count])
        del self._rest[:count]
        return data

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
        """End it with a RST."""
        with suppress(OSError):
            self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.stream.socket.close()


async def read_line(read: Any) -> bytes:
    """One message of multistream-select, without its newline."""
    length = shift = 0
    while True:
        (byte,) = await read.exactly(1)
        length |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
    if not 0 < length <= LINE_BYTES_MAX:
        raise Ended("a line of odd length")
    return bytes(await read.exactly(length)).removesuffix(b"\n")


async def choose(end: Any, protocol: bytes) -> None:
    """Agree on a protocol by multistream-select.

    Raises:
        Ended: the other end does not.
    """
    await end.send(line(MULTISTREAM) + line(protocol))
    if await read_line(end) != MULTISTREAM or await read_line(end) != protocol:
        raise Ended("no agreement")


@asynccontextmanager
async def dialled(door: Door, source: str | None, spent: Spent) -> AsyncIterator[Wire]:
    """A TCP connection from an address of ours; closed at the end."""
    with trio.fail_after(DIAL_TIMEOUT_S):
        stream = await trio.open_tcp_stream(door.host, door.port, local_address=source)
    wire = Wire(stream, spent)
    try:
        yield wire
    finally:
        await trio.aclose_forcefully(stream)


# --- Noise ---------------------------------------------------------------------------------


class Session:
    """Records after a Noise handshake."""

    def __init__(self, wire: Wire, sealer: bytes, opener: bytes, peer_id: str) -> None:
        self.wire = wire
        self.peer_id = peer_id  # that the other end proved
        self._sealer, self._opener = ChaCha20Poly1305(sealer), ChaCha20Poly1305(opener)
        self._sent = self._received = 0
        self._rest = bytearray()

    def seal(self, data: bytes) -> bytes:
        """One record; also an empty one."""
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

    async def record(self) -> bytes:
        """What is in the next record."""
        length = int.from_bytes(await self.wire.exactly(2), "big")
        sealed = await self.wire.exactly(length)
        nonce = b"\0\0\0\0" + self._received.to_bytes(8, "little")
        self._received += 1
        return self._opener.decrypt(nonce, sealed, None)

    async def exactly(self, count: int) -> bytes:
        """So many bytes of what was decrypted."""
        while len(self._rest) < count:
            self._rest += await self.record()
        data = bytes(self._rest[:count])
        del self._rest[:count]
        return data

    async def some(self) -> bytes:
        """What there is."""
        if self._rest:
            data = bytes(self._rest)
            self._rest.clear()
            return data
        return await self.record()


class Handshake:
    """A Noise handshake of ours, message by message."""

    def __init__(self, wire: Wire, identity: Identity) -> None:
        self.wire = wire
        static = X25519PrivateKey.generate()
        public = static.public_key().public_bytes_raw()
        key = KEY_HEAD + public_key_of(identity.peer_id)
        self.payload = delimited((1, key), (2, identity.sign(STATIC_DOMAIN, public)))
        self.noise: Any = NoiseConnection.from_name(NOISE_NAME)
        self.noise.set_keypair_from_private_bytes(Keypair.STATIC, static.private_bytes_raw())
        self.noise.set_as_initiator()
        self.noise.start_handshake()

    def message(self, payload: bytes = b"") -> bytes:
        """Our next message, with its length."""
        data = bytes(self.noise.write_message(payload))
        return len(data).to_bytes(2, "big") + data

    async def answer(self) -> bytes:
        """The payload of the other end's message."""
        data = await self.wire.exactly(int.from_bytes(await self.wire.exactly(2), "big"))
        return bytes(self.noise.read_message(data))

    async def run(self) -> Session:
        """All of it, as an honest peer would."""
        await self.wire.send(self.message())
        await self.answer()
        await self.wire.send(self.message(self.payload))
        protocol = self.noise.noise_protocol
        sealer, opener = protocol.cipher_state_encrypt, protocol.cipher_state_decrypt
        return Session(self.wire, sealer.k, opener.k, "")


async def secured(wire: Wire, identity: Identity) -> Session:
    """Up to the end of the Noise handshake."""
    await choose(wire, NOISE)
    return await Handshake(wire, identity).run()


# --- Yamux ---------------------------------------------------------------------------------

Serve = Callable[[bytes], bytes]
Handle = Callable[["Stream"], Awaitable[None]]


@dataclass(eq=False, slots=True)
class Stream:
    """A stream of ours, or of theirs."""

    mux: "Mux"
    number: int
    buffer: bytearray = field(default_factory=bytearray)
    changed: trio.Event = field(default_factory=trio.Event)
    ended: bool = False
    window: int = WINDOW_BYTES

    def wake(self) -> None:
        """Something is new."""
        self.changed.set()
        self.changed = trio.Event()

    async def send(self, data: bytes) -> None:
        """Send as the window allows."""
        at = 0
        while at < len(data):
            while self.window <= 0 and not self.ended:
                await self.changed.wait()
            if self.ended:
                raise Ended("the stream is over")
            piece = data[at : at + min(self.window, 65_536)]
            self.window -= len(piece)
            at += len(piece)
            await self.mux.send(frame(DATA, 0, self.number, len(piece), piece))

    async def exactly(self, count: int) -> bytes:
        """So many bytes.

        Raises:
            Ended: it is over before.
        """
        while len(self.buffer) < count:
            if self.ended:
                raise Ended("the stream is over")
            await self.changed.wait()
        data = bytes(self.buffer[:count])
        del self.buffer[:count]
        return data

    async def reset(self) -> None:
        """End it at once."""
        self.mux.streams.pop(self.number, None)
        await self.mux.send(frame(UPDATE, RST, self.number, 0))


class Mux:
    """A Yamux connection; `run` reads it.

    It answers pings and credits what it reads, unless `deaf`; streams that the other end opens are
    served by `serving`, a request and an answer each, or by `handling`; others are reset.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.streams: dict[int, Stream] = {}
        self.serving: dict[str, Serve] = {}
        self.handling: dict[str, Handle] = {}
        self.opened_by_them = 0
        self.over = trio.Event()
        self._pong = trio.Event()
        self._next = 1
        self._lock = trio.Lock()

    @property
    def spent(self) -> Spent:
        """The account of the attack."""
        return self.session.wire.spent

    async def send(self, data: bytes) -> None:
        """Send frames."""
        async with self._lock:
            await self.session.send(data)

    async def answers(self, timeout_s: float = PING_TIMEOUT_S) -> bool:
        """Whether a ping is answered: only then are we known to be let in."""
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
        """Of a new stream of ours."""
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
        """One request as the node's peers make it; None where it was refused.

        Raises:
            Ended, trio.TooSlowError: no answer.
        """
        stream = await self.open(protocol, len(payload).to_bytes(4, "big") + payload)
        try:
            with trio.fail_after(timeout_s):
                if await read_line(stream) != MULTISTREAM:
                    raise Ended("no multistream-select")
                if await read_line(stream) != protocol.encode():
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
            try:
                while not deaf:
                    await self._take(nursery)
                await trio.sleep_forever()
            except FAILURES:
                pass
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
            self.opened_by_them += 1
            self.streams[number] = Stream(self, number)
            await self.send(frame(UPDATE, ACK, number, 0))
            nursery.start_soon(self._serve, self.streams[number])
        await self._on_stream(self.streams.get(number), kind, flags, length, data)

    async def _on_stream(
        self, stream: Stream | None, kind: int, flags: int, length: int, data: bytes
    ) -> None:
        if stream is None:
            return
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
            if await read_line(stream) != MULTISTREAM:
                return
            protocol = (await read_line(stream)).decode(errors="replace")
            handle = self.handling.get(protocol)
            if handle is not None:
                await stream.send(line(MULTISTREAM) + line(protocol.encode()))
                await handle(stream)
                return
            serve = self.serving.get(protocol)
            if serve is None:
                await stream.send(line(MULTISTREAM) + line(b"na"))
                await stream.reset()
                return
            request = await stream.exactly(int.from_bytes(await stream.exactly(4), "big"))
            answer = serve(request)
            head = line(MULTISTREAM) + line(protocol.encode())
            await stream.send(head + b"\0" + len(answer).to_bytes(4, "big") + answer)
            await self.send(frame(DATA, FIN, stream.number, 0))


async def _cancel_with(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


@asynccontextmanager
async def admitted(
    door: Door, identity: Identity, source: str | None, spent: Spent, *, deaf: bool = False
) -> AsyncIterator[Mux]:
    """A connection as an honest peer has it, up to Yamux, and its reading.

    Raises:
        OSError, trio.TooSlowError: there was none.
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
        mux = Mux(session)
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
