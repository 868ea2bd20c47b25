"""What a peer can do from the first word of Noise until it is admitted, or just afterwards."""

import trio
from siege_wire import (
    GO_AWAY,
    MULTISTREAM,
    NOISE,
    YAMUX,
    Handshake,
    Session,
    Wire,
    choose,
    frame,
    line,
    read_line,
    secured,
    varint,
)

from siege_attacks import Assault, attack, crowd, held, over_and_over, paced, side_by_side, tried
from swarm.wire.messages import HELLO_PROTOCOL

DEATHS = 900
VISITS = 1_200
AHEAD_MAX = 24  # connections of one attack that are begun together
CHUNK = bytes(65_000)


async def _secured(assault: Assault, wire: Wire) -> Session:
    with trio.fail_after(10.0):
        return await secured(wire, assault.key())


@attack("handshake", "60 a second", "900 connections", alone=True)
async def dies_while_admitted(assault: Assault) -> None:
    """End by RST, GoAway or FIN when the handshake is just over."""

    async def once(number: int) -> None:
        async with assault.dialled(number) as wire:
            session = await _secured(assault, wire)
            await session.send(line(MULTISTREAM) + line(YAMUX))
            if number % 3 == 0:
                wire.reset()
            elif number % 3 == 1:
                await session.send(frame(GO_AWAY, 0, 0, 0))
                wire.reset()
            else:
                await wire.stream.send_eof()
                await tried(assault, wire.discard)

    await crowd(assault, once, max(60.0, DEATHS / assault.seconds), DEATHS, AHEAD_MAX)


@attack("handshake", "80 a second", "1,200 connections", alone=True)
async def short_visits(assault: Assault) -> None:
    """An ordinary connection, one request, and goodbye."""

    async def once(number: int) -> None:
        async with assault.admitted(number) as mux:
            stream = await mux.open(HELLO_PROTOCOL, b"\0\0\0\1x")
            await tried(assault, lambda: read_line(stream))
            await mux.send(frame(GO_AWAY, 0, 0, 0))

    await crowd(assault, once, max(80.0, VISITS / assault.seconds), VISITS, AHEAD_MAX)


@attack("handshake", "100 a second", "10,000 connections")
async def garbage_noise(assault: Assault) -> None:
    """Agree on Noise and speak something else."""
    rng = assault.rng

    async def once(number: int) -> None:
        async with assault.dialled(number) as wire:
            await choose(wire, NOISE)
            size = rng.choice((0, 1, 32, 200, 4_000))
            await wire.send(size.to_bytes(2, "big") + rng.randbytes(size))
            await held(wire, 5.0)

    await crowd(assault, once, 100.0, 10_000, 50)


@attack("handshake", "up to 900 a second", "30,000 handshakes")
async def stops_after_message_1(assault: Assault) -> None:
    """The same first message over and over: it costs us nothing, and the node two products."""
    async with assault.dialled() as wire:
        first = Handshake(wire, assault.key()).message()

    async def once(number: int) -> None:
        async with assault.dialled(number) as wire:
            await wire.send(line(MULTISTREAM) + line(NOISE) + first)
            await read_line(wire)
            await read_line(wire)
            await wire.exactly(2)  # it has answered
            assault.spent.count("answered")
            wire.reset()

    await crowd(assault, once, 900.0, 30_000, 64)


@attack("handshake", "20 a second", "200 connections at a time")
async def muxer_never(assault: Assault) -> None:
    """Finish the handshake, and say nothing more."""

    async def once(number: int) -> None:
        async with assault.dialled(number) as wire:
            await _secured(assault, wire)
            await held(wire, assault.seconds)

    await crowd(assault, once, 20.0, 3_000, 200)


