"""The interface of a role, and the common part of roles that train.

A role says what it needs before anything is opened, runs until it is done or told to leave, and
fills the node's status with what it did.
"""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Protocol

import trio

from node.config import NodeConfig
from node.engines.vllm.server import ServerFailed
from node.hosting.models import CHECKPOINTS
from node.interfaces.trainer import DamagedCheckpoint, PolicyInfo
from node.observe.event_log import Record
from node.observe.figures import guard_note
from node.observe.node_reports import Extras
from node.observe.progress_bars import Work
from node.observe.records import RoundDone, StatusSnapshot, StepDone, Trouble
from node.run.checkpoints import Checkpoint, Checkpoints
from node.run.node import Node
from node.run.progress import Progress
from node.run.world import Listener, SamplingTrainer, World
from node.system.stopping import unless
from swarm.errors import ChildFailed, ConfigError, first_of
from swarm.identity import Identity
from swarm.limits.backoff import Backoff
from swarm.storage import RunSync
from swarm.telemetry import reports

RESTART: Final = Backoff(1.0, 60.0)  # seconds before a child is started again
RESTARTS_MAX: Final = 5  # failures in a row without a finished round between them


@dataclass(frozen=True, slots=True)
class Needs:
    """The prerequisites of a role."""

    policy: bool  # to begin with: a model, made or fetched before anything listens
    draws: int | None  # shared groups in a round or step, at most; None: no part in the exchange


class Role(Protocol):
    """The work of a node in its run."""

    KIND: ClassVar[reports.Role]

    @staticmethod
    def needs(config: NodeConfig, identity: Identity) -> Needs:
        """The prerequisites of the role, by settings and key."""
        ...

    async def run(self, leaving: trio.Event) -> None:
        """Until it is done, or `leaving`.

        Raises:
            ExceptionGroup: of `ChildFailed`, where what it is made of dies again and again.
        """
        ...

    def status(self, snapshot: StatusSnapshot) -> StatusSnapshot:
        """The node's snapshot with what the role did."""
        ...

    def works(self) -> list[Work]:
        """The slow work of this moment."""
        ...

    def extras(self) -> Extras:
        """Figures that it reports besides."""
        ...


class RoleClass(Protocol):
    """A role's class."""

    KIND: reports.Role

    def __call__(
        self, world: World, config: NodeConfig, node: Node, listener: Listener, /
    ) -> Role: ...

    def needs(self, config: NodeConfig, identity: Identity) -> Needs: ...


def checkpoints_of(config: NodeConfig, run_sync: RunSync = trio.to_thread.run_sync) -> Checkpoints:
    """The node's checkpoints; another run or model than before is refused. `run_sync`: where
    what blocks goes."""
    return Checkpoints(
        config.data_dir / CHECKPOINTS,
        config.checkpoints_kept,
        {"run_id": config.run.run_id, "model": config.model},
        run_sync,
    )


Learn = Callable[[SamplingTrainer, PolicyInfo, Progress, Checkpoint | None], Awaitable[None]]


