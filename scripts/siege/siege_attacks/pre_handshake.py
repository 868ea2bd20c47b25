"""What a stranger can do before a word of Noise is spoken: anybody can, in private swarms too."""

import trio
from siege_wire import MULTISTREAM, line, read_line, varint

from siege_attacks import Assault, attack, crowd, held, over_and_over, side_by_side, tried

PIECE = bytes(range(32, 127)) * 690  # no newline in it, 65,550 bytes
READ_AHEAD = 64  # questions that are asked before the first answer is read


@attack("pre_handshake", "20 new ones a second", "300 TCP connections at a time")
async def idle_tcp(assault: Assault) -> None:
    """Connections that never say a word."""

    async def hold(number: int) -> None:
        async with assault.dialled(number) as wire:
            await held(wire, assault.seconds)

    await crowd(assault, hold, 20.0, 5_000, 300)


@attack("pre_handshake", "2 a second", "12 MB a line, 4 at a time")
async def line_without_newline(assault: Assault) -> None:
    """A line that ends in something else than it should."""

    async def once(number: int) -> None:
        async with assault.dialled(number) as wire:
            await wire.send(varint(12_000_000))
            for _ in range(12_000_000 // len(PIECE) + 1):
                await wire.send(PIECE)
            await held(wire, 5.0)

    await crowd(assault, once, 2.0, 200, 4)


@attack("pre_handshake", "2 a second", "26 MB a line, 4 at a time")
async def line_of_26_mb(assault: Assault) -> None:
    """A length that is kept to."""

    async def once(number: int) -> None:
        async with assault.dialled(number) as wire:
            await wire.send(line(MULTISTREAM) + varint(26_000_000))
            for _ in range(26_000_000 // len(PIECE) - 1):
                await wire.send(PIECE)
            await held(wire, 30.0)

    await crowd(assault, once, 2.0, 100, 4)


@attack("pre_handshake", "as fast as it is answered, 64 ahead", "8 connections at a time")
async def unknown_protocols(assault: Assault) -> None:
    """Ask for what is not there, for ever."""
    await side_by_side(
        8, lambda n: over_and_over(assault, lambda _: _ask(assault, n, b"/nope/%d"), 2.0)
    )


@attack("pre_handshake", "as fast as it is answered, 64 ahead", "4 connections at a time")
async def endless_ls(assault: Assault) -> None:
    """Ask what there is, for ever."""
    await side_by_side(4, lambda n: over_and_over(assault, lambda _: _ask(assault, n, b"ls"), 2.0))


async def _ask(assault: Assault, place: int, question: bytes) -> None:
    async with assault.dialled(place) as wire:
        await wire.send(line(MULTISTREAM))
        await read_line(wire)
        for number in range(1_000_000):
            text = question % number if b"%" in question else question
            await wire.send(line(text) * READ_AHEAD)
            for _ in range(READ_AHEAD):
                await read_line(wire)
            assault.spent.count("answered", READ_AHEAD)


@attack("pre_handshake", "a byte a second each", "60 connections at a time")
async def slow_drip(assault: Assault) -> None:
    """An offer of a protocol that takes half a minute."""

    async def once(number: int) -> None:
        async with assault.dialled(number) as wire:
            for byte in line(MULTISTREAM) + line(b"/noise"):
                await wire.send(bytes([byte]))
                await trio.sleep(1.0)

    await side_by_side(60, lambda n: over_and_over(assault, lambda _: once(n), 1.0))


@attack("pre_handshake", "200 a second", "20,000 connections")
async def connect_and_reset(assault: Assault) -> None:
    """Come and go."""

    async def once(number: int) -> None:
        async with assault.dialled(number) as wire:
            wire.reset()

    await crowd(assault, once, 200.0, 20_000, 100)


@attack("pre_handshake", "50 a second", "50 lines of 2 GB announced, none sent, at a time")
async def announced_length(assault: Assault) -> None:
    """A length alone, of every size, and then nothing."""

    async def once(number: int) -> None:
        async with assault.dialled(number) as wire:
            await wire.send(line(MULTISTREAM) + varint(1 << (number % 62)))
            await held(wire, 15.0)

    await crowd(assault, once, 50.0, 5_000, 50)


@attack("pre_handshake", "100 a second", "10,000 connections")
async def half_an_agreement(assault: Assault) -> None:
    """Agree on Noise and leave."""

    async def once(number: int) -> None:
        async with assault.dialled(number) as wire:
            await wire.send(line(MULTISTREAM) + line(b"/noise"))
            await read_line(wire)
            await tried(assault, lambda: read_line(wire))

    await crowd(assault, once, 100.0, 10_000, 100)


@attack("pre_handshake", "4 MB/s on each", "2 connections")
async def endless_length(assault: Assault) -> None:
    """A varint whose end never comes."""

    async def once(number: int) -> None:
        async with assault.dialled(number) as wire:
            for _ in range(int(assault.seconds) * 64):
                await wire.send(b"\xff" * 65_536)
                await trio.sleep(1 / 64)

    await side_by_side(2, lambda n: over_and_over(assault, lambda _: once(n), 2.0))
