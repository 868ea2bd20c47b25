"""A simulated learner for tests: hosts die and come back, workers lie, versions arrive on time.

A case may have versions arrive after a given time instead of being broadcast: a broadcast costs
more computing than all the rest, too much for runs of many hours. A `Witness` judges the batches.
"""

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from math import nan, pi, sin
from pathlib import Path
from random import Random
from typing import Any, cast

import trio

from node.config import NodeConfig
from node.engines.scripted import TOKENIZER
from node.hosting.membership import Membership
from node.hosting.policy_host import WorkerEngine
from node.hosting.publisher_queue import PublisherQueue
from node.interfaces.engine import Sampling, Serving
from node.interfaces.trainer import TrainingGroup
from node.observe.event_log import Record
from node.observe.records import WorkDone
from node.run.claims import Columns, Scorer, VersionDirectory
from node.run.learner import Learner
from node.run.learner_role import LearnerRole
from node.run.node import Node
from node.run.peer import Peer
from node.run.role import Role
from node.run.worker_role import WorkerRole
from node.run.world import Listener, Publishing, Watchers
from node.simulation.simulated_learner import LearnerCase, SimulatedLearner, SimulatedMachine
from node.simulation.simulated_policy import TimedEngine, TimedHost
from swarm.identity import Identity, PeerId
from swarm.leases.intake import Intake
from swarm.leases.lease_client import LeaseClient
from swarm.leases.lease_table import LeaseRules
from swarm.peers.connection_gater import ConnectionGater
from swarm.rollouts import Completion, version_spans
from swarm.simulation.world import stop_at_once
from swarm.transport.base import Transport
from swarm.transport.memory.network import MemoryTransport
from swarm.weights.publisher import VERSIONS_KEPT
from swarm.weights.weights_service import VersionOutcome, VersionProgress, WeightsService
from tests.simulation.witness import Witness

LEASES = LeaseRules()
WORK_KEPT = 4096  # records of each worker's batches, the newest


@dataclass(frozen=True)
class LabCase(LearnerCase):
    """A case of the tests."""

    leases: LeaseRules = LEASES
    credits_per_step: float = 2.0
    # seconds until a host has a version, once it is published; None: versions are broadcast
    transfer_s: Callable[[int, int], float] | None = None
    rescores: bool = False  # log-probs are those of versions, and are checked
    settings: Mapping[str, Any] = field(default_factory=dict)  # more of the learner's node