class Training:
    """A trainer from its last checkpoint on, started again with back-off where it or its engine
    dies. What is done with it is its role's."""

    def __init__(
        self,
        world: World,
        config: NodeConfig,
        node: Node,
        listener: Listener,
        checkpoints: Checkpoints,
    ) -> None:
        self._world = world
        self._config = config
        self._node = node
        self._listener = listener
        self.checkpoints = checkpoints
        resumed = checkpoints.latest()  # told of from the first report on
        self.progress = resumed.progress if resumed else Progress()
        self.policy: PolicyInfo | None = None  # this and the next survive restarts
        self.memory_bytes = 0
        self.is_loading = False
        self._rate_said = ""

    async def run(self, leaving: trio.Event, learn: Learn) -> None:
        """Learn until that ends. `learn` gets a trainer that is loaded, what it is, what there was
        when it was resumed, and from which checkpoint; it keeps `progress`.

        Raises:
            ChildFailed: it died `RESTARTS_MAX` times without finishing a round in between, or
                at all where somebody else starts it again.
        """
        failures = 0
        while True:
            before = self.progress.round
            try:
                await self._once(leaving, learn)
            except* ChildFailed as group:
                error = first_of(group)
                if not self._world.restarts_trainer:
                    await self._listener.tell(Trouble(f"the trainer failed: {error}"))
                    raise
                failures = 1 if self.progress.round > before else failures + 1
                what = "vLLM" if isinstance(error, ServerFailed) else "the trainer"
                await self._listener.tell(Trouble(f"{what} failed and is restarted: {error}"))
                often = "" if failures == 1 else f" {failures} times"
                self._node.notes.put("trainer", f"{what} failed{often}: {error}")
                if failures >= RESTARTS_MAX:
                    raise
            else:
                return
            with trio.move_on_after(RESTART.after(failures)):
                await leaving.wait()
                return

    async def note_progress(self, trainer: SamplingTrainer, record: Record) -> None:
        """A round or step is done, or an evaluation: the trainer works. What the guard over its
        steps did is kept for `status`."""
        self._node.notes.put("trainer", None)
        if isinstance(record, RoundDone | StepDone):
            self._node.notes.put("guard", guard_note(record))
        self.memory_bytes = await trainer.memory_bytes()

    async def _once(self, leaving: trio.Event, learn: Learn) -> None:
        resumed = self.checkpoints.latest()
        progress = resumed.progress if resumed else Progress()
        spent = max(progress.next_index, self.checkpoints.reserved())
        progress = replace(progress, next_index=spent)
        async with AsyncExitStack() as stack:
            trainers: list[SamplingTrainer] = []

            async def load() -> None:
                trainers.append(await self._open(stack, resumed))

            self.is_loading = True
            try:
                await unless(leaving, load)  # nothing has been trained that is not saved
            finally:
                self.is_loading = False
            if leaving.is_set() or not trainers:
                return
            trainer = trainers[0]
            self.policy = await trainer.info()
            self.progress = progress
            self._say_rate(self.policy)
            await learn(trainer, self.policy, progress, resumed)

    def _say_rate(self, policy: PolicyInfo) -> None:
        """Once, not at each start of a trainer."""
        if policy.rate_told != self._rate_said:
            self._rate_said = policy.rate_told
            self._listener.say(policy.rate_told)

    async def _open(self, stack: AsyncExitStack, resumed: Checkpoint | None) -> SamplingTrainer:
        """A trainer that ends with the stack. A checkpoint that does not load is put aside.

        Raises:
            ChildFailed: it failed; the next try takes the checkpoint before.
        """
        opened = self._world.open_trainer(self._config, resumed.directory if resumed else None)
        try:
            return await stack.enter_async_context(opened)
        except ConfigError as error:
            if resumed is None or not isinstance(error, DamagedCheckpoint):
                raise
            aside = self.checkpoints.put_aside(resumed)
            raise ChildFailed(f"{error}; moved to {aside}") from None

    # --- for whoever watches ------------------------------------------------------------------

    def works(self) -> list[Work]:
        return [Work("loading the policy")] if self.is_loading else []

    def status(self, snapshot: StatusSnapshot) -> StatusSnapshot:
        """The snapshot with what is trained, and how far that is."""
        policy, progress = self.policy, self.progress
        return replace(
            snapshot,
            model=policy.name if policy else snapshot.model,
            parameters=policy.parameters if policy else 0,
            trainer_memory_bytes=self.memory_bytes,
            round=progress.round,
            held_out_passed=progress.held_out_last,
            held_out_first=progress.held_out_first,
            validation_passed=progress.validated.last,
            validation_best=progress.validated.best,
            validation_best_round=progress.validated.best_round,
            rate_share=progress.validated.rate_share,
            returns=progress.validated.returns,
        )
