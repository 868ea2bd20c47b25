"""A learner and its workers over a simulated network: production code with timed stand-ins for
training and generation, under a virtual clock.

Real are the intake, leases, the loops of learner and workers, publication, broadcast and swap of
versions, on real files. The policy is a scripted one; its versions weigh what the case says. A case
may have versions arrive after a given time instead of being broadcast: a broadcast costs more
computing than all the rest, too much for runs of many hours.

What was trained on is judged by a `Witness` of its own.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import trio

from node.checkpoints import Checkpoints
from node.config import LearnerRules, NodeConfig, RunConfig
from node.engines.scripted import TOKENIZER
from node.learner import Learner, PolicyOutlet, intake_rules, lease_book, version_after
from node.learner_checks import LearnerChecks
from node.monitor.records import HeldOut, StepDone, WorkDone
from node.outlet import Outlet
from node.policy_weights import POLICY, published_versions
from node.rollout_worker import RolloutWorker, Serving
from node.sapo import Progress
from node.simulated import EPOCH_S, run_inline
from node.simulated_policy import ScriptedScorer, TimedEngine, TimedSwap, TimedTrainer
from node.simulated_witness import Witness
from node.steering import Steering
from node.tasks.held_out import HeldOutGuard
from node.tasks.verifier import InlineVerifier
from node.training.base import TrainingGroup
from swarm.errors import TransportError
from swarm.identity import PeerId
from swarm.leasing.coordination import ControlService
from swarm.leasing.intake import Intake
from swarm.leasing.lease_client import WorkSource
from swarm.leasing.leases import LeaseRules
from swarm.peers.connection_gater import Warden
from swarm.peers.ledger import Ledger
from swarm.simulation.determinism import stop_at_once
from swarm.simulation.world import World
from swarm.transport.memory.network import MemoryTransport
from swarm.weights.heads import HeadRules
from swarm.weights.publisher import VERSIONS_KEPT, Publisher
from swarm.weights.service import WeightsRules, WeightsService
from swarm.weights.store.chunks import ChunkStore
from swarm.weights.store.versions import Versions

LEARNER = 0
STORE_BYTES = 1 << 30
SECRET = bytes(32)
LEASES = LeaseRules()
WORK_KEPT = 4096  # records of each worker's batches, the newest
LOADED_KEPT = 1024  # versions of which it is known who had them when
AnyExitStack = ExitStack | AsyncExitStack


@dataclass(frozen=True, slots=True)
class LearnerCase:
    """What is simulated. Host 0 learns; `generate_s` of each worker is of one group."""

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
    """What is run in place of an honest worker's engine and source of work."""

    engine: "Callable[[float], TimedEngine]"
    source: type[WorkSource] = WorkSource


class _TimedOutlet:
    """Versions of a case with `transfer_s`: on offer from the moment that they are made."""

    def __init__(self, offers: "_Offers") -> None:
        self._offers = offers

    @property
    def newest(self) -> int:
        """See `PolicyOutlet.newest`."""
        return self._offers.newest

    async def offer(self, version: int, export: Callable[[Path], Awaitable[None]]) -> None:
        """See `PolicyOutlet.offer`."""
        await trio.lowlevel.checkpoint()
        self._offers.published.append(version)
        self._offers.news.set()
        self._offers.news = trio.Event()


@dataclass(slots=True)
class _Offers:
    """What was published, where versions are not broadcast; it outlives the learner."""

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
    warden: Warden


