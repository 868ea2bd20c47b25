"""The muxer: hostile frames, slow readers, cancelled writers. Over pipes, under a virtual clock."""

import random
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedStreamError, MuxedStreamReset
from libp2p.stream_muxer.yamux.yamux import (
    DEFAULT_WINDOW_SIZE,
    FLAG_ACK,
    FLAG_FIN,
    FLAG_RST,
    FLAG_SYN,
    HEADER_SIZE,
    MAX_WINDOW_SIZE,
    TYPE_DATA,
    TYPE_GO_AWAY,
    TYPE_PING,
    TYPE_WINDOW_UPDATE,
)

from swarm.identity import Identity
from swarm.transport.libp2p import frames as frame_rates
from swarm.transport.libp2p.frames import (
    OUTBOX_BYTES_MAX,
    OUTBOX_CONTROL_MAX,
    PIECE_BYTES_MIN,
    Ended,
    ReceiveBuffer,
)
from swarm.transport.libp2p.noise import RECORD_PLAIN_BYTES_MAX
from swarm.transport.libp2p.yamux import (
    FRAMES_PER_TURN,
    HEADER,
    INBOUND_STREAMS_MAX,
    PING_INTERVAL_S,
    PING_TIMEOUT_S,
    WINDOW_WAIT_MAX_S,
    WINDOWS_BYTES_MAX,
    EventStream,
    MuxedConnection,
)
from tests.integration.raw_pipes import Raw, lockstep_pipe, pipe
from tests.support import run

pytestmark = pytest.mark.integration

PEER = ID.from_base58(Identity(b"p" * 32).peer_id)
MIB = 1_048_576


def frame(kind: int, flags: int, stream_id: int, data: bytes | int = b"") -> bytes:
    length = data if isinstance(data, int) else len(data)
    head = HEADER.pack(0, kind, flags, stream_id, length)
    return head if isinstance(data, int) else head + data


def syn(stream_id: int, data: bytes = b"", flags: int = 0) -> bytes:
    return frame(TYPE_DATA, FLAG_SYN | flags, stream_id, data)


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[Any, Raw]]:
    """A connection that listens, and the raw end of a peer that dialled it."""
    theirs, ours = pipe()
    conn = MuxedConnection(ours, PEER)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(conn.start)
        await conn.event_started.wait()
        yield conn, theirs
        await conn.close()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def connected(ends: tuple[Raw, Raw] | None = None) -> AsyncIterator[tuple[Any, Any]]:
    """Two connections: who dialled, who listened."""
    dialled, listened = (MuxedConnection(end, PEER) for end in ends or pipe())  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        for conn in (dialled, listened):
            nursery.start_soon(conn.start)
            await conn.event_started.wait()
        yield dialled, listened
        nursery.cancel_scope.cancel()


async def opened(dialled: Any, listened: Any) -> tuple[EventStream, EventStream]:
    out = await dialled.open_stream()
    return out, await listened.accept_stream()


async def read_all(stream: Any, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += await stream.read(65_536)
    return data


async def until_reset(stream: Any) -> bytes:
    data = b""
    while True:
        try:
            data += await stream.read(65_536)
        except MuxedStreamReset:
            return data


async def settle() -> None:
    """Let everything happen that happens without a clock."""
    await trio.testing.wait_all_tasks_blocked()


# --- hostile frames ------------------------------------------------------------------------


async def ends_after(frames: Iterable[bytes]) -> bool:
    async with listening() as (conn, peer):
        for one in frames:
            if conn.alive:
                await peer.write(one)
                await settle()
        return not conn.alive


WINDOW = bytes(DEFAULT_WINDOW_SIZE)


@pytest.mark.parametrize(
    "frames",
    [
        [syn(1, WINDOW), frame(TYPE_DATA, 0, 1, b"x")],
        [syn(1, WINDOW + b"x")],
        [frame(TYPE_DATA, 0, 7, MAX_WINDOW_SIZE + 1)],
        [syn(2)],
        [syn(0)],
        [syn(1), syn(1)],
        [b"\x01" + bytes(11)],
        [frame(7, 0, 1, 0)],
        [frame(TYPE_GO_AWAY, 0, 0, 0)],
    ],
    ids=[
        "over the window", "over it at once", "a huge frame", "our ids", "id zero", "twice",
        "version", "type", "goodbye",
    ],
)  # fmt: skip
def test_a_peer_that_breaks_the_rules_loses_the_connection(frames: list[bytes]) -> None:
    assert run(ends_after, frames, virtual=True)


def test_a_peer_that_keeps_the_rules_does_not() -> None:
    frames = [
        syn(1, WINDOW),
        syn(3, b"all", FLAG_FIN),
        syn(5, b"", FLAG_RST),
        frame(TYPE_DATA, 0, 99, b"for a stream that is over"),
        frame(TYPE_WINDOW_UPDATE, FLAG_FIN, 1, 0),
        frame(TYPE_PING, FLAG_SYN, 0, 7),
    ]
    assert not run(ends_after, frames, virtual=True)


def test_streams_over_the_limit_are_reset() -> None:
    async def main() -> None:
        async with listening() as (conn, peer):
            for i in range(INBOUND_STREAMS_MAX + 3):
                await peer.write(syn(2 * i + 1))
                if i < INBOUND_STREAMS_MAX:
                    await conn.accept_stream()
            await settle()
            assert conn.alive
            assert len(conn.streams) == INBOUND_STREAMS_MAX
            sent = await peer.read(MIB)
            flags = [HEADER.unpack_from(sent, at)[1:3] for at in range(0, len(sent), HEADER_SIZE)]
            assert flags.count((TYPE_WINDOW_UPDATE, FLAG_RST)) == 3
            assert flags.count((TYPE_WINDOW_UPDATE, FLAG_ACK)) == INBOUND_STREAMS_MAX

    run(main, virtual=True)


def test_a_peer_that_asks_and_never_reads_loses_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frame_rates, "PINGS_AT_ONCE_MAX", 10 * OUTBOX_CONTROL_MAX)

    async def main() -> None:
        theirs, ours = lockstep_pipe()
        ended: Counter[str] = Counter()
        conn = MuxedConnection(ours, PEER, lambda _, reason: ended.update([reason]))  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(conn.start)
            asked = 0
            with trio.move_on_after(5.0):
                while conn.alive:
                    await theirs.write(frame(TYPE_PING, FLAG_SYN, 0, 1) * 64)
                    asked += 64
            assert not conn.alive
            assert OUTBOX_CONTROL_MAX <= asked <= OUTBOX_CONTROL_MAX + 1_000
            assert ended == {Ended.UNREAD: 1}
            nursery.cancel_scope.cancel()

    run(main, virtual=True)


