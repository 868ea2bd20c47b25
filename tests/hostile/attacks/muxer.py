"""Attacks of an admitted peer with records and frames, just within or beyond what is metered."""

from collections.abc import Callable

import trio

from swarm.wire.messages import HELLO_PROTOCOL
from tests.hostile.attack import Assault, admitting, attack, held, over_and_over, paced
from tests.hostile.wire import ACK, DATA, FIN, PING, RST, SYN, UPDATE, Mux, frame

BATCHES_PER_S = 50.0
EMPTY_RECORDS_PER_S = 150_000  # 22 Mbit/s
ONE_BYTE_RECORDS_PER_S = 60_000
RATES_MARGIN = 0.98  # of what a connection may have
SMALL_PER_S, STREAMS_PER_S, PINGS_PER_S = 5_000, 500, 10  # as nodes meter them


async def _frames(assault: Assault, mux: Mux, per_s: float, made: Callable[[int], bytes]) -> None:
    """Send frames at a rate, in batches."""
    each = max(1, int(per_s / BATCHES_PER_S))
    async for _ in paced(assault, per_s / each, 10_000_000, mux):
        await mux.send(b"".join(made(mux.number()) for _ in range(each)))
        assault.spent.count("frames", each)


async def _records(assault: Assault, mux: Mux, data: bytes, per_s: float) -> None:
    each = int(per_s / 100)
    async for _ in paced(assault, 100.0, mux=mux):
        await mux.send_records(data, each)
        assault.spent.count("records", each)


@attack("22 Mbit/s", "one connection at a time")
@admitting(1)
async def empty_records(assault: Assault, mux: Mux) -> None:
    """Noise records with nothing in them."""
    await _records(assault, mux, b"", EMPTY_RECORDS_PER_S)


@attack("60,000 records a second", "one connection at a time")
@admitting(1)
async def one_byte_records(assault: Assault, mux: Mux) -> None:
    """One large frame for a stream that is over, in records of a byte."""
    await mux.send(frame(DATA, 0, 99, 16_000_000))
    await _records(assault, mux, b"x", ONE_BYTE_RECORDS_PER_S)


@attack("9.8 pings a second each", "8 connections of one address")
@admitting(8)
async def pings_below_the_limit(assault: Assault, mux: Mux) -> None:
    """As many pings as are answered."""
    await _frames(assault, mux, PINGS_PER_S * RATES_MARGIN, lambda n: frame(PING, SYN, 0, n))


@attack("20,000 a second", "one connection at a time")
@admitting(1)
async def ping_flood(assault: Assault, mux: Mux) -> None:
    """Far more than that."""
    await _frames(assault, mux, 20_000, lambda n: frame(PING, SYN, 0, n))


@attack("4,900 a second each", "8 connections of one address")
@admitting(8)
async def window_updates(assault: Assault, mux: Mux) -> None:
    """Updates for streams that do not exist, just below the limit of each connection."""
    await _frames(assault, mux, SMALL_PER_S * RATES_MARGIN, lambda n: frame(UPDATE, 0, n + 2, 1))


@attack("490 a second each", "8 connections of one address")
@admitting(8)
async def rapid_resets(assault: Assault, mux: Mux) -> None:
    """Streams that are opened and reset at once, just below the limit of each connection."""

    def made(number: int) -> bytes:
        return frame(UPDATE, SYN, number, 0) + frame(UPDATE, RST, number, 0)

    await _frames(assault, mux, STREAMS_PER_S * RATES_MARGIN, made)


@attack("490 a second each", "8 connections of one address")
@admitting(8)
async def streams_below_the_limit(assault: Assault, mux: Mux) -> None:
    """Streams that are opened and closed with a word, just below the limit of each connection."""

    def made(number: int) -> bytes:
        return frame(UPDATE, SYN, number, 0) + frame(DATA, FIN, number, 2, b"\0\0")

    await _frames(assault, mux, STREAMS_PER_S * RATES_MARGIN, made)


@attack("5,000 a second", "one connection at a time")
@admitting(1)
async def stream_flood(assault: Assault, mux: Mux) -> None:
    """Streams far beyond the limit."""
    await _frames(assault, mux, 5_000, lambda n: frame(UPDATE, SYN, n, 0))


@attack("4,900 a second each", "8 connections of one address")
@admitting(8)
async def empty_data(assault: Assault, mux: Mux) -> None:
    """Data frames without data, on a stream that waits for a request."""
    number = (await mux.open(HELLO_PROTOCOL)).number
    await _frames(assault, mux, SMALL_PER_S * RATES_MARGIN, lambda _: frame(DATA, 0, number, 0))


@attack("500 at once", "4 connections of one address")
@admitting(4)
async def silent_streams(assault: Assault, mux: Mux) -> None:
    """Streams on which nothing is said."""
    for _ in range(500):
        await mux.open()
    await held(mux, assault.seconds)


@attack("as fast as it is read", "one connection at a time, 600 MB")
@admitting(1)
async def data_for_nobody(assault: Assault, mux: Mux) -> None:
    """Large frames for streams that are over."""
    data = bytes(65_000)
    async for _ in paced(assault, 500.0, 9_000):
        await mux.send(frame(DATA, 0, 77, len(data), data))


@attack("1,000 a second", "one connection that does not read")
@admitting(1, deaf=True)
async def pings_unread(assault: Assault, mux: Mux) -> None:
    """Have the node answer, and read nothing of it."""
    await _frames(assault, mux, 1_000, lambda n: frame(PING, SYN, 0, n))


@attack("20 a second", "400 frames of no kind")
async def nonsense_frames(assault: Assault) -> None:
    """Frames that break the rules: kinds, versions, ids, flags."""
    rng = assault.rng

    async def once(number: int) -> None:
        async with assault.admitted() as mux:
            kind, flags = rng.choice((DATA, UPDATE, 7)), rng.choice((SYN, ACK, FIN, 255))
            await mux.send(frame(kind, flags, rng.choice((0, 2, 3, 2**31)), 2**32 - 1))
            await held(mux, 2.0)

    await over_and_over(assault, once, 20.0, 400)


@attack("every 5 s a byte", "40 connections of one address")
@admitting(40)
async def frame_in_pieces(assault: Assault, mux: Mux) -> None:
    """A large frame that never comes to its end."""
    stream = await mux.open(HELLO_PROTOCOL)
    await mux.send(frame(DATA, 0, stream.number, 200_000))
    while not mux.over.is_set():
        await mux.send(b"x")
        await trio.sleep(5.0)
