"""What whoever reaches the monitor's own broker can make it hold: little, and not for long."""

import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import NamedTuple

import psutil
import pytest
import trio

from node.monitor.embedded_broker import RETAINED_TOPICS_MAX
from node.monitor.monitoring import embedded_broker
from tests.brokers import free_port
from tests.support import run

pytestmark = pytest.mark.integration

MIB = 1 << 20
WAIT_S = 60.0
CLIENTS_PER_ADDRESS = 256  # that the broker has room for on loopback
GAIN_MIB = 48

_names = count()


class Target(NamedTuple):
    port: int
    process: psutil.Process
    streams: list[trio.SocketStream]  # that were opened; closed at the end

    async def open(self) -> trio.SocketStream:
        self.streams.append(await trio.open_tcp_stream("127.0.0.1", self.port))
        return self.streams[-1]

    def memory_mib(self) -> float:
        rss: int = self.process.memory_info().rss
        return rss / MIB


@asynccontextmanager
async def target() -> AsyncIterator[Target]:
    before = set(psutil.Process().children())
    port = free_port()
    async with embedded_broker(f"127.0.0.1:{port}"):
        (process,) = set(psutil.Process().children()) - before
        where = Target(port, process, [])
        try:
            yield where
        finally:
            for stream in where.streams:
                stream.socket.close()


def length(size: int) -> bytes:
    raw = bytearray()
    while True:
        size, low = size >> 7, size & 0x7F
        raw.append(low | (0x80 if size else 0))
        if not size:
            return bytes(raw)


def text(value: bytes) -> bytes:
    return len(value).to_bytes(2, "big") + value


def packet(kind: int, body: bytes) -> bytes:
    return bytes((kind,)) + length(len(body)) + body


def connect(*, name: bytes | None = None, clean: bool = True, will: bytes = b"") -> bytes:
    flags = (2 if clean else 0) | (4 if will else 0)
    named = text(f"c{next(_names)}".encode() if name is None else name)
    end = text(b"w") + text(will) if will else b""
    return packet(0x10, text(b"MQTT") + bytes((4, flags, 0, 60)) + named + end)


def publish(topic: bytes, data: bytes, *, qos: int = 0, number: int = 1) -> bytes:
    head = text(topic) + (number.to_bytes(2, "big") if qos else b"")
    return packet(0x30 | qos << 1, head + data)


def retained(topic: bytes) -> bytes:
    return packet(0x31, text(topic) + b"kept")


def subscribe(topic: bytes, qos: int = 0) -> bytes:
    return packet(0x82, b"\x00\x01" + text(topic) + bytes((qos,)))


async def client(where: Target, **options: object) -> trio.SocketStream:
    stream = await where.open()
    await stream.send_all(connect(**options))  # type: ignore[arg-type]
    with trio.fail_after(WAIT_S):
        assert (await stream.receive_some(4))[:1] == b"\x20", "it is let in"
    return stream


async def send_all_that_goes(stream: trio.SocketStream, data: bytes, times: int) -> int:
    """How many bytes went before the connection ended, or nothing moved any more."""
    sent = 0
    with suppress(trio.BrokenResourceError), trio.move_on_after(WAIT_S / 2):
        for _ in range(times):
            with trio.fail_after(5.0):
                await stream.send_all(data)
            sent += len(data)
    return sent


async def ended(stream: trio.SocketStream) -> bool:
    with suppress(trio.BrokenResourceError):
        while await stream.receive_some(4_096):
            pass
    return True


async def is_well(where: Target) -> None:
    """An honest pair is let in and heard."""
    with trio.fail_after(WAIT_S):
        hearing, saying = await client(where), await client(where)
        await hearing.send_all(subscribe(b"honest"))
        assert (await hearing.receive_some(5))[:1] == b"\x90"
        await saying.send_all(publish(b"honest", b"well"))
        assert (await hearing.receive_some(100)).endswith(b"well")
        await hearing.aclose()
        await saying.aclose()


def gain_mib(attack: Callable[[Target], Awaitable[None]]) -> float:
    """The most that the broker's memory grows by under an attack, and that it is well then."""
    grown = 0.0

    async def body() -> None:
        async with target() as where:
            await is_well(where)
            before = where.memory_mib()

            async def watch() -> None:
                nonlocal grown
                while True:
                    grown = max(grown, where.memory_mib() - before)
                    await trio.sleep(0.05)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch)
                await attack(where)
                nursery.cancel_scope.cancel()
            await is_well(where)

    run(body, timeout_s=3 * WAIT_S)
    return grown


def test_no_packet_is_read_that_is_longer_than_it_may_be() -> None:
    async def attack(where: Target) -> None:
        stream = await client(where)
        await stream.send_all(b"\x30" + length(250 * MIB) + text(b"t"))
        sent = await send_all_that_goes(stream, bytes(MIB), 240)
        assert sent < 32 * MIB, "the rest has nowhere to go"
        with trio.fail_after(10):
            assert await ended(stream)

    assert gain_mib(attack) < GAIN_MIB


