"""Honest peers never ban each other, whatever happens to them: churn, slow and lossy links, clocks
that are minutes off, restarts from an empty disk, duplicated and reordered messages, partitions."""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import pytest
import trio

from node.engines.scripted import ScriptedPolicy
from node.observe.records import BanStatus
from node.simulation.simulated_nodes import SimulatedNode, build, run
from swarm.errors import Reject
from swarm.peers import reputation
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import SimulatedWorld, deterministic_run, open_world
from tests.simulation.test_swarm import CONFIG

NODES = 6
VIRTUAL_S = 500.0
DOWN_S = 20.0
LOOK_S = 5.0
SLOW = LinkProfile(
    latency_s=0.15,
    jitter_s=0.2,
    up_bytes_per_s=12_000.0,
    down_bytes_per_s=25_000.0,
    loss=0.03,
    duplication=0.3,
    reordering=0.3,
)
SKEWS_S = (0, 100, -100, -300, 400, 0)  # the run allows 120 s ahead


@dataclass
class Seen:
    """What all nodes together came to, over all their starts."""

    rejected: Counter[Reject] = field(default_factory=Counter)
    bans: list[BanStatus] = field(default_factory=list)
    accepted: int = 0
    starts: int = 0


async def live(world: SimulatedWorld, host: int, peers: tuple[str, ...], seen: Seen) -> None:
    """A host that dies now and then and comes back with its key and nothing else."""
    rng = world.rng(f"churn/{host}")
    config = CONFIG.model_copy(update={"rounds": None, "external_groups": 4})
    start = 0
    while True:
        off_s = SKEWS_S[host]
        simulated = build(world, host, config, peers, start=start, clock_off_s=off_s)
        policy = ScriptedPolicy(skill=0.5, generate_s=6.0, train_s=2.0)
        seen.starts += 1
        with trio.move_on_after(60 + 150 * rng.random()):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(run, simulated, policy, policy))
                nursery.start_soon(watch, simulated, seen)
        ledger = simulated.node.ledger
        seen.rejected.update(ledger.rejected)
        seen.accepted += ledger.accepted
        world.crash(host)
        await trio.sleep(DOWN_S * (0.5 + rng.random()))
        start += 1


async def watch(simulated: SimulatedNode, seen: Seen) -> None:
    while True:
        await trio.sleep(LOOK_S)
        seen.bans += simulated.node._ban_statuses()


async def cut(world: SimulatedWorld) -> None:
    """Halve the swarm now and then."""
    everybody = [world.peer_id(host) for host in range(NODES)]
    while True:
        await trio.sleep(100.0)
        world.network.partition(everybody[: NODES // 2], everybody[NODES // 2 :])
        await trio.sleep(25.0)
        world.network.heal()


async def swarm(seed: int) -> Seen:
    seen = Seen()
    async with open_world(seed, NODES, SLOW) as world, trio.open_nursery() as nursery:
        addresses = []
        for host in range(NODES):
            addresses += world.join(host).addresses()
            world.crash(host)
        for host in range(NODES):
            others = tuple(each for at, each in enumerate(addresses) if at != host)
            nursery.start_soon(live, world, host, others, seen)
        nursery.start_soon(cut, world)
        await trio.sleep(VIRTUAL_S)
        nursery.cancel_scope.cancel()
    return seen


@pytest.mark.parametrize("seed", [1])
def test_honest_peers_never_ban_each_other(seed: int) -> None:
    seen = deterministic_run(swarm, seed, seed=seed)
    assert seen.bans == []
    assert seen.accepted > 50
    assert seen.starts > 2 * NODES
    # all of this happened to them, and none of it is what only a liar produces
    assert {Reject.FUTURE, Reject.DUPLICATE_TASK, Reject.UNAVAILABLE} <= set(seen.rejected)
    assert set(seen.rejected).isdisjoint(reputation.MUCH)


def test_one_wrong_weight_bans_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the same swarm, were a fast clock a lie."""
    reason = Reject.FUTURE
    monkeypatch.setattr(reputation, "MUCH", {**reputation.MUCH, reason: 4.0})
    seen = deterministic_run(swarm, 1, seed=1)
    assert any(str(reason) in ban.why for ban in seen.bans)
