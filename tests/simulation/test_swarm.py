"""Whole nodes in a simulated wide-area network: sharing works, and a seed replays a run."""

import subprocess
import sys
from functools import partial
from itertools import permutations

import pytest
import trio

from node.config import NodeConfig, RunConfig
from node.engines.scripted import ScriptedPolicy
from node.observe.records import RoundDone
from node.simulation import simulated_nodes
from node.simulation.simulated_nodes import SimulatedNode, build, run
from node.verify.assignment import is_common
from swarm.exchange.pool import PoolLimits
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import deterministic_run, open_world

RUN = RunConfig.model_validate(
    {
        "name": "simulated",
        "environments": [{"name": "scripted_sum", "parameters": {"max": 99}}],
        "sampling": {"max_new_tokens": 8},
        "held_out": {"tasks": 10},
    }
)
CONFIG = NodeConfig(
    run=RUN, engine="scripted", local_groups=2, external_groups=2, group_size=4, rounds=12
)
WAN = LinkProfile(latency_s=0.1, loss=0.01)


async def swarm_of(
    nodes: int, seed: int, rounds: int, **settings: object
) -> tuple[str, list[SimulatedNode]]:
    """Run a swarm to its end; the trace's hash and the nodes."""
    async with open_world(seed, nodes, WAN) as world, trio.open_nursery() as nursery:
        config = CONFIG.model_copy(update={"rounds": rounds, **settings})
        swarm: list[SimulatedNode] = []
        done = trio.Semaphore(0)

        async def live(simulated: SimulatedNode) -> None:
            policy = ScriptedPolicy(skill=0.5, generate_s=1.0, train_s=1.0)

            async def on_record(record: object) -> None:
                world.record(f"host {simulated.host} {record}")
                if isinstance(record, RoundDone) and record.round == rounds:
                    done.release()

            await run(simulated, policy, policy, on_record)

        for host in range(nodes):
            first = swarm[0].transport.addresses()[:1] if swarm else ()
            swarm.append(build(world, host, config, first))
            nursery.start_soon(live, swarm[host])
        for _ in range(nodes):
            await done.acquire()
        nursery.cancel_scope.cancel()
        return world.trace_hash, swarm


def trace(seed: int) -> str:
    return deterministic_run(swarm_of, 16, seed, 5, seed=seed)[0]


def test_sixteen_nodes_share_over_a_slow_and_lossy_network() -> None:
    _, swarm = deterministic_run(swarm_of, 16, 1, 10, seed=1)
    for simulated in swarm:
        rounds = [r for r in simulated.records if isinstance(r, RoundDone)]
        assert len(rounds) == 10
        assert sum(r.external_groups for r in rounds[4:]) >= 10  # of 12 in the last six
        assert not simulated.node.ledger.rejected
        assert len(simulated.node.discovery.peers) >= 8
    sources = {
        p
        for s in swarm
        for r in s.records
        if isinstance(r, RoundDone)
        for p in r.foreign_by_producer
    }
    assert len(sources) == 16
    trained = told = 0
    for maker, taker in permutations(swarm, 2):
        mine = taker.node.ledger.account(maker.node.peer.identity.peer_id).trained
        heard = maker.node.ledger.credit.of(taker.node.peer.identity.peer_id)
        assert heard <= mine
        trained, told = trained + mine, told + heard
    assert told >= trained / 2  # hellos between two peers may be half a minute apart


def test_one_seed_gives_one_trace_and_another_seed_another() -> None:
    # in fresh processes with different hash seeds, so that no order leaks from sets or ids
    script = (
        "from tests.simulation.test_swarm import trace; import sys; print(trace(int(sys.argv[1])))"
    )
    traces = [
        subprocess.run(
            [sys.executable, "-c", script, seed],
            env={"PYTHONHASHSEED": hash_seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, hash_seed in (("8123", "1"), ("8123", "2"), ("8124", "1"))
    ]
    assert traces[0] == traces[1]
    assert traces[0] != traces[2]


@pytest.mark.parametrize("seed", [1])
def test_no_group_reaches_a_trainer_twice(seed: int) -> None:
    _, swarm = deterministic_run(swarm_of, 6, seed, 16, seed=seed)
    for simulated in swarm:
        marked = simulated.pool._db.execute(
            "SELECT count(*), count(DISTINCT group_id) FROM groups WHERE trained_round IS NOT NULL"
        ).fetchone()
        drawn = sum(r.external_groups for r in simulated.records if isinstance(r, RoundDone))
        assert drawn > 20
        assert marked[0] == marked[1] == drawn


def test_sharing_goes_on_when_every_producers_share_of_the_pool_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        simulated_nodes, "pool_limits", lambda _: PoolLimits(groups_per_producer_max=6)
    )

    async def long() -> tuple[str, list[SimulatedNode]]:
        return await swarm_of(4, 2, 30)

    _, swarm = deterministic_run(long, seed=2)
    for simulated in swarm:
        rounds = [r for r in simulated.records if isinstance(r, RoundDone)]
        assert max(simulated.pool.statistics().by_producer.values()) == 6
        assert sum(r.external_groups for r in rounds[-10:]) >= 15  # of 20
        assert not simulated.node.ledger.rejected


def test_nodes_meet_on_the_tasks_that_a_run_has_in_common() -> None:
    rules = {**RUN.model_dump(), "common": {"tasks": 6, "share": 0.5}}
    run_ = RunConfig.model_validate(rules)
    _, swarm = deterministic_run(partial(swarm_of, run=run_), 4, 1, 14, seed=1)
    done: set[tuple[int, int, int]] = set()  # host, task, attempt
    for simulated in swarm:
        assert not simulated.node.ledger.rejected
        pool = simulated.pool
        ids = [group_id for group_id, *_ in pool.own_newest(0)]
        for each in pool.groups(ids):
            if is_common(run_, each.group.task):
                done.add((simulated.host, each.group.task.index, each.group.attempt))
    assert {(task, again) for host, task, again in done if host == 0} >= {
        (task, again) for task in range(6) for again in (0, 1)
    }
    assert all(len({host for host, task, _ in done if task == number}) == 4 for number in range(6))
