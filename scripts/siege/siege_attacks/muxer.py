"""What an admitted peer can do with records and frames, just within or beyond what is metered."""

from collections.abc import Awaitable, Callable

import trio
from siege_wire import ACK, DATA, FIN, PING, RST, SYN, UPDATE, Mux, frame

from siege_attacks import Assault, attack, held, over_and_over, paced, side_by_side
from swarm.wire.messages import HELLO_PROTOCOL

BATCHES_PER_S = 50.0
EMPTY_RECORDS_PER_S = 150_000  # 22 Mbit/s
ONE_BYTE_RECORDS_PER_S = 60_000
RATES_MARGIN = 0.98  # of what a connection may have
SMALL_PER_S, STREAMS_PER_S, PINGS_PER_S = 5_000, 500, 10  # as nodes meter them

Once = Callable[[Mux], Awaitable[None]]


async def _on(assault: Assault, connections: int, attack_one: Once, *, deaf: bool = False) -> None:
    """On so many connections at once, each of which is made again when it ends."""

    async def one(place: int) -> None:
        async def once(number: int) -> None:
            async with assault.admitted(0, deaf=deaf) as mux:
                assault.spent.count("admitted")
                await attack_one(mux)

        await over_and_over(assault, once, 1.0)

    await side_by_side(connections, one)


async def _frames(assault: Assault, mux: Mux, per_s: float, made: Callable[[int], bytes]) -> None:
    """Frames at a rate, in batches."""
    each = max(1, int(per_s / BATCHES_PER_S))
    async for _ in paced(assault, per_s / each, 10_000_000):
        await mux.send(b"".join(made(mux.number()) for _ in range(each)))
        assault.spent.count("frames", each)
        if mux.over.is_set():
            return


@attack("muxer", "22 Mbit/s", "one connection at a time")
async def empty_records(assault: Assault) -> None:
    """Noise records with nothing in them."""
    await _on(assault, 1, lambda mux: _records(assault, mux, b"", EMPTY_RECORDS_PER_S))


@attack("muxer", "60,000 records a second", "one connection at a time")
async def one_byte_records(assault: Assault) -> None:
    """One large frame for a stream that is over, in records of a byte."""

    async def once(mux: Mux) -> None:
        await mux.send(frame(DATA, 0, 99, 16_000_000))
        await _records(assault, mux, b"x", ONE_BYTE_RECORDS_PER_S)

    await _on(assault, 1, once)


async def _records(assault: Assault, mux: Mux, data: bytes, per_s: float) -> None:
    each = int(per_s / 100)
    async for _ in paced(assault, 100.0, 1_000_000):
        await mux.send_records(data, each)
        assault.spent.count("records", each)
        if mux.over.is_set():
            return


@attack("muxer", "9.8 pings a second each", "8 connections of one address")
async def pings_below_the_limit(assault: Assault) -> None:
    """As many pings as are answered."""
    rate = PINGS_PER_S * RATES_MARGIN
    await _on(assault, 8, lambda mux: _frames(assault, mux, rate, lambda n: frame(PING, SYN, 0, n)))


@attack("muxer", "20,000 a second", "one connection at a time")
async def ping_flood(assault: Assault) -> None:
    """Far more than that."""
    await _on(
        assault, 1, lambda mux: _frames(assault, mux, 20_000, lambda n: frame(PING, SYN, 0, n))
    )


@attack("muxer", "4,900 a second each", "8 connections of one address")
async def window_updates(assault: Assault) -> None:
    """Updates for streams that do not exist, just below the limit of each connection."""
    rate = SMALL_PER_S * RATES_MARGIN
    await _on(
        assault, 8, lambda mux: _frames(assault, mux, rate, lambda n: frame(UPDATE, 0, n + 2, 1))
    )


@attack("muxer", "490 a second each", "8 connections of one address")
async def rapid_resets(assault: Assault) -> None:
    """Streams that are opened and reset at once, just below the limit of each connection."""
    rate = STREAMS_PER_S * RATES_MARGIN
    await _on(
        assault,
        8,
        lambda mux: _frames(
            assault, mux, rate, lambda n: frame(UPDATE, SYN, n, 0) + frame(UPDATE, RST, n, 0)
        ),
    )


@attack("muxer", "490 a second each", "8 connections of one address")
async def streams_below_the_limit(assault: Assault) -> None:
    """Streams that are opened and closed with a word, just below the limit of each connection."""
    rate = STREAMS_PER_S * RATES_MARGIN
    await _on(
        assault,
        8,
        lambda mux: _frames(
            assault, mux, rate, lambda n: frame(UPDATE, SYN, n, 0) + frame(DATA, FIN, n, 2, b"\0\0")
        ),
    )


@attack("muxer", "5,000 a second", "one connection at a time")
async def stream_flood(assault: Assault) -> None:
    """Streams far beyond the limit."""
    await _on(
        assault, 1, lambda mux: _frames(assault, mux, 5_000, lambda n: frame(UPDATE, SYN, n, 0))
    )


@attack("muxer", "4,900 a second each", "8 connections of one address")
async def empty_data(assault: Assault) -> None:
    """Data frames without data, on a stream that waits for a request."""
    rate = SMALL_PER_S * RATES_MARGIN

    async def once(mux: Mux) -> None:
        stream = await mux.open(HELLO_PROTOCOL)
        await _frames(assault, mux, rate, lambda n: frame(DATA, 0, stream.number, 0))

    await _on(assault, 8, once)


@attack("muxer", "500 at once", "4 connections of one address")
async def silent_streams(assault: Assault) -> None:
    """Streams on which nothing is said."""

    async def once(mux: Mux) -> None:
        for _ in range(500):
            await mux.open()
        await held(mux, assault.seconds)

    await _on(assault, 4, once)


@attack("muxer", "as fast as it is read", "one connection at a time, 600 MB")
async def data_for_nobody(assault: Assault) -> None:
    """Large frames for streams that are over."""
    data = bytes(65_000)

    async def once(mux: Mux) -> None:
        async for _ in paced(assault, 500.0, 9_000):
            await mux.send(frame(DATA, 0, 77, len(data), data))

    await _on(assault, 1, once)


@attack("muxer", "1,000 a second", "one connection that does not read")
async def pings_unread(assault: Assault) -> None:
    """Have the node answer, and read nothing of it."""
    await _on(
        assault,
        1,
        lambda mux: _frames(assault, mux, 1_000, lambda n: frame(PING, SYN, 0, n)),
        deaf=True,
    )


@attack("muxer", "20 a second", "400 frames of no kind")
async def nonsense_frames(assault: Assault) -> None:
    """Frames that break the rules: kinds, versions, ids, flags."""
    rng = assault.rng

    async def once(number: int) -> None:
        async with assault.admitted(0) as mux:
            kind, flags = rng.choice((DATA, UPDATE, 7)), rng.choice((SYN, ACK, FIN, 255))
            await mux.send(frame(kind, flags, rng.choice((0, 2, 3, 2**31)), 2**32 - 1))
            await held(mux, 2.0)

    await over_and_over(assault, once, 20.0, 400)


@attack("muxer", "every 5 s a byte", "40 connections of one address")
async def frame_in_pieces(assault: Assault) -> None:
    """A large frame that never comes to its end."""

    async def once(mux: Mux) -> None:
        stream = await mux.open(HELLO_PROTOCOL)
        await mux.send(frame(DATA, 0, stream.number, 200_000))
        while not mux.over.is_set():
            await mux.send(b"x")
            await trio.sleep(5.0)

    await _on(assault, 40, once)
