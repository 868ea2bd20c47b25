"""`swarm-node learn`: the central learner of a run as a process.

On top of what every node has: the publisher of the policy's versions, the intake that workers are
leased work by, and a process of its own that scores samples of what they hand in.

Under torchrun rank 0 is this node, and the other ranks only train: they have no identity and no
network (`training.sharded_worker.follow`).
"""

import os
import secrets
from contextlib import AsyncExitStack
from dataclasses import replace
from random import Random
from typing import Any, Final

import trio

from node.app import App, trainer_spec
from node.checkpoints import Checkpoint
from node.config import LearnerRules, NodeConfig
from node.learner import Learner, intake_rules, lease_book, lease_rules
from node.learner_checks import LearnerChecks, Scorer
from node.monitor.events import Record
from node.monitor.progress import Work, spread_work
from node.monitor.records import (
    HeldOut,
    StepDone,
    Trouble,
    VersionPublished,
    VersionSpread,
)
from node.outlet import Outlet
from node.policy_weights import POLICY, policy_weights, published_versions, version_directory
from node.sapo import Progress
from node.spreading import SpreadWatch
from node.steering import Steering
from node.training.process import TrainerProcess
from node.training.ranks import Ranks
from swarm.errors import ConfigError
from swarm.identity import Identity
from swarm.leasing.coordination import ControlService
from swarm.leasing.intake import Intake
from swarm.leasing.leases import TrialState
from swarm.storage.files import write_whole
from swarm.telemetry.reports import Role
from swarm.weights.publisher import Published, Publisher, Spread

SECRET_FILE: Final = "lease-secret"
SECRET_BYTES: Final = 32
EXPORTS: Final = "exports"
SCORER: Final = "scorer"
SPREAD_LOOK_S: Final = 0.5
COORDINATOR_SILENT_S: Final = 60.0  # after which its absence is worth a note


def rules_of(config: NodeConfig) -> LearnerRules:
    """The learner's rules of a run.

    Raises:
        ConfigError: the run has no learner.
    """
    if config.run.learner is None:
        raise ConfigError(
            f"run {config.run.name} has no learner: put learner.peer into its file (swarm-node "
            "keygen prints the id of a key), or take part in it with swarm-node join"
        )
    return config.run.learner