class LabEngine(TimedEngine):
    """A timed engine whose behaviour can be changed, and whose groups are witnessed."""

    def __init__(self, group_s: float) -> None:
        super().__init__(group_s)
        self.made: Callable[[str, int], None] = lambda prompt, version: None
        self.newest: Callable[[], int] = lambda: self.version  # that was heard of
        self.has_logprobs = False  # of versions; else they are any numbers

    @property
    def said_version(self) -> int:
        """The version that the worker reports."""
        return self.version

    async def generate(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[tuple[Completion, ...]]:
        began = self.version
        groups = await super().generate(prompts, completions_each, sampling, seed)
        for prompt in prompts:
            self.made(prompt, began)
        return groups

    def reported(self, prompt: str, completion: Completion, versions: Sequence[int]) -> Completion:
        completion = super().reported(prompt, completion, versions)
        return with_logprobs(prompt, completion) if self.has_logprobs else completion

    async def load(self, weights: Path, policy_version: int) -> None:
        await trio.lowlevel.checkpoint()
        self.take(policy_version, float((weights / "skill.json").read_text()))

    def take(self, version: int, skill: float) -> None:
        """Generate with these weights from now on."""
        self.version, self.skill = version, skill


class LabHost(TimedHost):
    """The host of a `LabEngine`."""

    engine: LabEngine

    def take(self, version: int) -> None:
        """Serve a version that has no files."""
        self.engine.take(version, self.engine.skill)
        self.serve(version)

    def serve(self, version: int) -> None:
        super().serve(version)
        self.serving = Serving(self.engine, TOKENIZER, lambda: self.engine.said_version)


@dataclass(frozen=True, slots=True)
class Actor:
    """The engine and the source of work of a dishonest worker."""

    engine: Callable[[float], LabEngine]
    source: type[LeaseClient] = LeaseClient


@dataclass(slots=True)
class _Offers:
    """Versions that were published without a broadcast. Outlives the learner."""

    published: deque[int] = field(default_factory=lambda: deque(maxlen=VERSIONS_KEPT))
    news: trio.Event = field(default_factory=trio.Event)
    held: dict[int, int] = field(default_factory=dict)  # host -> version on its disk

    @property
    def newest(self) -> int:
        return self.published[-1] if self.published else 0

    async def offer(self, version: int, export: Callable[[Path], Awaitable[None]]) -> None:
        """Versions are on offer from the moment that they are made."""
        await trio.lowlevel.checkpoint()
        self.published.append(version)
        self.news.set()
        self.news = trio.Event()


@dataclass(slots=True)
class LearnerHost:
    """The learner, while it is up."""

    learner: Learner
    intake: Intake
    gater: ConnectionGater


@dataclass
class LabLearner(SimulatedLearner):
    """Hosts may be killed and come back on what they left on disk."""

    case: LabCase
    work: dict[int, deque[WorkDone]] = field(default_factory=dict)
    verdicts: dict[int, dict[str, int]] = field(default_factory=dict)
    tasks: dict[int, trio.Nursery] = field(default_factory=dict)
    gone: dict[int, trio.Event] = field(default_factory=dict)
    transports: dict[int, MemoryTransport] = field(default_factory=dict)
    actors: dict[int, Actor] = field(default_factory=dict)  # of hosts that are not honest workers
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

    async def live(
        self, host: int, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        gone = self.gone[host] = trio.Event()
        try:
            async with trio.open_nursery() as self.tasks[host]:
                await self.tasks[host].start(super().live, host)
                task_status.started()
        finally:
            gone.set()

    async def kill(self, host: int) -> None:
        """Take a host off the network at once, in the middle of whatever it does."""
        self.world.crash(host)
        stop_at_once(self.tasks[host])
        await self.gone[host].wait()
        if host == self.first:
            self.witness.lost()

    def config_of(self, host: int) -> NodeConfig:
        more = self.case.settings if host == self.first else {}
        return super().config_of(host).model_copy(update={"coordinator": self.coordinator, **more})

    def machine_of(self, host: int) -> "_LabMachine":
        return _LabMachine(self, host)

    def role_of(self, machine: SimulatedMachine, config: NodeConfig, node: Node) -> Role:
        if machine.host == self.first:
            return LearnerRole(
                *(machine, config, node, machine),
                leases=self.case.leases,
                credits_per_step=self.case.credits_per_step,
            )
        source = self.actor_of(machine.host).source
        role = WorkerRole(machine, config, node, machine, source=source)
        cast("_LabMachine", machine).engine.newest = lambda: role.source.learner_version
        return role

    def actor_of(self, host: int) -> Actor:
        return self.actors.get(host, Actor(LabEngine))

    def judge_batch(self, groups: Sequence[TrainingGroup], version: int) -> None:
        self.witness.trained([group for group in groups if group.own_tokens], version)

    def receive(self, host: int, record: Record) -> None:
        super().receive(host, record)
        if isinstance(record, WorkDone):
            self.work.setdefault(host, deque(maxlen=WORK_KEPT)).append(record)
            self.verdicts[host] = dict(record.verdicts_total)


class _LabMachine(SimulatedMachine):
    there: LabLearner

    def __init__(self, there: LabLearner, host: int) -> None:
        super().__init__(there, host)
        if host != there.first:
            group_s = there.case.generate_s[host - there.first - 1]
            self.engine = there.actor_of(host).engine(group_s)

    @asynccontextmanager
    async def open_transport(
        self, identity: Identity, config: NodeConfig, membership: Membership
    ) -> AsyncIterator[Transport]:
        async with super().open_transport(identity, config, membership) as transport:
            self.there.transports[self.host] = cast("MemoryTransport", transport)
            yield transport

    @asynccontextmanager
    async def open_scorer(
        self, config: NodeConfig, find: VersionDirectory
    ) -> AsyncIterator[Scorer | None]:
        await trio.lowlevel.checkpoint()
        yield cast("Scorer", ScriptedScorer(find)) if self.there.case.rescores else None

    def policy_host(self, config: NodeConfig, listener: Listener) -> WorkerEngine:
        witness, engine, worker = (
            self.there.witness,
            self.engine,
            str(self.world.peer_id(self.host)),
        )
        engine.made = lambda prompt, version: witness.made(worker, prompt, version)
        engine.has_logprobs = self.there.case.rescores
        return LabHost(engine)

    def open_publishing(
        self, config: NodeConfig, peer: Peer, watchers: Watchers
    ) -> AbstractAsyncContextManager[Publishing]:
        if self.there.case.transfer_s is None:
            return super().open_publishing(config, peer, watchers)
        return _offering(self.there.offers)

    def open_following(
        self,
        config: NodeConfig,
        peer: Peer,
        host: WorkerEngine,
        tell: Callable[[VersionOutcome], None],
        watch: Callable[[VersionProgress], None],
    ) -> AbstractAsyncContextManager[WeightsService | None]:
        transfer_s = self.there.case.transfer_s
        if transfer_s is None:
            return super().open_following(config, peer, host, tell, watch)
        return _receiving(self.there.offers, self.host, transfer_s, cast("LabHost", host))


@asynccontextmanager
async def _offering(offers: _Offers) -> AsyncIterator[Publishing]:
    """The publishing of a case in which versions are not broadcast."""
    await trio.lowlevel.checkpoint()
    yield Publishing(
        cast("PublisherQueue", offers),
        lambda: tuple(offers.published),
        lambda version: Path() if version in offers.published else None,
        None,
        lambda: None,
    )


@asynccontextmanager
async def _receiving(
    offers: _Offers, host: int, transfer_s: Callable[[int, int], float], swap: LabHost
) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_follow, offers, host, transfer_s, swap)
        yield
        nursery.cancel_scope.cancel()


async def _follow(
    offers: _Offers, host: int, transfer_s: Callable[[int, int], float], swap: LabHost
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


def logprob(version: int, prompt: str, place: int, token: int) -> float:
    """Log-prob of a token under a version of the scripted policy. It drifts by 0.02 a version on
    average: a few versions apart is more than numerics explain (`node.run.claims`)."""
    rng = Random(f"{prompt}/{place}/{token}")
    return -0.6 - rng.random() + 0.5 * sin(0.06 * version + 2.0 * pi * rng.random())


def with_logprobs(prompt: str, completion: Completion) -> Completion:
    """The completion with the log-probs of the versions that it names."""
    versions = [version for version, count in version_spans(completion) for _ in range(count)]
    told = tuple(
        logprob(version, prompt, place, token)
        for place, (version, token) in enumerate(zip(versions, completion.token_ids, strict=True))
    )
    return replace(completion, logprobs=told)


class ScriptedScorer:
    """Scores tokens as `logprob` does, under versions that are kept."""

    precision = "float32"

    def __init__(self, find: VersionDirectory) -> None:
        self._find = find

    async def score(self, version: int, group: TrainingGroup) -> Columns | None:
        """Log-probs without means and variances."""
        await trio.lowlevel.checkpoint()
        if self._find(version) is None:
            return None
        columns: Columns = []
        for each in group.completions:
            count = len(each.token_ids)
            scored = tuple(
                logprob(version, group.prompt, place, token)
                for place, token in enumerate(each.token_ids)
            )
            columns.append((*scored, *(nan,) * (2 * count)))
        return columns
