"""A central learner (ECHO-2, arXiv 2602.02192): the source of its steps, and its versions.

Its own groups are R groups that workers made under leases and that are fresh enough. A step is a
round of `node.run.round`. After every κ steps it saves a checkpoint and hands the version to the
broadcast; at times it evaluates the run's fixed held-out tasks.

The policy's version is 1 + the number of steps. A version is published only once a checkpoint holds
it, so that no group can come from the future of a learner that resumes. Where that checkpoint is
lost, it goes on from the one before under a number above the published one.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

import msgpack
import trio

from node.config.node import rules_of
from node.config.run import LearnerRules
from node.hosting.publisher_queue import PublisherQueue
from node.methods.samplers import distinct
from node.observe.records import HeldOut, StepDone
from node.observe.samples import bounded
from node.run.checkpoints import Checkpoints
from node.run.evaluation import evaluate
from node.run.groups import finite, lengths, outcome_counts, sampled, seed_of
from node.run.parts import LivePolicy, NodeParts, OnSamples
from node.run.progress import Progress
from node.run.round import Round, Stopwatch, view_of
from node.stages.stage import BatchGroup, RoundOutcome, View
from node.stages.table import stages_of
from node.system.stopping import unless
from swarm.leases.intake import Intake
from swarm.leases.lease_table import LeaseRules
from swarm.rollouts import ScoredGroup, informative

FIRST_VERSION = 1
LOOK_S = 0.5  # seconds between checks of the time limit while no groups have come
CREDITS_PER_STEP = 2.0  # bound on buffered and leased groups, as a multiple of those of a step
FIRST_LEASE_S = 30.0  # assumed duration of a new worker's first lease, at least
FIRST_LEASE_SHARE = 0.1  # the same as a share of `lease_life_s`
INTAKE_FILE = "intake.msgpack"  # in each checkpoint

OnRecord = Callable[[StepDone | HeldOut], Awaitable[None]]


def version_after(progress: Progress) -> int:
    """The version of the policy after so many steps."""
    return FIRST_VERSION + progress.round


def lease_rules(rules: LearnerRules) -> LeaseRules:
    """Lease durations of a run; first leases last longer with `lease_life_s`."""
    life_s = float(rules.lease_life_s)
    return LeaseRules(first_s=max(FIRST_LEASE_S, FIRST_LEASE_SHARE * life_s), life_s_min=life_s)


class Learner:
    """The loop's body and its progress."""

    def __init__(
        self,
        node: NodeParts,
        policy: LivePolicy,
        intake: Intake,
        publisher_queue: PublisherQueue,
        checkpoints: Checkpoints,
        progress: Progress,
        on_samples: OnSamples | None = None,
    ) -> None:
        """The policy's engine generates for evaluations alone."""
        self._node = node
        self._config = node.config
        self._rules = rules_of(node.config)
        self._policy = policy
        self._intake = intake
        self._publisher_queue = publisher_queue
        self._checkpoints = checkpoints
        self._on_samples = on_samples
        self._is_over: Callable[[], bool] = lambda: False
        self._saved: int | None = None  # step of the last checkpoint
        self.publish_every = self._rules.publish_every  # κ; whoever coordinates may set another
        self.progress = progress
        self._round = Round(node, policy, self, stages_of(node.config))
        self.stages = self._round.stages
        self.stages.restore(progress.methods)

    @staticmethod
    def intake_record(checkpoint: Path) -> dict[str, Any] | None:
        """The intake's part of a checkpoint; None if it has none."""
        path = checkpoint / INTAKE_FILE
        if not path.exists():
            return None
        record: dict[str, Any] = msgpack.unpackb(path.read_bytes(), strict_map_key=False)
        return record

    @property
    def version(self) -> int:
        """The version of the present policy."""
        return version_after(self.progress)

    @property
    def published(self) -> int:
        """The newest version on offer, or on its way there; 0: none."""
        return self._publisher_queue.newest

    async def run(
        self, leaving: trio.Event, on_record: OnRecord, is_over: Callable[[], bool]
    ) -> None:
        """Learn until `leaving`, or until it is over by the node's own settings."""
        # the checkpoint of what was published is lost
        behind = self.published > self.version
        if behind:
            self.progress = replace(self.progress, round=self.published)
        self._intake.advance(self.version)
        self._set_terms()
        if behind or self.published < FIRST_VERSION or self._is_due():
            await self._publish()
        every = self._config.evaluate_every_rounds
        if every and self.progress.round == 0:
            await unless(leaving, lambda: self._evaluate(on_record))
        while not leaving.is_set() and not is_over():
            await unless(leaving, lambda: self._step(on_record, is_over))
            if every and self.progress.round % every == 0 and not leaving.is_set():
                await unless(leaving, lambda: self._evaluate(on_record))
        if every and self.progress.round % every and not leaving.is_set():
            await self._evaluate(on_record)
        await self._save(anew=True)
        self._node.enter("leaving")

    def _is_due(self) -> bool:
        """True if the present policy must be published. Versions further apart than the pacing
        depth would stop all leases."""
        period = min(self.publish_every, self._intake.book.account.pacing + 1)
        return self.version - self.published >= period

    # --- one step --------------------------------------------------------------------------

    async def _step(self, on_record: OnRecord, is_over: Callable[[], bool]) -> None:
        """One update. If it ends while it waits for groups, it leaves no trace."""
        self._is_over = is_over
        outcome = await self._round.run(self._view())
        if outcome is None:
            return
        with trio.CancelScope(shield=True):
            report = outcome.report
            staleness = [
                self.version - min(c.policy_version for c in each.scored.group.completions)
                for each in outcome.own
            ]
            self.progress = replace(
                self.progress,
                round=self.progress.round + 1,
                trained_tokens=self.progress.trained_tokens + report.trained_tokens,
                methods=self.stages.to_record(),
            )
            self._intake.advance(self.version)
            self._set_terms()
            if self._is_due():
                await self._publish()
            await on_record(self._record(outcome, staleness))

    def _set_terms(self) -> None:
        """Give the next leases the width and the limit that control asks for, and bound the work
        ahead."""
        usual = self._rules.group_size, self._config.run.engine_sampling.max_new_tokens
        at = self._view()
        width, limit = self.stages.lease(*usual, at)
        self.stages.feed(self._intake, at)
        if (width, limit) != usual:
            most = self._config.run.limits.group_size_max
            self._intake.book.terms = (min(width, most), min(limit, usual[1]))
        else:
            self._intake.book.terms = (0, 0)

    def _view(self) -> View:
        """The view of the next step."""
        steps = self.progress.round

        def seed(purpose: str, *more: int) -> int:
            return seed_of(self._config.seed, "learner", purpose, steps, *more)

        return view_of(self._node, self._policy, "learner", steps + 1, seed)

    async def own(self, at: View, clock: Stopwatch) -> list[BatchGroup] | None:
        """Leased groups that are fresh enough; waits until there are. None: the run is over."""
        self._node.enter("waiting")
        leased: list[ScoredGroup] = []
        while not leased:
            with trio.move_on_after(LOOK_S):
                leased = await self._intake.take()
            if not leased and self._is_over():
                return None
            if not leased and self._is_due():  # a plan has just lowered the depth
                await self._publish()
                self._node.enter("waiting")
        clock.lap("idle")
        return [BatchGroup(each) for each in leased]

    async def share(self, own: Sequence[BatchGroup], at: View) -> int:
        """A learner shares its weights, and no groups."""
        return 0

    async def draw(self, at: View) -> list[ScoredGroup]:
        wanted = self.stages.foreign_wanted(self._rules.pool_groups_per_step, at)
        if self._node.exchange is None or wanted == 0:
            return []
        with trio.CancelScope(shield=True):  # the leased groups are out of the intake
            chosen = await self.stages.draw(await self._node.exchange.candidates(), wanted, at)
            taken = await self._node.exchange.take(chosen, at.number)
        return distinct(taken)

    async def show(self, own: Sequence[BatchGroup], foreign: Sequence[ScoredGroup]) -> None:
        if self._on_samples is not None:
            run, number = self._config.run, self.progress.round + 1
            await self._on_samples(bounded(sampled(run, number, each.scored) for each in own))

    # --- versions and checkpoints ----------------------------------------------------------

    async def _publish(self) -> None:
        """Save, then put the policy on offer."""
        await self._save()
        self._node.enter("publishing")
        precision = self._config.publish_precision
        await self._publisher_queue.offer(
            self.version, partial(self._policy.trainer.export, precision=precision)
        )

    async def _save(self, *, anew: bool = False) -> None:
        """Save once for each step; `anew`: for what came in since, too."""
        if self._saved == self.progress.round and not anew:
            return
        self._node.enter("saving")
        with trio.CancelScope(shield=True):
            files = {INTAKE_FILE: partial(msgpack.packb, self._intake.to_record())}
            await self._checkpoints.save(self.progress, self._policy.trainer, files)
        self._saved = self.progress.round

    # --- evaluating and telling ------------------------------------------------------------

    async def _evaluate(self, on_record: OnRecord) -> None:
        self._node.enter("evaluating")
        record = await evaluate(self._node, self._policy.engine, self.progress)
        self.progress = self.progress.with_held_out(record.passed)
        with trio.CancelScope(shield=True):
            await on_record(record)

    def _record(self, outcome: RoundOutcome, staleness: Sequence[int]) -> StepDone:
        """The step as the learner saw it; `Node.counted` adds the network's figures."""
        leased = [each.scored for each in outcome.own]
        shared, report, laps = outcome.foreign, outcome.report, self._round.clock.laps
        rewards = [reward for each in leased for reward in each.rewards]
        used = [*leased, *shared]
        counts = self._intake.counts()
        return StepDone(
            step=self.progress.round,
            version=self.version,
            published_version=self.published,
            groups=len(leased) + len(shared),
            shared_groups=len(shared),
            informative_groups=sum(informative(each.rewards) for each in used),
            reward=fmean(rewards) if rewards else nan,
            staleness_mean=fmean(staleness) if staleness else nan,
            staleness_max=max(staleness, default=0),
            idle_s=laps["idle"],
            train_s=laps["train"],
            groups_by_worker=dict(sorted(Counter(each.source for each in leased).items())),
            buffered_groups=counts.buffered,
            leased_groups=counts.leased,
            discarded_total=counts.discarded,
            trained_tokens_total=self.progress.trained_tokens,
            loss=report.loss,
            grad_norm=report.grad_norm,
            clip_fraction=report.clip_fraction,
            effective_share=self._comparable(report.effective_share),
            mismatch_k3=self._comparable(report.mismatch_k3),
            peers=0,
            bytes_in_total=0,
            bytes_out_total=0,
            groups_quantised=sum(each.group.is_quantised for each in used),
            answers=outcome_counts(self._config.run, leased),
            step_kl=finite(report.step_kl),
            steps_taken_back=report.steps_taken_back,
            rate_scale=report.rate_scale,
            version_lag=finite(report.version_lag),
            by_lag=report.by_lag,
            acted=self.stages.acted,
            own_logprob=finite(report.own_logprob),
            step_rate=finite(report.step_rate),
            **lengths(c for each in leased for c in each.group.completions),
        )

    def _comparable(self, value: float) -> float | None:
        """A figure of workers against trainer, where both have one distribution."""
        return finite(value) if self._config.run.engine_sampling.is_whole else None
