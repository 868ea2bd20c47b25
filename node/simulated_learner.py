"""A learner and its workers over a simulated network: production code with timed stand-ins for
training and generation, under a virtual clock.

Real are the intake, leases, the loops of learner and workers, publication, broadcast and swap of
versions, on real files. The policy is a scripted one; its versions weigh what the case says.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import trio

from node.checkpoints import Checkpoints
from node.config import LearnerRules, NodeConfig, RunConfig
from node.engines.base import Sampling
from node.engines.scripted import TOKENIZER, ScriptedPolicy
from node.learner import Learner, intake_rules, lease_book, version_after
from node.learner_checks import LearnerChecks
from node.monitor.records import HeldOut, StepDone, WorkDone
from node.outlet import Outlet
from node.policy_weights import POLICY
from node.rollout_worker import RolloutWorker, Serving
from node.sapo import Progress
from node.simulated import EPOCH_S, run_inline
from node.tasks.held_out import HeldOutGuard
from node.tasks.verifier import InlineVerifier
from swarm.identity import PeerId
from swarm.intake import Intake
from swarm.leases import LeaseRules
from swarm.ledger import Ledger
from swarm.rollouts import Completion
from swarm.simulation.world import World
from swarm.transport.memory import MemoryTransport
from swarm.warden import Warden
from swarm.weights.chunks import ChunkStore
from swarm.weights.heads import HeadRules
from swarm.weights.publishing import VERSIONS_KEPT, Publisher
from swarm.weights.service import WeightsRules, WeightsService
from swarm.weights.versions import Versions, version_of
from swarm.work import WorkSource

LEARNER = 0
STORE_BYTES = 1 << 30
SECRET = bytes(32)
LEASES = LeaseRules()
SEGMENTS = 8  # of one generation, between which weights may be exchanged


@dataclass(frozen=True, slots=True)
class LearnerCase:
    """What is simulated. Host 0 learns; `generate_s` of each worker is of one group."""

    rules: LearnerRules
    generate_s: tuple[float, ...]
    train_s: float
    version_bytes: int = 10_000
    leases: LeaseRules = LEASES
    credits_per_step: float = 2.0


class TimedTrainer(ScriptedPolicy):
    """A scripted trainer whose versions weigh what they are told to."""

    def __init__(self, train_s: float, version_bytes: int) -> None:
        super().__init__(generate_s=0.0, train_s=train_s)
        self._version_bytes = version_bytes

    async def export(self, directory: Path) -> None:
        """See `Trainer.export`: noise, so that no delta makes it smaller."""
        await trio.lowlevel.checkpoint()
        (directory / "skill.json").write_text(str(self.skill))
        noise = Random(f"weights/{self.version}").randbytes(self._version_bytes)
        tensor = {"dtype": "U8", "shape": [len(noise)], "data_offsets": [0, len(noise)]}
        header = json.dumps({"noise": tensor}).encode()
        content = len(header).to_bytes(8, "little") + header + noise
        (directory / "model.safetensors").write_bytes(content)


class TimedEngine(ScriptedPolicy):
    """A scripted engine that takes a time for each group, and whose weights may be exchanged in the
    middle of it: each token says which version made it."""

    def __init__(self, group_s: float) -> None:
        super().__init__(generate_s=0.0)
        self.group_s = group_s
        self.paused: trio.Event | None = None

    async def generate(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[tuple[Completion, ...]]:
        """See `RolloutEngine.generate`."""
        versions = []
        for _ in range(SEGMENTS):
            while self.paused is not None:
                await self.paused.wait()
            versions.append(self.version)
            await trio.sleep(self.group_s * len(prompts) / SEGMENTS)
        groups = await super().generate(prompts, completions_each, sampling, seed)
        return [tuple(_by_versions(each, versions) for each in group) for group in groups]

    async def load(self, weights: Path, policy_version: int) -> None:
        """See `RolloutEngine.load`."""
        await trio.lowlevel.checkpoint()
        self.skill, self.version = float((weights / "skill.json").read_text()), policy_version


def _by_versions(completion: Completion, versions: Sequence[int]) -> Completion:
    """The completion with its tokens spread over the segments of its generation."""
    count = len(completion.token_ids)
    runs: list[tuple[int, int]] = []
    for at in range(count):
        version = versions[at * len(versions) // count]
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + 1)
        else:
            runs.append((version, 1))
    spans = tuple(runs) if len(runs) > 1 else ()
    return replace(completion, policy_version=min(versions), spans=spans)


class _TimedSwap:
    """The engine of a worker as a swap of versions sees it."""

    def __init__(self, engine: TimedEngine) -> None:
        self._engine = engine
        self.ready = trio.Event()

    async def pause(self) -> None:
        await trio.lowlevel.checkpoint()
        self._engine.paused = trio.Event()

    async def load(self, directory: Path) -> None:
        await self._engine.load(directory, version_of(directory))
        self.ready.set()

    async def resume(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._engine.paused is not None:
            self._engine.paused.set()
        self._engine.paused = None


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
    work: dict[int, list[WorkDone]] = field(default_factory=dict)
    verdicts: dict[int, dict[str, int]] = field(default_factory=dict)
    scopes: dict[int, trio.CancelScope] = field(default_factory=dict)
    gone: dict[int, trio.Event] = field(default_factory=dict)
    transports: dict[int, MemoryTransport] = field(default_factory=dict)
    up: LearnerHost | None = None

    async def start(self, host: int) -> None:
        """Put a host to work; the learner comes first."""
        transport = self.transports[host] = self.world.join(host)
        self.scopes[host], self.gone[host] = trio.CancelScope(), trio.Event()
        body = self._learn if host == LEARNER else self._work
        await self.nursery.start(self._live, host, body)
        for other, its in list(self.transports.items()):
            if other != host and not self.gone[other].is_set():
                await transport.connect(its.addresses()[0], timeout_s=30.0)

    async def kill(self, host: int) -> None:
        """Take a host off the network at once."""
        self.world.crash(host)
        self.scopes[host].cancel()
        await self.gone[host].wait()

    async def _live(
        self,
        host: int,
        body: Callable[[int, trio.TaskStatus[None]], Awaitable[None]],
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        try:
            with self.scopes[host]:
                await body(host, task_status)
        finally:
            self.gone[host].set()

    def _weights(
        self, host: int, warden: Warden, stack: ExitStack, swap: _TimedSwap | None
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
        trainer = TimedTrainer(case.train_s, case.version_bytes)
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
        intake = Intake(
            intake_rules(run, rules, TOKENIZER),
            book,
            transport,
            warden,
            LearnerChecks(HeldOutGuard(run, verifier), None),
            self.world.rng(f"intake/{trio.current_time()}"),
        )
        intake.restore(book, record)
        with ExitStack() as stack:
            service = self._weights(host, warden, stack, None)
            publisher = Publisher(service, self.world.identities[host])
            async with trio.open_nursery() as nursery:
                nursery.start_soon(warden.run)
                await nursery.start(service.run)
                await nursery.start(intake.run)
                nursery.start_soon(publisher.run)
                outlet = Outlet(
                    service, publisher, directory / "exports", nursery, _fail, run_inline
                )
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
                task_status.started()
                await learner.run(trio.Event(), self._keep_step, lambda: False)

    async def _keep_step(self, record: StepDone | HeldOut) -> None:
        await trio.lowlevel.checkpoint()
        if isinstance(record, StepDone):
            self.steps.append(record)

    async def _work(self, host: int, task_status: trio.TaskStatus[None]) -> None:
        run, transport = self.run_config, self.transports[host]
        warden = Warden(transport, Ledger())
        engine = TimedEngine(self.case.generate_s[host - 1])
        swap = _TimedSwap(engine)
        source = WorkSource(
            run.run_id,
            self.world.peer_id(LEARNER),
            self.world.identities[host],
            transport,
            warden.ledger,
            self.world.rng(f"work/{host}/{trio.current_time()}"),
        )

        async def keep(record: WorkDone) -> None:
            await trio.lowlevel.checkpoint()
            self.work.setdefault(host, []).append(record)
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
            service = self._weights(host, warden, stack, swap)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(warden.run)
                await nursery.start(service.run)
                task_status.started()
                current = service.versions.current()
                if current is not None:
                    await swap.load(current.directory)
                await swap.ready.wait()
                await worker.run(Serving(engine, TOKENIZER, lambda: engine.version))


async def _fail(what: str) -> None:
    raise AssertionError(what)


def run_of(world: World, rules: LearnerRules, run: RunConfig) -> RunConfig:
    """The run with the world's host 0 as its learner."""
    learner = rules.model_copy(update={"peer": str(world.peer_id(LEARNER))})
    return run.model_copy(update={"learner": learner})
