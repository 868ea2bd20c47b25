"""A node that joins late, or that slept, shares both ways within one round of its own."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import trio
import trio.testing

from node.engines.scripted import ScriptedPolicy
from node.interfaces.engine import Sampling
from node.interfaces.trainer import TrainingGroup, TrainReport
from node.observe.records import RoundDone
from node.simulation.simulated_nodes import SimulatedNode, build, run
from swarm.rollouts import Completion
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import SimulatedWorld, deterministic_run, open_world
from swarm.wire.messages import ADVERTS_PROTOCOL
from tests.simulation.exchanges import exchanges, group_of, now_s
from tests.simulation.test_swarm import CONFIG, RUN
from tests.support import run as run_trio

ROUND_S = 10.0
OTHERS = 2
LINK = LinkProfile(latency_s=0.05)


class Sleeper(ScriptedPolicy):
    """A policy that does not learn, so that its groups stay of use, on a machine that can be put
    to sleep in the middle of generating."""

    def __init__(self) -> None:
        super().__init__(skill=0.5, generate_s=0.6 * ROUND_S, train_s=0.4 * ROUND_S)
        self.awake = trio.Event()
        self.awake.set()

    async def generate(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[tuple[Completion, ...]]:
        completions = await super().generate(prompts, completions_each, sampling, seed)
        await self.awake.wait()
        return completions

    async def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        report = await super().train(groups)
        self.skill = 0.5
        return report


class Swarm:
    """Nodes that go on with their rounds."""

    def __init__(self, world: SimulatedWorld, nursery: trio.Nursery, life_s: int) -> None:
        self.world = world
        limits = RUN.limits.model_copy(update={"record_life_s": life_s})
        self._run = RUN.model_copy(update={"limits": limits})
        self.nodes: list[SimulatedNode] = []
        self.policies: list[Sleeper] = []
        self._nursery = nursery

    def add(self, local_groups: int = 4) -> SimulatedNode:
        config = CONFIG.model_copy(
            update={
                "run": self._run,
                "local_groups": local_groups,
                "external_groups": 4,
                "rounds": None,
                "evaluate_every_rounds": 0,
            }
        )
        first = self.nodes[0].transport.addresses()[:1] if self.nodes else ()
        node = build(self.world, len(self.nodes), config, first)
        policy = Sleeper()
        self.nodes.append(node)
        self.policies.append(policy)
        self._nursery.start_soon(run, node, policy, policy)
        return node

    def sleep(self, host: int) -> None:
        """Nothing goes in or out, and its rounds stand still."""
        self.policies[host].awake = trio.Event()
        everybody = {node.transport.peer_id for node in self.nodes}
        self.world.network.partition({self.nodes[host].transport.peer_id}, everybody)

    async def wake(self, host: int, *, drop: bool) -> None:
        transport = self.nodes[host].transport
        for peer in transport.peers() if drop else ():
            await transport.disconnect(peer)
        self.world.network.heal()
        self.policies[host].awake.set()


def rounds(node: SimulatedNode) -> list[RoundDone]:
    return [record for record in node.records if isinstance(record, RoundDone)]


def taken(others: Sequence[SimulatedNode], node: SimulatedNode) -> list[int]:
    """How many of a node's groups each of the others took in."""
    return [other.node.ledger.account(node.transport.peer_id).accepted for other in others]


async def until_round(node: SimulatedNode, number: int) -> None:
    with trio.fail_after(20 * ROUND_S):
        while len(rounds(node)) < number:  # noqa: ASYNC110 - rounds set no event
            await trio.sleep(0.1)


async def late_joiner() -> None:
    async with open_world(3, OTHERS + 1, LINK) as world, trio.open_nursery() as nursery:
        swarm = Swarm(world, nursery, 3600)
        others = [swarm.add() for _ in range(OTHERS)]
        await trio.sleep(50 * ROUND_S)
        late = swarm.add()
        await until_round(late, 2)
        assert [record.external_groups > 0 for record in rounds(late)] == [True, True]
        assert all(taken(others, late)), "what it shared in its first round was not taken"
        nursery.cancel_scope.cancel()


def test_a_late_joiner_shares_both_ways_within_one_round() -> None:
    deterministic_run(late_joiner, seed=3)


async def slept_for_fifty_rounds(life_s: int, drop: bool) -> None:
    async with open_world(4, OTHERS + 1, LINK) as world, trio.open_nursery() as nursery:
        swarm = Swarm(world, nursery, life_s)
        others = [swarm.add() for _ in range(OTHERS)]
        sleeper = swarm.add(16)  # more than anybody takes: they will ask the sleeper for the rest
        await until_round(sleeper, 5)
        await trio.sleep(0.3 * ROUND_S)
        asleep = sleeper.transport.peer_id
        before = len(rounds(sleeper))
        swarm.sleep(sleeper.host)
        tables = [other.exchange._offers for other in others]
        was_left_alone = False
        for _ in range(50):
            await trio.sleep(ROUND_S)
            now = trio.current_time()
            was_left_alone = was_left_alone or any(now < t.of(asleep).rests_until for t in tables)
        assert len(rounds(others[0])) > before + 45
        assert life_s == 240 or was_left_alone
        taken_before = taken(others, sleeper)
        assert all(taken_before)
        await swarm.wake(sleeper.host, drop=drop)
        await until_round(sleeper, before + 2)
        external = [record.external_groups for record in rounds(sleeper)[before:]]
        assert external[1] > 0, external
        gained = zip(taken_before, taken(others, sleeper), strict=True)
        assert all(after > then for then, after in gained), "its groups wait for something"
        assert not sleeper.node.ledger.account(others[0].transport.peer_id).rejected.keys() - {
            "unavailable"
        }
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("life_s", "drop"),
    [
        (240, True),  # all that it had advertised has expired, and its connections are gone
        (3600, False),  # others go on to ask it, in vain, and leave it alone for ever longer
    ],
)
def test_a_node_that_slept_for_fifty_rounds_shares_both_ways_within_one(
    life_s: int, drop: bool
) -> None:
    deterministic_run(slept_for_fifty_rounds, life_s, drop, seed=4)


def test_after_its_process_was_stopped_it_asks_all_peers_again() -> None:
    async def main() -> None:
        async with exchanges(4) as swarm:
            await swarm.start(*range(4))
            asked = swarm.peers[0].transport.counters.messages_out
            await trio.sleep(5)
            assert asked[ADVERTS_PROTOCOL] == 6  # as many requests as answers to others'
            clock = trio.lowlevel.current_clock()
            assert isinstance(clock, trio.testing.MockClock)
            clock.jump(600)
            await trio.sleep(5)
            assert asked[ADVERTS_PROTOCOL] == 12

    run_trio(main, virtual=True, timeout_s=1000)


def test_what_has_expired_is_neither_advertised_nor_handed_on() -> None:
    async def main() -> None:
        async with exchanges(3) as swarm:
            sleeper, other, late = swarm.peers
            await swarm.start(0, 1)
            group = group_of(sleeper.identity, 1)
            old = replace(group, created_at_s=group.created_at_s - 900, expires_at_s=int(now_s()))
            await sleeper.share(old)  # made before it slept, shared when it woke up
            group = replace(group_of(sleeper.identity, 2), expires_at_s=int(now_s()) + 3)
            await sleeper.share(group)
            await trio.sleep(3.5)  # its table is not tidied yet
            await swarm.start(2)
            await trio.sleep(20)
            for peer in (other, late):
                assert not peer.exchange.ledger.rejected

    run_trio(main, virtual=True, timeout_s=1000)
