"""One hostile peer among honest ones: their rounds go on, and each of its lies is counted.

The liar speaks real bytes over the real protocol handlers; nothing of the honest nodes is replaced.
It tells its lies one by one, so that a check that stopped working would show as a missing count or
as a hostile group in a batch.
"""

from collections.abc import Sequence

import pytest
import trio

from node.engines.scripted import TOKENIZER, ScriptedPolicy
from node.envs.scoring import pose
from node.observe.records import RoundDone
from node.observe.status import render_status
from node.simulation.simulated_nodes import EPOCH_S, SimulatedNode, build, run
from node.verify.assignment import assigned_task
from swarm.identity import PeerId
from swarm.rollouts import Completion, FinishReason, RolloutGroup
from swarm.simulation.liar import LIFE_S, Liar
from swarm.simulation.lies import CATALOGUE, Lie
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import SimulatedWorld, deterministic_run, open_world
from tests.simulation import test_swarm

RUN = test_swarm.RUN.model_copy(
    update={"limits": test_swarm.RUN.limits.model_copy(update={"group_size_max": 8})}
)
CONFIG = test_swarm.CONFIG.model_copy(update={"run": RUN})
LAN = LinkProfile(latency_s=0.02)
BY_NAME = {lie.name: lie for lie in CATALOGUE}
ALONE = (2, 12)  # honest nodes and their rounds, for one lie
TOGETHER = (4, 30)
PAUSE_S = 1.0


def now_s() -> float:
    return EPOCH_S + trio.current_time()


def honest_group(producer: PeerId, index: int) -> RolloutGroup:
    """A group that every check would pass and that is worth training on: what lies are made of."""
    task = assigned_task(RUN, producer, index)
    texts = ("1", "23", "4", pose(task, RUN.limits.prompt_chars_max).answer)
    return RolloutGroup(
        run_id=RUN.run_id,
        producer=producer,
        round=1,
        task=task,
        completions=tuple(
            Completion(text, tuple(text.encode()), (-0.1,) * len(text), FinishReason.STOP, 1)
            for text in texts
        ),
        tokenizer=TOKENIZER,
        temperature=1.0,
        top_p=1.0,
        created_at_s=int(now_s()),
        expires_at_s=int(now_s()) + LIFE_S,
    )


def make_liar(world: SimulatedWorld, host: int) -> Liar:
    return Liar(
        identity=world.identities[host],
        transport=world.join(host),
        run_id=RUN.run_id,
        make_group=honest_group,
        now_s=now_s,
        rng=world.rng("liar"),
        victim=world.identities[1],
        group_size_max=RUN.limits.group_size_max,
    )


async def swarm_with(
    lies: Sequence[Lie], size: tuple[int, int], seed: int
) -> tuple[PeerId, list[SimulatedNode]]:
    """Honest nodes to the end of their rounds, with a liar among them that tells `lies`."""
    honest, rounds = size
    async with open_world(seed, honest + 1, LAN) as world, trio.open_nursery() as nursery:
        liar = make_liar(world, honest)
        await liar.serve()
        swarm: list[SimulatedNode] = []
        done = trio.Semaphore(0)
        config = CONFIG.model_copy(update={"rounds": rounds, "external_groups": 4})

        async def live(simulated: SimulatedNode) -> None:
            policy = ScriptedPolicy(skill=0.5, generate_s=1.0, train_s=1.0)

            async def on_record(record: object) -> None:
                if isinstance(record, RoundDone) and record.round == rounds:
                    done.release()

            await run(simulated, policy, policy, on_record)

        for host in range(honest):
            known = [t.addresses()[0] for t in (liar.transport, *(s.transport for s in swarm[:1]))]
            swarm.append(build(world, host, config, known))
            nursery.start_soon(live, swarm[host])
        await trio.sleep(3.0)
        for lie in lies:
            await lie.tell(liar)
            await trio.sleep(PAUSE_S)
        for _ in range(honest):
            await done.acquire()
        for simulated in swarm:
            simulated.shown = simulated.node.snapshot()
        nursery.cancel_scope.cancel()
        return liar.identity.peer_id, swarm