def test_a_read_full_of_small_frames_stops_nobody() -> None:
    async def main() -> None:
        count, turns = 20_000, 0

        async def others() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        async with listening() as (conn, _), trio.open_nursery() as nursery:
            nursery.start_soon(others)
            await conn._process_piece(memoryview(frame(TYPE_WINDOW_UPDATE, 0, 99, 1) * count))
            nursery.cancel_scope.cancel()
        assert turns >= count // FRAMES_PER_TURN // 2

    run(main, virtual=True)


def test_a_peer_that_stops_within_a_frame_is_given_up() -> None:
    async def main() -> None:
        async with listening() as (conn, peer):
            started_s = trio.current_time()
            await peer.write(syn(1, b"whole") + frame(TYPE_DATA, 0, 1, 100) + b"half")
            await conn.event_closed.wait()
            assert trio.current_time() - started_s <= PING_INTERVAL_S + PING_TIMEOUT_S

    run(main, virtual=True, timeout_s=1_000.0)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1), st.integers(0, 2**32))
def test_frames_may_be_cut_anywhere(cuts: list[int], seed: int) -> None:
    async def main() -> None:
        draw = random.Random(seed)
        texts = [draw.randbytes(draw.randrange(1, 60)) for _ in range(6)]
        wire = syn(1) + b"".join(frame(TYPE_DATA, 0, 1, text) for text in texts)
        wire += frame(TYPE_WINDOW_UPDATE, FLAG_FIN, 1, 0)
        async with listening() as (conn, peer):
            at = step = 0
            while at < len(wire):
                await peer.write(wire[at : at + cuts[step % len(cuts)]])
                at += cuts[step % len(cuts)]
                step += 1
                await settle()
            stream = await conn.accept_stream()
            assert await read_all(stream, sum(map(len, texts))) == b"".join(texts)
            assert stream.recv_closed

    run(main, virtual=True)


# --- memory --------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 70_000), st.integers(0, 90_000)), max_size=30))
def test_the_buffer_gives_back_what_it_took(steps: list[tuple[int, int]]) -> None:
    buffer, came, went = ReceiveBuffer(), b"", b""
    for size, taken in steps:
        piece = bytes([len(came) % 251]) * size
        came += piece
        buffer.append(memoryview(piece))
        part = buffer.read(taken)
        if len(part) > 2:
            buffer.put_back(part[2:])
            part = part[:2]
        went += part
        assert len(buffer) == len(came) - len(went)
    assert went + buffer.read(len(buffer)) == came


def test_single_bytes_do_not_cost_an_object_each() -> None:
    buffer = ReceiveBuffer()
    for _ in range(10 * PIECE_BYTES_MIN):
        buffer.append(memoryview(b"x"))
    assert len(buffer._pieces) <= 10


def test_a_small_part_does_not_hold_the_whole() -> None:
    whole = memoryview(bytes(RECORD_PLAIN_BYTES_MAX))
    buffer = ReceiveBuffer()
    for _ in range(100):
        buffer.append(whole[:5_000])
    assert all(isinstance(piece, bytearray) for piece in buffer._pieces)


