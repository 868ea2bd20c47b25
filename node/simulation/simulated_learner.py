"""A learner and its workers over a simulated network: the production roles under a virtual clock.

Training and generation are timed stand-ins. Node, exchange, intake, leases, the loops of learner
and workers, broadcast and swap of versions are real, on real files.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import trio

from node.config import NodeConfig, RunConfig
from node.config.run import LearnerRules
from node.hosting.hand_over import EngineHandOver
from node.hosting.membership import Membership
from node.hosting.policy_host import WorkerEngine
from node.interfaces.engine import Engine
from node.interfaces.trainer import TrainingGroup
from node.observe.event_log import Record
from node.observe.records import SampledGroup, StepDone, Trouble
from node.run.claims import Scorer, VersionDirectory
from node.run.learner_role import LearnerRole
from node.run.node import Node, open_node
from node.run.role import Role
from node.run.worker_role import WorkerRole
from node.run.world import Listener, SamplingTrainer, World
from node.simulation.simulated_nodes import SimulatedNetwork
from node.simulation.simulated_policy import TimedEngine, TimedHost, TimedTrainer
from node.verify.verifier import InlineVerifier, Verifier
from swarm.rollouts import version_spans
from swarm.simulation.world import SimulatedWorld
from swarm.weights.weights_service import VersionOutcome

LEARNER = 0
STALE_KEPT = 8  # groups beyond the bound that are kept in words


@dataclass(frozen=True)
class LearnerCase:
    """A simulated learner's settings. `generate_s` of each worker is the time for one group."""

    rules: LearnerRules
    generate_s: tuple[float, ...]
    train_s: float
    version_bytes: int = 10_000


