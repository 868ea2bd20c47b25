"""Attacks before a word of Noise is spoken: anybody can do these, in private swarms too."""

import trio

from tests.hostile.attack import Assault, attack, dialling, drip, held, redialling, tried
from tests.hostile.wire import MULTISTREAM, Wire, line, varint

PIECE = bytes(range(32, 127)) * 690  # no newline in it, 65,550 bytes
READ_AHEAD = 64  # questions that are asked before the first answer is read


@attack("20 new ones a second", "300 TCP connections at a time")
@dialling(20.0, 5_000, 300)
async def idle_tcp(assault: Assault, wire: Wire, number: int) -> None:
    """Connections that never say a word."""
    await held(wire, assault.seconds)


@attack("2 a second", "12 MB a line, 4 at a time")
@dialling(2.0, 200, 4)
async def line_without_newline(assault: Assault, wire: Wire, number: int) -> None:
    """A line that ends in something else than it should."""
    await wire.send(varint(12_000_000))
    for _ in range(12_000_000 // len(PIECE) + 1):
        await wire.send(PIECE)
    await held(wire, 5.0)


@attack("2 a second", "26 MB a line, 4 at a time")
@dialling(2.0, 100, 4)
async def line_of_26_mb(assault: Assault, wire: Wire, number: int) -> None:
    """A length that is kept to."""
    await wire.send(line(MULTISTREAM) + varint(26_000_000))
    for _ in range(26_000_000 // len(PIECE) - 1):
        await wire.send(PIECE)
    await held(wire, 30.0)


@attack("as fast as it is answered, 64 ahead", "8 connections at a time")
@redialling(8, 2.0)
async def unknown_protocols(assault: Assault, wire: Wire) -> None:
    """Ask for protocols that are not there, for ever."""
    await ask_ahead(assault, wire, b"/nope/%d")


@attack("as fast as it is answered, 64 ahead", "4 connections at a time")
@redialling(4, 2.0)
async def endless_ls(assault: Assault, wire: Wire) -> None:
    """Ask for the list of protocols, for ever."""
    await ask_ahead(assault, wire, b"ls")


async def ask_ahead(assault: Assault, end: Wire, question: bytes) -> None:
    """Ask by multistream-select, many questions before the first answer is read."""
    await end.send(line(MULTISTREAM))
    await end.line()
    for number in range(1_000_000):
        text = question % number if b"%" in question else question
        await end.send(line(text) * READ_AHEAD)
        for _ in range(READ_AHEAD):
            await end.line()
        assault.spent.count("answered", READ_AHEAD)


@attack("a byte a second each", "60 connections at a time")
@redialling(60)
async def slow_drip(assault: Assault, wire: Wire) -> None:
    """An offer of a protocol that takes half a minute."""
    await drip(wire, line(MULTISTREAM) + line(b"/noise"), 1.0)


@attack("200 a second", "20,000 connections")
@dialling(200.0, 20_000, 100)
async def connect_and_reset(assault: Assault, wire: Wire, number: int) -> None:
    """Come and go."""
    wire.reset()
    await trio.lowlevel.checkpoint()


@attack("50 a second", "50 lines of 2 GB announced, none sent, at a time")
@dialling(50.0, 5_000, 50)
async def announced_length(assault: Assault, wire: Wire, number: int) -> None:
    """A length alone, of every size, and then nothing."""
    await wire.send(line(MULTISTREAM) + varint(1 << (number % 62)))
    await held(wire, 15.0)


@attack("100 a second", "10,000 connections")
@dialling(100.0, 10_000, 100)
async def half_an_agreement(assault: Assault, wire: Wire, number: int) -> None:
    """Agree on Noise and leave."""
    await wire.send(line(MULTISTREAM) + line(b"/noise"))
    await wire.line()
    await tried(assault, wire.line)


@attack("4 MB/s on each", "2 connections")
@redialling(2, 2.0)
async def endless_length(assault: Assault, wire: Wire) -> None:
    """A varint whose end never comes."""
    for _ in range(int(assault.seconds) * 64):
        await wire.send(b"\xff" * 65_536)
        await trio.sleep(1 / 64)
