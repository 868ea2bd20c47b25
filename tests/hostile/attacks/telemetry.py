"""Attacks on what listens beside the swarm: a monitor's broker and page, a node's metrics page."""

import time
from collections.abc import Awaitable, Callable
from functools import partial, wraps

import trio

from swarm.identity import Identity
from tests.hostile.attack import (
    Assault,
    Run,
    attack,
    crowd,
    drip,
    held,
    over_and_over,
    paced,
    side_by_side,
    tried,
)
from tests.hostile.wire import FAILURES, Door, Wire

EVIL = "evil.example"
ANSWER_S = 8.0
CONNECT = b"\x10\x10\x00\x04MQTT\x04\x02\x00\x3c\x00\x04"  # and a client id of four bytes
HONEST_EVERY_S = 0.5
HONEST_WAIT_S_MAX = 1.0  # of an honest client, in the median
PUBLISH_BYTES = 250_000_000
on_the_page = partial(attack, target="page")


def remaining(length: int) -> bytes:
    """A length as MQTT writes it."""
    out = bytearray()
    while True:
        length, byte = divmod(length, 128)
        out.append(byte | (0x80 if length else 0))
        if not length:
            return bytes(out)


async def connected(wire: Wire) -> None:
    """Connect to the broker as a client, and be let in."""
    await wire.send(CONNECT + Identity.generate().peer_id[-4:].encode())
    with trio.fail_after(ANSWER_S):
        await wire.exactly(4)


