"""Fetched groups that a node accepts in a second, on one core.

    python bench_accept.py [--groups N] [--repeats N]

Simulated peers in this process hold signed groups of 16 kB (eight completions), with ready answers.
The production exchange hears adverts, chooses, fetches without latency, decodes, checks, has each
group verified, and keeps it in a pool on disk (WAL). All threads are bound to one core.

Groups are verified in three ways: `scripted` approves all, which leaves the exchange; `inline` is
the verifier in this process; `process` is a node's, with its worker on the same core. The baseline
is one Ed25519 check and one insertion with a primary key and a transaction for each record.

Rates are groups per second of CPU time, worker included, and by the wall clock.
"""

import argparse
import os
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

import psutil
import trio

from node.config import NodeConfig, RunConfig
from node.verify.assignment import assigned_task
from node.verify.verifier import InlineVerifier, ProcessVerifier
from swarm.exchange.exchange_service import Exchange, ExchangeRules, Verify
from swarm.exchange.pool import Pool, PoolLimits
from swarm.identity import Identity, verify
from swarm.rollouts import Completion, FinishReason, RolloutGroup
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import open_world
from swarm.storage import Runtime
from swarm.transport.base import ServeLimits
from swarm.transport.memory.network import MemoryTransport
from swarm.wire import codec
from swarm.wire.messages import (
    ADVERT_GROUPS_MAX,
    GROUP_BYTES_MAX,
    GROUP_DOMAIN,
    GROUPS_REPLY_BYTES_MAX,
    ROLLOUTS_PROTOCOL,
    WANT_BYTES_MAX,
    AdvertBody,
    AdvertEntry,
    GroupsReply,
    Signed,
    Want,
    adverts_topic,
)

GROUP_SIZE, TOKENS, TEXT_CHARS = 8, 190, 400  # of a group and each of its completions: 16 kB
PRODUCERS = 8
LIFE_S = 3600
WAYS = ("scripted", "inline", "process")
BASELINE = "Ed25519 and INSERT alone"
RUN = RunConfig.model_validate(
    {
        "name": "bench-accept",
        "environments": [{"name": "scripted_sum", "parameters": {"max": 99}}],
        "sampling": {"max_new_tokens": TOKENS},
        "held_out": {"tasks": 10},
    }
)


