"""The central learner of a run (`swarm-node learn`).

Beyond a node's parts it has the publisher of versions, the intake that leases work to workers, and
a process that scores samples of submitted groups.

Under torchrun rank 0 is this node, and the other ranks only train: they have no identity and no
network (`training.sharded.worker.follow`).
"""

from dataclasses import replace
from functools import partial
from math import isfinite
from typing import ClassVar, Final

import trio

from node.config import NodeConfig
from node.config.node import rules_of
from node.hosting.policy_weights import POLICY
from node.interfaces.trainer import PolicyInfo
from node.observe.event_log import Record
from node.observe.node_reports import Extras
from node.observe.progress_bars import Work, spread_work
from node.observe.records import (
    HeldOut,
    StatusSnapshot,
    StepDone,
    Trouble,
    VersionPublished,
    VersionSpread,
)
from node.run.checkpoints import Checkpoint
from node.run.claims import TEMPERATURE_MIN, LearnerChecks, Scores
from node.run.coordinator_client import CoordinatorClient
from node.run.learner import (
    CREDITS_PER_STEP,
    Learner,
    intake_rules,
    lease_book,
    lease_rules,
    staleness_rules,
    version_after,
)
from node.run.node import Node
from node.run.parts import LivePolicy
from node.run.progress import Progress
from node.run.role import Needs, Training, checkpoints_of
from node.run.version_spread import SpreadWatch
from node.run.world import Listener, Publishing, SamplingTrainer, Watchers, World
from swarm.errors import ConfigError
from swarm.identity import Identity
from swarm.leases.coordination import ControlService
from swarm.leases.intake import Intake
from swarm.leases.lease_table import LeaseRules, TrialState
from swarm.storage import write_whole
from swarm.telemetry import reports
from swarm.weights.publisher import Published, Spread
from swarm.weights.weights_service import WeightsService

SECRET_FILE: Final = "lease-secret"
SECRET_BYTES: Final = 32
LEASE_IDS: Final = 1 << 62  # bound on the random first lease number of a process
SPREAD_LOOK_S: Final = 0.5
COORDINATOR_SILENT_S: Final = 60.0  # silence of the coordinator before a note