def test_nor_is_one_before_a_client_is_let_in() -> None:
    async def attack(where: Target) -> None:
        for kind in (0x10, 0x30, 0x82):
            stream = await where.open()
            # a name as long as names may be, and then a will that never ends
            head = text(b"MQTT") + bytes((4, 6, 0, 60)) + text(b"n" * 60_000)
            await stream.send_all(bytes((kind,)) + length(200 * MIB) + head)
            assert await send_all_that_goes(stream, bytes(MIB), 64) < 32 * MIB
            with trio.fail_after(10):
                assert await ended(stream)

    assert gain_mib(attack) < GAIN_MIB


def test_who_says_nothing_or_little_has_to_go() -> None:
    async def attack(where: Target) -> None:
        silent = await where.open()
        slow = await where.open()

        async def trickle() -> None:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                for byte in connect(name=b"x" * 99):
                    await slow.send_all(bytes((byte,)))
                    await trio.sleep(1.0)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trickle)
            with trio.fail_after(20):
                assert await ended(silent)
                assert await ended(slow)
            nursery.cancel_scope.cancel()

    assert gain_mib(attack) < GAIN_MIB


def test_one_address_has_half_of_the_places_and_whoever_is_too_many_goes_at_once() -> None:
    async def attack(where: Target) -> None:
        streams = [await where.open() for _ in range(300)]
        over = Counter[bool]()

        async def look(stream: trio.SocketStream) -> None:
            over[await ended(stream)] += 1

        with trio.move_on_after(5.0):
            async with trio.open_nursery() as nursery:
                for stream in streams:
                    nursery.start_soon(look, stream)
        assert over[True] == 300 - CLIENTS_PER_ADDRESS
        assert where.process.num_fds() < CLIENTS_PER_ADDRESS + 64
        for stream in streams:
            await stream.aclose()
        await trio.sleep(0.5)

    assert gain_mib(attack) < GAIN_MIB


def test_who_takes_nothing_is_not_waited_for() -> None:
    """The messages that wait for it are bounded, however many there are."""

    async def attack(where: Target) -> None:
        deaf = [await client(where) for _ in range(4)]
        for stream in deaf:
            await stream.send_all(subscribe(b"#", qos=1) * 8)
        loud = await client(where)
        for number in range(1_600):  # of 64 KiB, each with bytes of its own
            with suppress(trio.BrokenResourceError):
                await loud.send_all(publish(b"t", os.urandom(65_000), number=number + 1))
        await trio.sleep(2.0)

    assert gain_mib(attack) < GAIN_MIB + 512 * 65_000 / MIB


def test_messages_that_are_never_released_are_not_kept() -> None:
    async def attack(where: Target) -> None:
        stream = await client(where)
        with suppress(trio.BrokenResourceError):
            for number in range(1, 2_000):
                await stream.send_all(publish(b"t", os.urandom(65_000), qos=2, number=number))
        with trio.fail_after(10):
            assert await ended(stream)

    assert gain_mib(attack) < GAIN_MIB


def test_nothing_is_kept_of_who_came_and_went() -> None:
    async def attack(where: Target) -> None:
        for number in range(1_500):
            stream = await client(where, will=os.urandom(8_000), clean=number % 2 == 0)
            await stream.send_all(subscribe(b"t/%d" % number))
            await stream.receive_some(5)
            await stream.send_all(b"\xe0\x00")
            await stream.aclose()

    assert gain_mib(attack) < 8


@pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8")
def test_one_address_pushes_out_no_others_retained_message() -> None:
    async def body() -> None:
        async with target() as where:
            honest = await client(where)
            await honest.send_all(retained(b"lasting"))
            await is_well(where)
            greedy = await trio.open_tcp_stream("127.0.0.1", where.port, local_address="127.0.0.2")
            where.streams.append(greedy)
            await greedy.send_all(connect())
            for number in range(RETAINED_TOPICS_MAX + 500):
                await greedy.send_all(retained(b"greedy/%d" % number))
            await greedy.send_all(publish(b"x", b"x", qos=1))
            seen = b""
            while not seen.endswith(b"\x40\x02\x00\x01"):  # all before it is dealt with
                seen += await greedy.receive_some(4_096)
            await honest.send_all(subscribe(b"lasting"))
            seen = b""
            while b"lastingkept" not in seen:
                seen += await honest.receive_some(4_096)

    run(body, timeout_s=WAIT_S)


def test_filters_are_few() -> None:
    async def attack(where: Target) -> None:
        stream, answers = await client(where), Counter[int]()
        for number in range(40):
            await stream.send_all(subscribe(b"t/%d" % number))
            answers[(await stream.receive_some(5))[4]] += 1
        assert answers == {0: 16, 0x80: 24}
        await stream.send_all(subscribe(b"x" * 300))
        assert (await stream.receive_some(5))[4] == 0x80
        await stream.aclose()

    assert gain_mib(attack) < GAIN_MIB
