"""What a peer can say about others, and whom it can make the node dial."""

import secrets

import trio
from siege_messages import hello, hello_reply, known_peer, no_adverts, provide, wanted
from siege_wire import FAILURES, Mux

from siege_attacks import Assault, attack, crowd, held, over_and_over, paced, side_by_side, tried
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

LIARS = 4
DIALS_PER_S_MAX = 1.0  # that a node may make to one endpoint on the word of strangers
DIALS_AT_ONCE = 5  # before it has learned that nobody is there


@attack("address_book", "100 a second", "8 connections of new keys")
async def hello_flood(assault: Assault) -> None:
    """Proper hellos, far more than anybody needs."""

    async def one(place: int) -> None:
        async def once(_: int) -> None:
            key = assault.key()
            async with assault.admitted(0, key) as mux:
                record = hello(assault.run_id, key)
                async for _number in paced(assault, 12.5, 100_000):
                    await tried(assault, mux.request, HELLO_PROTOCOL, record)
                    if mux.over.is_set():
                        return

        await over_and_over(assault, once, 1.0)

    await side_by_side(8, one)


class _Victim:
    """Somebody at an address of the attacker's choice, who counts who comes."""

    def __init__(self) -> None:
        self.dials = 0
        self.address = ""

    async def listen(self, host: str, task_status: trio.TaskStatus[None]) -> None:
        async def hear(stream: trio.SocketStream) -> None:
            self.dials += 1
            await trio.aclose_forcefully(stream)

        listeners = await trio.open_tcp_listeners(0, host=host)
        port = listeners[0].socket.getsockname()[1]
        self.address = f"/ip4/{host}/tcp/{port}"
        task_status.started()
        await trio.serve_listeners(hear, listeners)