@dataclass(slots=True)
class SimulatedLearner:
    """A learner, its workers and what they reported. Hosts may be killed and come back on what they
    left on disk."""

    case: LearnerCase
    world: World
    directory: Path
    nursery: trio.Nursery
    run_config: RunConfig
    steps: list[StepDone] = field(default_factory=list)
    work: dict[int, deque[WorkDone]] = field(default_factory=dict)
    verdicts: dict[int, dict[str, int]] = field(default_factory=dict)
    tasks: dict[int, trio.Nursery] = field(default_factory=dict)
    gone: dict[int, trio.Event] = field(default_factory=dict)
    transports: dict[int, MemoryTransport] = field(default_factory=dict)
    actors: dict[int, Actor] = field(default_factory=dict)  # of hosts that are not honest workers
    up: LearnerHost | None = None
    loaded: dict[int, dict[int, float]] = field(default_factory=dict)  # version -> host -> when
    witness: Witness = field(init=False)
    offers: _Offers = field(default_factory=_Offers)
    coordinator: PeerId | None = None  # who may steer the learner, where versions are broadcast
    steering: Steering | None = None

    def __post_init__(self) -> None:
        self.witness = Witness(self.case.rules.staleness_max)

    async def start(self, host: int) -> None:
        """Put a host to work; the learner comes first."""
        transport = self.transports[host] = self.world.join(host)
        self.gone[host] = trio.Event()
        body = self._learn if host == LEARNER else self._work
        await self.nursery.start(self._live, host, body)
        for other, its in list(self.transports.items()):
            if other == host or self.gone[other].is_set() or not self._meet(host, other):
                continue
            with suppress(TransportError):  # it has just died
                await transport.connect(its.addresses()[0], timeout_s=30.0)

    def _meet(self, one: int, other: int) -> bool:
        """Whether two hosts have business: workers pass weights to each other, nothing else."""
        return self.case.transfer_s is None or LEARNER in (one, other)

    async def kill(self, host: int) -> None:
        """Take a host off the network at once, in the middle of whatever it does."""
        self.world.crash(host)
        stop_at_once(self.tasks[host])
        await self.gone[host].wait()
        if host == LEARNER:
            self.witness.lost()

    async def _live(
        self,
        host: int,
        body: Callable[[int, trio.TaskStatus[None]], Awaitable[None]],
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        try:
            async with trio.open_nursery() as self.tasks[host]:
                await self.tasks[host].start(body, host)
                task_status.started()
        finally:
            self.gone[host].set()

    def _weights(
        self, host: int, warden: Warden, stack: AnyExitStack, swap: TimedSwap | None
    ) -> WeightsService:
        publishes = host == LEARNER
        directory = self.directory / f"host{host}"
        kept = VERSIONS_KEPT if publishes else 2
        return WeightsService(
            WeightsRules(
                HeadRules(self.run_config.run_id, frozenset({self.world.peer_id(LEARNER)})),
                POLICY,
                follows=not publishes,
                shared_versions=kept,
            ),
            self.transports[host],
            warden,
            directory / "policy",
            Versions(directory / "policy", keep=kept),
            stack.enter_context(ChunkStore(directory / "store", STORE_BYTES)),
            now_s=self._now_s,
            rng=self.world.rng(f"weights/{host}/{trio.current_time()}"),
            run_sync=run_inline,
            engine=swap,
        )

    def _now_s(self) -> float:
        return EPOCH_S + trio.current_time()

    async def _learn(self, host: int, task_status: trio.TaskStatus[None]) -> None:
        case, rules, run = self.case, self.case.rules, self.run_config
        transport, directory = self.transports[host], self.directory / f"host{host}"
        config = NodeConfig(run=run, evaluate_every_rounds=0, data_dir=directory)
        verifier = InlineVerifier(run)
        trainer = TimedTrainer(case.train_s, case.version_bytes, self._witness_step)
        checkpoints = Checkpoints(directory / "checkpoints", 2, {}, run_inline)
        resumed = checkpoints.latest()
        progress = resumed.progress if resumed else Progress()
        trainer.version = version_after(progress)
        warden = Warden(transport, Ledger())
        record = None if resumed is None else Learner.intake_record(resumed.directory)
        book = lease_book(
            run,
            rules,
            case.leases,
            progress,
            record,
            secret=SECRET,
            start=self.world.rng(f"start/{trio.current_time()}").getrandbits(60),
            credits_per_step=case.credits_per_step,
        )
        async with AsyncExitStack() as stack:
            nursery = await stack.enter_async_context(trio.open_nursery())
            nursery.start_soon(warden.run)
            outlet, held = await self._outlet(warden, stack, nursery)
            guard, scorer = HeldOutGuard(run, verifier), ScriptedScorer(held)
            intake = Intake(
                intake_rules(run, rules, TOKENIZER),
                book,
                transport,
                warden,
                LearnerChecks(guard, scorer, held) if case.rescores else LearnerChecks(guard, None),
                self.world.rng(f"intake/{trio.current_time()}"),
            )
            intake.restore(book, record)
            await nursery.start(intake.run)
            learner = Learner(
                config,
                rules,
                trainer,
                trainer,
                verifier,
                intake,
                outlet,
                checkpoints,
                progress,
                tokenizer=TOKENIZER,
            )
            self.up = LearnerHost(learner, intake, warden)
            if self.steering is not None:
                self.steering.attend(learner, intake)
            task_status.started()
            await learner.run(trio.Event(), self._keep_step, lambda: False)

    async def _outlet(
        self, warden: Warden, stack: AsyncExitStack, nursery: trio.Nursery
    ) -> tuple[PolicyOutlet, Callable[[], tuple[int, ...]]]:
        """Where versions leave, and which of them are kept."""
        if self.case.transfer_s is not None:
            return _TimedOutlet(self.offers), lambda: tuple(self.offers.published)
        service = self._weights(LEARNER, warden, stack, None)
        directory, transport = self.directory / f"host{LEARNER}", self.transports[LEARNER]
        self.steering = Steering(
            directory, self.run_config.run_id, self.case.rules, transport, service, run_inline
        )
        ControlService(
            transport, warden, self.steering, lambda peer: peer == self.coordinator
        ).serve()
        publisher = Publisher(service, self.world.identities[LEARNER], self.steering.note_spread)
        await nursery.start(service.run)
        nursery.start_soon(publisher.run)
        outlet = Outlet(
            service,
            publisher,
            directory / "exports",
            nursery,
            _fail,
            run_inline,
            self.steering.note_published,
        )
        return outlet, lambda: published_versions(service)

    def _witness_step(self, groups: Sequence[TrainingGroup], version: int) -> None:
        """`version`: the updates that the trainer has made. The learner's number is above it where
        steps were lost."""
        assert self.up is not None
        self.witness.trained(groups, max(version, self.up.learner.version))

    async def _keep_step(self, record: StepDone | HeldOut) -> None:
        await trio.lowlevel.checkpoint()
        if isinstance(record, StepDone):
            if self.steering is not None:
                self.steering.note_step(record)
            self.steps.append(record)

    async def _work(self, host: int, task_status: trio.TaskStatus[None]) -> None:
        run, transport = self.run_config, self.transports[host]
        actor = self.actors.get(host, Actor(TimedEngine))
        warden = Warden(transport, Ledger())
        engine = actor.engine(self.case.generate_s[host - 1])
        swap = TimedSwap(engine, lambda version: self._note_loaded(host, version))
        source = actor.source(
            run.run_id,
            self.world.peer_id(LEARNER),
            self.world.identities[host],
            transport,
            warden.ledger,
            self.world.rng(f"work/{host}/{trio.current_time()}"),
        )
        worker_id = str(self.world.peer_id(host))
        engine.made = lambda prompt, version: self.witness.made(worker_id, prompt, version)
        engine.newest = lambda: source.learner_version
        engine.has_logprobs = self.case.rescores

        async def keep(record: WorkDone) -> None:
            await trio.lowlevel.checkpoint()
            self.work.setdefault(host, deque(maxlen=WORK_KEPT)).append(record)
            self.verdicts[host] = dict(source.verdicts)

        worker = RolloutWorker(
            run,
            self.case.rules,
            PeerId(self.world.peer_id(host)),
            source,
            HeldOutGuard(run, InlineVerifier(run)),
            now_s=self._now_s,
            on_work=keep,
        )
        with ExitStack() as stack:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(warden.run)
                if self.case.transfer_s is not None:
                    nursery.start_soon(self._follow, host, self.case.transfer_s, swap)
                    task_status.started()
                else:
                    service = self._weights(host, warden, stack, swap)
                    await nursery.start(service.run)
                    task_status.started()
                    current = service.versions.current()
                    if current is not None:
                        await swap.load(current.directory)
                await swap.ready.wait()
                await worker.run(Serving(engine, TOKENIZER, lambda: engine.said_version))

    async def _follow(
        self, host: int, transfer_s: Callable[[int, int], float], swap: TimedSwap
    ) -> None:
        """Have each new version some time after it is out. As with broadcasts, one that is
        overtaken on its way is dropped for the newer one."""
        offers = self.offers
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

    def _note_loaded(self, host: int, version: int) -> None:
        self.loaded.setdefault(version, {})[host] = trio.current_time()
        while len(self.loaded) > LOADED_KEPT:
            del self.loaded[next(iter(self.loaded))]


async def _fail(what: str) -> None:
    raise AssertionError(what)


def run_of(world: World, rules: LearnerRules, run: RunConfig) -> RunConfig:
    """The run with the world's host 0 as its learner."""
    learner = rules.model_copy(update={"peer": str(world.peer_id(LEARNER))})
    return run.model_copy(update={"learner": learner})
