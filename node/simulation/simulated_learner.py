"""A learner and its workers over a simulated network: the production roles under a virtual clock,
with timed stand-ins for training and generation.

Real are the node with its peer, discovery and exchange, the intake, leases, the loops of learner
and workers, publication, broadcast and swap of versions, on real files. The policy is a scripted
one; its versions weigh what the case says. A case may have versions arrive after a given time
instead of being broadcast: a broadcast costs more computing than all the rest, too much for runs
of many hours.

What was trained on is judged by a `Witness` of its own.
"""

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import trio

from node.config import NodeConfig, RunConfig
from node.config.run import LearnerRules
from node.hosting.membership import Membership
from node.hosting.policy_host import WorkerEngine
from node.interfaces.engine import Engine
from node.interfaces.trainer import TrainingGroup
from node.observe.event_log import Record
from node.observe.records import SampledGroup, StepDone, Trouble, WorkDone
from node.run.claims import Scores, VersionDirectory
from node.run.learner import Learner
from node.run.learner_role import LearnerRole
from node.run.node import Node, open_node
from node.run.parts import HandOver
from node.run.peer import Peer
from node.run.role import Role
from node.run.worker_role import WorkerRole
from node.run.world import Listener, Publishing, SamplingTrainer, Watchers, World
from node.simulation.simulated_nodes import SimulatedNetwork
from node.simulation.simulated_policy import ScriptedScorer, TimedEngine, TimedHost, TimedTrainer
from node.simulation.witness import Witness
from node.verify.verifier import InlineVerifier, Verifier
from swarm.identity import Identity, PeerId
from swarm.leases.intake import Intake
from swarm.leases.lease_client import LeaseClient
from swarm.leases.lease_table import LeaseRules
from swarm.peers.connection_gater import ConnectionGater
from swarm.simulation.world import SimulatedWorld, stop_at_once
from swarm.transport.base import Transport
from swarm.transport.memory.network import MemoryTransport
from swarm.weights.publisher import VERSIONS_KEPT
from swarm.weights.weights_service import Outcome, Stage, WeightsService

LEARNER = 0
LEASES = LeaseRules()
WORK_KEPT = 4096  # records of each worker's batches, the newest
LOADED_KEPT = 1024  # versions of which it is known who had them when


@dataclass(frozen=True, slots=True)
class LearnerCase:
    """A simulated learner's settings. `generate_s` of each worker is the time for one group."""

    rules: LearnerRules
    generate_s: tuple[float, ...]
    train_s: float
    version_bytes: int = 10_000
    leases: LeaseRules = LEASES
    credits_per_step: float = 2.0
    transfer_s: Callable[[int, int], float] | None = None  # to a host, of a version, once it is
    # published; None: versions are broadcast
    rescores: bool = False  # log-probs are those of versions, and are checked


@dataclass(frozen=True, slots=True)
class Actor:
    """The engine and the source of work of a dishonest worker."""

    engine: "Callable[[float], TimedEngine]"
    source: type[LeaseClient] = LeaseClient


class _TimedOutlet:
    """Versions of a case with `transfer_s`: on offer from the moment that they are made."""

    def __init__(self, offers: "_Offers") -> None:
        self._offers = offers

    @property
    def newest(self) -> int:
        return self._offers.newest

    async def offer(self, version: int, export: Callable[[Path], Awaitable[None]]) -> None:
        await trio.lowlevel.checkpoint()
        self._offers.published.append(version)
        self._offers.news.set()
        self._offers.news = trio.Event()


@dataclass(slots=True)
class _Offers:
    """Versions that were published without a broadcast. Outlives the learner."""

    published: deque[int] = field(default_factory=lambda: deque(maxlen=VERSIONS_KEPT))
    news: trio.Event = field(default_factory=trio.Event)
    held: dict[int, int] = field(default_factory=dict)  # host -> version on its disk

    @property
    def newest(self) -> int:
        return self.published[-1] if self.published else 0


@dataclass(slots=True)
class LearnerHost:
    """The learner, while it is up."""

    learner: Learner
    intake: Intake
    gater: ConnectionGater


