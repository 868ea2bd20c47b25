"""The base of all roles, and of those that train.

A role names its needs before anything is opened, runs until it is done or told to leave, and fills
the node's status.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final

import trio

from node.config import NodeConfig
from node.config.joined import starts_of
from node.engines.vllm.server import ServerFailed
from node.hosting.models import CHECKPOINTS, lasting_model
from node.interfaces.trainer import DamagedCheckpoint, PolicyInfo
from node.observe.event_log import Record
from node.observe.figures import guard_note
from node.observe.node_reports import Extras
from node.observe.progress_bars import Work
from node.observe.records import RoundDone, StatusSnapshot, StepDone, Trouble
from node.run.checkpoints import Checkpoint, Checkpoints
from node.run.node import Node, Notes
from node.run.progress import Progress
from node.run.world import Listener, SamplingTrainer, World
from node.system.stopping import unless
from swarm.errors import CannotHeal, ChildFailed, ConfigError, first_of
from swarm.identity import Identity
from swarm.limits.backoff import Backoff
from swarm.storage import RunSync
from swarm.telemetry import reports

RESTART: Final = Backoff(1.0, 60.0)  # seconds before a child is started again
RESTARTS_MAX: Final = 5  # failures in a row without a finished round between them
SAME_FAILURES_MAX: Final = 3  # alike at one step; one more start would fail as they did
_FIGURES: Final = re.compile(r"\d+")  # addresses, sizes and times, in which like failures differ


class Deaths:
    """The failures of a child process that is started again each time."""

    def __init__(self, data_dir: Path, notes: Notes) -> None:
        self._data_dir = data_dir
        self._notes = notes
        self._alike: Counter[tuple[int, str]] = Counter()
        self.in_a_row = 0  # without finished work in between

    def count(self, what: str, error: BaseException, done: int, *, went_on: bool) -> str:
        """Count and note a failure of `what` after so many rounds or batches. `went_on`: some were
        done since the last failure. Returns the line that tells of it.

        Raises:
            CannotHeal: it failed at this step in this way `SAME_FAILURES_MAX` times.
        """
        self.in_a_row = 1 if went_on else self.in_a_row + 1
        failure = (done, _FIGURES.sub("#", str(error)))
        self._alike[failure] += 1
        if self._alike[failure] >= SAME_FAILURES_MAX:
            raise CannotHeal(
                f"{what} failed {SAME_FAILURES_MAX} times alike after round {done}: {error}; it is "
                f"not started again: mend that (the logs in {self._data_dir} may say more), then "
                "start anew"
            )
        times = "" if self.in_a_row == 1 else f" {self.in_a_row} times"
        self._notes.put("trainer", f"{what} failed{times}: {error}")
        return f"{what} failed and is restarted: {error}"


@dataclass(frozen=True, slots=True)
class Needs:
    """The prerequisites of a role."""

    policy: bool  # to begin with: a model, made or fetched before anything listens
    draws: int | None  # shared groups in a round or step, at most; None: no part in the exchange


class Role:
    """The work of a node in its run."""

    KIND: ClassVar[reports.Role]

    def __init__(self, world: World, config: NodeConfig, node: Node, listener: Listener) -> None:
        self._world = world
        self._config = config
        self._node = node
        self._listener = listener

    @staticmethod
    def needs(config: NodeConfig, identity: Identity) -> Needs:
        """The prerequisites of the role; `ConfigError` if settings or key do not suit it."""
        raise NotImplementedError

    async def run(self, leaving: trio.Event) -> None:
        """Until it is done, or `leaving`; fails with `ChildFailed` if its parts die repeatedly."""
        raise NotImplementedError

    def status(self, snapshot: StatusSnapshot) -> StatusSnapshot:
        """The node's snapshot with what the role did."""
        raise NotImplementedError

    def farewell(self) -> str:
        """The gain of the session, for whoever ends it; empty: none."""
        return ""

    def works(self) -> list[Work]:
        """The slow work of this moment."""
        return self._node.works()

    def extras(self) -> Extras:
        """Figures that it reports besides."""
        return Extras()


def checkpoints_of(config: NodeConfig, run_sync: RunSync = trio.to_thread.run_sync) -> Checkpoints:
    """The node's checkpoints; those of another run or model are refused."""
    return Checkpoints(
        config.data_dir / CHECKPOINTS,
        config.checkpoints_kept,
        {"run_id": config.run.run_id, "model": lasting_model(config.model)},
        run_sync,
    )


@contextmanager
def forked(config: NodeConfig, resumed: Checkpoint | None) -> Iterator[Checkpoint | None]:
    """The checkpoint that `fork` names, held within the block; None: there is none to copy."""
    if config.fork is None:
        yield None
        return
    place, _, number = config.fork.rpartition("@")
    if resumed is not None:
        if all(each.settings.get("fork") != config.fork for each in starts_of(config.data_dir)):
            raise ConfigError(
                f"--fork {config.fork}: --data-dir {config.data_dir} has checkpoints of its own; "
                "name a new directory, or go on there without --fork"
            )
        yield None
        return
    source = checkpoints_of(config.model_copy(update={"data_dir": Path(place)}))
    with source.held(int(number)) as found:
        if found is None:
            rounds = sorted(source.rounds(), key=lambda each: abs(each - int(number)))
            near = " and ".join(map(str, sorted(rounds[:2])))
            told = f"the nearest are of {near}" if near else "that directory has none"
            raise ConfigError(
                f"--fork {config.fork}: no checkpoint of that round; {told} "
                "(--checkpoints-kept keeps more)"
            )
        yield found


