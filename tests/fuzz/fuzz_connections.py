"""Fuzz target: the bytes of connections, from their first one, which come from anybody.

An input is a mode, how the bytes end (`End`), how they are cut into pieces, and the bytes:

    0  what a stranger says who dialled us, up to the end of the handshake
    1  what a stranger says whom we dialled
    2  the payload of a handshake that is right in all else
    3  the choice of a muxer, by who dialled us
    4  Yamux frames, from whoever has shaken hands
    5  Yamux frames with their headers made of few bytes each, so that most fit together

A handshake ends well or with `UpgradeFailure`. Over a muxed connection runs what runs in a node;
nothing but its end may come of frames, no stream holds more than its window, and when it is over
nothing of it is left.
"""

import struct
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.peer.id import ID
from libp2p.stream_muxer.yamux.yamux import DEFAULT_WINDOW_SIZE, MAX_WINDOW_SIZE
from libp2p.transport.exceptions import UpgradeFailure
from libp2p.utils import encode_delim

from swarm.errors import RemoteProtocolError, RequestRefused
from swarm.transport.libp2p.admission import ADMISSION_TIMEOUT_S, BoundedRawConnection
from swarm.transport.libp2p.negotiation import MULTISTREAM
from swarm.transport.libp2p.streams import Sending, receive
from swarm.transport.libp2p.yamux import HEADER, INBOUND_STREAMS_MAX, MuxedConnection
from swarm.wire.messages import ROLLOUTS_PROTOCOL
from tests.fuzz.fuzz_streams import request
from tests.fuzz.rig import HEAD_BYTES, PATIENCE_S, Bench, BenchCheck, Desk, End, pieces
from tests.hostile.wire import Handshake, line
from tests.unit.test_wire_files import golden
from tests.wire_samples import ALICE

INPUT_BYTES_MAX = 2_048
MODES = 6
INBOUND, OUTBOUND, PAYLOAD, MUXER, FRAMES, SHAPED = range(MODES)
NOISE = "/noise"
YAMUX = "/yamux/1.0.0"
AGREED = line(MULTISTREAM.encode()) + line(NOISE.encode())
STATIC = bytes(range(32))  # of the stranger's Noise keys
ALICE_KEYS = create_new_key_pair(ALICE.seed)
ALICE_ID = ID.from_base58(ALICE.peer_id)
LONG = 0x8000  # in the length of a shape
HALF_A_WINDOW = DEFAULT_WINDOW_SIZE // 2
ZEROS_MAX = 1_048_576  # in one input
SHAPE = struct.Struct("!BBBH")  # type and flags, stream, window or data?, length


