"""A node for programs and notebooks: the round's parts as plain calls, in the caller's order.

    from node.client import Client

    with Client(run="sums", model="smollm2") as client:
        groups = client.sample(client.tasks(4))
        client.forward_backward(groups, loss="grpo")
        client.optim_step()

`sample`, `forward_backward`, `optim_step`, `save_state` and `load_state` are the verbs of Tinker's
training client. The same settings, tasks and calls give the weights of `swarm-node join`, bit for
bit, under the conditions of `node.run.round`.
"""

import atexit
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, Final, Self, TypeVar, cast

import trio

from node.config import load_config
from node.hosting.membership import Membership, load_identity
from node.hosting.models import resolve_model
from node.hosting.run_data import have_data
from node.interfaces.engine import Request
from node.interfaces.prompts import Prompt, PromptMessage
from node.interfaces.trainer import TrainReport
from node.methods.choices import chosen_loss
from node.methods.groups import Advantages
from node.observe.event_log import Record
from node.observe.records import HeldOut, SampledGroup, Trouble
from node.run.groups import rollout_group
from node.run.machine import RealWorld
from node.run.node import open_node
from node.run.parts import LivePolicy, NodeParts
from node.run.role import checkpoints_of
from node.run.round import Stopwatch, training_groups
from node.run.sapo import Sapo
from node.stages.stage import BatchGroup, Wanted
from node.stages.table import stages_of
from node.system.machine import counted
from node.train.process import TrainerProcess
from node.verify.held_out import Assignment
from swarm.errors import ChildFailed, ConfigError, first_of
from swarm.rollouts import Completion, FinishReason, GroupId, ScoredGroup, Task
from swarm.storage import data_directory
from swarm.weights.weights_service import VersionOutcome

Question = Assignment | str | Sequence[Mapping[str, str]]  # a task of the run, or a prompt
T = TypeVar("T")

CROSS_ENTROPY: Final = "cross_entropy"
RATE_MAX: Final = 1.0
KEPT: Final = 1000  # states: the program saves what it wants to keep
_OWN: Final = Task("", "", "{}", 0, 0)  # of a prompt that is no task of the run


@dataclass(eq=False, slots=True)
class ClientGroup:
    """A prompt with its completions. Rewards and advantages may be changed before training."""

    made: BatchGroup  # as it was sampled or drawn
    rewards: list[float]  # by the run's verifier; 0.0 for a prompt of the program's own
    advantages: list[float | None] | None = None  # None: from the rewards, as `--advantage` says

    @property
    def prompt(self) -> str:
        """The last question."""
        return Prompt.read(self.made.scored.prompt).question

    @property
    def completions(self) -> tuple[Completion, ...]:
        """Text, token ids and log-probs of each."""
        return self.made.scored.group.completions

    @property
    def texts(self) -> list[str]:
        return [each.text for each in self.completions]

    @property
    def maker(self) -> str:
        """The peer that sampled it."""
        return str(self.made.scored.group.producer)

    @property
    def is_given(self) -> bool:
        """True if its answers were given, and not sampled."""
        return not self.made.drawn and not self.made.scored.group.tokenizer

    def rewarded(self) -> BatchGroup:
        """The group with its present rewards. `ConfigError`: not one number for each completion."""
        count = len(self.completions)
        for name, column in (("rewards", self.rewards), ("advantages", self.advantages)):
            if column is not None and len(column) != count:
                raise ConfigError(f"{len(column)} {name} for {count} completions")
            for each in column or ():
                if each is not None and not (isinstance(each, int | float) and isfinite(each)):
                    raise ConfigError(f"{name}: {each!r} is no finite number")
        return replace(self.made, scored=replace(self.made.scored, rewards=tuple(self.rewards)))


