"""Attacks with requests: how many, how large, how slow, and with answers that lie unread."""

import secrets

import trio

from swarm.wire import codec
from swarm.wire.messages import (
    ADVERTS_PROTOCOL,
    HELLO_PROTOCOL,
    HOLDERS_PROTOCOL,
    ROLLOUTS_PROTOCOL,
    WANT_GROUPS_MAX,
    Have,
    RecentAdverts,
    Want,
)
from tests.hostile.attack import (
    Assault,
    admitting,
    asking,
    attack,
    connected,
    drip,
    held,
    paced,
    side_by_side,
    tried,
)
from tests.hostile.messages import hello, want
from tests.hostile.wire import MULTISTREAM, Mux, framed, line

TOGETHER = 4  # requests of one peer at a time
NAMES = (ROLLOUTS_PROTOCOL, HOLDERS_PROTOCOL, HELLO_PROTOCOL)


async def _ask_on(assault: Assault, protocol: str, payload: bytes, per_s: float, keys: int) -> None:
    """Ask at a rate from so many keys of one address, a new key when one is cut off."""

    async def use(mux: Mux) -> None:
        rate = per_s / TOGETHER
        await side_by_side(TOGETHER, lambda _: asking(assault, mux, protocol, payload, rate))

    await connected(assault, keys, use)


def _ids() -> tuple[bytes, ...]:
    return tuple(secrets.token_bytes(32) for _ in range(WANT_GROUPS_MAX))


def recent_adverts(run_id: str) -> bytes:
    return codec.encode(RecentAdverts(type="recent_adverts", run_id=run_id))


@attack("200 a second", "4 keys of one address, 50 a second each")
async def want_flood(assault: Assault) -> None:
    """Groups that nobody has, 16 at a time."""
    ask = codec.encode(Want(type="want", run_id=assault.run_id, group_ids=_ids()))
    await _ask_on(assault, ROLLOUTS_PROTOCOL, ask, 50.0, 4)


@attack("160 a second", "8 keys of one address, just within their quotas")
async def wants_within_quotas(assault: Assault) -> None:
    """As many as each may."""
    await _ask_on(assault, ROLLOUTS_PROTOCOL, want(assault.run_id), 19.0, 8)


@attack("200 a second", "4 keys of one address, 50 a second each")
async def have_flood(assault: Assault) -> None:
    """Which of 16 groups are here?"""
    ask = codec.encode(Have(type="have", run_id=assault.run_id, group_ids=_ids()))
    await _ask_on(assault, HOLDERS_PROTOCOL, ask, 50.0, 4)


@attack("80 a second", "4 keys of one address, 20 a second each")
async def catch_up_flood(assault: Assault) -> None:
    """All adverts, again and again."""
    await _ask_on(assault, ADVERTS_PROTOCOL, recent_adverts(assault.run_id), 20.0, 4)


@attack("40 a second", "4 keys of one address, 4 KB each")
async def garbage_requests(assault: Assault) -> None:
    """Bytes that are no request, to two protocols."""
    async with trio.open_nursery() as nursery:
        for protocol in (ROLLOUTS_PROTOCOL, HELLO_PROTOCOL):
            junk = secrets.token_bytes(4_000)
            nursery.start_soon(_ask_on, assault, protocol, junk, 10.0, 2)


@attack("16 a second", "8 streams of one connection, 2 KB each")
@admitting(1, 0.5)
async def garbage_on_streams(assault: Assault, mux: Mux) -> None:
    """Bytes that name no protocol."""
    for _ in range(8):
        await mux.open(more=secrets.token_bytes(2_000))
    await held(mux, 2.0)


@attack("each announced whole and sent half", "250 streams, 8 connections")
@admitting(8, 0.5)
async def half_requests(assault: Assault, mux: Mux) -> None:
    """Requests whose end never comes, on as many streams as there are."""
    for number in range(250):
        await mux.open(NAMES[number % 3], (4_000).to_bytes(4, "big") + bytes(2_000))
    await held(mux, 30.0)


@attack("a byte in half a second each", "16 streams of one connection")
@admitting(1)
async def slow_payloads(assault: Assault, mux: Mux) -> None:
    """Requests that are announced whole and come byte by byte."""
    streams = [await mux.open(ROLLOUTS_PROTOCOL, (4_096).to_bytes(4, "big")) for _ in range(16)]
    await side_by_side(16, lambda n: tried(assault, drip, streams[n], bytes(4_096), 0.5))


@attack("20 a second on each", "4 connections that do not read")
@admitting(4, deaf=True)
async def unread_answers(assault: Assault, mux: Mux) -> None:
    """Ask for the longest answers, and read none."""
    asks = (
        (ADVERTS_PROTOCOL, recent_adverts(assault.run_id)),
        (HELLO_PROTOCOL, hello(assault.run_id, mux.key)),
    )
    async for number in paced(assault, 20.0, 10_000):
        protocol, payload = asks[number % 2]
        await mux.open(protocol, framed(payload))


@attack("50 a second", "4 GB announced each, none sent")
@admitting(1)
async def announced_requests(assault: Assault, mux: Mux) -> None:
    """Requests of a length that nobody could take."""
    async for _ in paced(assault, 50.0, mux=mux):
        await mux.open(ROLLOUTS_PROTOCOL, b"\xff\xff\xff\xff")


@attack("a byte in two seconds each", "250 streams of one connection")
@admitting(1)
async def slow_streams(assault: Assault, mux: Mux) -> None:
    """Protocols that are agreed on byte by byte."""
    word = line(MULTISTREAM) + line(ROLLOUTS_PROTOCOL.encode())
    streams = [await mux.open() for _ in range(250)]
    await side_by_side(250, lambda n: tried(assault, drip, streams[n], word, 2.0))


@attack("as fast as it is answered", "2 connections, 64 ahead")
@admitting(2)
async def unknown_stream_protocols(assault: Assault, mux: Mux) -> None:
    """Streams that ask for protocols that nobody serves, sixteen on each."""
    names = b"".join(line(b"/none/%d" % number) for number in range(15))
    async for _ in paced(assault, 400.0, mux=mux):
        await mux.open("/none/0", names)
