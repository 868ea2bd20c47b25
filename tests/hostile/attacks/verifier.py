"""Attacks of a producer on the verifier: groups that keep every rule and cost seconds each."""

import time
from collections.abc import Callable, Sequence
from functools import partial, wraps

import trio

from swarm.wire.messages import ADVERTS_PROTOCOL, ROLLOUTS_PROTOCOL, adverts_topic
from tests.hostile.attack import Assault, Run, attack, connected, paced
from tests.hostile.attacks.gossip import gossiping, published, signed
from tests.hostile.messages import Producer, load_run, no_adverts
from tests.hostile.targets import ask_status
from tests.hostile.wire import Mux, Spent, admitted

DEAR, CHEAP = "propositional_logic", "scripted_sum"
PRODUCERS = 4
GROUPS_AT_ONCE = 8  # in an advert
WAIT_S_MAX = 3.0  # of an honest group, from its being fetched until it counts
LOOK_S = 0.2
on_the_verifier = partial(attack, "16 groups a second", target="reasoner")


async def _offer(
    assault: Assault, producer: Producer, mux: Mux, environment: str, texts: Sequence[str],
    every_s: float, each: int,
) -> None:  # fmt: skip
    """Advertise new groups again and again, and serve them."""
    mux.serving = {ROLLOUTS_PROTOCOL: producer.answer_want, ADVERTS_PROTOCOL: no_adverts}
    topic = adverts_topic(assault.run_id)
    stream = await gossiping(mux, topic)
    async for _ in paced(assault, 1 / every_s, 5_000, mux):
        ids = [producer.add(environment, texts) for _ in range(each)]
        await stream.send(published(signed(mux.key, [topic], producer.advert(ids))))
        assault.spent.count("groups offered", each)


def producing(completions: int) -> Callable[..., Run]:
    """Decorate what makes a text: producers offer groups of it, a new key when one is cut off,
    beside an honest producer of another block."""

    def shaped(make: Callable[[], str]) -> Run:
        @wraps(make)
        async def run(assault: Assault) -> None:
            rules, texts = load_run(assault.extra["run_file"]), [make()] * completions

            async def use(mux: Mux) -> None:
                producer = Producer(mux.key, rules, f"/ip4/{assault.source()}/tcp/9")
                await _offer(assault, producer, mux, DEAR, texts, 2.0, GROUPS_AT_ONCE)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(_honest, assault)
                await connected(assault, PRODUCERS, use)

        return run

    return shaped


async def _honest(assault: Assault) -> None:
    """An honest producer of another block; its groups' waiting time is claimed."""
    key, source = assault.key(), assault.source(7, block=90)
    producer = Producer(key, load_run(assault.extra["run_file"]), f"/ip4/{source}/tcp/9")
    waits_s: list[float] = []
    try:
        async with (
            admitted(assault.door, key, source, Spent()) as mux,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(_watch, assault, producer, waits_s)
            await _offer(assault, producer, mux, CHEAP, ["1", "2"], 1.0, 1)
    finally:
        assault.spent.count("honest groups fetched", len(producer.wanted_at_s))
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


@on_the_verifier("64 completions each, 4 producers", alone=True)
@producing(64)
def negations() -> str:
    """Formulas of 190 negations: each parses in a fifth of a second."""
    return "¬" * 190 + "P"


@on_the_verifier("6 completions each, 4 producers")
@producing(6)
def just_below_the_limit() -> str:
    """Few enough of them that no group runs out of its time."""
    return "¬" * 190 + "P"


@on_the_verifier("64 completions each, 4 producers")
@producing(64)
def parentheses() -> str:
    """Formulas nested as deep as they may be."""
    return "(" * 90 + "P" + ")" * 90


@on_the_verifier("64 completions each, 4 producers")
@producing(64)
def implications() -> str:
    """Formulas of 94 arrows."""
    return "→".join("P" * 95)
