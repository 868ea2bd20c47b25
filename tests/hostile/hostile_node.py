"""A hostile peer as a process: joins a swarm and tries all it knows on everybody, over and over.

    python tests/hostile/hostile_node.py --peer ADDR --run FILE --seed 1 --seconds 60

prints one JSON object a line: first its peer id, then each lie and how many peers were connected
when it was told, then whether it was cut off and came back, and in the end a sum. Cut off by
everybody it dials on, as before under the same key, or with `--identities N` under up to N others.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).parents[2]))  # as a script it is in no package

from node.config import RunConfig, load_config
from node.envs.scoring import pose
from node.verify.assignment import INDEX_MAX, assigned_task
from swarm.errors import SwarmError
from swarm.identity import Identity, PeerId
from swarm.rollouts import Completion, FinishReason, RolloutGroup
from swarm.simulation.liar import LIFE_S, Liar
from swarm.simulation.lies import CATALOGUE, Lie, hello
from swarm.transport.libp2p.host import open_libp2p
from swarm.wire import codec
from swarm.wire.messages import HELLO_PROTOCOL, HELLO_REPLY_BYTES_MAX, HelloReply
from tests.hostile.attack import Assault, attacked, load_all
from tests.hostile.attacks import ON_SOCKETS
from tests.hostile.wire import Door

LIE_S = 8.0  # at most for one lie
ON_SOCKETS_S = 3.0  # of an attack below messages
PAUSE_S = 0.3
DIAL_TIMEOUT_S = 5.0
WRONG = ("1", "no", "")

Say = Callable[[Mapping[str, Any]], None]


def say(record: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def maker(run: RunConfig) -> Callable[[PeerId, int], RolloutGroup]:
    """Makes groups that every honest node would take."""

    def make(producer: PeerId, index: int) -> RolloutGroup:
        task = assigned_task(run, producer, index % INDEX_MAX)
        texts = (*WRONG, pose(task, run.limits.prompt_chars_max).answer)
        now_s = int(time.time())
        completions = tuple(
            Completion(
                text, tuple(text.encode()), (-0.1,) * len(text.encode()), FinishReason.STOP, 1
            )
            for text in texts
        )
        return RolloutGroup(
            run_id=run.run_id,
            producer=producer,
            round=1,
            task=task,
            completions=completions[-run.limits.group_size_max :],
            tokenizer="hostile",
            temperature=1.0,
            top_p=1.0,
            created_at_s=now_s,
            expires_at_s=now_s + min(LIFE_S, run.limits.record_life_s),
        )

    return make


class Attacker:
    """One identity's go at the swarm."""

    def __init__(self, liar: Liar, addresses: set[str], tell: Say) -> None:
        self.liar = liar
        self.addresses = addresses  # of everybody heard of; shared by all identities
        self.say = tell
        self.told = 0
        self.reached = 0  # lies that had somebody to hear them

    async def meet(self) -> None:
        """Dial everybody known, and ask everybody connected whom else they know."""
        transport = self.liar.transport
        connected = transport.peers()
        for address in sorted(self.addresses):
            if not address.endswith(tuple(connected) or ("-",)):
                with suppress(SwarmError):
                    await transport.connect(address, timeout_s=DIAL_TIMEOUT_S)
        for peer in transport.peers():
            with suppress(SwarmError):
                answer = await transport.request(
                    peer,
                    HELLO_PROTOCOL,
                    hello(self.liar, self.liar.identity),
                    timeout_s=DIAL_TIMEOUT_S,
                    response_bytes_max=HELLO_REPLY_BYTES_MAX,
                )
                reply = codec.decode(answer, HelloReply, HELLO_REPLY_BYTES_MAX)
                for known in reply.known_peers:
                    if known.peer_id != transport.peer_id:
                        self.addresses.update(known.addresses[:1])

    async def attack(self, started: float) -> None:
        """The whole catalogue, in an order of its own, again and again."""
        below = [Lie(name, partial(self.below, name), why) for name, why in ON_SOCKETS.items()]
        lies = [*CATALOGUE, *below]
        while True:
            self.liar.rng.shuffle(lies)
            for lie in lies:
                await self.meet()
                peers = len(self.liar.transport.peers())
                with trio.move_on_after(LIE_S), suppress(SwarmError):
                    await lie.tell(self.liar)
                self.told += 1
                self.reached += peers > 0
                record = {"lie": lie.name, "reason": lie.reason, "peers": peers}
                self.say({**record, "at_s": round(trio.current_time() - started, 2)})
                await trio.sleep(PAUSE_S)

    async def below(self, name: str, liar: Liar) -> None:
        """Attack everybody known below messages, with the raw client."""
        async with trio.open_nursery() as nursery:
            for address in self.addresses:
                with suppress(ValueError):  # not by IP and TCP
                    door = Door.of(address)
                    assault = Assault(
                        name, door, liar.run_id, ON_SOCKETS_S, network="", identity=liar.identity
                    )
                    nursery.start_soon(attacked, assault)

    async def until_cut_off(self) -> None:
        """Come back when nobody has been connected for a while."""
        empty = 0
        while empty < 5:
            await trio.sleep(1.0)
            empty = 0 if self.liar.transport.peers() else empty + 1


async def main(arguments: argparse.Namespace) -> None:
    load_all()
    run = load_config({}, {}, arguments.run).run
    started = trio.current_time()
    addresses, told, reached = set(arguments.peer), 0, 0
    with trio.move_on_after(arguments.seconds):
        for number in range(arguments.identities):
            seed = hashlib.sha256(f"{arguments.seed}/{number}".encode()).digest()
            identity = Identity(seed)
            async with AsyncExitStack() as stack:
                transport = await stack.enter_async_context(
                    open_libp2p(identity, [arguments.listen])
                )
                rng = Random(seed)
                liar = Liar(
                    identity=identity,
                    transport=transport,
                    run_id=run.run_id,
                    make_group=maker(run),
                    now_s=time.time,
                    rng=rng,
                    victim=Identity(rng.randbytes(32)),
                    group_size_max=run.limits.group_size_max,
                )
                await liar.serve()
                attacker = Attacker(liar, addresses, say)
                say({"peer_id": identity.peer_id, "run_id": run.run_id})
                try:
                    await one_identity(attacker, started, number + 1 == arguments.identities)
                finally:
                    told, reached = told + attacker.told, reached + attacker.reached
    say({"told": told, "reached": reached, "catalogue": len(CATALOGUE) + len(ON_SOCKETS)})


async def one_identity(attacker: Attacker, started: float, is_last: bool) -> None:
    """Attack; with another identity left, until cut off by everybody."""
    await attacker.meet()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(attacker.attack, started)
        if not is_last:
            await attacker.until_cut_off()
            say({"cut_off": attacker.liar.identity.peer_id})
            nursery.cancel_scope.cancel()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", action="append", required=True, help="multiaddr; repeatable")
    parser.add_argument("--run", type=Path, required=True, help="file, or a packaged run's name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--identities", type=int, default=1)
    parser.add_argument("--listen", default="/ip4/127.0.0.1/tcp/0")
    return parser.parse_args()


if __name__ == "__main__":
    trio.run(main, parsed())
