"""A node that learns by itself, from its own groups and from those that others share (SAPO)."""

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Final

import trio

from node.config import NodeConfig
from node.interfaces.trainer import PolicyInfo, Trainer
from node.observe.records import HeldOut, RoundDone, StatusSnapshot, WentBack
from node.observe.text_format import often
from node.observe.usefulness import ROUNDS_MAX, TIMES_MAX, saved_text, usefulness
from node.run.checkpoints import Checkpoint, Checkpoints, SavingPace
from node.run.node import Node
from node.run.parts import LivePolicy, OnSamples
from node.run.progress import Progress
from node.run.recorded import Recorder
from node.run.role import Needs, TrainingRole
from node.run.rollback import Rollback
from node.run.sapo import Sapo
from node.run.world import Listener, SamplingTrainer, World
from node.stages.table import refuse_of_others
from node.system.stopping import unless
from node.train.process import TrainerClient
from swarm.exchange.exchange_service import Exchange
from swarm.identity import Identity
from swarm.telemetry import reports

TOO_FEW_PROBLEMS: Final = (
    "this run has too few problems for so many validation tasks: the node neither goes back to its "
    "best policy nor slows down; give --validation-tasks an eighth of the problems at most, or 0"
)
Record = RoundDone | HeldOut | WentBack
OnRecord = Callable[[Record], Awaitable[None]]