@dataclass
class SimulatedLearner:
    """A learner, its workers and their reports."""

    case: LearnerCase
    world: SimulatedWorld
    directory: Path
    nursery: trio.Nursery
    run_config: RunConfig
    first: int = LEARNER  # host of the learner; those of its workers follow
    peers: tuple[str, ...] = ()  # addresses that all know besides the learner's
    steps: list[StepDone] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)  # by host
    nodes: dict[int, Node] = field(default_factory=dict)
    roles: dict[int, Role] = field(default_factory=dict)
    leaving: dict[int, trio.Event] = field(default_factory=dict)  # set: a host's role ends
    stale: deque[str] = field(default_factory=lambda: deque(maxlen=STALE_KEPT))

    async def start(self, host: int) -> None:
        """Put a host to work; the learner comes first."""
        self.starts[host] = self.starts.get(host, 0) + 1
        with self.world.on(host):
            await self.nursery.start(self.live, host)

    async def live(
        self, host: int, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """One start of a host, until it is cancelled: as `app` runs a node."""
        role_class = LearnerRole if host == self.first else WorkerRole
        identity, config = self.world.identities[host], self.config_of(host)
        draws = role_class.needs(config, identity).draws
        machine = self.machine_of(host)
        async with open_node(machine, config, identity, Membership(None, None), draws) as node:
            role = self.role_of(machine, config, node)
            self.nodes[host], self.roles[host] = node, role
            leaving = self.leaving[host] = trio.Event()
            async with trio.open_nursery() as nursery:
                await nursery.start(node.run_network)
                nursery.start_soon(role.run, leaving)
                if isinstance(role, LearnerRole):
                    await role.ready.wait()
                task_status.started()

    def config_of(self, host: int) -> NodeConfig:
        """The settings of a host."""
        learner = self.world.network.address(self.world.peer_id(self.first))
        directory = self.directory / f"host{host}"
        directory.mkdir(parents=True, exist_ok=True)
        return NodeConfig(
            run=self.run_config,
            engine="torch",  # the only one that all roles take; the machine opens another
            evaluate_every_rounds=0,
            data_dir=directory,
        ).model_copy(update={"peers": self.peers if host == self.first else (learner, *self.peers)})

    def machine_of(self, host: int) -> "SimulatedMachine":
        """The outside of a host's role."""
        return SimulatedMachine(self, host)

    def role_of(self, machine: "SimulatedMachine", config: NodeConfig, node: Node) -> Role:
        """The role of a machine's host."""
        role_class = LearnerRole if machine.host == self.first else WorkerRole
        return role_class(machine, config, node, machine)

    def judge_batch(self, groups: Sequence[TrainingGroup], version: int) -> None:
        """Compare the age of each token with the bound, apart from the code that enforces it.
        Shared groups are of other policies, and have no age. `version`: the trainer's."""
        for group in groups:
            versions = [run[0] for each in group.completions for run in version_spans(each)]
            is_stale = version - min(versions) > self.case.rules.staleness_max
            if group.own_tokens and (is_stale or max(versions) > version):
                self.stale.append(f"versions {sorted(set(versions))} at version {version}")

    def receive(self, host: int, record: Record) -> None:
        """Record what a role tells. Troubles of the learner are faults of the code."""
        if isinstance(record, StepDone):
            self.steps.append(record)
        elif isinstance(record, Trouble) and host == self.first:
            raise AssertionError(record.what)


class SimulatedMachine(SimulatedNetwork, World):
    """`World` and `Listener` of one start of one host."""

    def __init__(self, there: SimulatedLearner, host: int) -> None:
        super().__init__(there.world, host, there.starts[host])
        self.there = there

    async def rest(self, config: NodeConfig, tell: Callable[[str], None]) -> None:
        await trio.lowlevel.checkpoint()

    @asynccontextmanager
    async def open_verifier(self, config: NodeConfig) -> AsyncIterator[Verifier]:
        await trio.lowlevel.checkpoint()
        yield InlineVerifier(config.run)

    @asynccontextmanager
    async def open_trainer(
        self, config: NodeConfig, checkpoint: Path | None
    ) -> AsyncIterator[SamplingTrainer]:
        await trio.lowlevel.checkpoint()
        case = self.there.case
        trainer = TimedTrainer(case.train_s, case.version_bytes, self._judge)
        if checkpoint is not None:
            trainer.restore(checkpoint)
        yield trainer

    def _judge(self, groups: Sequence[TrainingGroup], version: int) -> None:
        """The learner's version is above the trainer's where steps were lost."""
        learner = cast("LearnerRole", self.there.roles[self.host]).learner
        assert learner is not None
        self.there.judge_batch(groups, max(version, learner.version))

    @asynccontextmanager
    async def open_engine(
        self, config: NodeConfig, trainer: SamplingTrainer, listener: Listener
    ) -> AsyncIterator[tuple[Engine, EngineHandOver | None]]:
        await trio.lowlevel.checkpoint()
        yield trainer, None

    @asynccontextmanager
    async def open_scorer(
        self, config: NodeConfig, find: VersionDirectory
    ) -> AsyncIterator[Scorer | None]:
        await trio.lowlevel.checkpoint()
        yield None

    def policy_host(self, config: NodeConfig, listener: Listener) -> WorkerEngine:
        worker = self.host - self.there.first - 1
        return TimedHost(TimedEngine(self.there.case.generate_s[worker]))

    def say(self, text: str) -> None:
        """Nobody watches a simulation."""

    async def show(self, groups: Sequence[SampledGroup]) -> None: ...

    def note_outcome(self, outcome: VersionOutcome) -> None: ...

    async def tell(self, record: Record) -> None:
        await trio.lowlevel.checkpoint()
        self.there.receive(self.host, record)


def run_of(
    world: SimulatedWorld, rules: LearnerRules, run: RunConfig, host: int = LEARNER
) -> RunConfig:
    """The run with one of the world's hosts as its learner."""
    learner = rules.model_copy(update={"peer": str(world.peer_id(host))})
    return run.model_copy(update={"learner": learner})
