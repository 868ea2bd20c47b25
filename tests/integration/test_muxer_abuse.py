"""What a peer may do to a muxed connection, and for how long: slow ones stay, floods and dead ones
go, and it is counted why."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import pytest
import trio
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from libp2p.stream_muxer.yamux.yamux import (
    FLAG_ACK,
    FLAG_RST,
    FLAG_SYN,
    TYPE_DATA,
    TYPE_PING,
    TYPE_WINDOW_UPDATE,
)

from swarm.errors import Reject, TransportError
from swarm.identity import Identity, PeerId
from swarm.transport.base import ServeLimits
from swarm.transport.libp2p import frames as frame_rates
from swarm.transport.libp2p import yamux
from swarm.transport.libp2p.frames import (
    FRAME_BYTES_SMALL,
    PINGS_AT_ONCE_MAX,
    PINGS_PER_S_MAX,
    SMALL_FRAMES_AT_ONCE_MAX,
    SMALL_FRAMES_PER_S_MAX,
    STREAMS_AT_ONCE_MAX,
    STREAMS_PER_S_MAX,
    Ended,
    Outbox,
)
from swarm.transport.libp2p.host import Libp2pTransport, open_libp2p
from swarm.transport.libp2p.noise import NoiseSession
from swarm.transport.libp2p.streams import InboundStream
from swarm.transport.libp2p.yamux import (
    FRAMES_PER_TURN,
    HEADER,
    PING_INTERVAL_S,
    PING_TIMEOUT_S,
    WRITE_STALL_MAX_S,
    MuxedConnection,
)
from tests.integration.raw_pipes import Raw, lockstep_pipe, pipe
from tests.support import run

pytestmark = pytest.mark.integration

PEER = ID.from_base58(Identity(b"p" * 32).peer_id)
LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
PROTOCOL = "/test/echo/1.0.0"
MIB = 1_048_576


class Peer:
    """A connection of ours, and the raw end of the peer that dialled it."""

    def __init__(self, theirs: Raw, ours: Raw) -> None:
        self.ended: Counter[str] = Counter()
        self.conn = MuxedConnection(ours, PEER, self.note)  # type: ignore[arg-type]
        self.raw = theirs

    def note(self, peer: ID, reason: Ended) -> None:
        assert peer == PEER
        self.ended[reason] += 1

    async def discard(self) -> None:
        with suppress(ConnectionClosedError):
            while await self.raw.read(MIB):
                pass

    async def accept(self) -> None:
        with suppress(MuxedConnUnavailable):
            while True:
                await self.conn.accept_stream()

    async def send(self, data: bytes) -> None:
        try:
            await self.raw.write(data)
        except ConnectionClosedError:
            assert not self.conn.alive
        await trio.testing.wait_all_tasks_blocked()


@asynccontextmanager
async def peer(ends: Callable[[], tuple[Raw, Raw]] = pipe) -> AsyncIterator[Peer]:
    made = Peer(*ends())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.conn.start)
        await made.conn.event_started.wait()
        yield made
        nursery.cancel_scope.cancel()


# --- what has been sent ---------------------------------------------------------------------


async def told_after(answer_bytes: int) -> list[int]:
    """How much of an answer the socket had taken when we heard that it is written."""
    taken, told = 0, []
    async with peer(lockstep_pipe) as theirs, trio.open_nursery() as nursery:
        inbound = InboundStream(await theirs.conn.open_stream())

        async def answer() -> None:
            await inbound.answer(bytes(answer_bytes))
            await inbound.written()
            told.append(taken)

        nursery.start_soon(answer)
        while not told:
            taken += len(await theirs.raw.read(1_000))
            await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return told


def test_an_answer_is_written_when_the_socket_has_taken_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run(told_after, 100_000, virtual=True)[0] > 99_000
    monkeypatch.setattr(Outbox, "wait_written", do_not_wait)
    assert run(told_after, 100_000, virtual=True)[0] < 2_000  # it lay in the outbox


# --- signs of life -------------------------------------------------------------------------


async def ends_while(step: Callable[[Peer, int], Awaitable[None]], each_s: float) -> Counter[str]:
    """Have a peer that answers no ping do something now and then, for twenty times."""
    async with peer() as theirs:
        for number in range(20):
            await step(theirs, number)
            await trio.sleep(each_s)
        return theirs.ended


async def send_a_frame(theirs: Peer, number: int) -> None:
    await theirs.send(HEADER.pack(0, TYPE_WINDOW_UPDATE, 0, 99, 1))


async def send_a_part(theirs: Peer, number: int) -> None:
    head = b"" if number else HEADER.pack(0, TYPE_DATA, 0, 99, MIB)
    await theirs.send(head + bytes(2_000))


async def send_nothing(theirs: Peer, number: int) -> None:
    await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("step", [send_a_frame, send_a_part])
def test_a_peer_that_is_heard_of_is_not_dead(step: Callable[[Peer, int], Awaitable[None]]) -> None:
    """Its answer to the ping may queue behind its data, and one frame takes minutes."""
    assert not run(ends_while, step, 0.9 * PING_TIMEOUT_S, virtual=True, timeout_s=1_000)


@pytest.mark.parametrize(
    ("step", "each_s"), [(send_nothing, 3.0), (send_a_frame, 1.1 * PING_TIMEOUT_S)]
)
def test_a_silent_peer_is(step: Callable[[Peer, int], Awaitable[None]], each_s: float) -> None:
    ended = run(ends_while, step, each_s, virtual=True, timeout_s=1_000)
    assert ended == {Ended.SILENT: 1}


@pytest.mark.parametrize("attempt", range(10))  # which task runs first is drawn
def test_what_came_while_we_slept_counts(attempt: int) -> None:
    async def main() -> None:
        async with peer() as theirs:
            await trio.testing.wait_all_tasks_blocked()
            await theirs.raw.write(window_update(0))
            clock = trio.lowlevel.current_clock()
            assert isinstance(clock, trio.testing.MockClock)
            clock.jump(10 * PING_TIMEOUT_S)
            await trio.testing.wait_all_tasks_blocked()
            assert not theirs.ended

    run(main, virtual=True, timeout_s=1_000)


async def uploads_slowly() -> Counter[str]:
    """Send for a minute, over a slow uplink, to a peer that answers pings and says nothing more."""
    async with peer(lockstep_pipe) as theirs, trio.open_nursery() as nursery:
        assert await theirs.raw.read(MIB) == HEADER.pack(0, TYPE_PING, FLAG_SYN, 0, 1)
        await theirs.send(HEADER.pack(0, TYPE_PING, FLAG_ACK, 0, 1))
        stream = await theirs.conn.open_stream()
        nursery.start_soon(stream.write, bytes(200_000))
        got = b""
        with suppress(ConnectionClosedError):
            while theirs.conn.alive and ping(2) not in got:
                await trio.sleep(1.2 * PING_TIMEOUT_S / 50)
                got += await theirs.raw.read(4_000)
        ended = theirs.ended.copy()
        nursery.cancel_scope.cancel()
    return ended


async def do_not_wait(outbox: Outbox) -> None:
    await trio.lowlevel.checkpoint()


def test_a_ping_counts_from_when_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not run(uploads_slowly, virtual=True, timeout_s=1_000)
    monkeypatch.setattr(Outbox, "wait_written", do_not_wait)
    assert run(uploads_slowly, virtual=True, timeout_s=1_000) == {Ended.SILENT: 1}


async def sends_within(read_bytes: int, each_s: float) -> tuple[int, Counter[str]]:
    """Send 200 kB to a peer that reads so much now and then, and is heard of; what it got."""
    got = 0
    async with peer(lockstep_pipe) as theirs, trio.open_nursery() as nursery:
        stream = await theirs.conn.open_stream()
        nursery.start_soon(stream.write, bytes(200_000))
        while theirs.conn.alive and got < 200_000:
            await trio.sleep(each_s)
            await theirs.send(window_update(0))
            if read_bytes:
                got += len(await theirs.raw.read(read_bytes))
        ended = theirs.ended.copy()
        nursery.cancel_scope.cancel()
    return got, ended


def test_a_slow_reader_gets_it_all_and_none_is_cut_off() -> None:
    got, ended = run(sends_within, 1_000, 2.0, virtual=True, timeout_s=1_000)
    assert got >= 200_000
    assert WRITE_STALL_MAX_S + PING_INTERVAL_S + PING_TIMEOUT_S < 200 * 2.0, "slow indeed"
    assert not ended


def test_who_reads_nothing_is_cut_off() -> None:
    got, ended = run(sends_within, 0, 2.0, virtual=True, timeout_s=1_000)
    assert got == 0
    assert ended == {Ended.STALLED: 1}


# --- floods --------------------------------------------------------------------------------


def opened(number: int) -> bytes:
    """A stream that is opened and reset at once."""
    stream = 2 * number + 1
    syn = HEADER.pack(0, TYPE_WINDOW_UPDATE, FLAG_SYN, stream, 0)
    return syn + HEADER.pack(0, TYPE_WINDOW_UPDATE, FLAG_RST, stream, 0)


def ping(number: int) -> bytes:
    return HEADER.pack(0, TYPE_PING, FLAG_SYN, 0, number)


def window_update(number: int) -> bytes:
    return HEADER.pack(0, TYPE_WINDOW_UPDATE, 0, 99, 1)


def one_byte(number: int) -> bytes:
    return HEADER.pack(0, TYPE_DATA, 0, 99, 1) + b"x"


Make = Callable[[int], bytes]
FLOODS = [
    (opened, STREAMS_AT_ONCE_MAX, STREAMS_PER_S_MAX, Ended.STREAMS),
    (ping, PINGS_AT_ONCE_MAX, PINGS_PER_S_MAX, Ended.PINGS),
    (window_update, SMALL_FRAMES_AT_ONCE_MAX, SMALL_FRAMES_PER_S_MAX, Ended.SMALL_FRAMES),
    (one_byte, SMALL_FRAMES_AT_ONCE_MAX, SMALL_FRAMES_PER_S_MAX, Ended.SMALL_FRAMES),
]
NAMES = [make.__name__ for make, *_ in FLOODS]


async def flooded(make: Make, *steps: tuple[int, float]) -> Counter[str]:
    """What a connection ended of, after so many frames at a time, each with a pause after them."""
    numbers = count()
    async with peer() as theirs, trio.open_nursery() as nursery:
        nursery.start_soon(theirs.accept)
        nursery.start_soon(theirs.discard)
        for frames, pause_s in steps:
            await theirs.send(b"".join(make(next(numbers)) for _ in range(frames)))
            await trio.sleep(pause_s)
        ended = theirs.ended.copy()
        nursery.cancel_scope.cancel()
    return ended


@pytest.mark.parametrize(("make", "at_once", "per_s", "reason"), FLOODS, ids=NAMES)
def test_a_flood_ends_the_connection(make: Make, at_once: int, per_s: int, reason: Ended) -> None:
    assert not run(flooded, make, (at_once, 0.0), virtual=True)
    over = at_once + FRAMES_PER_TURN
    assert run(flooded, make, (over, 0.0), virtual=True) == {reason: 1}


@pytest.mark.parametrize(("make", "at_once", "per_s", "reason"), FLOODS, ids=NAMES)
def test_what_is_quick_but_no_flood_does_not(
    make: Make, at_once: int, per_s: int, reason: Ended
) -> None:
    steady = [(per_s, 1.0)] * 20
    assert not run(flooded, make, *steady, virtual=True)
    over = [(2 * per_s, 1.0)] * (at_once // per_s + 2)
    assert run(flooded, make, *over, virtual=True) == {reason: 1}


def test_any_number_of_frames_with_data_in_them_is_taken() -> None:
    def full(number: int) -> bytes:
        return HEADER.pack(0, TYPE_DATA, 0, 99, FRAME_BYTES_SMALL) + bytes(FRAME_BYTES_SMALL)

    steps = [(2_000, 0.0)] * (SMALL_FRAMES_AT_ONCE_MAX // 2_000 + 2)
    assert not run(flooded, full, *steps, virtual=True)


# --- over real connections ------------------------------------------------------------------


async def echo(asker: PeerId, payload: bytes) -> bytes:
    return payload


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    with trio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110  transports announce no changes
            await trio.sleep(0.01)


@asynccontextmanager
async def three() -> AsyncIterator[tuple[Libp2pTransport, Libp2pTransport, Libp2pTransport]]:
    """A node, and two that dialled it."""
    async with (
        open_libp2p(Identity(b"a" * 32), LOOPBACK) as node,
        open_libp2p(Identity(b"b" * 32), LOOPBACK) as friend,
        open_libp2p(Identity(b"c" * 32), LOOPBACK) as stranger,
    ):
        node.serve(PROTOCOL, echo, ServeLimits(4 * MIB, 4 * MIB))
        for each in (friend, stranger):
            await each.connect(node.addresses()[0])
        await until(lambda: len(node.peers()) == 2)
        yield node, friend, stranger


async def ask(asker: Libp2pTransport, node: Libp2pTransport, payload: bytes) -> bytes:
    return await asker.request(
        node.peer_id, PROTOCOL, payload, timeout_s=30.0, response_bytes_max=4 * MIB
    )


def muxed(asker: Libp2pTransport, node: Libp2pTransport) -> Any:
    conn = asker._network.live(ID.from_base58(node.peer_id))
    assert conn is not None
    return conn.muxed_conn


async def reset_rapidly(
    node: Libp2pTransport, friend: Libp2pTransport, stranger: Libp2pTransport, streams: int
) -> int:
    """Streams that a stranger opens and resets until it has done so many or is cut off, while a
    friend asks. Returns how many."""
    conn = muxed(stranger, node)
    first = conn.next_stream_id // 2
    for number in range(streams):
        try:
            await conn.outbox.put(opened(first + number))
        except ConnectionClosedError:
            return number
        if number % 200 == 0:
            assert await ask(friend, node, b"well?") == b"well?"
    return streams


def test_rapid_resets_end_and_friends_are_served_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    slowly = STREAMS_PER_S_MAX / 10  # which a stranger exceeds on a busy machine, too
    monkeypatch.setattr(frame_rates, "STREAMS_PER_S_MAX", slowly)

    async def main() -> None:
        async with three() as (node, friend, stranger):
            offences: list[tuple[PeerId, Reject]] = []
            node.report_to(lambda peer, reason: offences.append((peer, reason)))
            started_s = trio.current_time()
            conn = muxed(node, stranger)
            assert await reset_rapidly(node, friend, stranger, 10**6) < 10**6
            await until(lambda: stranger.peer_id not in node.peers())
            taken_s = trio.current_time() - started_s
            assert node.counters.ended == {Ended.STREAMS: 1}
            assert offences == [(stranger.peer_id, Reject.FLOOD)]
            streams = STREAMS_AT_ONCE_MAX + slowly * taken_s
            assert conn._frames <= 2 * streams + FRAMES_PER_TURN
            assert await ask(friend, node, bytes(MIB)) == bytes(MIB)
            assert friend.peer_id in node.peers()

    run(main)


def test_rapid_resets_did_not_end_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("STREAMS_AT_ONCE_MAX", "SMALL_FRAMES_AT_ONCE_MAX"):
        monkeypatch.setattr(frame_rates, limit, 10**9)

    async def main() -> None:
        async with three() as (node, friend, stranger):
            wanted = 2 * STREAMS_AT_ONCE_MAX
            assert await reset_rapidly(node, friend, stranger, wanted) == wanted
            assert not node.counters.ended

    run(main)


def test_honest_requests_in_quick_succession_are_no_flood() -> None:
    async def main() -> None:
        async with three() as (node, friend, _):
            for number in range(300):
                payload = number.to_bytes(2, "big")
                assert await ask(friend, node, payload) == payload
            assert not node.counters.ended

    run(main)


class SlowReading(trio.abc.Stream):
    """A socket that is read slowly, or not at all."""

    def __init__(self, inner: trio.SocketStream, read_bytes: int, each_s: float) -> None:
        self._inner = inner
        self._read_bytes = read_bytes
        self._each_s = each_s

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        await trio.sleep(self._each_s)
        return await self._inner.receive_some(self._read_bytes)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._inner.aclose()


ANSWER_BYTES = MIB // 2
STALL_S = 2.0
READ_BYTES, READ_EACH_S = 32_768, 0.5  # at which half of the answer takes longer than STALL_S


async def reads_slowly(each_s: float) -> tuple[bool, Counter[str]]:
    """Whether a large answer gets to somebody who reads so slowly, and what ended."""

    async def answer(asker: PeerId, payload: bytes) -> bytes:
        return bytes(ANSWER_BYTES)

    async with three() as (node, _, stranger):
        offences: list[PeerId] = []
        node.report_to(lambda peer, reason: offences.append(peer))
        node.serve("/test/large", answer, ServeLimits(100, ANSWER_BYTES, timeout_s=60.0))
        await ask(stranger, node, b"to begin with")
        secured = muxed(stranger, node).secured_conn
        secured._tcp.socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, READ_BYTES)
        secured._tcp = SlowReading(secured._tcp, READ_BYTES, each_s)
        arrived = False
        with trio.move_on_after(30.0):
            async with trio.open_nursery() as nursery:

                async def fetch() -> None:
                    nonlocal arrived
                    try:
                        got = await stranger.request(
                            node.peer_id, "/test/large", b"", timeout_s=60.0,
                            response_bytes_max=ANSWER_BYTES,
                        )  # fmt: skip
                    except TransportError:
                        return
                    arrived = len(got) == ANSWER_BYTES
                    nursery.cancel_scope.cancel()

                nursery.start_soon(fetch)
                await until(lambda: node.counters.ended)
                nursery.cancel_scope.cancel()
        assert not offences
        return arrived, node.counters.ended


def test_over_sockets_a_slow_reader_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yamux, "WRITE_STALL_MAX_S", STALL_S)
    assert run(reads_slowly, READ_EACH_S) == (True, {})


def test_over_sockets_a_slow_reader_is_cut_off_where_nobody_looks_at_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(yamux, "WRITE_STALL_MAX_S", STALL_S)
    write = NoiseSession.write_pieces
    monkeypatch.setattr(
        NoiseSession, "write_pieces", lambda session, pieces, moved=None: write(session, pieces)
    )
    assert run(reads_slowly, READ_EACH_S) == (False, {Ended.STALLED: 1})


def test_over_sockets_who_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yamux, "WRITE_STALL_MAX_S", STALL_S)
    assert run(reads_slowly, 1_000.0) == (False, {Ended.STALLED: 1})
