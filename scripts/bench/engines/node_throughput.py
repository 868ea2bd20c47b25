"""What a node can judge in a second: groups, adverts and bytes. Printed by `bench_node.py`.

Groups of the demo run are sampled here from its tiny policy with a node's own code. Each goes
through what a node does with a group that it fetched; then adverts; then the codec alone. A figure
is the median over the repeats. No repeat sees a task that another one has seen, for problems are
cached.
"""

import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgpack
import trio

from node.config import NodeConfig
from node.interfaces.trainer_spec import TrainerSpec
from node.training.process import InProcessTrainer
from node.verification.assignment import assigned_task
from node.verification.held_out import HeldOutGuard
from node.verification.verifier import InlineVerifier, ProcessVerifier, Verifier, check_assignment
from swarm.exchange.offers import OfferLimits, OfferTable
from swarm.exchange.pool import AddResult, Pool, PoolLimits
from swarm.identity import Identity, PeerId, verify
from swarm.rollouts import RolloutGroup, VerifiedGroup
from swarm.wire import codec
from swarm.wire.messages import (
    ADVERT_BYTES_MAX,
    ADVERT_DOMAIN,
    GROUP_BYTES_MAX,
    GROUP_DOMAIN,
    AdvertBody,
    AdvertEntry,
    Signed,
)

GROUP_SIZE = 8
GROUPS_PER_REPEAT = 60
AT_ONCE = 4  # fetches that a node has under way, by default
SAMPLED_AT_ONCE = 16
PRODUCERS, ROUNDS, ENTRIES = 64, 4, 4
LARGE_COMPLETIONS, LARGE_TOKENS, LARGE_CHARS = 64, 1024, 4096
CODEC_S = 0.3  # of each measurement of the codec

Stages = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `ratio` is this figure over the baseline's."""

    what: str
    value: float
    unit: str
    ratio: float | None = None
    baseline: str = ""


async def sample(
    config: NodeConfig, model: str, identity: Identity, count: int
) -> tuple[list[RolloutGroup], list[str]]:
    """Groups that a node with this identity would share first, and their prompts."""
    run, sampling = config.run, config.run.engine_sampling
    trainer = InProcessTrainer(TrainerSpec(model, threads=1))
    info = await trainer.info()
    assigned, _ = await HeldOutGuard(run, InlineVerifier(run)).assignments(
        identity.peer_id, 0, count
    )
    now_s = int(time.time())
    groups: list[RolloutGroup] = []
    for start in range(0, count, SAMPLED_AT_ONCE):
        batch = assigned[start : start + SAMPLED_AT_ONCE]
        made = await trainer.generate([a.prompt for a in batch], GROUP_SIZE, sampling, start)
        groups += [
            RolloutGroup(
                run_id=run.run_id,
                producer=identity.peer_id,
                round=1,
                task=assignment.task,
                completions=completions,
                tokenizer=info.tokenizer,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                created_at_s=now_s,
                expires_at_s=now_s + run.limits.record_life_s,
            )
            for assignment, completions in zip(batch, made, strict=True)
        ]
    return groups, [assignment.prompt for assignment in assigned]


async def measure(
    config: NodeConfig,
    identity: Identity,
    groups: Sequence[RolloutGroup],
    repeats: int,
    scratch: Path,
) -> list[Row]:
    """All lines. `groups` are at least `repeats * GROUPS_PER_REPEAT`."""
    records = [codec.sign_group(group, identity)[1] for group in groups]
    batches = [records[n * GROUPS_PER_REPEAT : (n + 1) * GROUPS_PER_REPEAT] for n in range(repeats)]
    rows = await _validation(config, batches, scratch)
    rows += _adverts(config, records[0], groups[0], repeats)
    rows += _codec("a group of the run", groups[0], identity, repeats)
    rows += _codec("a large group", _large(groups[0]), identity, repeats)
    return rows


# --- groups -------------------------------------------------------------------------------------