def test_what_is_still_to_come_of_a_frame_is_not_credited_yet() -> None:
    """A reader between its pieces would grant the peer a whole frame more than the window."""

    async def main() -> None:
        async with listening() as (conn, peer):
            await peer.write(syn(1) + frame(TYPE_DATA, 0, 1, DEFAULT_WINDOW_SIZE))
            stream = await conn.accept_stream()
            sent, most = 0, 0
            for size in (1_000, 150_000, 5_000, DEFAULT_WINDOW_SIZE - 156_000):
                await peer.write(bytes(size))
                sent += size
                assert len(await read_all(stream, size)) == size
                missing_bytes = DEFAULT_WINDOW_SIZE - sent
                most = max(most, stream.recv_window)
                assert stream.recv_window + missing_bytes <= stream.target_recv_window
            assert most > 0, "it was credited in between"

    run(main, virtual=True)


def test_windows_of_a_connection_share_a_budget() -> None:
    async def main() -> None:
        async with connected() as (dialled, listened):
            pairs = [await opened(dialled, listened) for _ in range(8)]
            for _, inbound in pairs:
                for _ in range(10):
                    inbound.target_recv_window = listened.wider(inbound.target_recv_window)
            windows = [inbound.target_recv_window for _, inbound in pairs]
            assert max(windows) == MAX_WINDOW_SIZE
            assert sum(windows) <= WINDOWS_BYTES_MAX + len(pairs) * DEFAULT_WINDOW_SIZE

    run(main, virtual=True)


def test_64_megabytes_pass_in_bounded_memory() -> None:
    """To a reader that lags behind: what waits is bounded by the window, not by the transfer."""

    async def main() -> None:
        async with connected() as (dialled, listened):
            out, inbound = await opened(dialled, listened)
            piece = random.Random(0).randbytes(MIB)

            async def send() -> None:
                for _ in range(64):
                    await out.write(piece)
                await out.close()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                got = 0
                while got < 64 * MIB:
                    data = await inbound.read(300_000)
                    assert data == (piece + piece)[got % MIB :][: len(data)]
                    got += len(data)
                    await settle()

    tracemalloc.start()
    try:
        run(main, virtual=True)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < MAX_WINDOW_SIZE + 8 * MIB


# --- slow readers, cancelled writers -------------------------------------------------------


async def outlasts(pause_s: float) -> bool:
    """Whether a write outlasts a reader that pauses."""
    async with connected() as (dialled, listened):
        out, inbound = await opened(dialled, listened)
        got = b""

        async def read_late() -> None:
            nonlocal got
            await trio.sleep(pause_s)
            got = await read_all(inbound, 2 * MIB)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_late)
            try:
                await out.write(bytes(2 * MIB))
            except MuxedStreamError:
                nursery.cancel_scope.cancel()
        return len(got) == 2 * MIB


@pytest.mark.parametrize(
    ("pause_s", "lasts"), [(60.0, True), (WINDOW_WAIT_MAX_S - 1, True), (500.0, False)]
)
def test_a_reader_may_pause_for_long_but_not_for_ever(pause_s: float, lasts: bool) -> None:
    assert run(outlasts, pause_s, virtual=True, timeout_s=1_000.0) is lasts


def test_a_paused_reader_holds_up_no_other_stream() -> None:
    async def main() -> None:
        async with connected() as (dialled, listened):
            slow = await opened(dialled, listened)
            quick = await opened(dialled, listened)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(slow[0].write, bytes(MIB))
                await settle()
                for i in range(20):
                    await quick[0].write(bytes([i]) * 50_000)
                    assert await read_all(quick[1], 50_000) == bytes([i]) * 50_000
                nursery.cancel_scope.cancel()

    run(main, virtual=True)


def test_a_write_may_be_cancelled_at_any_point() -> None:
    """Other streams go on, and what came of the cancelled one is a prefix."""

    async def main() -> None:
        ends = lockstep_pipe()  # so that the socket is always full
        async with connected(ends) as (dialled, listened):
            for steps in range(0, 60, 3):
                out, inbound = await opened(dialled, listened)
                data = random.Random(steps).randbytes(MIB)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(out.write, data)
                    for _ in range(steps):
                        await trio.lowlevel.checkpoint()
                    nursery.cancel_scope.cancel()
                await out.reset()
                assert data.startswith(await until_reset(inbound))
                again, back = await opened(dialled, listened)
                await again.write(b"still here")
                assert await read_all(back, 10) == b"still here"
                await again.reset()
                await back.reset()
            assert dialled.outbox._data_bytes <= OUTBOX_BYTES_MAX
            await settle()
            assert not dialled.streams
            assert not listened.streams

    run(main, virtual=True)