async def honest_clients(assault: Assault) -> None:
    """One client after the other connects and leaves, from another block than the attackers. The
    time until the broker lets them in is claimed."""
    waits_s: list[float] = []
    failed = 0
    try:
        async for _ in paced(assault, 1 / HONEST_EVERY_S):
            began_s = time.monotonic()
            try:
                async with assault.dialled(block=100) as wire:
                    await connected(wire)
            except FAILURES:
                failed += 1
            waits_s.append(time.monotonic() - began_s)
    finally:
        middle = sorted(waits_s)[len(waits_s) // 2] if waits_s else ANSWER_S
        what = "s until the broker lets an honest client in"
        assault.claim(what, round(middle, 2), HONEST_WAIT_S_MAX)
        assault.claim("honest clients kept out by the broker", failed, 0)


def on_the_broker(rate: str, bound: str, *, alone: bool = False) -> Callable[[Run], Run]:
    """Enter an attack on a broker into the catalogue; honest clients come beside it."""

    def enter(attack_it: Run) -> Run:
        @wraps(attack_it)
        async def run(assault: Assault) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(honest_clients, assault)
                await attack_it(assault)

        return attack(rate, bound, target="broker", alone=alone)(run)

    return enter


@on_the_broker("up to 60 MB/s", "one message of 250 MB", alone=True)
async def huge_publish(assault: Assault) -> None:
    """One message, as large as MQTT allows."""

    async def once(_: int) -> None:
        async with assault.dialled() as wire:
            await connected(wire)
            topic = b"\x00\x05siege"
            await wire.send(b"\x30" + remaining(len(topic) + PUBLISH_BYTES) + topic)
            async for _number in paced(assault, 900.0, PUBLISH_BYTES // 65_000):
                await wire.send(bytes(65_000))
            await held(wire, 5.0)

    await over_and_over(assault, once, 0.5, 3)


@on_the_broker("200 a second", "1,000 clients at a time", alone=True)
async def many_clients(assault: Assault) -> None:
    """Clients that connect and stay."""

    async def once(number: int) -> None:
        async with assault.dialled(number) as wire:
            await connected(wire)
            await held(wire, assault.seconds)

    await crowd(assault, once, 200.0, 2_000, 1_000)


@on_the_broker("a byte a second each", "300 clients")
async def slow_clients(assault: Assault) -> None:
    """Clients that never come to the end of their first word."""
    await _dripping(assault, CONNECT, 50.0, 300)


@on_the_broker("2,000 a second", "20,000 topics of 1 KB")
async def topic_flood(assault: Assault) -> None:
    """Retained messages of ever new topics."""

    async def once(place: int) -> None:
        async with assault.dialled() as wire:
            await connected(wire)
            async for number in paced(assault, 100.0, 1_000):
                parts = []
                for each in range(20):
                    topic = f"siege/{place}/{number * 20 + each}".encode()
                    body = len(topic).to_bytes(2, "big") + topic + bytes(1_000)
                    parts.append(b"\x31" + remaining(len(body)) + body)
                await wire.send(b"".join(parts))

    await over_and_over(assault, once, 1.0, 10)


# --- pages -----------------------------------------------------------------------------------


async def get(assault: Assault, path: str, host: str, more: str = "") -> int:
    """The status of an answer; 0 where there is none."""
    async with assault.dialled() as wire:
        await wire.send(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode())
        with trio.fail_after(ANSWER_S):
            words = (await wire.some()).split(b" ", 2)
        return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


async def _foreign(assault: Assault, paths: tuple[str, ...]) -> None:
    """Ask by a name that is not the page's, as a browser does that was misled by its resolver."""
    own = foreign = 0
    port = assault.door.port
    for path in paths:
        for more in ("", f"Origin: http://{EVIL}\r\n"):
            try:
                foreign += await get(assault, path, f"{EVIL}:{port}", more) == 200
                own += await get(assault, path, f"127.0.0.1:{port}") == 200
            except FAILURES:
                assault.spent.count("no answer")
    assault.spent.count("answered by its own name", own)
    assault.claim("pages given to a foreign Host", foreign, 0)


async def _dripping(assault: Assault, word: bytes, per_s: float, together: int) -> None:
    """Connections that say a word byte by byte."""

    async def once(number: int) -> None:
        async with assault.dialled(number) as wire:
            await drip(wire, word, 1.0)

    await crowd(assault, once, per_s, 3_000, together)


async def _slow_http(assault: Assault, path: str) -> None:
    asked = answered = 0

    async def ask() -> None:
        nonlocal asked, answered
        async for _ in paced(assault, 1.0):
            asked += 1
            with trio.move_on_after(ANSWER_S):
                answered += await _answers(assault, path)

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            word = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 10_000
            await _dripping(assault, word, 20.0, 200)
    finally:
        assault.spent.count("asked meanwhile", asked)
        assault.spent.count("answered meanwhile", answered)


async def _answers(assault: Assault, path: str) -> bool:
    try:
        return await get(assault, path, f"127.0.0.1:{assault.door.port}") == 200
    except FAILURES:
        return False


async def _headers(assault: Assault) -> None:
    async def once(_: int) -> None:
        async with assault.dialled() as wire:
            await wire.send(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
            for number in range(400):
                await wire.send(b"X-%d: " % number + b"x" * 60_000 + b"\r\n")
            await held(wire, 2.0)

    await side_by_side(4, lambda _: over_and_over(assault, once, 2.0))


def on_metrics(rate: str, bound: str, *, alone: bool = False) -> Callable[[Run], Run]:
    """Enter an attack on a node's metrics page into the catalogue."""

    def enter(attack_it: Callable[[Assault], Awaitable[None]]) -> Run:
        @wraps(attack_it)
        async def run(assault: Assault) -> None:
            assault.door = Door(assault.door.host, int(assault.extra["metrics_port"]), "")
            await attack_it(assault)

        return attack(rate, bound, alone=alone)(run)

    return enter


@on_metrics("a few", "four requests", alone=True)
async def metrics_by_a_foreign_name(assault: Assault) -> None:
    """The metrics page, by a name that an attacker's resolver gave it."""
    await _foreign(assault, ("/metrics",))


@on_the_page("a few", "12 requests", alone=True)
async def page_by_a_foreign_name(assault: Assault) -> None:
    """The monitor's page, by such a name."""
    await _foreign(assault, ("/", "/api/state", "/metrics"))


@on_metrics("a byte a second each", "200 connections")
async def slow_metrics(assault: Assault) -> None:
    """Requests to the metrics page that never end."""
    await _slow_http(assault, "/metrics")


@on_the_page("a byte a second each", "200 connections")
async def slow_page(assault: Assault) -> None:
    """Requests to the monitor's page that never end."""
    await _slow_http(assault, "/")


@on_metrics("as fast as they are taken", "24 MB a request, 4 at a time")
async def metrics_headers(assault: Assault) -> None:
    """Headers without end, to the metrics page."""
    await _headers(assault)


@on_the_page("as fast as they are taken", "24 MB a request, 4 at a time")
async def page_headers(assault: Assault) -> None:
    """Headers without end, to the monitor's page."""
    await _headers(assault)


@on_the_page("50 a second", "300 at a time")
async def many_viewers(assault: Assault) -> None:
    """Viewers of the live page who read nothing."""

    async def once(number: int) -> None:
        async with assault.dialled(number) as wire:
            await wire.send(b"GET /api/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            await trio.sleep(assault.seconds)

    await crowd(assault, once, 50.0, 3_000, 300)


@on_metrics("100 a second", "5,000 requests")
async def metrics_flood(assault: Assault) -> None:
    """The metrics page, over and over."""
    await crowd(
        assault, lambda _: tried(assault, get, assault, "/metrics", "127.0.0.1"), 100.0, 5_000, 16
    )
