"""What a producer can make a node compute: groups that keep every rule and cost seconds each."""

import time
from collections.abc import Sequence

import trio
from siege_messages import Producer, load_run, no_adverts
from siege_target import ask_status
from siege_wire import Mux, Spent, admitted

from siege_attacks import Assault, attack, over_and_over, paced, side_by_side
from siege_attacks.gossip import gossiping, published, signed, wrapped
from swarm.wire.messages import ADVERTS_PROTOCOL, ROLLOUTS_PROTOCOL, adverts_topic

DEAR, CHEAP = "propositional_logic", "scripted_sum"
NEGATIONS = "¬" * 190 + "P"
PARENTHESES = "(" * 90 + "P" + ")" * 90
CHAIN = "→".join("P" * 95)
PRODUCERS = 4
GROUPS_AT_ONCE = 8  # in an advert
HONEST_EVERY_S = 1.0
WAIT_S_MAX = 3.0  # of an honest group, from its being fetched until it counts
LOOK_S = 0.2


async def _offer(
    assault: Assault, producer: Producer, mux: Mux, environment: str, texts: Sequence[str],
    every_s: float, each: int,
) -> None:  # fmt: skip
    """Advertise new groups again and again, and serve them."""
    mux.serving[ROLLOUTS_PROTOCOL] = producer.answer_want
    mux.serving[ADVERTS_PROTOCOL] = no_adverts
    topic = adverts_topic(assault.run_id)
    stream = await gossiping(mux, topic)
    async for _ in paced(assault, 1 / every_s, 5_000):
        ids = [producer.add(environment, texts) for _ in range(each)]
        message = signed(producer.identity, [topic], producer.advert(ids))
        await stream.send(wrapped(published(message)))
        assault.spent.count("groups offered", each)
        if mux.over.is_set():
            return


async def _produce(assault: Assault, text: str, completions: int) -> None:
    """Producers of dear groups; a new key when one is cut off."""
    run = load_run(assault.extra["run_file"])

    async def one(place: int) -> None:
        async def once(_: int) -> None:
            key = assault.key()
            address = f"/ip4/{assault.source()}/tcp/9"
            producer = Producer(key, run, address)
            async with assault.admitted(0, key) as mux:
                texts = [text] * completions
                await _offer(assault, producer, mux, DEAR, texts, 2.0, GROUPS_AT_ONCE)

        await over_and_over(assault, once, 1.0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_honest, assault)
        await side_by_side(PRODUCERS, one)


async def _honest(assault: Assault) -> None:
    """An honest producer of another block, and how long its groups wait for their turn."""
    run = load_run(assault.extra["run_file"])
    key = assault.key()
    producer = Producer(key, run, f"/ip4/{assault.source(7, block=90)}/tcp/9")
    waits_s: list[float] = []
    try:
        async with (
            admitted(assault.door, key, assault.source(7, block=90), Spent()) as mux,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(_watch, assault, producer, waits_s)
            await _offer(assault, producer, mux, CHEAP, ["1", "2"], HONEST_EVERY_S, 1)
    finally:
        fetched = len(producer.wanted_at_s)
        assault.spent.count("honest groups fetched", fetched)
        assault.spent.count("honest groups counted", len(waits_s))
        now_s = time.monotonic()
        waits_s += [now_s - at_s for at_s in sorted(producer.wanted_at_s)[len(waits_s) :]]
        assault.claim("s an honest group waited", round(max(waits_s, default=0.0), 1), WAIT_S_MAX)


async def _watch(assault: Assault, producer: Producer, waits_s: list[float]) -> None:
    while True:
        await trio.sleep(LOOK_S)
        status = await trio.to_thread.run_sync(ask_status, assault.data_dir)
        for peer in (status or {}).get("peers", ()):
            if peer["peer_id"] == producer.identity.peer_id:
                done = peer["groups_accepted"] + sum(peer["rejected"].values())
                while len(waits_s) < min(done, len(producer.wanted_at_s)):
                    waits_s.append(time.monotonic() - producer.wanted_at_s[len(waits_s)])


@attack(
    "verifier", "16 groups a second", "64 completions each, 4 producers",
    target="reasoner", alone=True,
)  # fmt: skip
async def negations(assault: Assault) -> None:
    """Formulas of 190 negations: each parses in a fifth of a second."""
    await _produce(assault, NEGATIONS, 64)


@attack(
    "verifier", "16 groups a second", "6 completions each, 4 producers",
    target="reasoner",
)  # fmt: skip
async def just_below_the_limit(assault: Assault) -> None:
    """Few enough of them that no group runs out of its time."""
    await _produce(assault, NEGATIONS, 6)


@attack("verifier", "16 groups a second", "64 completions each, 4 producers", target="reasoner")
async def parentheses(assault: Assault) -> None:
    """Formulas nested as deep as they may be."""
    await _produce(assault, PARENTHESES, 64)


@attack(
    "verifier", "16 groups a second", "64 completions each, 4 producers", target="reasoner",
)  # fmt: skip
async def implications(assault: Assault) -> None:
    """Formulas of 94 arrows."""
    await _produce(assault, CHAIN, 64)