async def _with_a_victim(assault: Assault, liars: int, lie: object) -> None:
    assert callable(lie)
    victim = _Victim()
    began_s = trio.current_time()
    try:
        async with trio.open_nursery() as nursery:

            async def listen(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
                await victim.listen(assault.source(249), task_status)

            await nursery.start(listen)
            for _ in range(liars):
                nursery.start_soon(lie, victim)
    finally:
        elapsed_s = max(1.0, trio.current_time() - began_s)
        most = DIALS_AT_ONCE + DIALS_PER_S_MAX * elapsed_s
        assault.spent.count("dials of the victim", victim.dials)
        assault.claim("dials of a victim on strangers' word", victim.dials, most)


async def _tell(assault: Assault, mux: Mux, key: Identity, address: str, per_s: float) -> None:
    """Answer hellos with 32 peers at the address, and say hello from there ourselves."""

    def answer(_: bytes) -> bytes:
        assault.spent.count("lies")
        known = [known_peer(address) for _ in range(KNOWN_PEERS_MAX)]
        return hello_reply(assault.run_id, (f"{address}/p2p/{key.peer_id}",), known)

    mux.serving[HELLO_PROTOCOL] = answer
    mux.serving[ADVERTS_PROTOCOL] = no_adverts
    own = hello(assault.run_id, key, (f"{address}/p2p/{key.peer_id}",))
    async for _ in paced(assault, per_s, 1_000):
        await tried(assault, mux.request, HELLO_PROTOCOL, own)
        if mux.over.is_set():
            return


@attack("address_book", "4 liars, each back every 2 s", "32 names a hello", alone=True)
async def hearsay_of_a_victim(assault: Assault) -> None:
    """Names of nobody at a victim's address: how often is it dialled?"""

    async def lie(victim: _Victim) -> None:
        async def once(_: int) -> None:
            key = assault.key()
            with trio.move_on_after(2.5):
                async with assault.admitted(0, key) as mux:
                    await _tell(assault, mux, key, victim.address, 0.5)

        await over_and_over(assault, once, 1.0)

    await _with_a_victim(assault, LIARS, lie)


@attack("address_book", "20 new keys a second", "2,000 keys")
async def many_who_live_there(assault: Assault) -> None:
    """Many keys, each of which says that it can be reached at the victim's."""

    async def lie(victim: _Victim) -> None:
        async def once(_: int) -> None:
            key = assault.key()
            async with assault.admitted(0, key) as mux:
                own = hello(assault.run_id, key, (f"{victim.address}/p2p/{key.peer_id}",))
                await mux.request(HELLO_PROTOCOL, own)

        await crowd(assault, once, 20.0, 2_000, 20)

    await _with_a_victim(assault, 1, lie)


@attack("address_book", "20 a second", "2,000 keys, each of four runs")
async def provider_spam(assault: Assault) -> None:
    """Say of many runs, this one too, that somebody takes part in them at the victim's."""

    async def lie(victim: _Victim) -> None:
        async def once(_: int) -> None:
            key = assault.key()
            async with assault.admitted(0, key) as mux:
                addresses = [f"{victim.address}/p2p/{key.peer_id}"] * 8
                for run in range(6):
                    found = key_of(assault.run_id) if run == 0 else secrets.token_bytes(32)
                    told = provide(found, addresses)
                    await tried(assault, mux.request, PROVIDERS_PROTOCOL, told)

        await crowd(assault, once, 20.0, 2_000, 20)

    await _with_a_victim(assault, 1, lie)


@attack("address_book", "40 a second", "8 connections, four ports each")
async def dial_back_flood(assault: Assault) -> None:
    """Have the node dial our own ports, over and over."""
    ports = tuple(range(40_001, 40_005))
    ask = codec.encode(DialBack(type="dial_back", ports=ports))

    async def one(_: int) -> None:
        async def once(_: int) -> None:
            async with assault.admitted(0) as mux:
                async for _number in paced(assault, 5.0, 10_000):
                    await tried(assault, mux.request, REACH_PROTOCOL, ask)
                    if mux.over.is_set():
                        return

        await over_and_over(assault, once, 1.0)

    await side_by_side(8, one)


@attack("address_book", "as often as it is asked", "8 connections")
async def nonsense_answers(assault: Assault) -> None:
    """Answer the node's own questions with what is no answer, large or endless."""
    answers = (b"", secrets.token_bytes(300), bytes(131_072), b"\x91" * 9_000)

    async def one(place: int) -> None:
        async def once(number: int) -> None:
            async with assault.admitted(0) as mux:
                answer = answers[(place + number) % len(answers)]
                mux.serving[HELLO_PROTOCOL] = lambda _: answer
                mux.serving[ADVERTS_PROTOCOL] = lambda _: answer
                await held(mux, 6.0)

        await over_and_over(assault, once, 0.5)

    await side_by_side(8, one)


@attack("address_book", "30 a second", "3,000 connections of one key")
async def one_key_over_and_over(assault: Assault) -> None:
    """The same peer connects again and again, each time beside itself."""
    key = assault.key()

    async def once(number: int) -> None:
        async with assault.admitted(number % 3, key) as mux:
            await held(mux, 3.0)

    try:
        await crowd(assault, once, 30.0, 3_000, 60)
    except FAILURES:
        return


@attack("address_book", "100 a second", "1,000 keys of one address", alone=True)
async def providers_of_one_address(assault: Assault) -> None:
    """All places of a run in the hash table: are five honest providers found?"""
    key, honest, found = key_of("besieged"), [assault.key() for _ in range(5)], set[str]()

    async def say(number: int, who: Identity) -> None:
        address = f"/ip4/{assault.source(number)}/tcp/4001/p2p/{who.peer_id}"
        async with assault.admitted(number, who) as mux:
            await mux.request(PROVIDERS_PROTOCOL, provide(key, (address,)))

    async def greedy(_: int) -> None:
        assault.spent.count("providers")
        await say(0, assault.key())

    async def look() -> None:
        async with assault.admitted(9) as mux:
            answer = await mux.request(PROVIDERS_PROTOCOL, wanted(key))
            reply = codec.decode(answer, ProvidersReply, PROVIDERS_REPLY_BYTES_MAX)
            found.update(each.peer_id for each in reply.providers)

    for number, who in enumerate(honest, 1):
        await tried(assault, say, number, who)
    await crowd(assault, greedy, 100.0, 1_000, 50)
    await tried(assault, look)
    hidden = sum(who.peer_id not in found for who in honest)
    assault.claim("honest providers hidden", hidden, 0)
