"""Attacks from the first word of Noise until a peer is admitted, or just afterwards."""

from random import Random

import trio

from swarm.wire.messages import HELLO_PROTOCOL
from tests.hostile.attack import (
    Assault,
    attack,
    crowd,
    dialling,
    drip,
    held,
    paced,
    redialling,
    tried,
)
from tests.hostile.attacks.pre_handshake import ask_ahead
from tests.hostile.wire import (
    GO_AWAY,
    MULTISTREAM,
    NOISE,
    YAMUX,
    Handshake,
    Wire,
    choose,
    frame,
    line,
    secured,
    varint,
)

DEATHS = 900
VISITS = 1_200
AHEAD_MAX = 24  # connections of one attack that are begun together
CHUNK = bytes(65_000)


@attack("60 a second", "900 connections", alone=True)
async def dies_while_admitted(assault: Assault) -> None:
    """End by RST, GoAway or FIN when the handshake is just over."""

    async def once(number: int) -> None:
        async with assault.dialled(number) as wire:
            session = await secured(wire, assault.key())
            await session.send(line(MULTISTREAM) + line(YAMUX))
            if number % 3 == 1:
                await session.send(frame(GO_AWAY, 0, 0, 0))
            if number % 3 == 2:
                await wire.stream.send_eof()
                await tried(assault, wire.discard)
            else:
                wire.reset()

    await crowd(assault, once, max(60.0, DEATHS / assault.seconds), DEATHS, AHEAD_MAX)


@attack("80 a second", "1,200 connections", alone=True)
async def short_visits(assault: Assault) -> None:
    """An ordinary connection, one request, and goodbye."""

    async def once(number: int) -> None:
        async with assault.admitted(number) as mux:
            stream = await mux.open(HELLO_PROTOCOL, b"\0\0\0\1x")
            await tried(assault, stream.line)
            await mux.send(frame(GO_AWAY, 0, 0, 0))

    await crowd(assault, once, max(80.0, VISITS / assault.seconds), VISITS, AHEAD_MAX)


@attack("100 a second", "10,000 connections")
@dialling(100.0, 10_000, 50)
async def garbage_noise(assault: Assault, wire: Wire, number: int) -> None:
    """Agree on Noise and speak something else."""
    await choose(wire, NOISE)
    size = (0, 1, 32, 200, 4_000)[number % 5]
    await wire.send(size.to_bytes(2, "big") + Random(number).randbytes(size))
    await held(wire, 5.0)


@attack("up to 900 a second", "30,000 handshakes")
async def stops_after_message_1(assault: Assault) -> None:
    """The same first message over and over: it costs us nothing, and the node two products."""
    async with assault.dialled() as wire:
        first = Handshake(wire, assault.key()).message()

    async def once(number: int) -> None:
        async with assault.dialled(number) as wire:
            await wire.send(line(MULTISTREAM) + line(NOISE) + first)
            await wire.line()
            await wire.line()
            await wire.exactly(2)  # it has answered
            assault.spent.count("answered")
            wire.reset()

    await crowd(assault, once, 900.0, 30_000, 64)


@attack("20 a second", "200 connections at a time")
@dialling(20.0, 3_000, 200)
async def muxer_never(assault: Assault, wire: Wire, number: int) -> None:
    """Finish the handshake, and say nothing more."""
    await secured(wire, assault.key())
    await held(wire, assault.seconds)


@attack("up to 56 MB/s", "one connection, 560 MB")
@redialling(1)
async def line_after_noise(assault: Assault, wire: Wire) -> None:
    """A line of 2 GB where the muxer is agreed on."""
    session = await secured(wire, assault.key())
    await session.send(line(MULTISTREAM) + varint(2_000_000_000))
    async for _ in paced(assault, 56_000_000 / len(CHUNK), 9_000):
        await session.send(CHUNK)


@attack("as fast as it is answered, 64 ahead", "4 connections at a time")
@redialling(4, 2.0)
async def unknown_muxers(assault: Assault, wire: Wire) -> None:
    """Ask for muxers that do not exist, for ever."""
    await ask_ahead(assault, await secured(wire, assault.key()), b"/mux/%d")


@attack("20 a second", "1,000 connections")
@dialling(20.0, 1_000, 32)
async def wrong_signature(assault: Assault, wire: Wire, number: int) -> None:
    """A handshake that is right but for the proof of the key."""
    await choose(wire, NOISE)
    shake = Handshake(wire, assault.key())
    await wire.send(shake.message())
    await shake.answer()
    await wire.send(shake.message(shake.payload[:-1] + bytes([shake.payload[-1] ^ 1])))
    await held(wire, 5.0)


@attack("10 a second", "60 connections at a time")
@dialling(10.0, 2_000, 60)
async def drip_in_a_message(assault: Assault, wire: Wire, number: int) -> None:
    """A message of the handshake, byte by byte."""
    await choose(wire, NOISE)
    await drip(wire, Handshake(wire, assault.key()).message(), 0.5)


@attack("20 a second", "400 keys, held")
async def many_keys_of_one_address(assault: Assault) -> None:
    """Whole connections, each under a key of its own, all from one address."""

    async def once(number: int) -> None:
        async with assault.admitted() as mux:
            assault.spent.count("admitted", await mux.answers())
            await held(mux, assault.seconds)

    await crowd(assault, once, 20.0, 400, 400)


@attack("40 a second", "128 keys from three addresses of one block each, held", alone=True)
async def three_addresses_each(assault: Assault) -> None:
    """A block's cap of peers, with as many connections for each as the node lets it have."""
    keys = [assault.key() for _ in range(128)]

    async def once(number: int) -> None:
        async with assault.admitted(number // 128, keys[number % 128]) as mux:
            assault.spent.count("admitted", await mux.answers())
            await held(mux, assault.seconds)

    await crowd(assault, once, 40.0, 384, 384)


@attack("at once", "43 keys with three connections each, held", alone=True)
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
