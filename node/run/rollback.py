"""Keeps the best policy and rolls back to it at a lower learning rate, as `validation` decides."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import trio

from node.config import NodeConfig
from node.observe.records import HeldOut, WentBack
from node.run.checkpoints import Checkpoints
from node.run.parts import LivePolicy
from node.run.progress import Progress
from node.run.validation import Validated, decide
from swarm.errors import ChildFailed, ConfigError


class Rollback:
    """The rollback of one trainer."""

    def __init__(
        self,
        config: NodeConfig,
        policy: LivePolicy,
        checkpoints: Checkpoints | None,
        on_phase: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Without `checkpoints` no policy is kept, and none can be rolled back to."""
        self._config = config
        self._trainer, self._hand_over = policy.trainer, policy.hand_over
        self._checkpoints = checkpoints
        self._on_phase = on_phase
        self._keeps = False  # the present policy is the best and is not kept yet
        self.is_fresh = False  # the policy went back since it was last saved

    async def begin(self, progress: Progress) -> Progress:
        """Restore earlier decisions. The best policy is the one on disk, not the checkpoint's."""
        validated = progress.validated
        if self._checkpoints is not None:
            kept = self._checkpoints.best()
            validated = validated.with_best_of(None if kept is None else kept.progress.validated)
        if validated.rate_share < 1.0:
            await self._trainer.slow_down(validated.rate_share)
        return replace(progress, validated=validated)

    async def decide_on(
        self, progress: Progress, record: HeldOut
    ) -> tuple[Progress, WentBack | None]:
        """Decide on an evaluation and act; `keep` stores the best policy after the round's
        checkpoint. Returns the progress with the decision, and an event to log."""
        if record.validation is None:
            return progress, None
        act, validated = decide(
            progress.validated,
            record.validation,
            record.validation_tasks,
            record.round,
            returns=self._config.returns_to_best and self._checkpoints is not None,
        )
        progress = replace(progress, validated=validated)
        if act == "keep":
            self._keeps = self._checkpoints is not None
        if act == "return":
            return progress, await self._roll_back(record.round, validated)
        return progress, None

    async def _roll_back(self, round_: int, validated: Validated) -> WentBack:
        best, passed = validated.best, validated.last
        assert self._checkpoints is not None
        assert best is not None
        assert passed is not None
        kept = self._checkpoints.best()
        if kept is None:
            raise ChildFailed("the best policy is not where it was kept")
        self._on_phase("training")
        with trio.CancelScope(shield=True):  # trainer and engine have one policy
            if self._hand_over is not None:
                await self._hand_over.before_training()
            await self._trainer.slow_down(validated.rate_share)
            try:
                version = await self._trainer.roll_back(kept.directory)
            except ConfigError as error:
                aside = self._checkpoints.put_aside(kept)
                raise ChildFailed(f"{error}; moved to {aside}") from None
            if self._hand_over is not None:
                await self._hand_over.after_training(version)
        self.is_fresh = True
        return WentBack(round_, version, passed, best, validated.best_round, validated.rate_share)

    async def keep(self, progress: Progress, saved: Path | None) -> bool:
        """Keep the present policy if the last evaluation found it best. `saved`: a checkpoint of
        it. Returns whether files were written."""
        self.is_fresh = self.is_fresh and saved is None
        if not self._keeps:
            return False
        assert self._checkpoints is not None
        self._on_phase("saving")
        with trio.CancelScope(shield=True):
            await self._checkpoints.save_best(progress, self._trainer, saved)
        self._keeps = False
        return saved is None