@attack("handshake", "up to 56 MB/s", "one connection, 560 MB")
async def line_after_noise(assault: Assault) -> None:
    """A line of 2 GB where the muxer is agreed on."""

    async def once(number: int) -> None:
        async with assault.dialled(number) as wire:
            session = await _secured(assault, wire)
            await session.send(line(MULTISTREAM) + varint(2_000_000_000))
            async for _ in paced(assault, 56_000_000 / len(CHUNK), 9_000):
                await session.send(CHUNK)

    await over_and_over(assault, once, 1.0)


@attack("handshake", "as fast as it is answered, 64 ahead", "4 connections at a time")
async def unknown_muxers(assault: Assault) -> None:
    """Ask for muxers that do not exist, for ever."""

    async def once(number: int) -> None:
        async with assault.dialled(number) as wire:
            session = await _secured(assault, wire)
            await session.send(line(MULTISTREAM))
            await read_line(session)
            for count in range(1_000_000):
                await session.send(line(b"/mux/%d" % count) * 64)
                for _ in range(64):
                    await read_line(session)
                assault.spent.count("answered", 64)

    await side_by_side(4, lambda n: over_and_over(assault, lambda _: once(n), 2.0))


@attack("handshake", "20 a second", "1,000 connections")
async def wrong_signature(assault: Assault) -> None:
    """A handshake that is right but for who we say we are."""

    async def once(number: int) -> None:
        async with assault.dialled(number) as wire:
            await choose(wire, NOISE)
            shake = Handshake(wire, assault.key())
            await wire.send(shake.message())
            await shake.answer()
            payload = bytearray(shake.payload)
            payload[-1] ^= 1
            await wire.send(shake.message(bytes(payload)))
            await held(wire, 5.0)

    await crowd(assault, once, 20.0, 1_000, 32)


@attack("handshake", "10 a second", "60 connections at a time")
async def drip_in_a_message(assault: Assault) -> None:
    """A message of the handshake, byte by byte."""

    async def once(number: int) -> None:
        async with assault.dialled(number) as wire:
            await choose(wire, NOISE)
            for byte in Handshake(wire, assault.key()).message():
                await wire.send(bytes([byte]))
                await trio.sleep(0.5)

    await crowd(assault, once, 10.0, 2_000, 60)


@attack("handshake", "20 a second", "400 keys, held")
async def many_keys_of_one_address(assault: Assault) -> None:
    """Whole connections, each under a key of its own, all from one address."""

    async def once(number: int) -> None:
        async with assault.admitted(0) as mux:
            assault.spent.count("admitted", await mux.answers())
            await held(mux, assault.seconds)

    await crowd(assault, once, 20.0, 400, 400)


@attack(
    "handshake",
    "40 a second",
    "128 keys from three addresses of one block each, held",
    alone=True,
)
async def three_addresses_each(assault: Assault) -> None:
    """A block's cap of peers, with as many connections for each as the node lets it have."""
    keys = [assault.key() for _ in range(128)]

    async def once(number: int) -> None:
        async with assault.admitted(number // 128, keys[number % 128]) as mux:
            assault.spent.count("admitted", await mux.answers())
            await held(mux, assault.seconds)

    await crowd(assault, once, 40.0, 384, 384)


@attack("handshake", "at once", "43 keys with three connections each, held", alone=True)
async def block_greed(assault: Assault) -> None:
    """All places of an address block for one address: do its neighbours get in?"""
    keys, let_in = [assault.key() for _ in range(43)], 0

    async def neighbour(number: int) -> None:
        nonlocal let_in
        async with assault.admitted(number) as mux:
            let_in += await mux.answers()

    async def hold(number: int) -> None:
        async with assault.admitted(0, keys[number % len(keys)]) as mux:
            assault.spent.count("admitted", await mux.answers())
            await held(mux, assault.seconds)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(crowd, assault, hold, 40.0, 129, 129)
        await trio.sleep(assault.seconds / 2)
        for number in (1, 2, 3):
            await tried(assault, neighbour, number)
        nursery.cancel_scope.cancel()
    assault.claim("neighbours kept out", 3 - let_in, 0)
