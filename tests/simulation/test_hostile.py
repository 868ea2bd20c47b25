"""One hostile peer among honest ones: their rounds go on, and each of its lies is counted.

The hostile host speaks real bytes over the real protocol handlers; nothing of the honest nodes is
replaced. Its lies are planted one by one, so that a check that stopped working would show as a
missing count or as a hostile group in a batch.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import trio

from node.engines.scripted import TOKENIZER, ScriptedPolicy
from node.monitor.records import RoundDone
from node.monitor.status import render_status
from node.simulated import EPOCH_S, SimulatedNode, build, run
from node.tasks.stream import assigned_task
from swarm import codec
from swarm.errors import Reject
from swarm.identity import Identity, PeerId
from swarm.messages import (
    ADVERT_GROUPS_MAX,
    ADVERTS_PROTOCOL,
    GROUPS_REPLY_BYTES_MAX,
    ROLLOUTS_PROTOCOL,
    WANT_BYTES_MAX,
    AdvertBody,
    AdvertEntry,
    GroupsReply,
    Want,
    adverts_topic,
)
from swarm.rollouts import Completion, FinishReason, RolloutGroup
from swarm.simulation.determinism import deterministic_run
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import World, open_world
from swarm.transport.base import ServeLimits
from swarm.transport.memory import MemoryTransport
from tests.simulation.test_swarm import CONFIG, RUN

HONEST = 4
ROUNDS = 14
LAN = LinkProfile(latency_s=0.02)


def honest_group(identity: Identity, index: int) -> RolloutGroup:
    """A group that every check would pass: the starting point of each lie."""
    completions = tuple(
        Completion(text, tuple(text.encode()), (-0.1,) * len(text), FinishReason.STOP, 1)
        for text in ("1", "23", "4", "167")
    )
    now_s = int(EPOCH_S + trio.current_time())
    return RolloutGroup(
        run_id=RUN.run_id,
        producer=identity.peer_id,
        round=1,
        task=assigned_task(RUN, identity.peer_id, index),
        completions=completions,
        tokenizer=TOKENIZER,
        temperature=1.0,
        top_p=1.0,
        created_at_s=now_s,
        expires_at_s=now_s + 600,
    )


class Liar:
    """Adverts its groups properly and serves whatever bytes a lie made of them."""

    def __init__(self, world: World, host: int, victim: Identity) -> None:
        self.identity = world.identities[host]
        self.transport: MemoryTransport = world.join(host)
        self.victim = victim
        self.records: dict[bytes, bytes] = {}
        self.silent = False
        self.index = 0
        self.rng = Random(0)
        self.transport.serve(
            ROLLOUTS_PROTOCOL, self.serve, ServeLimits(WANT_BYTES_MAX, GROUPS_REPLY_BYTES_MAX + 99)
        )
        self.transport.serve(ADVERTS_PROTOCOL, self.garbage, ServeLimits(WANT_BYTES_MAX, 1000))

    async def garbage(self, peer: str, payload: bytes) -> bytes:
        return self.rng.randbytes(300)

    async def serve(self, peer: str, payload: bytes) -> bytes:
        if self.silent:
            await trio.sleep_forever()
        want = codec.decode(payload, Want, WANT_BYTES_MAX)
        records = [self.records[i] for i in want.group_ids if i in self.records]
        if any(record == b"oversize" for record in records):
            return bytes(GROUPS_REPLY_BYTES_MAX + 1)
        if any(record == b"truncated" for record in records):
            return codec.encode(GroupsReply(type="groups", records=(bytes(99),)))[:-40]
        return codec.encode(GroupsReply(type="groups", records=tuple(records)))

    async def offer(self, group_id: bytes, record: bytes, round_: int) -> None:
        self.records[group_id] = record
        await self.advertise(
            [AdvertEntry(group_id=group_id, size_bytes=max(1, len(record)))], round_
        )

    async def advertise(self, entries: list[AdvertEntry], round_: int) -> None:
        now_s = int(EPOCH_S + trio.current_time())
        body = AdvertBody(
            type="advert",
            run_id=RUN.run_id,
            producer=self.identity.peer_id,
            round=round_,
            addresses=self.transport.addresses(),
            groups=tuple(entries),
            created_at_s=now_s,
            expires_at_s=now_s + 600,
        )
        await self.transport.publish(
            adverts_topic(RUN.run_id), codec.sign_advert(body, self.identity)
        )

    async def offer_group(self, change: Callable[[RolloutGroup], RolloutGroup]) -> None:
        self.index += 1
        group = change(honest_group(self.identity, self.index))
        group_id, record = codec.sign_group(group, self.identity)
        await self.offer(group_id, record, group.round)


async def lie_unassigned(liar: Liar) -> None:
    """A task of its own choosing, e.g. one whose answer it knows."""
    await liar.offer_group(lambda g: replace(g, task=replace(g.task, seed=g.task.seed + 1)))


async def lie_stolen(liar: Liar) -> None:
    """Another peer's group under its own name."""
    await liar.offer_group(
        lambda g: replace(g, task=assigned_task(RUN, liar.victim.peer_id, g.task.index))
    )