class Rounds:
    """The rounds of one node, with a trainer and an engine that others opened."""

    def __init__(self, config: NodeConfig, node: Node) -> None:
        assert node.sharing is not None
        self._config = config
        self._node = node
        self.exchange: Exchange = node.sharing.exchange
        self.progress = Progress()
        self.last: RoundDone | None = None
        self._recorder: Recorder | None = None
        self._recent: deque[RoundDone] = deque(maxlen=ROUNDS_MAX)

    # Long: the order of a round's parts is what it says.
    async def run(
        self,
        policy: LivePolicy,
        progress: Progress,
        *,
        leaving: trio.Event,
        on_record: OnRecord,
        checkpoints: Checkpoints | None = None,
        on_samples: OnSamples | None = None,
        rest: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Run rounds from `progress` until the settings end the run, or `leaving`, which abandons a
        round before its update. Only a run that reaches its end is evaluated once more.
        `rest` waits before each round until the machine may be used."""
        node, trainer, began = self._node, policy.trainer, progress.round
        rollback = Rollback(self._config, policy, checkpoints, node.enter)
        progress = await rollback.begin(progress)
        before_share = checkpoints.reserve if checkpoints else None
        sapo = Sapo(node.parts, policy, progress, before_share, on_samples)
        self.progress = progress
        self._recorder = None
        if self._config.record_rounds:
            assert isinstance(trainer, TrainerClient)
            self._recorder = Recorder(node.parts, trainer, node.run_sync)
        every = self._config.evaluate_every_rounds
        pace = SavingPace(self._config.checkpoint_every_rounds)
        if progress.round == self._config.first_round and every:
            await unless(leaving, lambda: self._evaluate(sapo, rollback, on_record))
            await rollback.keep(sapo.progress, None)
        while not leaving.is_set() and not node.is_over(sapo.progress):
            if rest is not None:
                with trio.move_on_at(node.ends_at):
                    await unless(leaving, rest)
            if not leaving.is_set() and not node.is_over(sapo.progress):
                await unless(leaving, lambda: self._round(sapo, on_record))
            done = sapo.progress.round
            if every and done % every == 0:
                await unless(leaving, lambda: self._evaluate(sapo, rollback, on_record))
            saved, began_s = None, trio.current_time()
            if pace.is_due(done, began_s) or rollback.is_fresh:
                # after a rollback the policy is not the round's
                version = self.last.policy_version if self.last and not rollback.is_fresh else None
                saved = await self._save(sapo, trainer, checkpoints, version)
            if await rollback.keep(sapo.progress, saved) or saved is not None:
                pace.saved(began_s, trio.current_time())
        done = sapo.progress.round  # no new one: an interrupt may have come before its evaluation
        if every and not leaving.is_set() and (done % every or done == began):
            await self._evaluate(sapo, rollback, on_record)
        await rollback.keep(sapo.progress, await self._save(sapo, trainer, checkpoints))
        node.enter("leaving")

    async def _round(self, sapo: Sapo, on_record: OnRecord) -> None:
        before = sapo.progress
        if self._recorder is not None:
            self._node.enter("saving")
            with trio.CancelScope(shield=True):
                await self._recorder.begin(before)
        record = self._node.counted(await sapo.round())
        assert self._node.sharing is not None
        pool = self._node.sharing.figures
        record = replace(record, pool_groups=pool.groups, pool_bytes=pool.bytes)
        self._node.note_rate(record)
        self.progress, self.last = sapo.progress, record
        self._recent.append(record)
        self._note_sharing(record)
        with trio.CancelScope(shield=True):  # what was trained is told, also when leaving
            if self._recorder is not None:
                await self._recorder.keep(before, sapo)
            await on_record(record)

    def _note_sharing(self, record: RoundDone) -> None:
        """Say it when sharing does not work: a silent J = 0 looks like health and is none."""
        notes = self._node.notes
        notes.put("sharing", None)
        failures = self.exchange.fetcher.verifier_failures
        if failures:
            notes["verifier"] = f"the verifier of foreign groups failed {often(failures)} so far"
        found = self._node.verifier.counters
        if found.overruns:
            notes["overruns"] = (
                f"{found.overruns} foreign groups used up their CPU time in the verifier, "
                f"{found.cpu_s['overrun']:.0f} s in all, and {found.turned_away} found no turn"
            )
        if record.external_wanted and record.external_groups == 0 and record.peers > 0:
            peers = "a peer is" if record.peers == 1 else f"{record.peers} peers are"
            notes["sharing"] = (
                f"no usable foreign group in round {record.round} although {peers} "
                "connected: they may be starting, or all their groups pass or fail alike"
            )

    async def _evaluate(self, sapo: Sapo, rollback: Rollback, on_record: OnRecord) -> None:
        record = await sapo.evaluate()
        with trio.CancelScope(shield=True):
            sapo.progress, turn = await rollback.decide_on(sapo.progress, record)
            self.progress = sapo.progress
            await on_record(record)
            if turn is not None:
                await on_record(turn)
        if self._node.guard.lacks_validation:
            self._node.notes["validation"] = TOO_FEW_PROBLEMS

    async def _save(
        self,
        sapo: Sapo,
        trainer: Trainer,
        checkpoints: Checkpoints | None,
        version: int | None = None,
    ) -> Path | None:
        saved: Path | None = None
        if checkpoints is not None and sapo.progress.round > 0:
            self._node.enter("saving")
            with trio.CancelScope(shield=True):
                saved = await checkpoints.save(sapo.progress, trainer, version=version)
        return saved

    def saved(self) -> str:
        """The gain of the last rounds, as `saved_text`."""
        return saved_text(self._recent)

    def status(self, snapshot: StatusSnapshot) -> StatusSnapshot:
        """With the last round."""
        wanted, last = self._config.external_groups, self.last
        if last is None:
            return replace(snapshot, external_groups_wanted=wanted)
        useful = usefulness(self._recent, wanted)
        return replace(
            snapshot.with_figures(last),
            policy_version=last.policy_version,
            local_groups=last.own_taught,
            local_groups_made=last.local_groups,
            answers=last.answers,
            external_groups=last.external_groups,
            external_groups_wanted=wanted if last.external_wanted is None else last.external_wanted,
            own_reward=last.own_reward,
            foreign_gradient=last.foreign_gradient,
            sharing_per_token=min(useful.per_token, TIMES_MAX) if useful and wanted else None,
            groups_quantised=last.groups_quantised,
        )


class SapoRole(TrainingRole):
    KIND: ClassVar[reports.Role] = "node"

    @staticmethod
    def needs(config: NodeConfig, identity: Identity) -> Needs:
        """The role shares groups even if it draws none."""
        refuse_of_others(config, "node")
        return Needs(policy=config.engine != "openai", draws=config.external_groups)

    def __init__(self, world: World, config: NodeConfig, node: Node, listener: Listener) -> None:
        super().__init__(world, config, node, listener)
        self._rounds = Rounds(config, node)

    async def learn(
        self,
        leaving: trio.Event,
        trainer: SamplingTrainer,
        policy: PolicyInfo,
        resumed: Checkpoint | None,
    ) -> None:
        listener = self._listener
        if not policy.clipping_active:
            listener.say("one update per batch: every ratio is 1, so clipping is inactive")
        if policy.adapted:
            listener.say(f"training an adapter {policy.adapted}")
        await listener.tell(self._node.started(policy, self._progress))

        async def on_record(record: Record) -> None:
            self._progress = self._rounds.progress
            await self.tell_progress(trainer, record)

        opened = self._world.open_engine(self._config, trainer, listener)
        async with opened as (engine, hand_over):
            await self._node.note_maker(engine.maker, listener.tell)
            await self._rounds.run(
                await LivePolicy.of(trainer, engine, hand_over),
                self._progress,
                leaving=leaving,
                on_record=on_record,
                checkpoints=self._checkpoints,
                on_samples=listener.show,
                rest=lambda: self._world.rest(self._config, self._node.enter),
            )

    def farewell(self) -> str:
        return self._rounds.saved()

    def status(self, snapshot: StatusSnapshot) -> StatusSnapshot:
        snapshot = self._rounds.status(super().status(snapshot))
        rules = self._config.run.learner
        return snapshot if rules is None else replace(snapshot, staleness_bound=rules.staleness_max)