class TrainingRole(Role):
    """A role with a trainer. The trainer resumes from the last checkpoint, and starts again with
    back-off where it or its engine dies."""

    def __init__(self, world: World, config: NodeConfig, node: Node, listener: Listener) -> None:
        super().__init__(world, config, node, listener)
        self._checkpoints = checkpoints_of(config, world.run_sync)
        resumed = self._checkpoints.latest()  # told of from the first report on
        self._progress = resumed.progress if resumed else Progress()
        self._policy: PolicyInfo | None = None  # this and the next survive restarts
        self._memory_bytes = 0
        self._is_loading = False
        self._rate_said = ""

    async def learn(
        self,
        leaving: trio.Event,
        trainer: SamplingTrainer,
        policy: PolicyInfo,
        resumed: Checkpoint | None,
    ) -> None:
        """Learn with a loaded trainer until that ends, and keep `_progress`."""
        raise NotImplementedError

    async def run(self, leaving: trio.Event) -> None:
        """Fail where somebody else starts it again, and as `Deaths` says."""
        deaths = Deaths(self._config.data_dir, self._node.notes)
        while True:
            before = self._progress.round
            try:
                await self._once(leaving)
            except* ChildFailed as group:
                error = first_of(group)
                if not self._world.restarts_trainer:
                    await self._listener.tell(Trouble(f"the trainer failed: {error}"))
                    raise
                what = "vLLM" if isinstance(error, ServerFailed) else "the trainer"
                done = self._progress.round
                told = deaths.count(what, error, done, went_on=done > before)
                await self._listener.tell(Trouble(told))
                if deaths.in_a_row >= RESTARTS_MAX:
                    raise
            else:
                return
            with trio.move_on_after(RESTART.after(deaths.in_a_row)):
                await leaving.wait()
                return

    async def tell_progress(self, trainer: SamplingTrainer, record: Record) -> None:
        """Tell of a round, step or evaluation, after which the trainer works."""
        self._node.notes.put("trainer", None)
        if isinstance(record, RoundDone | StepDone):
            self._node.notes.put("guard", guard_note(record))
        self._memory_bytes = await trainer.memory_bytes()
        await self._listener.tell(record)

    async def _once(self, leaving: trio.Event) -> None:
        resumed = self._checkpoints.latest()
        progress = self._checkpoints.progress_after(resumed)
        async with AsyncExitStack() as stack:
            trainers: list[SamplingTrainer] = []

            async def load() -> None:
                trainers.append(await self._open(stack, resumed))

            self._is_loading = True
            try:
                await unless(leaving, load)  # nothing has been trained that is not saved
            finally:
                self._is_loading = False
            if leaving.is_set() or not trainers:
                return
            trainer = trainers[0]
            self._policy = policy = await trainer.info()
            self._progress = progress
            if policy.rate_told != self._rate_said:
                self._rate_said = policy.rate_told
                self._listener.say(policy.rate_told)
                if policy.precision_told:
                    self._listener.say(policy.precision_told)
                if policy.arguments_told:
                    self._listener.say(policy.arguments_told)
                if policy.thoughts_told:
                    await self._listener.tell(Trouble(policy.thoughts_told))
            await self.learn(leaving, trainer, policy, resumed)

    async def _open(self, stack: AsyncExitStack, resumed: Checkpoint | None) -> SamplingTrainer:
        """A trainer that ends with the stack. A checkpoint that does not load is put aside, so that
        the next try takes the one before."""
        opened = self._world.open_trainer(self._config, resumed.directory if resumed else None)
        try:
            return await stack.enter_async_context(opened)
        except ConfigError as error:
            if resumed is None or not isinstance(error, DamagedCheckpoint):
                raise
            aside = self._checkpoints.put_aside(resumed)
            raise ChildFailed(f"{error}; moved to {aside}") from None

    # --- for whoever watches ------------------------------------------------------------------

    def works(self) -> list[Work]:
        loading = [Work("loading the policy")] if self._is_loading else []
        return [*loading, *super().works()]

    def status(self, snapshot: StatusSnapshot) -> StatusSnapshot:
        """The snapshot with what is trained, and how far that is."""
        policy, progress = self._policy, self._progress
        return replace(
            snapshot,
            model=policy.name if policy else snapshot.model,
            parameters=policy.parameters if policy else 0,
            trainer_memory_bytes=self._memory_bytes,
            round=progress.round,
            held_out_passed=progress.held_out_last,
            held_out_first=progress.held_out_first,
            validation_passed=progress.validated.last,
            validation_best=progress.validated.best,
            validation_best_round=progress.validated.best_round,
            rate_share=progress.validated.rate_share,
            returns=progress.validated.returns,
        )
