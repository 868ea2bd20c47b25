"""One node's membership and exchange on loopback, by whatever release PYTHONPATH names.

    python release_child.py SEED DIRECTORY [BOOTSTRAP]

It shares three groups of one turn, and where its release knows them, a large one. It prints where
its release is from and its address; then, a line at a time, what has come of it, until its input
ends.
"""

import json
import sys
from dataclasses import fields
from pathlib import Path
from random import Random
from time import time  # noqa: TID251 - the edge of this process
from typing import Any

import trio

import swarm
from swarm.exchange.pool import Pool, PoolLimits
from swarm.exchange.service import Exchange, ExchangeRules
from swarm.identity import Identity
from swarm.peers.address_book import AddressBook
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.discovery import Discovery, NodeInfo
from swarm.peers.ledger import Ledger
from swarm.rollouts import Completion, FinishReason, RolloutGroup, Task
from swarm.transport.libp2p.host import open_libp2p

RUN_ID = "releases-1"
LARGE, SMALL = 16, 2  # completions
GROUPS = 3
LARGE_TOKENS = 9_000


def group_of(identity: Identity, index: int, tokens: int, size: int) -> RolloutGroup:
    now_s = int(time())
    some = tuple(range(tokens))
    each = Completion("12", some, (-0.5,) * tokens, FinishReason.STOP, 1)
    return RolloutGroup(
        run_id=RUN_ID,
        producer=identity.peer_id,
        round=1,
        task=Task("scripted_sum", "1", "{}", index, index),
        completions=(each,) * size,
        tokenizer="bytes-1",
        temperature=1.0,
        top_p=1.0,
        created_at_s=now_s,
        expires_at_s=now_s + 900,
        engine="torch",
        precision="float32",
    )


def rewards_of(group: RolloutGroup) -> tuple[float, ...]:
    return tuple(float(at % 2) for at in range(len(group.completions)))


async def approve(group: RolloutGroup) -> tuple[str, tuple[float, ...]]:
    await trio.lowlevel.checkpoint()
    return f"prompt {group.task.index}", rewards_of(group)


def tell(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def until_input_ends(scope: trio.CancelScope) -> None:
    await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
    scope.cancel()


async def main(seed: str, directory: Path, *bootstrap: str) -> None:
    identity = Identity(seed.encode() * 32)
    knows_large = "group_bytes_max" in {field.name for field in fields(ExchangeRules)}
    more: dict[str, Any] = {"group_bytes_max": 2**21} if knows_large else {}
    rules = ExchangeRules(
        RUN_ID, 8, record_life_s=3600, clock_skew_s=60, group_size_max=LARGE, **more
    )
    async with (
        open_libp2p(identity, ["/ip4/127.0.0.1/tcp/0"]) as host,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(until_input_ends, nursery.cancel_scope)
        gater = ConnectionGater(host, Ledger())
        discovery = Discovery(
            NodeInfo(RUN_ID, f"child/{seed}", identity, seed.encode() * 16),
            bootstrap,
            AddressBook(),
            gater,
            now_s=time,
            rng=Random(seed),
            run_sync=trio.to_thread.run_sync,
        )
        pool = Pool(directory / f"{seed}.sqlite", PoolLimits())
        exchange = Exchange(
            rules, identity, host, pool, approve, now_s=time, rng=Random(seed),
            run_sync=trio.to_thread.run_sync, gater=gater,
        )  # fmt: skip
        nursery.start_soon(gater.run)
        await nursery.start(discovery.run)
        await nursery.start(exchange.run)
        tell(release=str(Path(swarm.__file__).parent.parent), address=host.addresses()[0])
        while not discovery.peers:  # noqa: ASYNC110 - it sets no event
            await trio.sleep(0.05)
        await trio.sleep(1.0)  # until gossip knows who listens
        groups = [group_of(identity, index, 5, SMALL) for index in range(GROUPS)]
        if knows_large:
            groups.append(group_of(identity, GROUPS, LARGE_TOKENS, LARGE))
        await exchange.share(groups, ["prompt"] * len(groups), [*map(rewards_of, groups)])
        while True:
            tell(
                peers=list(discovery.peers),
                agents=[info.agent for info in discovery.peers.values()],
                accepted=exchange.ledger.accepted,
                rejected={str(k): n for k, n in exchange.ledger.rejected.items()},
                asked=dict(host.counters.messages_out),
            )
            await trio.sleep(0.5)


if __name__ == "__main__":
    trio.run(main, sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
