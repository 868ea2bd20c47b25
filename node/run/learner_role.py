"""The central learner of a run (`swarm-node learn`).

It has a publisher of versions, an intake that leases work to workers, and a process that scores
samples of submitted groups. Under torchrun rank 0 is this node; the other ranks only train
(`node.train.sharded_worker`).
"""

from dataclasses import replace
from math import isfinite
from typing import Any, ClassVar, Final

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
from node.run.claims import TEMPERATURE_MIN, LearnerChecks, Scorer
from node.run.coordinator_client import CoordinatorClient
from node.run.learner import (
    CREDITS_PER_STEP,
    Learner,
    lease_rules,
    version_after,
)
from node.run.node import Node
from node.run.parts import LivePolicy
from node.run.role import Needs, TrainingRole
from node.run.version_spread import SpreadWatch
from node.run.world import Listener, Publishing, SamplingTrainer, Watchers, World
from node.stages.table import refuse_of_others
from swarm.errors import ConfigError
from swarm.identity import Identity
from swarm.leases.coordination import ControlService
from swarm.leases.intake import Intake, IntakeRules
from swarm.leases.lease_table import LeaseBook, LeaseRules, TrialState
from swarm.leases.staleness import Account, StalenessRules
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
class LearnerRole(TrainingRole):
    KIND: ClassVar[reports.Role] = "learner"

    @staticmethod
    def needs(config: NodeConfig, identity: Identity) -> Needs:
        rules = rules_of(config)
        refuse_of_others(config, "learner")
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
        """`leases`: None for those of the run's rules. `credits_per_step`: leased and buffered
        groups, as a multiple of those of a step."""
        super().__init__(world, config, node, listener)
        self._rules = rules_of(config)
        self._leases = leases or lease_rules(self._rules)
        self._credits_per_step = credits_per_step
        self._last: StepDone | None = None
        self._publishing: Publishing | None = None
        self._scorer: Scorer | None = None
        self.learner: Learner | None = None  # this and the next: once a trainer is there
        self.intake: Intake | None = None
        self.coordinator: CoordinatorClient | None = None
        self.ready = trio.Event()  # it learns

    async def run(self, leaving: trio.Event) -> None:
        config, world = self._config, self._world
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            watchers = Watchers(
                *(self._note_published, self._note_spread),
                lambda what: self._listener.tell(Trouble(what)),
            )
            async with (
                world.open_publishing(config, self._node.peer, watchers) as publishing,
                world.open_scorer(config, publishing.find) as self._scorer,
            ):
                self._publishing = publishing
                self.coordinator = self._serve_coordinator(publishing.service)
                if publishing.service is not None:
                    nursery.start_soon(self._watch_spread, publishing.service, self.coordinator)
                await super().run(leaving)
                nursery.cancel_scope.cancel()

    def _serve_coordinator(self, service: WeightsService | None) -> CoordinatorClient:
        """Serve a coordinator with reports, and take its plans."""
        config, node = self._config, self._node
        coordinator = config.coordinator
        client = CoordinatorClient(
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
        """Show a note while the coordinator is silent. Its last plan stays in force, except that
        standby ends while nobody works."""
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

    async def learn(
        self,
        leaving: trio.Event,
        trainer: SamplingTrainer,
        policy: PolicyInfo,
        resumed: Checkpoint | None,
    ) -> None:
        assert self._publishing is not None
        assert self.coordinator is not None
        node, client, progress = self._node, self.coordinator, self._progress
        intake = await self._restored(self._publishing, policy, resumed)
        await self._listener.tell(node.started(policy, progress))
        await node.note_maker(trainer.maker, self._listener.tell)
        self._last = None
        learner = self.learner = Learner(
            node.parts,
            LivePolicy(trainer, trainer, policy.tokenizer),
            intake,
            self._publishing.publisher_queue,
            self._checkpoints,
            progress,
            self._listener.show,
        )
        client.attend(learner, intake)
        self.ready.set()

        async def tell(record: StepDone | HeldOut) -> None:
            self._progress = learner.progress
            if isinstance(record, StepDone):
                client.note_step(record)
                record = self._last = node.counted(record)
            await self.tell_progress(trainer, record)

        await learner.run(leaving, tell, lambda: node.is_over(learner.progress))

    async def _restored(
        self, publishing: Publishing, policy: PolicyInfo, resumed: Checkpoint | None
    ) -> Intake:
        """The intake of a checkpoint. After a trainer's death the same one is restored."""
        record = None if resumed is None else Learner.intake_record(resumed.directory)
        run, node = self._config.run, self._node
        book = self._lease_book(record)
        if self.intake is not None:
            self.intake.restore(book, record)
            return self.intake
        checks = LearnerChecks(
            node.guard,
            self._scorer if self._can_rescore() else None,
            publishing.held,
            run.sampling.temperature,
        )
        self.intake = Intake(
            self._intake_rules(policy.tokenizer),
            book,
            node.peer.transport,
            node.gater,
            checks,
            self._world.rng("intake"),
        )
        self.intake.restore(book, record)
        await self._nursery.start(self.intake.run)
        self._nursery.start_soon(self._note_checks, self.intake, checks)
        return self.intake

    def _intake_rules(self, tokenizer: str) -> IntakeRules:
        run = self._config.run
        return IntakeRules(
            run_id=run.run_id,
            group_size=self._rules.group_size,
            tokenizer=tokenizer,
            temperature=run.sampling.temperature,
            top_p=run.sampling.top_p,
            rescored_share=self._rules.rescored_share,
        )

    def _lease_book(self, record: dict[str, Any] | None) -> LeaseBook:
        """The leases of an intake's record, or none."""
        rules, run_id, secret = self._rules, self._config.run.run_id, self._secret()
        start = int.from_bytes(self._world.secret(8)) % LEASE_IDS
        credit = int(self._credits_per_step * rules.groups_per_step)
        staleness = StalenessRules(rules.staleness_max, rules.groups_per_step, credit)
        if record is None:
            account = Account(staleness, version_after(self._progress))
            return LeaseBook(self._leases, account, run_id, secret, start)
        return LeaseBook.from_record(
            record["book"],
            rules=self._leases,
            staleness_rules=staleness,
            run_id=run_id,
            secret=secret,
            start=start,
            now=trio.current_time(),
        )

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
        """Scores are of the whole vocabulary; at a low temperature rounding hides differences."""
        sampling = self._config.run.engine_sampling
        if not sampling.is_whole:
            why = "another top_p than 1"
        elif sampling.temperature < TEMPERATURE_MIN:
            why = f"a temperature below {TEMPERATURE_MIN}"
        else:
            return True
        self._node.notes["rescoring"] = (
            f"log-probs of workers are not checked: the run samples at {why}"
        )
        return False

    def _secret(self) -> bytes:
        """The secret of lease ids, which survives restarts."""
        path = self._config.data_dir / SECRET_FILE
        if not path.exists() or path.stat().st_size != SECRET_BYTES:
            write_whole(path, self._world.secret(SECRET_BYTES), mode=0o600)
        return path.read_bytes()

    # --- for whoever watches ------------------------------------------------------------------

    def status(self, snapshot: StatusSnapshot) -> StatusSnapshot:
        snapshot = replace(
            super().status(snapshot),
            role="learner",
            policy_version=version_after(self._progress),
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
        works = super().works()
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
    """A note that new workers wait for others on trial; None if nobody waits."""
    if not state.waiting:
        return None
    return (
        f"{state.waiting} workers that have delivered nothing yet wait for work: "
        f"{state.workers} like them, of {state.places} addresses or blocks, hold {state.held} "
        f"of the {state.most} groups that such workers may; those that deliver wait for none"
    )
