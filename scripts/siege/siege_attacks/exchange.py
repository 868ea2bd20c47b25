"""What a peer can ask for, and how it can leave the answers lying."""

import secrets

import trio
from siege_messages import hello, want
from siege_wire import MULTISTREAM, Mux, line

from siege_attacks import Assault, attack, held, over_and_over, paced, side_by_side, tried
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

TOGETHER = 4  # requests of one peer at a time


async def _ask_on(assault: Assault, protocol: str, payload: bytes, per_s: float, keys: int) -> None:
    """Requests at a rate from so many keys of one address, a new key when one is cut off."""

    async def one(_: int) -> None:
        async def once(_: int) -> None:
            async with assault.admitted(0) as mux:
                await side_by_side(TOGETHER, lambda _: _ask(assault, mux, protocol, payload, per_s))

        await over_and_over(assault, once, 1.0)

    await side_by_side(keys, one)


async def _ask(assault: Assault, mux: Mux, protocol: str, payload: bytes, per_s: float) -> None:
    async for _ in paced(assault, per_s / TOGETHER, 1_000_000):
        await tried(assault, mux.request, protocol, payload)
        assault.spent.count("asked")
        if mux.over.is_set():
            return


@attack("exchange", "200 a second", "4 keys of one address, 50 a second each")
async def want_flood(assault: Assault) -> None:
    """Groups that nobody has, 16 at a time."""
    ids = tuple(secrets.token_bytes(32) for _ in range(WANT_GROUPS_MAX))
    ask = codec.encode(Want(type="want", run_id=assault.run_id, group_ids=ids))
    await _ask_on(assault, ROLLOUTS_PROTOCOL, ask, 50.0, 4)


@attack("exchange", "160 a second", "8 keys of one address, just within their quotas")
async def wants_within_quotas(assault: Assault) -> None:
    """As many as each may."""
    await _ask_on(assault, ROLLOUTS_PROTOCOL, want(assault.run_id), 19.0, 8)


@attack("exchange", "200 a second", "4 keys of one address, 50 a second each")
async def have_flood(assault: Assault) -> None:
    """Which of 16 groups are here?"""
    ids = tuple(secrets.token_bytes(32) for _ in range(WANT_GROUPS_MAX))
    ask = codec.encode(Have(type="have", run_id=assault.run_id, group_ids=ids))
    await _ask_on(assault, HOLDERS_PROTOCOL, ask, 50.0, 4)


@attack("exchange", "80 a second", "4 keys of one address, 20 a second each")
async def catch_up_flood(assault: Assault) -> None:
    """All adverts, again and again."""
    ask = codec.encode(RecentAdverts(type="recent_adverts", run_id=assault.run_id))
    await _ask_on(assault, ADVERTS_PROTOCOL, ask, 20.0, 4)


@attack("exchange", "80 a second", "4 keys of one address, 4 KB each")
async def garbage_requests(assault: Assault) -> None:
    """What is no request, to each protocol."""
    await _ask_on(assault, ROLLOUTS_PROTOCOL, secrets.token_bytes(4_000), 10.0, 2)
    await _ask_on(assault, HELLO_PROTOCOL, secrets.token_bytes(4_000), 10.0, 2)


@attack("exchange", "each announced whole and sent half", "250 streams, 8 connections")
async def half_requests(assault: Assault) -> None:
    """Requests whose end never comes, on as many streams as there are."""

    async def one(_: int) -> None:
        async def once(_: int) -> None:
            async with assault.admitted(0) as mux:
                for number in range(250):
                    protocol = (ROLLOUTS_PROTOCOL, HOLDERS_PROTOCOL, HELLO_PROTOCOL)[number % 3]
                    await mux.open(protocol, (4_000).to_bytes(4, "big") + bytes(2_000))
                await held(mux, 30.0)

        await over_and_over(assault, once, 0.5)

    await side_by_side(8, one)


@attack("exchange", "20 a second on each", "4 connections that do not read")
async def unread_answers(assault: Assault) -> None:
    """Ask for the longest answers, and read none."""
    ask = codec.encode(RecentAdverts(type="recent_adverts", run_id=assault.run_id))

    async def one(_: int) -> None:
        async def once(_: int) -> None:
            key = assault.key()
            async with assault.admitted(0, key, deaf=True) as mux:
                asks = ((ADVERTS_PROTOCOL, ask), (HELLO_PROTOCOL, hello(assault.run_id, key)))
                async for number in paced(assault, 20.0, 10_000):
                    protocol, payload = asks[number % 2]
                    await mux.open(protocol, len(payload).to_bytes(4, "big") + payload)

        await over_and_over(assault, once, 1.0)

    await side_by_side(4, one)


@attack("exchange", "50 a second", "4 GB announced each, none sent")
async def announced_requests(assault: Assault) -> None:
    """Requests of a length that nobody could take."""

    async def once(_: int) -> None:
        async with assault.admitted(0) as mux:
            async for _number in paced(assault, 50.0, 100_000):
                await mux.open(ROLLOUTS_PROTOCOL, b"\xff\xff\xff\xff")
                if mux.over.is_set():
                    return

    await over_and_over(assault, once, 1.0)


@attack("exchange", "a byte in two seconds each", "250 streams of one connection")
async def slow_streams(assault: Assault) -> None:
    """Protocols that are agreed on byte by byte."""
    word = line(MULTISTREAM) + line(ROLLOUTS_PROTOCOL.encode())

    async def once(_: int) -> None:
        async with assault.admitted(0) as mux:
            streams = [await mux.open() for _ in range(250)]
            for at in range(len(word)):
                for stream in streams:
                    await tried(assault, stream.send, word[at : at + 1])
                await trio.sleep(2.0)

    await over_and_over(assault, once, 1.0)


@attack("exchange", "as fast as it is answered", "2 connections, 64 ahead")
async def unknown_stream_protocols(assault: Assault) -> None:
    """Streams that ask for protocols that nobody serves, sixteen on each."""
    names = b"".join(line(b"/none/%d" % number) for number in range(15))

    async def one(_: int) -> None:
        async def once(_: int) -> None:
            async with assault.admitted(0) as mux:
                async for _number in paced(assault, 400.0, 1_000_000):
                    await mux.open("/none/0", names)
                    if mux.over.is_set():
                        return

        await over_and_over(assault, once, 1.0)

    await side_by_side(2, one)