class _Told:
    """`Listener` for a program: lines go to one function."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say

    async def tell(self, record: Record) -> None:
        if isinstance(record, Trouble):
            self.say(record.what)

    async def show(self, groups: Sequence[SampledGroup]) -> None:
        pass

    def note_outcome(self, outcome: VersionOutcome) -> None:
        pass


# Long: a line for each call of the user, and one for its work in the node's thread.
class Client:
    """One node's policy. All calls block; they come from one thread at a time."""

    def __init__(
        self,
        run: str | Path | None = None,
        *,
        join: bool = False,
        say: Callable[[str], None] = print,
        **settings: Any,
    ) -> None:
        """Load the policy, from the last state in `data_dir` if there is one.

        `run`: as `--run`. `join`: take part in the swarm, as `swarm-node join` does; without it
        nothing listens. `say`: gets lines for people. `settings`: those of `swarm-node join`, by
        their names in docs/settings.md; methods of a round are not among them.

        Raises:
            ConfigError: one line that names the setting and the fix.
            ChildFailed: the trainer does not start.
        """
        given = None if run is None else Path(run)
        ours: dict[str, Any] = {"checkpoints_kept": KEPT} | ({} if join else {"share": "none"})
        self._config = load_config(ours | settings, os.environ, given)
        if methods := stages_of(self._config).methods:
            named = ", ".join(each.set_to.kind for each in methods)
            raise ConfigError(f"{named}: a method of whole rounds; here the program makes them")
        self._say, self._join = say, join
        self._token: trio.lowlevel.TrioToken | None = None
        self._failed: BaseException | None = None
        self._closing: trio.Event | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._live, name="swarm-node client", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failed is not None:
            raise self._failed
        atexit.register(self.close)

    # --- the verbs ----------------------------------------------------------------------------

    def tasks(self, count: int) -> list[Assignment]:
        """The next tasks of the node's stream; none of them is held out."""
        if count < 1:
            raise ConfigError(f"tasks: a count of {count}; take at least 1")
        return self._call(self._tasks, count)

    def sample(
        self,
        questions: Question | Sequence[Question],
        num_samples: int | None = None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> list[ClientGroup]:
        """Completions of each task or prompt by the present policy, tasks with their rewards.

        A prompt is a text, or chat messages with `role` and `content`. `num_samples`: of each; None
        for the setting `group_size`. The other arguments: None for the run's. Tasks and prompts
        that do not fit the context are left out.
        """
        asked = list(_each(questions))
        each = self._config.group_size if num_samples is None else num_samples
        wanted = [
            Wanted(its, Request(its.prompt, each, max_tokens, temperature, seed=seed))
            for its in map(_assignment, asked)
        ]
        if len({each.assigned.task is _OWN for each in wanted}) > 1:
            raise ConfigError("sample: tasks and prompts of your own in one call; take two calls")
        return self._call(self._sample, wanted)

    def example(self, question: str | Sequence[Mapping[str, str]], *answers: str) -> ClientGroup:
        """A prompt with given answers, for `loss="cross_entropy"`."""
        if not answers:
            raise ConfigError("example: no answer; give at least one")
        made = tuple(Completion(each, (), (), FinishReason.STOP, 0) for each in answers)
        return self._call(self._example, _assignment(question), made)

    def forward_backward(self, groups: Sequence[ClientGroup], loss: Any = None) -> float:
        """Add the gradient of these groups' loss to that of the calls since the last `optim_step`,
        and return the loss.

        `loss`: a name of docs/methods.md or a table with `kind`, from here on; None: as before, at
        first the run's. `"cross_entropy"` learns all completions alike, for this call.
        """
        if loss not in (None, CROSS_ENTROPY):
            try:
                chosen_loss(loss)
            except ValueError as error:
                raise ConfigError(f"loss {loss!r}: {error}, {CROSS_ENTROPY}") from None
        if loss != CROSS_ENTROPY and any(each.is_given for each in groups):
            raise ConfigError(f"given answers are learned by loss={CROSS_ENTROPY!r} alone")
        return self._call(self._forward_backward, list(groups), loss)

    def optim_step(self, learning_rate: float | None = None) -> TrainReport:
        """Update the policy by the gradient so far. None: at the learning rate of the settings,
        with its warm-up. A step that is not finite or moves too far is taken back; without a
        gradient there is none. `trained_tokens` is 0 then."""
        if learning_rate is not None and not 0.0 < learning_rate < RATE_MAX:
            raise ConfigError(f"learning_rate {learning_rate}: take above 0 and below {RATE_MAX}")
        return self._call(self._optim_step, learning_rate)

    def save_state(self) -> Path:
        """Write weights, optimizer and position as a checkpoint into `data_dir`, for `load_state`,
        `swarm-node eval`, `export` and `join`. Returns its directory."""
        return self._call(self._save_state)

    def load_state(self, directory: Path | str | None = None) -> None:
        """Take weights and optimizer from a state; None: the last of `data_dir`. The count of steps
        and the stream of tasks go on, so that no task or random number comes twice."""
        self._call(self._load_state, None if directory is None else Path(directory))

    def evaluate(self) -> HeldOut:
        """The pass rate on the run's held-out tasks, as `swarm-node join` measures it."""
        return self._call(self._evaluate)

    def share(self, groups: Sequence[ClientGroup]) -> int:
        """Offer groups of the run's tasks to the swarm; the number that was offered. Others score
        them by their own verifier."""
        self._check_joined("share")
        if any(each.made.private or each.made.drawn for each in groups):
            raise ConfigError(
                "share: others cannot check answers to prompts of your own, and have what was "
                "drawn; share groups of tasks() alone"
            )
        return self._call(self._share, list(groups))

    def draw(self, count: int) -> list[ClientGroup]:
        """At most so many groups of other nodes that have arrived, with rewards by this node's own
        verifier. Does not wait."""
        self._check_joined("draw")
        return self._call(self._draw, count)

    # --- the node -----------------------------------------------------------------------------

    def close(self) -> None:
        """End the node. What was not saved is lost. May be called again."""
        if self._token is not None and self._closing is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._closing.set)
        self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_joined(self, verb: str) -> None:
        if not self._join:
            raise ConfigError(f"{verb}: this node is in no swarm; give Client join=True")

    def _call(self, verb: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        async def alone() -> T:
            async with self._lock:  # what was interrupted may still be at work
                return await verb(*arguments)

        try:
            return trio.from_thread.run(alone, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            why = f": {self._failed}" if self._failed else "; open another"
            raise ChildFailed(f"this client has ended{why}") from self._failed

    def _live(self) -> None:
        try:
            with data_directory(self._config.data_dir, say=self._say):
                trio.run(self._serve)
        except BaseExceptionGroup as group:
            self._failed = first_of(group)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self._failed = error
        if self._failed is not None and self._ready.is_set():  # no call waits for it
            self._say(f"! this client has ended: {self._failed}")
        self._ready.set()

    async def _serve(self) -> None:
        config, say = self._config, self._say
        identity, membership = load_identity(config), Membership.of(config)
        have_data(config, identity, membership, lambda _: config.yes, say)
        self._checkpoints = checkpoints_of(config)
        resumed = self._checkpoints.latest()
        model = resolve_model(config, say)
        with counted() as nodes_here:
            world = RealWorld(model, nodes_here, say)
            async with (
                self._parts_of(world, identity, membership) as parts,
                world.open_trainer(config, resumed.directory if resumed else None) as trainer,
                world.open_engine(config, trainer, _Told(say)) as (engine, hand_over),
            ):
                if not isinstance(trainer, TrainerProcess):
                    raise ConfigError(f"engine {config.engine}: it is served, and not trained here")
                self._trainer, self._hand_over = trainer, hand_over
                policy = await LivePolicy.of(trainer, engine, hand_over)
                progress = self._checkpoints.progress_after(resumed)
                self._sapo = Sapo(parts, policy, progress, self._checkpoints.reserve)
                self._make = partial(rollout_group, parts, policy)
                self._closing, self._lock = trio.Event(), trio.Lock()
                self._token = trio.lowlevel.current_trio_token()
                self._begin()
                self._ready.set()
                await self._closing.wait()

    @asynccontextmanager
    async def _parts_of(
        self, world: RealWorld, identity: Any, membership: Membership
    ) -> AsyncIterator[NodeParts]:
        config = self._config
        if self._join:
            draws = max(1, config.external_groups)
            async with (
                open_node(world, config, identity, membership, draws) as node,
                trio.open_nursery() as nursery,
            ):
                await nursery.start(node.run_network)
                self._say(f"this node is {identity.peer_id}, run {config.run.run_id}")
                for address in node.peer.transport.addresses():
                    self._say(f"  swarm-node join --peer {address}")
                yield node.parts
                nursery.cancel_scope.cancel()
            return
        async with world.open_verifier(config) as verifier:
            await verifier.problems([])
            yield NodeParts.without_network(config, identity.peer_id, verifier, world.now_s)

    # --- in the node's thread -----------------------------------------------------------------

    def _begin(self) -> None:
        """Begin a round, with its random numbers."""
        self._at = self._sapo.view(self._sapo.progress.round + 1)
        self._sampled = self._shared = 0  # calls of `sample`; groups
        self._sapo.begin()

    async def _tasks(self, count: int) -> list[Assignment]:
        choose = partial(self._sapo.stages.choose, rng=self._at.rng("tasks"), at=self._at)
        return [each.assigned for each in await self._sapo.assign(count, 1, choose)]

    async def _sample(self, wanted: Sequence[Wanted]) -> list[ClientGroup]:
        attempt, self._sampled = self._sampled, self._sampled + 1
        made = await self._sapo.generate(wanted, attempt, self._at)
        if any(its.assigned.task is _OWN for its, _ in made):
            return [_group(self._unscored(its.assigned, got.completions)) for its, got in made]
        return [_group(each) for each in await self._sapo.scored(made, Stopwatch())]

    def _unscored(self, its: Assignment, completions: tuple[Completion, ...]) -> BatchGroup:
        group = self._make(self._sapo.progress.round + 1, its, completions)
        rewards = (0.0,) * len(completions)
        return BatchGroup(
            ScoredGroup(GroupId(b""), group, its.prompt, rewards, own=True), private=True
        )

    async def _example(self, its: Assignment, made: tuple[Completion, ...]) -> ClientGroup:
        group = self._unscored(its, made)
        text = replace(group.scored.group, tokenizer="")  # it has no tokens yet
        return _group(replace(group, scored=replace(group.scored, group=text)))

    async def _forward_backward(self, groups: Sequence[ClientGroup], loss: Any) -> float:
        batch = [each.rewarded() for each in groups]
        worth: Advantages
        if loss == CROSS_ENTROPY:
            loss = None
            counts = [len(each.completions) for each in groups]
            worth = [(1.0,) * count for count in counts]
            batch = [
                replace(each, guided=count, guided_weight=1.0)
                for each, count in zip(batch, counts, strict=True)
            ]
        else:
            by_rewards = await self._sapo.stages.advantage(batch, self._at)
            worth = [
                its if group.advantages is None else tuple(group.advantages)
                for its, group in zip(by_rewards, groups, strict=True)
            ]
        return await self._trainer.forward_backward(training_groups(batch, worth, self._at), loss)

    async def _optim_step(self, learning_rate: float | None) -> TrainReport:
        report = await self._trainer.optim_step(learning_rate)
        await self._hand_on(report.policy_version)
        self._sapo.advance(report, self._shared)
        self._begin()
        return report

    async def _hand_on(self, policy_version: int) -> None:
        if self._hand_over is not None:
            await self._hand_over.after_training(policy_version)

    async def _save_state(self) -> Path:
        return await self._checkpoints.save(self._sapo.progress, self._trainer)

    async def _load_state(self, directory: Path | None) -> None:
        kept = self._checkpoints
        saved = kept.latest() if directory is None else kept.read(directory)
        if saved is None:
            where = directory or self._config.data_dir
            raise ConfigError(f"load_state: {where} holds no state of this run and model")
        await self._trainer.resume(saved.directory)
        await self._hand_on((await self._trainer.info()).policy_version)

    async def _evaluate(self) -> HeldOut:
        return await self._sapo.evaluate()

    async def _share(self, groups: Sequence[ClientGroup]) -> int:
        shared = await self._sapo.share([each.made for each in groups], self._at)
        self._shared += shared
        return shared

    async def _draw(self, count: int) -> list[ClientGroup]:
        found = await self._sapo.take(count, self._at)
        return [_group(BatchGroup(each, drawn=True)) for each in found]


def _each(questions: Question | Sequence[Question]) -> Sequence[Question]:
    is_one = isinstance(questions, str | Assignment) or isinstance(
        next(iter(questions), None), Mapping
    )
    return [cast("Question", questions)] if is_one else cast("Sequence[Question]", questions)


def _assignment(question: Question) -> Assignment:
    if isinstance(question, Assignment):
        return question
    if isinstance(question, str):
        return Assignment(_OWN, Prompt.of(question).text)
    messages = tuple(PromptMessage(each["role"], each["content"]) for each in question)
    if not messages or messages[-1].role != "user":
        raise ConfigError("a prompt's messages end with one of the role user")
    return Assignment(_OWN, Prompt(messages).text)


def _group(made: BatchGroup) -> ClientGroup:
    return ClientGroup(made, list(made.scored.rewards))