async def lie_parameters(liar: Liar) -> None:
    """A forged problem: easier parameters than the run's."""
    await liar.offer_group(lambda g: replace(g, task=replace(g.task, parameters='{"max":1}')))


async def lie_signature(liar: Liar) -> None:
    """A record that is not signed by who it says."""
    group_id, record = codec.sign_group(honest_group(liar.identity, 70), liar.identity)
    position = record.index(group_signature(record))
    await liar.offer(group_id, record[:position] + bytes(64) + record[position + 64 :], 1)


def group_signature(record: bytes) -> bytes:
    import msgpack

    return bytes(msgpack.unpackb(record)["signature"])


async def lie_truncated(liar: Liar) -> None:
    await liar.offer(liar.rng.randbytes(32), b"truncated", 1)


async def lie_oversize(liar: Liar) -> None:
    await liar.offer(liar.rng.randbytes(32), b"oversize", 1)


async def lie_record_garbage(liar: Liar) -> None:
    await liar.offer(liar.rng.randbytes(32), liar.rng.randbytes(500), 1)


async def lie_other_record(liar: Liar) -> None:
    """A good record that nobody asked for."""
    _, record = codec.sign_group(honest_group(liar.identity, 80), liar.identity)
    await liar.offer(liar.rng.randbytes(32), record, 1)


async def lie_run(liar: Liar) -> None:
    await liar.offer_group(lambda g: replace(g, run_id="another-run"))


async def lie_expired(liar: Liar) -> None:
    await liar.offer_group(
        lambda g: replace(g, created_at_s=EPOCH_S - 9000, expires_at_s=EPOCH_S - 8000)
    )


async def lie_future(liar: Liar) -> None:
    await liar.offer_group(
        lambda g: replace(g, created_at_s=g.created_at_s + 9000, expires_at_s=g.created_at_s + 9600)
    )


async def lie_same_task_twice(liar: Liar) -> None:
    """Two groups for one task: the honest way to look like two."""
    liar.index = 90
    await liar.offer_group(lambda g: g)
    await trio.sleep(3)
    liar.index = 90
    await liar.offer_group(lambda g: replace(g, temperature=0.9))


async def lie_silent(liar: Liar) -> None:
    """Groups that exist nowhere, and no answer to who asks for them."""
    liar.silent = True
    for _ in range(8):
        for _ in range(2):
            ids = [liar.rng.randbytes(32) for _ in range(ADVERT_GROUPS_MAX)]
            await liar.advertise([AdvertEntry(group_id=i, size_bytes=9_000) for i in ids], 1)
        await trio.sleep(1)
    liar.silent = False


async def lie_other_producers_record(liar: Liar) -> None:
    """Other people's groups under its own name."""
    group_id, record = codec.sign_group(honest_group(liar.victim, 500), liar.victim)
    await liar.offer(group_id, record, 1)


async def lie_other_producers_old_advert(liar: Liar) -> None:
    """What others said in another run, and what they will say only later."""
    victim, now_s = liar.victim, int(EPOCH_S + trio.current_time())
    for run_id, created_at_s in (("another-run", now_s), (RUN.run_id, now_s - 90_000)):
        body = AdvertBody(
            type="advert",
            run_id=run_id,
            producer=victim.peer_id,
            round=1,
            addresses=(),
            groups=(AdvertEntry(group_id=bytes(32), size_bytes=9),),
            created_at_s=created_at_s,
            expires_at_s=created_at_s + 600,
        )
        await liar.transport.publish(adverts_topic(RUN.run_id), codec.sign_advert(body, victim))


async def lie_gossip(liar: Liar) -> None:
    for size in (0, 1, 40, 4000):
        await liar.transport.publish(adverts_topic(RUN.run_id), liar.rng.randbytes(size))


LIES: dict[Callable[[Liar], Any], Reject] = {
    lie_unassigned: Reject.UNASSIGNED_TASK,
    lie_stolen: Reject.UNASSIGNED_TASK,
    lie_parameters: Reject.UNASSIGNED_TASK,
    lie_signature: Reject.BAD_SIGNATURE,
    lie_truncated: Reject.MALFORMED,
    lie_oversize: Reject.OVERSIZE,
    lie_record_garbage: Reject.MALFORMED,
    lie_other_record: Reject.NOT_REQUESTED,
    lie_run: Reject.WRONG_RUN,
    lie_expired: Reject.EXPIRED,
    lie_future: Reject.FUTURE,
    lie_same_task_twice: Reject.DUPLICATE_TASK,
    lie_gossip: Reject.MALFORMED,
    lie_other_producers_record: Reject.WRONG_PRODUCER,
    lie_other_producers_old_advert: Reject.WRONG_RUN,
    lie_silent: Reject.UNAVAILABLE,
}