@dataclass(slots=True)
class SimulatedLearner:
    """A learner, its workers and what they reported. Hosts may be killed and come back on what they
    left on disk."""

    case: LearnerCase
    world: SimulatedWorld
    directory: Path
    nursery: trio.Nursery
    run_config: RunConfig
    first: int = LEARNER  # host of the learner; those of its workers follow
    peers: tuple[str, ...] = ()  # addresses that all know besides the learner's
    steps: list[StepDone] = field(default_factory=list)
    work: dict[int, deque[WorkDone]] = field(default_factory=dict)
    verdicts: dict[int, dict[str, int]] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    tasks: dict[int, trio.Nursery] = field(default_factory=dict)
    gone: dict[int, trio.Event] = field(default_factory=dict)
    transports: dict[int, MemoryTransport] = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)
    roles: dict[int, Role] = field(default_factory=dict)
    actors: dict[int, Actor] = field(default_factory=dict)  # of hosts that are not honest workers
    loaded: dict[int, dict[int, float]] = field(default_factory=dict)  # version -> host -> when
    witness: Witness = field(init=False)
    offers: _Offers = field(default_factory=_Offers)
    coordinator: PeerId | None = None  # who may steer the learner

    def __post_init__(self) -> None:
        self.witness = Witness(self.case.rules.staleness_max)

    @property
    def up(self) -> LearnerHost | None:
        """The learner that was started last; None: it has not begun yet."""
        role = self.roles.get(self.first)
        if not isinstance(role, LearnerRole) or role.learner is None or role.intake is None:
            return None
        return LearnerHost(role.learner, role.intake, self.nodes[self.first].gater)

    async def start(self, host: int) -> None:
        """Put a host to work; the learner comes first."""
        self.gone[host] = trio.Event()
        self.starts[host] = self.starts.get(host, 0) + 1
        with self.world.on(host):
            await self.nursery.start(self._live, host)

    async def kill(self, host: int) -> None:
        """Take a host off the network at once, in the middle of whatever it does."""
        self.world.crash(host)
        stop_at_once(self.tasks[host])
        await self.gone[host].wait()
        if host == self.first:
            self.witness.lost()

    async def _live(
        self, host: int, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        try:
            async with trio.open_nursery() as self.tasks[host]:
                await self.tasks[host].start(self._run, host)
                task_status.started()
        finally:
            self.gone[host].set()

    async def _run(
        self, host: int, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """One start of a host, until it is killed: as `app` runs a node."""
        makes = LearnerRole if host == self.first else WorkerRole
        identity, config = self.world.identities[host], self._config(host)
        draws = makes.needs(config, identity).draws
        machine = _Machine(self, host)
        async with open_node(machine, config, identity, Membership(None, None), draws) as node:
            role = self._role(machine, config, node)
            self.nodes[host], self.roles[host] = node, role
            async with trio.open_nursery() as nursery:
                await nursery.start(node.run_network)
                nursery.start_soon(role.run, trio.Event())
                if isinstance(role, LearnerRole):
                    await role.ready.wait()
                task_status.started()

    def _config(self, host: int) -> NodeConfig:
        config = NodeConfig(
            run=self.run_config,
            engine="torch",  # the only one that all roles take; it is `_Machine`'s
            evaluate_every_rounds=0,
            data_dir=self.directory / f"host{host}",
            coordinator=self.coordinator,
        )
        config.data_dir.mkdir(parents=True, exist_ok=True)
        learner = self.world.network.address(self.world.peer_id(self.first))
        peers = self.peers if host == self.first else (learner, *self.peers)
        return config.model_copy(update={"peers": peers})

    def _role(self, machine: "_Machine", config: NodeConfig, node: Node) -> Role:
        host = machine.host
        if host == self.first:
            return LearnerRole(
                *(machine, config, node, machine),
                leases=self.case.leases,
                credits_per_step=self.case.credits_per_step,
            )
        actor = self.actors.get(host, Actor(TimedEngine))
        role = WorkerRole(machine, config, node, machine, source=actor.source)
        machine.engine.newest = lambda: role.source.learner_version
        return role

    def note_loaded(self, host: int, version: int) -> None:
        """A worker serves a version from now on."""
        self.loaded.setdefault(version, {})[host] = trio.current_time()
        while len(self.loaded) > LOADED_KEPT:
            del self.loaded[next(iter(self.loaded))]

    def witness_step(self, groups: Sequence[TrainingGroup], version: int) -> None:
        """`version`: the updates that the trainer has made. The learner's number is above it where
        steps were lost. Shared groups are of other policies, and have no age."""
        assert self.up is not None
        leased = [group for group in groups if group.own_tokens]
        self.witness.trained(leased, max(version, self.up.learner.version))


class _Machine(SimulatedNetwork, World):
    """`World` of one start of one host, and who hears its role."""

    def __init__(self, there: SimulatedLearner, host: int) -> None:
        super().__init__(there.world, host, there.starts[host])
        self._there = there
        if host != there.first:
            actor = there.actors.get(host, Actor(TimedEngine))
            self.engine = actor.engine(there.case.generate_s[host - there.first - 1])

    async def rest(self, config: NodeConfig, tell: Callable[[str], None]) -> None:
        await trio.lowlevel.checkpoint()

    @asynccontextmanager
    async def open_transport(
        self, identity: Identity, config: NodeConfig, membership: Membership
    ) -> AsyncIterator[Transport]:
        async with super().open_transport(identity, config, membership) as transport:
            self._there.transports[self.host] = cast("MemoryTransport", transport)
            yield transport

    @asynccontextmanager
    async def open_verifier(self, config: NodeConfig) -> AsyncIterator[Verifier]:
        await trio.lowlevel.checkpoint()
        yield InlineVerifier(config.run)

    @asynccontextmanager
    async def open_trainer(
        self, config: NodeConfig, checkpoint: Path | None
    ) -> AsyncIterator[SamplingTrainer]:
        await trio.lowlevel.checkpoint()
        case = self._there.case
        trainer = TimedTrainer(case.train_s, case.version_bytes, self._there.witness_step)
        if checkpoint is not None:
            trainer.restore(checkpoint)
        yield trainer

    @asynccontextmanager
    async def open_engine(
        self, config: NodeConfig, trainer: SamplingTrainer, listener: Listener
    ) -> AsyncIterator[tuple[Engine, HandOver | None]]:
        await trio.lowlevel.checkpoint()
        yield trainer, None

    @asynccontextmanager
    async def open_scorer(
        self, config: NodeConfig, find: VersionDirectory
    ) -> AsyncIterator[Scores | None]:
        await trio.lowlevel.checkpoint()
        yield ScriptedScorer(find) if self._there.case.rescores else None

    def policy_host(self, config: NodeConfig, listener: Listener) -> WorkerEngine:
        there, engine, worker = self._there, self.engine, str(self.world.peer_id(self.host))
        engine.made = lambda prompt, version: there.witness.made(worker, prompt, version)
        engine.has_logprobs = there.case.rescores
        return TimedHost(engine, lambda version: there.note_loaded(self.host, version))

    def open_publishing(
        self, config: NodeConfig, peer: Peer, watchers: Watchers
    ) -> AbstractAsyncContextManager[Publishing]:
        if self._there.case.transfer_s is None:
            return super().open_publishing(config, peer, watchers)
        return _offering(self._there.offers)

    def open_following(
        self,
        config: NodeConfig,
        peer: Peer,
        host: WorkerEngine,
        tell: Callable[[Outcome], None],
        watch: Callable[[Stage], None],
    ) -> AbstractAsyncContextManager[WeightsService | None]:
        transfer_s = self._there.case.transfer_s
        if transfer_s is None:
            return super().open_following(config, peer, host, tell, watch)
        return _receiving(self._there.offers, self.host, transfer_s, cast("TimedHost", host))

    # --- what it hears ------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Nobody watches a simulation."""

    async def show(self, groups: Sequence[SampledGroup]) -> None: ...

    def note_outcome(self, outcome: Outcome) -> None: ...

    async def tell(self, record: Record) -> None:
        await trio.lowlevel.checkpoint()
        there, host = self._there, self.host
        if isinstance(record, StepDone):
            there.steps.append(record)
        elif isinstance(record, WorkDone):
            there.work.setdefault(host, deque(maxlen=WORK_KEPT)).append(record)
            there.verdicts[host] = dict(record.verdicts_total)
        elif isinstance(record, Trouble) and host == there.first:
            raise AssertionError(record.what)


@asynccontextmanager
async def _offering(offers: _Offers) -> AsyncIterator[Publishing]:
    """The publishing of a case in which versions are not broadcast."""
    await trio.lowlevel.checkpoint()
    yield Publishing(
        _TimedOutlet(offers),
        lambda: tuple(offers.published),
        lambda version: Path() if version in offers.published else None,
        None,
        lambda: None,
    )


@asynccontextmanager
async def _receiving(
    offers: _Offers, host: int, transfer_s: Callable[[int, int], float], swap: TimedHost
) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_follow, offers, host, transfer_s, swap)
        yield
        nursery.cancel_scope.cancel()


async def _follow(
    offers: _Offers, host: int, transfer_s: Callable[[int, int], float], swap: TimedHost
) -> None:
    """Have each new version some time after it is out. As with broadcasts, one that is overtaken on
    its way is dropped for the newer one."""
    if host in offers.held:
        swap.take(offers.held[host])
    while True:
        version, news = offers.newest, offers.news
        if version > offers.held.get(host, 0):
            with trio.move_on_after(transfer_s(host, version)) as transfer:
                await news.wait()
            if not transfer.cancelled_caught:
                continue
            offers.held[host] = version
            swap.take(version)
        if news is offers.news:
            await news.wait()


def run_of(
    world: SimulatedWorld, rules: LearnerRules, run: RunConfig, host: int = LEARNER
) -> RunConfig:
    """The run with one of the world's hosts as its learner."""
    learner = rules.model_copy(update={"peer": str(world.peer_id(host))})
    return run.model_copy(update={"learner": learner})