# Long: the whole of `Role` for a learner.
class LearnerRole:
    KIND: ClassVar[reports.Role] = "learner"

    @staticmethod
    def needs(config: NodeConfig, identity: Identity) -> Needs:
        rules = rules_of(config)
        if rules.peer != identity.peer_id:
            raise ConfigError(
                f"the learner of run {config.run.name} is {rules.peer}, and this key is "
                f"{identity.peer_id}: give that one's with --key-file, or correct learner.peer"
            )
        return Needs(policy=True, draws=rules.pool_groups_per_step or None)

    def __init__(
        self,
        world: World,
        config: NodeConfig,
        node: Node,
        listener: Listener,
        *,
        leases: LeaseRules | None = None,
        credits_per_step: float = CREDITS_PER_STEP,
    ) -> None:
        """`leases`: None for those of the run's rules. `credits_per_step`: groups that may be
        leased and buffered, as a multiple of those of a step."""
        self._world = world
        self._config = config
        self._node = node
        self._listener = listener
        self._rules = rules_of(config)
        self._leases = leases or lease_rules(self._rules)
        self._credits_per_step = credits_per_step
        checkpoints = checkpoints_of(config, world.run_sync)
        self._training = Training(world, config, node, listener, checkpoints)
        self._last: StepDone | None = None
        self._publishing: Publishing | None = None
        self.learner: Learner | None = None  # this and the next: once a trainer is there
        self.intake: Intake | None = None
        self.coordinator: CoordinatorClient | None = None
        self.ready = trio.Event()  # it learns

    async def run(self, leaving: trio.Event) -> None:
        config, world = self._config, self._world
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            watchers = Watchers(self._note_published, self._note_spread, self._complain)
            async with (
                world.open_publishing(config, self._node.peer, watchers) as publishing,
                world.open_scorer(config, publishing.find) as scorer,
            ):
                self._publishing = publishing
                client = self._serve_coordinator(publishing.service)
                if publishing.service is not None:
                    nursery.start_soon(self._watch_spread, publishing.service, client)
                learn = partial(self._learn, leaving, publishing, scorer, client)
                await self._training.run(leaving, learn)
                nursery.cancel_scope.cancel()

    def _serve_coordinator(self, service: WeightsService | None) -> CoordinatorClient:
        """Serve a coordinator with reports, and take its plans."""
        config, node = self._config, self._node
        coordinator = config.coordinator
        client = self.coordinator = CoordinatorClient(
            config.data_dir,
            config.run.run_id,
            self._rules,
            node.peer.transport,
            service,
            self._world.run_sync,
            has_coordinator=coordinator is not None,
        )
        control = ControlService(
            node.peer.transport, node.gater, client, lambda peer: peer == coordinator
        )
        control.serve()
        if coordinator is not None:
            self._nursery.start_soon(self._note_coordinator, control, client)
        return client

    async def _note_coordinator(self, service: ControlService, client: CoordinatorClient) -> None:
        """Say where it has not been heard for long: the last plan stays in force, but for workers
        that stand by while nobody works."""
        idle_s, notes = 0.0, self._node.notes
        while True:
            await trio.sleep(1.0)
            heard_s = service.heard_s
            notes.put("plan", client.failure or None)
            if heard_s is not None and trio.current_time() - heard_s < COORDINATOR_SILENT_S:
                notes.put("coordinator", None)
                idle_s = 0.0
                continue
            idle_s = idle_s + 1.0 if client.is_idle else 0.0
            if idle_s >= COORDINATOR_SILENT_S:
                client.lift()
            if heard_s is None and client.plan_number == 0:
                notes["coordinator"] = "the coordinator has not been heard of yet"
            else:
                notes["coordinator"] = "the coordinator is away; its last plan stays in force"

    # --- versions -----------------------------------------------------------------------------

    def _log(self, record: Record) -> None:
        self._nursery.start_soon(self._listener.tell, record)

    def _note_published(self, published: Published) -> None:
        assert self.coordinator is not None
        self.coordinator.note_published(published)
        self._log(
            VersionPublished(
                version=published.version,
                size_bytes=published.size_bytes,
                full_bytes=published.full_bytes,
                delta_bytes=published.delta_bytes,
                made_s=published.made_s,
                announced_ago_s=published.announced_ago_s,
            )
        )

    def _note_spread(self, spread: Spread) -> None:
        assert self.coordinator is not None
        self.coordinator.note_spread(spread)
        self._log(VersionSpread(spread.version, spread.peers, spread.time_s, spread.bound_s))

    async def _complain(self, what: str) -> None:
        await self._listener.tell(Trouble(what))

    async def _watch_spread(self, service: WeightsService, client: CoordinatorClient) -> None:
        """Log how far the newest version has come."""
        watch = SpreadWatch()
        while True:
            await trio.sleep(SPREAD_LOOK_S)
            head = service.heads.newest(service.rules.policy)
            if head is None:
                continue
            using = [e.peer for e in client.workers() if (e.version or 0) >= head.version]
            shares = service.sharing.shares(head.version)
            news = watch.poll(head.version, shares, using)
            if news is not None:
                await self._listener.tell(news)

    # --- learning -----------------------------------------------------------------------------

    async def _learn(
        self,
        leaving: trio.Event,
        publishing: Publishing,
        scorer: Scores | None,
        client: CoordinatorClient,
        trainer: SamplingTrainer,
        policy: PolicyInfo,
        progress: Progress,
        resumed: Checkpoint | None,
    ) -> None:
        node = self._node
        intake = await self._restored(publishing, scorer, resumed, progress, policy)
        await self._listener.tell(node.started(policy, progress))
        await node.note_maker(trainer.maker, self._listener.tell)
        self._last = None
        learner = self.learner = Learner(
            node.parts,
            LivePolicy(trainer, trainer, policy.tokenizer),
            intake,
            publishing.publisher_queue,
            self._training.checkpoints,
            progress,
            self._listener.show,
        )
        client.attend(learner, intake)
        self.ready.set()

        async def tell(record: StepDone | HeldOut) -> None:
            self._training.progress = learner.progress
            if isinstance(record, StepDone):
                client.note_step(record)
                record = self._last = node.counted(record)
            await self._training.note_progress(trainer, record)
            await self._listener.tell(record)

        await learner.run(leaving, tell, lambda: node.is_over(learner.progress))

    async def _restored(
        self,
        publishing: Publishing,
        scorer: Scores | None,
        resumed: Checkpoint | None,
        progress: Progress,
        policy: PolicyInfo,
    ) -> Intake:
        """The intake as a checkpoint left it. It is made once: after a trainer's death it goes back
        to the checkpoint, as the trainer does."""
        record = None if resumed is None else Learner.intake_record(resumed.directory)
        run, rules, world, node = self._config.run, self._rules, self._world, self._node
        book = lease_book(
            run.run_id,
            staleness_rules(rules, self._credits_per_step),
            self._leases,
            version_after(progress),
            record,
            secret=self._secret(),
            start=int.from_bytes(world.secret(8)) % LEASE_IDS,
        )
        if self.intake is not None:
            self.intake.restore(book, record)
            return self.intake
        checks = LearnerChecks(
            node.guard,
            scorer if self._can_rescore() else None,
            publishing.held,
            run.sampling.temperature,
            policy.precision,
        )
        self.intake = Intake(
            intake_rules(run, rules, policy.tokenizer),
            book,
            node.peer.transport,
            node.gater,
            checks,
            world.rng("intake"),
        )
        self.intake.restore(book, record)
        await self._nursery.start(self.intake.run)
        self._nursery.start_soon(self._note_checks, self.intake, checks)
        return self.intake

    async def _note_checks(self, intake: Intake, checks: LearnerChecks) -> None:
        notes = self._node.notes
        while True:
            await trio.sleep(1.0)
            if intake.faulty:
                notes["faulty"] = (
                    f"{intake.faulty} groups of workers did not stand up to verification, the last "
                    f"of {intake.last_fault}"
                )
            worker, doubt = next(iter(checks.doubts.items()), (None, ""))
            notes.put("doubts", f"{worker} may not use what it claims: {doubt}" if worker else None)
            notes.put("trial", _trial_note(intake.trial_state()))
            if intake.check_failures:
                notes["checks"] = (
                    f"{intake.check_failures} groups could not be looked at, and are handed in "
                    f"again: {intake.last_check_failure}"
                )

    def _can_rescore(self) -> bool:
        """Scores are of the whole vocabulary, and not of the part that top-p leaves of it. At a low
        temperature rounding hides what is looked for."""
        sampling = self._config.run.engine_sampling
        if sampling.is_whole and sampling.temperature >= TEMPERATURE_MIN:
            return True
        why = "another top_p than 1"
        if sampling.is_whole:
            why = f"a temperature below {TEMPERATURE_MIN}"
        self._node.notes["rescoring"] = (
            f"log-probs of workers are not checked: the run samples at {why}"
        )
        return False

    def _secret(self) -> bytes:
        """The secret, kept so that leases that were granted before a restart stay unforeseen."""
        path = self._config.data_dir / SECRET_FILE
        if not path.exists() or path.stat().st_size != SECRET_BYTES:
            write_whole(path, self._world.secret(SECRET_BYTES), mode=0o600)
        return path.read_bytes()

    # --- for whoever watches ------------------------------------------------------------------

    def status(self, snapshot: StatusSnapshot) -> StatusSnapshot:
        snapshot = replace(
            self._training.status(snapshot),
            role="learner",
            policy_version=version_after(self._training.progress),
            external_groups_wanted=self._rules.pool_groups_per_step,
            staleness_bound=self._rules.staleness_max,
        )
        step = self._last
        if step is None:
            return snapshot
        return replace(
            snapshot.with_figures(step),
            policy_version=step.version,
            local_groups=step.groups - step.shared_groups,
            external_groups=step.shared_groups,
            own_reward=step.reward if isfinite(step.reward) else None,
            groups_quantised=step.groups_quantised,
            answers=step.answers,
            step=step,
        )

    def works(self) -> list[Work]:
        works = [*self._training.works(), *self._node.works()]
        if self._publishing is None:  # nothing has begun
            return works
        making, service = self._publishing.making(), self._publishing.service
        if making is not None:
            works.append(Work(f"publishing version {making}"))
        head = None if service is None else service.heads.newest(POLICY)
        if service is None or head is None:
            return works
        spread = spread_work(service.sharing, head.version)
        return works if spread is None else [*works, spread]

    def extras(self) -> Extras:
        return Extras() if self.coordinator is None else self.coordinator.extras()


def _trial_note(state: TrialState) -> str | None:
    """A note that new workers wait because others, which have delivered nothing either, hold all
    groups that such workers may; None if nobody waits."""
    if not state.waiting:
        return None
    return (
        f"{state.waiting} workers that have delivered nothing yet wait for work: "
        f"{state.workers} like them, of {state.places} addresses or blocks, hold {state.held} "
        f"of the {state.most} groups that such workers may; those that deliver wait for none"
    )