async def swarm_with(
    lies: list[Callable[[Liar], Any]], seed: int
) -> tuple[str, list[SimulatedNode]]:
    """Honest nodes to the end of their rounds, with a liar among them that tells `lies`."""
    async with open_world(seed, HONEST + 1, LAN) as world, trio.open_nursery() as nursery:
        liar = Liar(world, HONEST, world.identities[1])
        swarm: list[SimulatedNode] = []
        done = trio.Semaphore(0)
        config = CONFIG.model_copy(update={"rounds": ROUNDS, "external_groups": 4})

        async def live(simulated: SimulatedNode) -> None:
            policy = ScriptedPolicy(skill=0.5, generate_s=1.0, train_s=1.0)

            async def on_record(record: object) -> None:
                if isinstance(record, RoundDone) and record.round == ROUNDS:
                    done.release()

            await run(simulated, policy, policy, on_record)

        for host in range(HONEST):
            known = [t.addresses()[0] for t in (liar.transport, *(s.transport for s in swarm[:1]))]
            swarm.append(build(world, host, config, known))
            nursery.start_soon(live, swarm[host])
        await trio.sleep(3)
        await liar.transport.subscribe(adverts_topic(RUN.run_id), lambda *_: True)
        for lie in lies:
            await lie(liar)
            await trio.sleep(1)
        for _ in range(HONEST):
            await done.acquire()
        for simulated in swarm:
            simulated.shown = simulated.node.snapshot(
                model="scripted", parameters=0, memory_bytes=0, trainer_memory_bytes=0
            )
        nursery.cancel_scope.cancel()
        return liar.identity.peer_id, swarm


def external(simulated: SimulatedNode) -> int:
    return sum(r.external_groups for r in simulated.records if isinstance(r, RoundDone))


def honest(simulated: SimulatedNode, liar: str) -> list[PeerId]:
    return [peer for peer in simulated.node.ledger.peers() if peer != liar]


@pytest.mark.parametrize(("lie", "reason"), LIES.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_a_lie_is_counted_under_its_name_and_never_trained_on(
    lie: Callable[[Liar], Any], reason: Reject
) -> None:
    liar, swarm = deterministic_run(swarm_with, [lie], 5, seed=5)
    assert sum(s.node.ledger.rejected[reason] for s in swarm) > 0, [
        s.node.ledger.rejected for s in swarm
    ]
    trained = {
        p
        for s in swarm
        for r in s.records
        if isinstance(r, RoundDone)
        for p in r.foreign_by_producer
    }
    if lie is not lie_same_task_twice:  # its first group for the task is an honest one
        assert liar not in trained
    shown = [s.shown for s in swarm if s.shown is not None and reason in s.shown.rejected]
    assert shown
    assert not any(s.node.ledger.of(p).rejected for s in swarm for p in honest(s, liar))
    guilty = next(p for p in shown[0].peers if p.rejected)
    assert str(reason) in render_status(shown[0])
    assert guilty.rejected[reason] > 0


def test_an_honest_group_of_the_same_maker_is_accepted() -> None:
    """The negative control: without a lie the same machinery takes the group in."""

    async def truth(liar: Liar) -> None:
        for _ in range(6):
            await liar.offer_group(lambda g: g)

    liar, swarm = deterministic_run(swarm_with, [truth], 5, seed=5)
    assert sum(s.node.ledger.of(liar).accepted for s in swarm) > 0  # type: ignore[arg-type]


def test_all_lies_together_leave_the_others_training_as_it_was() -> None:
    _, calm = deterministic_run(swarm_with, [], 5, seed=5)
    liar, swarm = deterministic_run(swarm_with, list(LIES) * 2, 5, seed=5)
    for before, after in zip(calm, swarm, strict=True):
        rounds = [r.round for r in after.records if isinstance(r, RoundDone)]
        assert rounds == list(range(1, ROUNDS + 1))
        assert external(after) >= external(before) - 4
        assert after.node.ledger.of(liar).rejected  # type: ignore[arg-type]
        assert not any(after.node.ledger.of(p).rejected for p in honest(after, liar))


def test_a_silent_flood_leaves_the_others_their_sharing() -> None:
    _, calm = deterministic_run(swarm_with, [], 5, seed=5)
    _, swarm = deterministic_run(swarm_with, [lie_silent] * 4, 5, seed=5)
    assert sum(map(external, swarm)) >= 0.8 * sum(map(external, calm)) > 100