async def _validation(
    config: NodeConfig, batches: Sequence[Sequence[bytes]], scratch: Path
) -> list[Row]:
    limits = PoolLimits()
    rates: dict[str, list[float]] = {"one": [], "many": [], "inline": []}
    stages: Stages = defaultdict(list)
    async with (  # a verifier for each way, so that none has met the tasks before
        ProcessVerifier.open(config) as for_one,
        ProcessVerifier.open(config) as for_many,
    ):
        one, many = HeldOutGuard(config.run, for_one), HeldOutGuard(config.run, for_many)
        inline = HeldOutGuard(config.run, InlineVerifier(config.run))
        for guard in (one, many, inline):
            await guard.questions()
        for verifier in (for_one, for_many):
            await _start(config, verifier, codec.decode_group(batches[0][0])[1])
        for number, batch in enumerate(batches):
            with (
                Pool(scratch / f"one-{number}.sqlite", limits) as first,
                Pool(scratch / f"many-{number}.sqlite", limits) as second,
                Pool(":memory:", limits) as third,
            ):
                rates["one"].append(await _rate(config, batch, one.verify, first, stages))
                rates["many"].append(await _rate(config, batch, many.verify, second, None, AT_ONCE))
                rates["inline"].append(await _rate(config, batch, inline.verify, third, None))
    return _validation_rows({name: median(values) for name, values in rates.items()}, stages)


def _validation_rows(rates: dict[str, float], stages: Stages) -> list[Row]:
    baseline = "the same in one process, pool in memory"
    rows = [
        Row("groups validated, one by one", rates["one"], "/s"),
        Row(f"groups validated, {AT_ONCE} at once", rates["many"], "/s"),
        Row(f"  {baseline}", rates["inline"], "/s"),
    ]
    rows = [replace(row, ratio=row.value / rates["inline"], baseline=baseline) for row in rows]
    medians = {name: median(values) for name, values in stages.items()}
    total = sum(medians.values())
    return rows + [
        Row(f"  {name}", 1e3 * seconds, "ms", seconds / total, "their sum")
        for name, seconds in medians.items()
    ]


async def _start(config: NodeConfig, verifier: Verifier, group: RolloutGroup) -> None:
    """Start a verifier's process for foreign work, on a task that no batch has."""
    producer = Identity.generate().peer_id
    task = assigned_task(config.run, producer, 0)
    await verifier.verify(replace(group, producer=producer, task=task))


async def _rate(
    config: NodeConfig,
    batch: Sequence[bytes],
    judge: Callable[[RolloutGroup], Awaitable[tuple[str, tuple[float, ...]]]],
    pool: Pool,
    stages: Stages | None,
    at_once: int = 1,
) -> float:
    """Groups per second through all that a node does with a fetched record."""
    waiting = list(reversed(batch))
    timed: list[tuple[bytes, list[float]]] = []

    async def work() -> None:
        while waiting:
            record = waiting.pop()
            marks = [time.perf_counter()]
            group_id, group = codec.decode_group(record)
            marks.append(time.perf_counter())
            check_assignment(config.run, group)
            marks.append(time.perf_counter())
            prompt, rewards = await judge(group)
            marks.append(time.perf_counter())
            verified = VerifiedGroup(group_id, group, prompt, rewards)
            result = await trio.to_thread.run_sync(_add, pool, record, verified)
            marks.append(time.perf_counter())
            if result is not AddResult.ADDED:
                raise AssertionError(result)
            timed.append((record, marks))

    started = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(work)
    rate = len(batch) / (time.perf_counter() - started)
    if stages is not None:
        for record, marks in timed:
            _note(stages, record, marks)
    return rate


def _add(pool: Pool, record: bytes, verified: VerifiedGroup) -> AddResult:
    return pool.add(record, verified, own=False, now_s=time.time())


def _note(stages: Stages, record: bytes, marks: Sequence[float]) -> None:
    """Split one group's time; the signature is checked once more, by itself, to know its part."""
    envelope = codec.decode(record, Signed, GROUP_BYTES_MAX)
    started = time.perf_counter()
    verify(envelope.signer, GROUP_DOMAIN, envelope.payload, envelope.signature)
    signature = time.perf_counter() - started
    decoded, assigned, judged, pooled = (end - start for start, end in pairwise(marks))
    stages["decode"].append(decoded - signature)
    stages["signature"].append(signature)
    stages["assignment"].append(assigned)
    stages["problem and rewards, in a worker"].append(judged - assigned)  # it checks that as well
    stages["pool, in a thread"].append(pooled)