class LearnerApp(App):
    """The learner."""

    ROLE: Role = "learner"
    _outlet: Outlet | None = None

    @classmethod
    def check(cls, config: NodeConfig, identity: Identity) -> None:
        """See `App.check`."""
        learner = rules_of(config).peer
        if learner != identity.peer_id:
            raise ConfigError(
                f"the learner of run {config.run.name} is {learner}, and this key is "
                f"{identity.peer_id}: give that one's with --key-file, or correct learner.peer"
            )

    async def _work(self) -> None:
        config, node = self._config, self._node
        self._ranks = Ranks.of(os.environ)
        self._rules = rules_of(config)
        with policy_weights(config, self._transport, node.warden, publishes=True) as service:
            self._service = service
            self._steering = Steering(
                config.data_dir,
                config.run.run_id,
                self._rules,
                self._transport,
                service,
                trio.to_thread.run_sync,
                has_coordinator=config.coordinator is not None,
            )
            self._extras = self._steering.extras
            publisher = Publisher(service, self._identity, self._note_spread)
            async with AsyncExitStack() as stack:
                self._scorer = await stack.enter_async_context(
                    Scorer.open(
                        replace(trainer_spec(config, self._model), threads=1),
                        config.data_dir / SCORER,
                        lambda version: version_directory(service, version),
                    )
                )
                async with trio.open_nursery() as nursery:
                    await nursery.start(service.run)
                    self._nursery = nursery
                    nursery.start_soon(publisher.run)
                    nursery.start_soon(self._watch_spread)
                    exports = config.data_dir / EXPORTS
                    self._outlet = Outlet(
                        service,
                        publisher,
                        exports,
                        nursery,
                        self._complain,
                        trio.to_thread.run_sync,
                        self._note_published,
                    )
                    self._intake: Intake | None = None
                    self._serve_coordinator()
                    await self._train_to_the_end()
                    nursery.cancel_scope.cancel()

    def _serve_coordinator(self) -> None:
        coordinator = self._config.coordinator
        service = ControlService(
            self._transport, self._node.warden, self._steering, lambda peer: peer == coordinator
        )
        service.serve()
        if coordinator is not None:
            self._nursery.start_soon(self._note_coordinator, service)

    async def _note_coordinator(self, service: ControlService) -> None:
        """Say where it has not been heard for long: the last plan stays in force, but for workers
        that stand by while nobody works."""
        idle_s, notes = 0.0, self._node.notes
        while True:
            await trio.sleep(1.0)
            heard_s = service.heard_s
            if self._steering.failure:
                notes["plan"] = self._steering.failure
            else:
                notes.pop("plan", None)
            if heard_s is not None and trio.current_time() - heard_s < COORDINATOR_SILENT_S:
                notes.pop("coordinator", None)
                idle_s = 0.0
                continue
            idle_s = idle_s + 1.0 if self._steering.is_idle else 0.0
            if idle_s >= COORDINATOR_SILENT_S:
                self._steering.lift()
            if heard_s is None and self._steering.plan_number == 0:
                notes["coordinator"] = "the coordinator has not been heard of yet"
            else:
                notes["coordinator"] = "the coordinator is away; its last plan stays in force"

    def _works(self) -> list[Work]:
        """See `App._works`."""
        works = super()._works()
        if self._outlet is None:  # nothing has begun
            return works
        making = self._outlet.making
        if making is not None:
            works.append(Work(f"publishing version {making}"))
        head = self._service.heads.newest(POLICY)
        spread = None if head is None else spread_work(self._service.sharing, head.version)
        return works if spread is None else [*works, spread]

    def _log(self, record: Record) -> None:
        self._nursery.start_soon(self._tell, record)

    def _note_published(self, published: Published) -> None:
        self._steering.note_published(published)
        self._log(
            VersionPublished(
                version=published.version,
                size_bytes=published.size_bytes,
                full_bytes=published.full_bytes,
                delta_bytes=published.delta_bytes,
                made_s=published.made_s,
                announced_ago_s=published.announced_ago_s,
                strategy=published.strategy,
            )
        )

    def _note_spread(self, spread: Spread) -> None:
        self._steering.note_spread(spread)
        self._log(VersionSpread(spread.version, spread.peers, spread.time_s, spread.bound_s))

    async def _watch_spread(self) -> None:
        """Log how far the newest version has come."""
        service, watch = self._service, SpreadWatch()
        while True:
            await trio.sleep(SPREAD_LOOK_S)
            head = service.heads.newest(service.rules.policy)
            if head is None:
                continue
            workers = self._steering.workers()
            using = [each.peer for each in workers if (each.version or 0) >= head.version]
            news = watch.look(head.version, service.sharing.shares(head.version), using)
            if news is not None:
                await self._tell(news)

    async def _complain(self, what: str) -> None:
        await self._tell(Trouble(what))

    async def _learn(
        self, trainer: TrainerProcess, progress: Progress, resumed: Checkpoint | None
    ) -> None:
        policy = await trainer.info()
        intake = await self._restored(resumed, progress, policy.tokenizer)
        await self._tell(self._started(policy, progress))
        await self._note_maker(trainer.maker)
        self._node.progress, self._node.last_step = progress, None
        learner = Learner(
            self._config,
            self._rules,
            trainer,
            trainer,
            self._verifier,
            intake,
            self._outlet,
            self._checkpoints,
            progress,
            exchange=self._node.exchange,
            tokenizer=policy.tokenizer,
            on_phase=self._enter,
        )

        self._steering.attend(learner, intake)

        async def tell(record: StepDone | HeldOut) -> None:
            if isinstance(record, StepDone):
                self._steering.note_step(record)
            await self._tell_step(record, learner, trainer)

        await learner.run(self._leaving, tell, lambda: self._node.is_over(learner.progress))

    async def _restored(
        self, resumed: Checkpoint | None, progress: Progress, tokenizer: str
    ) -> Intake:
        """The intake as a checkpoint left it. It is made once: after a trainer's death it goes back
        to the checkpoint, as the trainer does."""
        record = None if resumed is None else Learner.intake_record(resumed.directory)
        run, rules = self._config.run, self._rules
        leases = lease_rules(rules)
        secret, start = self._secret(), secrets.randbits(62)
        book = lease_book(run, rules, leases, progress, record, secret=secret, start=start)
        is_first = self._intake is None
        if self._intake is None:
            self._intake = Intake(
                intake_rules(run, rules, tokenizer),
                book,
                self._transport,
                self._node.warden,
                LearnerChecks(
                    self._node.guard,
                    self._scorer if self._can_rescore() else None,
                    lambda: published_versions(self._service),
                ),
                Random(secrets.randbits(64)),
            )
        self._intake.restore(book, record)
        if is_first:
            await self._nursery.start(self._intake.run)
            self._nursery.start_soon(self._note_checks, self._intake)
        return self._intake

    async def _note_checks(self, intake: Intake) -> None:
        while True:
            await trio.sleep(1.0)
            if intake.faulty:
                self._node.notes["faulty"] = (
                    f"{intake.faulty} groups of workers did not stand up to verification, the last "
                    f"of {intake.last_fault}"
                )
            self._note_trials(intake.trial_state())
            if intake.check_failures:
                self._node.notes["checks"] = (
                    f"{intake.check_failures} groups could not be looked at, and are handed in "
                    f"again: {intake.last_check_failure}"
                )

    def _note_trials(self, state: TrialState) -> None:
        """Say where workers wait because others, that have delivered nothing either, hold all that
        such workers may."""
        if not state.waiting:
            self._node.notes.pop("trial", None)
            return
        self._node.notes["trial"] = (
            f"{state.waiting} workers that have delivered nothing yet wait for work: "
            f"{state.workers} like them, of {state.places} addresses or blocks, hold {state.held} "
            f"of the {state.most} groups that such workers may; those that deliver wait for none"
        )

    def _can_rescore(self) -> bool:
        """Scores are under the policy as it is, not under other rules of sampling."""
        sampling = self._config.run.sampling
        if (sampling.temperature, sampling.top_p) == (1.0, 1.0):
            return True
        self._node.notes["rescoring"] = (
            "log-probs of workers are not checked: the run samples at another temperature or top_p "
            "than 1"
        )
        return False

    def _secret(self) -> bytes:
        """Kept, so that leases of before a restart stay unforeseen; written whole or not at all."""
        path = self._config.data_dir / SECRET_FILE
        if not path.exists() or path.stat().st_size != SECRET_BYTES:
            write_whole(path, secrets.token_bytes(SECRET_BYTES), mode=0o600)
        return path.read_bytes()

    def _enter(self, phase: str) -> None:
        self._node.phase = phase

    async def _tell_step(self, record: StepDone | HeldOut, learner: Learner, trainer: Any) -> None:
        self._node.progress = learner.progress
        if isinstance(record, StepDone):
            counters = self._transport.counters
            record = replace(
                record,
                peers=len(self._node.discovery.peers),
                bytes_in_total=counters.bytes_in.total(),
                bytes_out_total=counters.bytes_out.total(),
            )
            self._node.last_step = record
        self._node.notes.pop("trainer", None)
        self._loaded.memory_bytes = await trainer.memory_bytes()
        await self._tell(record)