def rounds_of(simulated: SimulatedNode) -> list[RoundDone]:
    return [record for record in simulated.records if isinstance(record, RoundDone)]


def trained_on(swarm: Sequence[SimulatedNode], peer: PeerId) -> int:
    each = (r.foreign_by_producer for s in swarm for r in rounds_of(s))
    return sum(counts.get(peer, 0) for counts in each)


def external(simulated: SimulatedNode) -> int:
    return sum(r.external_groups for r in rounds_of(simulated))


def assert_no_honest_peer_is_blamed(swarm: Sequence[SimulatedNode], liar: PeerId) -> None:
    for simulated in swarm:
        ledger = simulated.node.ledger
        blamed = {
            p: ledger.account(p).rejected for p in ledger.peers() if ledger.account(p).rejected
        }
        assert blamed.keys() <= {liar}, blamed
        assert banned(simulated) <= {liar}


def banned(simulated: SimulatedNode) -> set[str]:
    """Whom the node had banned at the end."""
    assert simulated.shown is not None
    return {ban.subject for ban in simulated.shown.bans}


LIES = [lie for lie in CATALOGUE if lie.reason is not None]
CLAIMS = [lie for lie in CATALOGUE if lie.reason is None]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.name)
def test_a_lie_is_counted_under_its_name_and_never_trained_on(lie: Lie) -> None:
    liar, swarm = deterministic_run(swarm_with, [lie], ALONE, 5, seed=5)
    assert lie.reason is not None
    counted = [s.node.ledger.account(liar).rejected for s in swarm]
    assert sum(each[lie.reason] for each in counted) > 0, counted
    if lie.name != "same_task_twice":  # its first group for the task is an honest one
        assert trained_on(swarm, liar) == 0
    assert_no_honest_peer_is_blamed(swarm, liar)
    shown = [s.shown for s in swarm if s.shown is not None and lie.reason in s.shown.rejected]
    guilty = [p for each in shown for p in each.peers if p.peer_id == liar]
    assert guilty[0].rejected[lie.reason] > 0
    assert str(lie.reason) in render_status(shown[0])


@pytest.mark.parametrize("lie", CLAIMS, ids=lambda lie: lie.name)
def test_a_claim_that_nobody_uses_costs_nothing(lie: Lie) -> None:
    liar, swarm = deterministic_run(swarm_with, [lie], ALONE, 5, seed=5)
    assert not any(s.node.ledger.account(liar).rejected for s in swarm)
    if lie.name != "known_peers_invented":
        assert sum(s.node.ledger.account(liar).accepted for s in swarm) > 0
        assert trained_on(swarm, liar) > 0


def test_an_honest_group_of_the_same_maker_is_trained_on() -> None:
    """The negative control: without a lie the same machinery takes the group in."""

    async def truth(liar: Liar) -> None:
        await liar.offer_group(lambda group: group)

    liar, swarm = deterministic_run(swarm_with, [Lie("truth", truth, None)], ALONE, 5, seed=5)
    assert trained_on(swarm, liar) > 0
    assert not any(s.node.ledger.rejected for s in swarm)


def test_all_lies_together_leave_the_others_training_as_it_was_and_end_in_a_ban() -> None:
    _, calm = deterministic_run(swarm_with, [], TOGETHER, 5, seed=5)
    liar, swarm = deterministic_run(swarm_with, CATALOGUE, TOGETHER, 5, seed=5)
    for before, after in zip(calm, swarm, strict=True):
        assert [r.round for r in rounds_of(after)] == list(range(1, TOGETHER[1] + 1))
        assert external(after) >= external(before) - 8
        assert banned(after) == {liar}
        assert after.shown is not None
        assert "banned (1)" in render_status(after.shown)
    assert_no_honest_peer_is_blamed(swarm, liar)


def test_a_silent_flood_leaves_the_others_their_sharing() -> None:
    lies = [BY_NAME["silence"]] * 4
    _, calm = deterministic_run(swarm_with, [], TOGETHER, 5, seed=5)
    _, swarm = deterministic_run(swarm_with, lies, TOGETHER, 5, seed=5)
    assert sum(map(external, swarm)) >= 0.8 * sum(map(external, calm)) > 100
    assert not any(map(banned, swarm))  # it may have had a bad day