def main() -> None:
    parser = argparse.ArgumentParser(description="How many groups a second a node accepts.")
    parser.add_argument("--groups", type=int, default=1024, help="in each repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--way", choices=WAYS, action="append", help="only this one")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    cores = sorted(os.sched_getaffinity(0))
    identities = [Identity.generate() for _ in range(PRODUCERS)]
    records = [_records(identity, arguments.groups // PRODUCERS) for identity in identities]
    rates: dict[str, list[Rate]] = {}
    for _ in range(arguments.repeats):  # in turns, so that a busy machine slows all of them
        rates.setdefault(BASELINE, []).append(_bare(cores[:1], records))
        for way in arguments.way or WAYS:
            rate = trio.run(_accept, way, cores, identities, records)
            rates.setdefault(way, []).append(rate)
    medians = {
        name: Rate(median(each.cpu for each in values), median(each.wall for each in values))
        for name, values in rates.items()
    }
    size_bytes = len(next(iter(records[0].values())))
    print(f"groups of {size_bytes / 1e3:.1f} kB, {GROUP_SIZE} completions of {TOKENS} tokens;")
    print(f"medians of {arguments.repeats} times {arguments.groups}; load before {load:.1f}")
    print(f"{'':36} {'/s of CPU':>10} {'ratio':>7} {'/s':>8}   ratio to {BASELINE}")
    for name, rate in medians.items():
        what = name if name == BASELINE else f"accepted, verified {name}"
        ratio = rate.cpu / medians[BASELINE].cpu
        print(f"{what:36} {rate.cpu:10,.0f} {ratio:7.3f} {rate.wall:8,.0f}")


@dataclass(frozen=True, slots=True)
class Rate:
    """Groups per second of CPU time, and by the wall clock."""

    cpu: float
    wall: float


class _Watch:
    """Measures from its making on."""

    def __init__(self) -> None:
        self._children = psutil.Process().children(recursive=True)
        self._wall, self._cpu = time.perf_counter(), self._spent()

    def _spent(self) -> float:
        times = [child.cpu_times() for child in self._children]
        return time.process_time() + sum(each.user + each.system for each in times)

    def rate(self, count: int) -> Rate:
        cpu_s, wall_s = self._spent() - self._cpu, time.perf_counter() - self._wall
        return Rate(count / cpu_s, count / wall_s)


def _records(identity: Identity, count: int) -> dict[bytes, bytes]:
    rng, now_s = Random(identity.peer_id), int(time.time())
    return dict(
        codec.sign_group(_group(identity, index, rng, now_s), identity) for index in range(count)
    )


def _group(identity: Identity, index: int, rng: Random, now_s: int) -> RolloutGroup:
    return RolloutGroup(
        run_id=RUN.run_id,
        producer=identity.peer_id,
        round=1 + index // ADVERT_GROUPS_MAX,
        task=assigned_task(RUN, identity.peer_id, index),
        completions=tuple(_completion(rng) for _ in range(GROUP_SIZE)),
        tokenizer="bench",
        temperature=1.0,
        top_p=1.0,
        created_at_s=now_s,
        expires_at_s=now_s + LIFE_S,
    )


def _completion(rng: Random) -> Completion:
    return Completion(
        text="".join(rng.choices("0123456789 +-=", k=TEXT_CHARS)),
        token_ids=tuple(rng.randrange(32_000) for _ in range(TOKENS)),
        logprobs=tuple(-rng.random() for _ in range(TOKENS)),
        finish_reason=FinishReason.STOP,
        policy_version=1,
    )


def _bare(core: Sequence[int], records: Sequence[dict[bytes, bytes]]) -> Rate:
    os.sched_setaffinity(0, core)
    envelopes = [
        (group_id, record, codec.decode(record, Signed, GROUP_BYTES_MAX))
        for of_producer in records
        for group_id, record in of_producer.items()
    ]
    with tempfile.TemporaryDirectory() as scratch:
        db = sqlite3.connect(Path(scratch) / "bare.sqlite", isolation_level=None)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("CREATE TABLE records (group_id BLOB PRIMARY KEY, record BLOB)")
        watch = _Watch()
        for group_id, record, envelope in envelopes:
            verify(envelope.signer, GROUP_DOMAIN, envelope.payload, envelope.signature)
            db.execute("INSERT INTO records VALUES (?, ?)", (group_id, record))
        rate = watch.rate(len(envelopes))
        db.close()
    return rate


async def _approve(group: RolloutGroup) -> tuple[str, tuple[float, ...]]:
    return "prompt", tuple(float(at % 2) for at in range(len(group.completions)))


# Long: one measurement from start to end.
async def _accept(
    way: str,
    cores: Sequence[int],
    identities: Sequence[Identity],
    records: Sequence[dict[bytes, bytes]],
) -> Rate:
    """From the first advert to the last group in the pool."""
    os.sched_setaffinity(0, cores[:1])
    total = sum(map(len, records))
    async with AsyncExitStack() as stack:
        judge: Verify = _approve
        if way == "inline":
            judge = InlineVerifier(RUN).verify
        elif way == "process":
            config = NodeConfig(run=RUN, engine="scripted")
            judge = (await stack.enter_async_context(ProcessVerifier.open(config))).verify
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        limits = PoolLimits(groups_max=2 * total, groups_per_producer_max=total)
        pool = stack.enter_context(Pool(Path(scratch) / "pool.sqlite", limits))
        world = await stack.enter_async_context(open_world(1, 1, LinkProfile()))
        exchange = Exchange(
            ExchangeRules(
                RUN.run_id,
                total,
                LIFE_S,
                60,
                GROUP_SIZE,
                fetch_bytes_per_s=1e12,
            ),
            world.identities[0],
            transport := world.join(0),
            pool,
            judge,
            Runtime(time.time, Random(0), trio.to_thread.run_sync),
        )
        nursery = await stack.enter_async_context(trio.open_nursery())
        peers = [world.network.join(identity.peer_id) for identity in identities]
        for peer, of_producer in zip(peers, records, strict=True):
            _serve(peer, of_producer)
            await peer.connect(transport.addresses()[0])
        await nursery.start(exchange.run)
        if way != "scripted":  # the worker starts, and imports, at its first use
            first = codec.decode_group(next(iter(records[0].values())))[1]
            await judge(first)
        watch = _Watch()
        for peer, identity, of_producer in zip(peers, identities, records, strict=True):
            await _advertise(peer, identity, of_producer)
        while exchange.ledger.accepted < total:  # noqa: ASYNC110 - it sets no event
            await trio.sleep(0.001)
        rate = watch.rate(total)
        if exchange.ledger.rejected:
            raise AssertionError(exchange.ledger.rejected)
        nursery.cancel_scope.cancel()
    return rate


def _serve(peer: MemoryTransport, records: dict[bytes, bytes]) -> None:
    async def serve(_: str, payload: bytes) -> bytes:
        want = codec.decode(payload, Want, WANT_BYTES_MAX)
        found = tuple(records[group_id] for group_id in want.group_ids)
        return codec.encode(GroupsReply(type="groups", records=found))

    peer.serve(ROLLOUTS_PROTOCOL, serve, ServeLimits(WANT_BYTES_MAX, GROUPS_REPLY_BYTES_MAX))


async def _advertise(
    peer: MemoryTransport, identity: Identity, records: dict[bytes, bytes]
) -> None:
    now_s = int(time.time())
    entries = [AdvertEntry(group_id=i, size_bytes=len(r)) for i, r in records.items()]
    await peer.subscribe(adverts_topic(RUN.run_id), lambda *_: True)
    for start in range(0, len(entries), ADVERT_GROUPS_MAX):
        body = AdvertBody(
            type="advert",
            run_id=RUN.run_id,
            producer=identity.peer_id,
            round=1 + start // ADVERT_GROUPS_MAX,
            addresses=(),
            groups=tuple(entries[start : start + ADVERT_GROUPS_MAX]),
            created_at_s=now_s,
            expires_at_s=now_s + LIFE_S,
        )
        await peer.publish(adverts_topic(RUN.run_id), codec.sign_advert(body, identity)[1])


if __name__ == "__main__":
    main()