class Wire:
    """A socket, or a secured connection, whose far end is the input."""

    def __init__(self, data: bytes, cut: int, end: End, *, is_initiator: bool = False) -> None:
        self.is_initiator = is_initiator
        self._pieces = pieces(data, cut)
        self._end = end
        self._rest = b""
        self._closed = trio.Event()
        self.on_read: Callable[[], None] = lambda: None
        self.written = 0

    async def read(self, n: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        self.on_read()
        self._rest = self._rest or next(self._pieces, b"")
        if self._closed.is_set() or (not self._rest and self._end is End.RESET):
            raise ConnectionClosedError("closed", transport="tcp")
        if not self._rest and self._end in (End.SILENCE, End.DEAF):
            with trio.move_on_after(PATIENCE_S):
                await self._closed.wait()
            raise ConnectionClosedError("closed", transport="tcp")
        count = len(self._rest) if n is None else n
        data, self._rest = self._rest[:count], self._rest[count:]
        return data

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.written += len(data)
        if self._end is End.DEAF:
            await self._closed.wait()

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()
        self._closed.set()

    def get_remote_address(self) -> tuple[str, int] | None:
        return ("203.0.113.9", 4001)


class Stranger:
    """The far end of a socket: shakes hands as it should, with any payload."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._shake = _handshake()
        self._heard = b""
        self._to_say = AGREED + self._shake.message()

    async def read(self, n: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        count = len(self._to_say) if n is None else n
        data, self._to_say = self._to_say[:count], self._to_say[count:]
        return data

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self._heard += data
        answer = self._heard.removeprefix(AGREED)
        if len(answer) > 2 and len(answer) >= 2 + int.from_bytes(answer[:2], "big"):
            self._shake.noise.read_message(answer[2:])
            self._to_say += self._shake.message(self._payload)
            self._heard = b""

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None


def _record(message: bytes) -> bytes:
    return len(message).to_bytes(2, "big") + message


def _handshake() -> Handshake:
    no_wire: Any = None
    return Handshake(no_wire, ALICE, STATIC)


def right_payload() -> bytes:
    """The proof of Alice's key under the stranger's Noise key."""
    return _handshake().payload


async def _run(bench: Bench, mode: int, end: End, cut: int, data: bytes) -> None:
    async with bench.desk() as desk:
        if mode in (FRAMES, SHAPED):
            frames = data if mode == FRAMES else b"".join(shaped(data))
            await _check_frames(desk, Wire(frames, cut, end, is_initiator=bool(cut & 2)))
        else:
            with trio.move_on_after(ADMISSION_TIMEOUT_S):  # the front door's, around all steps
                await _check_upgrade(desk, mode, Wire(data, cut, end), data)


check = BenchCheck(MODES, _run)


async def _check_upgrade(desk: Desk, mode: int, wire: Wire, data: bytes) -> None:
    upgrader = desk.real._network.upgrader
    secured: Any = wire
    try:
        if mode == MUXER:
            await upgrader.upgrade_connection(secured, ALICE_ID)
        elif mode == PAYLOAD:
            stranger: Any = Stranger(data)
            found = await upgrader.upgrade_security(BoundedRawConnection(stranger, False), False)
            assert found.get_remote_peer() == ALICE_ID
            assert right_payload()[-64:] in data, "without a signature"
        else:
            dialled = mode == OUTBOUND
            raw = BoundedRawConnection(secured, dialled)
            await upgrader.upgrade_security(raw, dialled, ALICE_ID if dialled else None)
            raise AssertionError("a handshake without keys")
    except UpgradeFailure:
        pass


async def _check_frames(desk: Desk, wire: Wire) -> None:
    """Run a muxed connection, with a request of ours on it, until it is over."""
    secured: Any = wire
    muxed = MuxedConnection(secured, ALICE_ID)
    wire.on_read = lambda: _check_bounds(muxed)
    conn = SwarmConn(muxed, desk.real._network)
    async with trio.open_nursery() as nursery:
        await nursery.start(_ask, muxed)  # first, so that frames can be answers to it
        nursery.start_soon(muxed.start)
        await muxed.event_started.wait()
        nursery.start_soon(conn.start)
        await muxed.event_closed.wait()
        await conn.close()
    desk.swallowed.check()
    assert not muxed.streams, f"{len(muxed.streams)} streams are left"
    for protocol, served in desk.real._served.items():
        taken = [*served.requests_by_peer, *served.slots]
        assert not taken, f"{protocol}: a slot is not given back"


async def _ask(
    muxed: MuxedConnection, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    stream = await muxed.open_stream()
    task_status.started()
    try:
        await Sending(stream, ROLLOUTS_PROTOCOL, b"payload").run()
        await receive(stream, ROLLOUTS_PROTOCOL, MAX_WINDOW_SIZE)
    except (BaseLibp2pError, RemoteProtocolError, RequestRefused):
        pass


def _check_bounds(muxed: MuxedConnection) -> None:
    assert len(muxed.streams) <= INBOUND_STREAMS_MAX + 1, "more streams than a peer may have"
    for stream in muxed.streams.values():
        assert stream.recv_window >= 0, "more data than the window has room for"
        held = len(muxed.stream_buffers.get(stream.stream_id, b""))
        assert held <= stream.target_recv_window, "more data than the window has room for"


def shaped(data: bytes) -> Iterator[bytes]:
    """Frames: five bytes of `data` make a header. What a data frame carries follows them, or is as
    many zeros as half a window has."""
    at, zeros_left = 0, ZEROS_MAX
    while at + SHAPE.size <= len(data):
        kind, flags, stream, length = SHAPE.unpack_from(data, at)
        at += SHAPE.size
        is_data = kind % 5 == 0
        body = b""
        if is_data and length & LONG:
            body = bytes(min(HALF_A_WINDOW, zeros_left))
            zeros_left -= len(body)
        elif is_data:
            body = data[at : at + length % 512]
            at += len(body)
        size = len(body) if is_data else length
        yield HEADER.pack(0, kind % 5, flags & 0x0F, stream % 16, size) + body


# --- seeds and mutation ----------------------------------------------------------------------


def _head(mode: int, end: End = End.EOF, cut: int = 0) -> bytes:
    return bytes([mode, end, cut])


def _frame(kind: int, flags: int, stream: int, body: bytes = b"", length: int = 0) -> bytes:
    return HEADER.pack(0, kind, flags, stream, length or len(body)) + body


def seeds() -> dict[str, bytes]:
    """Inputs to start from, by name."""
    agree = encode_delim(MULTISTREAM.encode()) + encode_delim(NOISE.encode())
    hello = request(ROLLOUTS_PROTOCOL, golden()["want"])
    served = _frame(1, 1, 1) + _frame(0, 0, 1, hello) + _frame(1, 4, 1)
    many = b"".join(_frame(1, 1, 1 + 2 * i) + _frame(1, 8, 1 + 2 * i) for i in range(80))
    frames = {
        "request": served,
        "request-reset": served[:-12] + _frame(1, 8, 1),
        "ping": _frame(2, 1, 0, length=7) + _frame(2, 2, 0, length=1),
        "goodbye": _frame(3, 0, 0),
        "answer": _frame(1, 2, 2) + _frame(0, 4, 2, encode_delim(b"na")),
        "over-window": _frame(1, 1, 1) + _frame(0, 0, 1, bytes(9), length=2**24),
        "length-bomb": _frame(0, 0, 1, length=2**32 - 1),
        "wrong-id": _frame(1, 1, 2) + _frame(1, 1, 0),
        "version": b"\x01" + _frame(2, 1, 0)[1:],
        "many-resets": many,
        "window-bomb": _frame(1, 1, 1, length=2**32 - 1) * 2,
    }
    handshakes = {
        "inbound": _head(INBOUND) + agree + _record(bytes(32)) + _record(bytes(99)),
        "inbound-no-text": _head(INBOUND) + b"\x02\xff\n",
        "inbound-varint": _head(INBOUND) + b"\xff" * 12,
        "inbound-silent": _head(INBOUND, End.SILENCE) + agree[:7],
        "outbound": _head(OUTBOUND) + agree + _record(bytes(200)),
        "outbound-no-text": _head(OUTBOUND) + b"\x02\xff\n",
        "outbound-deaf": _head(OUTBOUND, End.DEAF) + agree,
        "payload": _head(PAYLOAD) + right_payload(),
        "payload-nothing": _head(PAYLOAD),
        "muxer": _head(MUXER)
        + encode_delim(MULTISTREAM.encode())
        + encode_delim(b"/mplex/6.7.0")
        + encode_delim(YAMUX.encode()),
        "muxer-no-text": _head(MUXER) + b"\x02\xff\n",
    }
    found = {f"frames-{name}": _head(FRAMES) + data for name, data in frames.items()}
    found |= {
        f"frames-{name}-cut": _head(FRAMES, End.SILENCE, 1) + data
        for name, data in frames.items()
        if name in ("request", "answer", "ping")
    }
    shapes = [(1, 1, 1, 0), (0, 0, 1, 0), (1, 4, 1, 0), (1, 1, 3, 9), (2, 1, 0, 5), (1, 8, 3, 0)]
    found["shaped"] = _head(SHAPED) + b"".join(SHAPE.pack(*shape) for shape in shapes)
    malformed = SHAPE.pack(0, 2, 2, 4) + b"\x01\x01\x01\x01"  # nobody reads on after it
    found["shaped-over-window"] = _head(SHAPED) + malformed + SHAPE.pack(0, 0, 2, LONG) * 7
    zeros = SHAPE.pack(0, 0, 3, LONG) * (ZEROS_MAX // HALF_A_WINDOW)  # for a stream that is over
    found["shaped-zeros-cut"] = _head(SHAPED, End.SILENCE, 2) + zeros
    wrong = right_payload()[:-1] + b"\x00"
    found["payload-wrong"] = _head(PAYLOAD) + wrong
    return found | handshakes


def mutate(data: bytes, random: Random) -> bytes | None:
    """Change the head alone now and then; cut, repeat or shuffle whole frames of a shape."""
    if len(data) <= HEAD_BYTES:
        return None
    if random.random() < 0.1:
        return bytes([data[0], random.randrange(len(End)), random.randrange(5)]) + data[HEAD_BYTES:]
    if data[0] % MODES != SHAPED:
        return None
    body = data[HEAD_BYTES:]
    shapes = [body[at : at + SHAPE.size] for at in range(0, len(body), SHAPE.size)]
    at = random.randrange(len(shapes))
    match random.randrange(4):
        case 0:
            del shapes[at]
        case 1:
            shapes.insert(at, random.choice(shapes))
        case 2:
            random.shuffle(shapes)
        case _:
            few = (random.randrange(5), 1 << random.randrange(4), random.randrange(6))
            shapes[at] = SHAPE.pack(*few, random.choice((0, 1, 5, 40, 300, LONG)))
    return data[:HEAD_BYTES] + b"".join(shapes)
