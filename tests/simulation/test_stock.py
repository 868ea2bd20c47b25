"""How many groups of others each role fetches: as many as it draws, and a worker none."""

from collections.abc import Sequence
from pathlib import Path

import trio

from node.config.run import LearnerRules
from node.engines.scripted import ScriptedPolicy
from node.interfaces.trainer import TrainingGroup, TrainReport
from node.run.node import POOL_FILE
from node.simulation.simulated_learner import run_of
from node.simulation.simulated_nodes import SimulatedNode, build, run
from swarm.leases.lease_table import LeaseRules
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import deterministic_run, open_world
from swarm.wire.messages import ROLLOUTS_PROTOCOL
from tests.simulation.lab_learner import LabCase, LabLearner
from tests.simulation.test_swarm import CONFIG
from tests.wire_samples import ALICE

LEARNER, WORKER, NODES = 0, 1, (2, 3)
PER_STEP = 24
LINK = LinkProfile(latency_s=0.05)
CASE = LabCase(
    LearnerRules(
        peer=ALICE.peer_id,
        groups_per_step=2,
        group_size=4,
        pool_groups_per_step=PER_STEP,
        rescored_share=0.0,
    ),
    generate_s=(4.0,),
    train_s=4.0,
    leases=LeaseRules(target_s=8.0, first_s=10.0, life_s_min=20.0, groups_max=8),
)


class Steady(ScriptedPolicy):
    """A policy that does not learn, so that its groups stay of use."""

    async def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        report = await super().train(groups)
        self.skill = 0.5
        return report


async def mixed_swarm(directory: Path, steps: int) -> tuple[LabLearner, list[SimulatedNode]]:
    """A learner and its worker beside nodes that learn by themselves and share."""
    async with open_world(0, 2 + len(NODES), LINK) as world, trio.open_nursery() as nursery:
        rules = run_of(world, CASE.rules, CONFIG.run)
        there = LabLearner(CASE, world, directory, nursery, rules)
        config = CONFIG.model_copy(
            update={"run": rules, "role": "node", "local_groups": 32, "rounds": None}
        )
        await there.start(LEARNER)
        await there.start(WORKER)
        first = there.transports[LEARNER].addresses()[:1]
        nodes = [build(world, host, config, first) for host in NODES]
        for node in nodes:
            policy = Steady(skill=0.5, generate_s=2.0, train_s=2.0)
            nursery.start_soon(run, node, policy, policy)
        with trio.fail_after(200.0):
            while len(there.steps) < steps:  # noqa: ASYNC110 - of no one event
                await trio.sleep(1.0)
        nursery.cancel_scope.cancel()
    return there, nodes


def test_a_learner_gets_all_the_groups_that_its_step_draws_and_a_worker_fetches_none(
    tmp_path: Path,
) -> None:
    there, nodes = deterministic_run(mixed_swarm, tmp_path, 8, seed=0)
    assert [step.shared_groups for step in there.steps[-3:]] == [PER_STEP] * 3
    assert there.nodes[WORKER].sharing is None
    assert not (tmp_path / f"host{WORKER}" / POOL_FILE).exists()
    assert there.transports[WORKER].counters.bytes_in[ROLLOUTS_PROTOCOL] == 0
    assert there.nodes[WORKER].discovery.peers.keys() >= {
        node.node.peer.identity.peer_id for node in nodes
    }
    assert all(node.pool.statistics().by_producer for node in nodes)
