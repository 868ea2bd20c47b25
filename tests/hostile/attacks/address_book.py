"""Attacks with statements about other peers, and on whom the node dials."""

import secrets
from collections.abc import Awaitable, Callable
from functools import wraps

import trio

from swarm.identity import Identity
from swarm.peers.dht import key_of
from swarm.wire import codec
from swarm.wire.messages import (
    ADVERTS_PROTOCOL,
    HELLO_PROTOCOL,
    KNOWN_PEERS_MAX,
    PROVIDERS_PROTOCOL,
    PROVIDERS_REPLY_BYTES_MAX,
    REACH_PROTOCOL,
    DialBack,
    ProvidersReply,
)
from tests.hostile.attack import (
    Assault,
    Run,
    admitting,
    asking,
    attack,
    connected,
    crowd,
    held,
    tried,
)
from tests.hostile.messages import find_providers, hello, hello_reply, known_peer, no_adverts
from tests.hostile.wire import Mux

LIARS = 4
DIALS_PER_S_MAX = 1.0  # that a node may make to one endpoint on the word of strangers
DIALS_AT_ONCE = 5  # before it has learned that nobody is there
ANSWERS = (b"", secrets.token_bytes(300), bytes(131_072), b"\x91" * 9_000)


@attack("100 a second", "8 connections of new keys")
@admitting(8)
async def hello_flood(assault: Assault, mux: Mux) -> None:
    """Proper hellos, far more than anybody needs."""
    await asking(assault, mux, HELLO_PROTOCOL, hello(assault.run_id, mux.key), 12.5)


def with_a_victim(lie: Callable[[Assault, str], Awaitable[None]]) -> Run:
    """Decorate lies about an address: somebody listens there and counts how often it is dialled."""

    @wraps(lie)
    async def run(assault: Assault) -> None:
        host, dials, began_s = assault.source(249) or "127.0.0.1", 0, trio.current_time()

        async def count(stream: trio.SocketStream) -> None:
            nonlocal dials
            dials += 1
            await trio.aclose_forcefully(stream)

        listeners = await trio.open_tcp_listeners(0, host=host)
        port = listeners[0].socket.getsockname()[1]
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.serve_listeners, count, listeners)
                await lie(assault, f"/ip4/{host}/tcp/{port}")
        finally:
            elapsed_s = max(1.0, trio.current_time() - began_s)
            assault.spent.count("dials of the victim", dials)
            most = DIALS_AT_ONCE + DIALS_PER_S_MAX * elapsed_s
            assault.claim("dials of a victim on strangers' word", dials, most)

    return run


@attack("4 liars, each back every 2 s", "32 names a hello", alone=True)
@with_a_victim
async def hearsay_of_a_victim(assault: Assault, victim: str) -> None:
    """Names of nobody at a victim's address: how often is it dialled?"""

    async def use(mux: Mux) -> None:
        own = (f"{victim}/p2p/{mux.key.peer_id}",)

        def answer(_: bytes) -> bytes:
            assault.spent.count("lies")
            known = [known_peer(victim) for _ in range(KNOWN_PEERS_MAX)]
            return hello_reply(assault.run_id, own, known)

        mux.serving = {HELLO_PROTOCOL: answer, ADVERTS_PROTOCOL: no_adverts}
        with trio.move_on_after(2.5):
            record = hello(assault.run_id, mux.key, own)
            await asking(assault, mux, HELLO_PROTOCOL, record, 0.5)

    await connected(assault, LIARS, use)


@attack("20 new keys a second", "2,000 keys")
@with_a_victim
async def many_who_live_there(assault: Assault, victim: str) -> None:
    """Many keys, each of which says that it can be reached at the victim's."""

    async def once(_: int) -> None:
        async with assault.admitted() as mux:
            own = hello(assault.run_id, mux.key, (f"{victim}/p2p/{mux.key.peer_id}",))
            await mux.request(HELLO_PROTOCOL, own)

    await crowd(assault, once, 20.0, 2_000, 20)


@attack("20 a second", "2,000 keys, each of six runs")
@with_a_victim
async def provider_spam(assault: Assault, victim: str) -> None:
    """Say of many runs, this one too, that somebody takes part in them at the victim's."""

    async def once(_: int) -> None:
        async with assault.admitted() as mux:
            addresses = [f"{victim}/p2p/{mux.key.peer_id}"] * 8
            for run in range(6):
                found = key_of(assault.run_id) if run == 0 else secrets.token_bytes(32)
                told = find_providers(found, "provide", addresses)
                await tried(assault, mux.request, PROVIDERS_PROTOCOL, told)

    await crowd(assault, once, 20.0, 2_000, 20)


@attack("40 a second", "8 connections, four ports each")
@admitting(8)
async def dial_back_flood(assault: Assault, mux: Mux) -> None:
    """Have the node dial our own ports, over and over."""
    ask = codec.encode(DialBack(type="dial_back", ports=tuple(range(40_001, 40_005))))
    await asking(assault, mux, REACH_PROTOCOL, ask, 5.0)


@attack("as often as it is asked", "8 connections")
@admitting(8, 0.5)
async def nonsense_answers(assault: Assault, mux: Mux) -> None:
    """Answer the node's own questions with what is no answer, large or endless."""
    answer = ANSWERS[assault.spent.connections % len(ANSWERS)]
    mux.serving = dict.fromkeys((HELLO_PROTOCOL, ADVERTS_PROTOCOL), lambda _: answer)
    await held(mux, 6.0)


@attack("30 a second", "3,000 connections of one key")
async def one_key_over_and_over(assault: Assault) -> None:
    """The same peer connects again and again, each time beside itself."""
    key = assault.key()

    async def once(number: int) -> None:
        async with assault.admitted(number % 3, key) as mux:
            await held(mux, 3.0)

    await crowd(assault, once, 30.0, 3_000, 60)


@attack("100 a second", "1,000 keys of one address", alone=True)
async def providers_of_one_address(assault: Assault) -> None:
    """All places of a run in the hash table: are five honest providers found?"""
    key, honest, found = key_of("besieged"), [assault.key() for _ in range(5)], set[str]()

    async def say(number: int, who: Identity) -> None:
        address = f"/ip4/{assault.source(number)}/tcp/4001/p2p/{who.peer_id}"
        async with assault.admitted(number, who) as mux:
            await mux.request(PROVIDERS_PROTOCOL, find_providers(key, "provide", (address,)))

    async def greedy(_: int) -> None:
        assault.spent.count("providers")
        await say(0, assault.key())

    async def look() -> None:
        async with assault.admitted(9) as mux:
            answer = await mux.request(PROVIDERS_PROTOCOL, find_providers(key, "find"))
            reply = codec.decode(answer or b"", ProvidersReply, PROVIDERS_REPLY_BYTES_MAX)
            found.update(each.peer_id for each in reply.providers)

    for number, who in enumerate(honest, 1):
        await tried(assault, say, number, who)
    with trio.move_on_after(0.8 * assault.seconds):
        await crowd(assault, greedy, 100.0, 1_000, 50)
    await tried(assault, look)
    hidden = sum(who.peer_id not in found for who in honest)
    assault.claim("honest providers hidden", hidden, 0)