# --- adverts ------------------------------------------------------------------------------------


def _adverts(config: NodeConfig, record: bytes, group: RolloutGroup, repeats: int) -> list[Row]:
    """Adverts as gossip brings them: decoded, checked against the clock, put on the table."""
    adverts = [
        _advert(group, identity, round_, len(record))
        for identity in [Identity.generate() for _ in range(PRODUCERS)]
        for round_ in range(1, ROUNDS + 1)
    ]
    limits = config.run.limits
    taken: list[float] = []
    checked: list[float] = []
    for _ in range(repeats):
        table = OfferTable(OfferLimits())
        started = time.perf_counter()
        for advert in adverts:
            _, body = codec.decode_advert(advert)
            codec.check_times(
                body.created_at_s,
                body.expires_at_s,
                time.time(),
                limits.record_life_s,
                limits.clock_skew_s,
            )
            table.hear(body, PeerId(body.producer), started)
        taken.append(len(adverts) / (time.perf_counter() - started))
        if len(table) != PRODUCERS * ROUNDS * ENTRIES:
            raise AssertionError(f"{len(table)} offers on the table")
        envelopes = [codec.decode(advert, Signed, ADVERT_BYTES_MAX) for advert in adverts]
        started = time.perf_counter()
        for each in envelopes:
            verify(each.signer, ADVERT_DOMAIN, each.payload, each.signature)
        checked.append(len(adverts) / (time.perf_counter() - started))
    ratio = median(taken) / median(checked)
    return [
        Row(f"adverts of {ENTRIES} groups", median(taken), "/s", ratio, "signature check alone"),
        Row("signature check alone", median(checked), "/s"),
    ]


def _advert(group: RolloutGroup, identity: Identity, round_: int, size_bytes: int) -> bytes:
    entries = tuple(
        AdvertEntry(group_id=secrets.token_bytes(32), size_bytes=size_bytes) for _ in range(ENTRIES)
    )
    body = AdvertBody(
        type="advert",
        run_id=group.run_id,
        producer=identity.peer_id,
        round=round_,
        addresses=(f"/ip4/192.0.2.1/tcp/4001/p2p/{identity.peer_id}",),
        groups=entries,
        created_at_s=group.created_at_s,
        expires_at_s=group.expires_at_s,
    )
    return codec.sign_advert(body, identity)[1]


# --- the codec alone ----------------------------------------------------------------------------


def _large(group: RolloutGroup) -> RolloutGroup:
    """As many completions as a message holds, of a thousand tokens each: synthesised."""
    example = group.completions[0]
    completion = replace(
        example,
        text="x" * LARGE_CHARS,
        token_ids=tuple(range(LARGE_TOKENS)),
        logprobs=tuple(-number / LARGE_TOKENS for number in range(LARGE_TOKENS)),
    )
    return replace(group, completions=(completion,) * LARGE_COMPLETIONS)


def _codec(name: str, group: RolloutGroup, identity: Identity, repeats: int) -> list[Row]:
    record = codec.sign_group(group, identity)[1]
    payload = codec.decode(record, Signed, GROUP_BYTES_MAX).payload
    tree = msgpack.unpackb(payload)
    rates: dict[str, list[float]] = {"encode": [], "decode": [], "pack": [], "unpack": []}
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: codec.sign_group(group, identity),
        "decode": lambda: codec.decode_group(record),
        "pack": lambda: msgpack.packb(tree),
        "unpack": lambda: msgpack.unpackb(payload),
    }
    for _ in range(repeats):
        for call, values in rates.items():
            values.append(_calls_per_s(calls[call]) * len(record) / 1e6)
    medians = {call: median(values) for call, values in rates.items()}
    size = f"{name}, {len(record) / 1e3:,.1f} kB"
    ratios = medians["encode"] / medians["pack"], medians["decode"] / medians["unpack"]
    return [
        Row(f"encode and sign {size}", medians["encode"], "MB/s", ratios[0], "msgpack alone"),
        Row(f"decode and check {size}", medians["decode"], "MB/s", ratios[1], "msgpack alone"),
    ]


def _calls_per_s(call: Callable[[], object]) -> float:
    calls, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < CODEC_S:
        call()
        calls += 1
    return calls / spent
