"""The protocol of the methods that act in a round, stage by stage.

A method overrides the stages in which it acts; all others leave things as they are. `Stages` runs
the methods of a node in the order in which they were named.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from random import Random
from typing import Any, Final, Generic, Protocol, TypeVar

from node.config import NodeConfig
from node.config.node import rules_of
from node.interfaces.engine import Engine, Outcome, Recorded, Request, Sampling
from node.interfaces.trainer import Trainer, TrainingGroup, TrainReport
from node.methods.choices import advantages
from node.methods.groups import Advantages
from node.methods.method import MethodSettings, Role
from node.methods.replay import SolvedTasks
from node.methods.samplers import draw_foreign
from node.verify.held_out import Assignment, Due
from node.verify.task_choice import TaskChoice
from node.verify.verifier import Verifier
from swarm.errors import ConfigError
from swarm.exchange.exchange_service import Exchange
from swarm.exchange.pool import Candidate
from swarm.leases.intake import Intake
from swarm.rollouts import GroupId, ScoredGroup
from swarm.texts import first_line

RECORD_CHARS_MAX: Final = 2**22  # of a method's record in a checkpoint, as JSON
MORE_MAX: Final = 16  # times that a round may ask for further completions
ROLLOUTS_TIMES_MAX: Final = 16  # completions of a round, in multiples of I G

S = TypeVar("S", bound=MethodSettings)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Completions wanted of one task."""

    assigned: Assignment
    request: Request
    context: str = ""  # the name of what the prompt has beside the task's; empty: nothing
    weight: float = 1.0  # of each completion's loss
    private: bool = False  # the completions are not shared: they are not plain samples of the task


@dataclass(frozen=True, slots=True)
class BatchGroup:
    """A group on its way to the update. Columns have an entry for each completion, or none at all
    where they would say nothing."""

    scored: ScoredGroup
    prompts: tuple[str, ...] = ()  # where each was generated, if that is not the task's prompt
    recorded: tuple[Recorded, ...] = ()
    weights: tuple[float, ...] = ()  # of each one's loss
    masks: tuple[tuple[bool, ...], ...] = ()  # tokens that are trained on; empty: all
    token_advantages: tuple[tuple[float, ...], ...] = ()  # in place of the completion's
    teacher_logprobs: tuple[tuple[float, ...], ...] = ()
    guided: int = 0  # so many of the last completions are guidance, by their texts
    shaping: float = 0.0  # a token of guidance counts by p / (p + shaping)
    guided_weight: float = 0.0  # above 0: guidance is learned by plain supervision, times this
    private: bool = False  # not shared
    drawn: bool = False  # of another node, from the pool

    @property
    def is_bare(self) -> bool:
        """True if each completion was generated from the task's own prompt."""
        return not self.prompts

    @property
    def assigned(self) -> Assignment:
        group = self.scored.group
        return Assignment(group.task, self.scored.prompt, group.attempt)

    def prompt_of(self, place: int) -> str:
        return self.prompts[place] if self.prompts else self.scored.prompt

    def column(self, name: str, default: Any) -> list[Any]:
        """A column with an entry for each completion."""
        found = getattr(self, name)
        return list(found) or [default] * len(self.scored.rewards)

    def only(self, places: Sequence[int]) -> "BatchGroup":
        """The group with these completions alone. Guidance stays last."""
        group = self.scored.group
        count = len(group.completions)
        scored = replace(
            self.scored,
            group=replace(group, completions=tuple(group.completions[at] for at in places)),
            rewards=tuple(self.scored.rewards[at] for at in places),
            contexts=tuple(self.scored.contexts[at] for at in places if self.scored.contexts),
        )
        columns: dict[str, Any] = {
            name: tuple(getattr(self, name)[at] for at in places if getattr(self, name))
            for name in COLUMNS
        }
        guided = sum(at >= count - self.guided for at in places)
        return replace(self, scored=scored, guided=guided, **columns)

    def joined(self, other: "BatchGroup") -> "BatchGroup":
        """The completions of both, for one task."""
        mine, its = self.scored, other.scored
        sides = ((self, len(mine.rewards)), (other, len(its.rewards)))
        contexts = tuple(c for each, n in sides for c in each.scored.contexts or ("",) * n)
        completions = (*mine.group.completions, *its.group.completions)
        scored = replace(
            mine,
            group=replace(mine.group, completions=completions),
            rewards=(*mine.rewards, *its.rewards),
            decided=mine.decided and its.decided,
            contexts=contexts if any(contexts) else (),
        )
        columns: dict[str, Any] = {}
        for name, default in COLUMNS.items():
            if name == "prompts" and (self.prompts or other.prompts):
                default = mine.prompt
            has_any = getattr(self, name) or getattr(other, name)
            both = (*self.column(name, default), *other.column(name, default))
            columns[name] = both if has_any else ()
        is_alike = mine.group.temperature == its.group.temperature
        private = self.private or other.private or not is_alike
        return replace(self, scored=scored, private=private, guided=other.guided, **columns)


COLUMNS: Final[Mapping[str, Any]] = {
    "prompts": "",
    "recorded": Recorded(),
    "weights": 1.0,
    "masks": (),
    "token_advantages": (),
    "teacher_logprobs": (),
}  # of `BatchGroup`, with the entry that says nothing


class Seed(Protocol):
    """The seed of a purpose, by its name, in this round."""

    def __call__(self, purpose: str, *numbers: int) -> int: ...


@dataclass(frozen=True, slots=True)
class View:
    """The node and the round, as methods see them."""

    number: int  # of the round or step, from 1
    role: Role
    config: NodeConfig
    seed: Seed
    tokenizer: str  # fingerprint of the policy's
    engine: Engine
    trainer: Trainer
    choice: TaskChoice
    solved: SolvedTasks
    exchange: Exchange | None = None
    verifier: Verifier | None = None

    @property
    def step(self) -> int:
        """The number of updates before this one."""
        return self.number - 1

    @property
    def sampling(self) -> Sampling:
        return self.config.run.engine_sampling

    @property
    def group_size(self) -> int:
        """G: completions of a task."""
        if self.role == "learner":
            return rules_of(self.config).group_size
        return self.config.group_size

    def rng(self, purpose: str) -> Random:
        return Random(self.seed(purpose))


@dataclass(frozen=True, slots=True)
class More:
    """Further completions of a round's tasks, and further tasks."""

    wanted: Sequence[Wanted] = ()
    tasks: int = 0


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """The result of a round."""

    own: Sequence[BatchGroup]  # as they were scored
    foreign: Sequence[ScoredGroup]
    batch: Sequence[BatchGroup]  # as it was trained on
    report: TrainReport
    shared: int  # own groups that were offered to others
    paused_s: float | None = None  # for which the engine could not sample; None: it never stopped
    trained: Sequence[TrainingGroup] = ()  # the batch as the trainer got it


class Sample(Protocol):
    """The completions of requests, under weights with noise of this standard deviation."""

    def __call__(
        self, wanted: Sequence[Wanted], noise: float = 0.0
    ) -> Awaitable[list[Outcome]]: ...


class Stage(Generic[S]):
    """A method at work on a node. It holds its settings, what it learned, and how often it acted.

    No stage may wait for peers, and randomness comes from `View.rng` alone.
    """

    ahead: int = 1  # tasks that `choose` looks at for each one taken

    def __init__(self, set_to: S) -> None:
        self.set_to = set_to
        self.acted = 0  # times in this round that it changed what would have been

    def begin(self) -> None:
        """Begin a round: forget what belonged to the one before, also if that was abandoned."""
        self.acted = 0

    # --- the stages, in a round's order -----------------------------------------------------

    def choose(self, due: Sequence[Due], count: int, rng: Random, at: View) -> Sequence[Due] | None:
        """`count` of these tasks, in their order. None: no choice."""
        return None

    def plan(self, wanted: Sequence[Wanted], at: View) -> Sequence[Wanted]:
        """Requests with other widths, limits, temperatures, prompts or beginnings."""
        return wanted

    def lease(self, width: int, limit: int, at: View) -> tuple[int, int]:
        """A learner's leases: completions of each task, and the most tokens of one."""
        return width, limit

    def feed(self, intake: Intake, at: View) -> None:
        """Set how far ahead of a learner's steps its workers may run."""

    async def generate(self, wanted: Sequence[Wanted], at: View, sample: Sample) -> list[Outcome]:
        """The completions of requests, by `sample`, once or several times."""
        return await sample(wanted)

    def more(self, made: Sequence[BatchGroup], at: View) -> More:
        """Further completions that the round needs, once these are scored. Asked again until no
        method wants more, within the round's bounds."""
        return More()

    def foreign_wanted(self, wanted: int, at: View) -> int:
        """J of this round."""
        return wanted

    async def draw(
        self, candidates: Sequence[Candidate], wanted: int, each_max: int, at: View
    ) -> list[GroupId] | None:
        """Others' groups for the batch. None: a uniform draw."""
        return None

    def reward(self, batch: Sequence[BatchGroup], at: View) -> Sequence[BatchGroup]:
        """Other rewards to train on. What is shared and counted stays as it was scored."""
        return batch

    def replay(self, batch: Sequence[BatchGroup], at: View) -> Sequence[BatchGroup]:
        """Completions of the past or of others that join own groups."""
        return batch

    def select(self, batch: Sequence[BatchGroup], at: View) -> Sequence[BatchGroup]:
        """The groups that are trained on."""
        return batch

    async def advantage(self, batch: Sequence[BatchGroup], at: View) -> Advantages | None:
        """One tuple for each group. None: by another method."""
        return None

    def weigh(
        self, batch: Sequence[BatchGroup], worth: Advantages, at: View
    ) -> tuple[Sequence[BatchGroup], Advantages]:
        """Weights and masks, or other advantages, once the advantages are known."""
        return batch, worth

    def learn(self, outcome: RoundOutcome, at: View) -> None:
        """Take in what the round came to."""

    def evaluated(self, gain: float | None, rng: Random) -> None:
        """Take in the gain of the pass rate on validation tasks since the last evaluation."""

    # --- in a checkpoint ------------------------------------------------------------------------

    def to_record(self) -> Any:
        """The method's state, for JSON, of bounded size. None: it has none."""
        return None

    def restore(self, record: Any) -> None:
        """Take back a record. KeyError, TypeError, ValueError: it is none."""


@dataclass(slots=True)
class Stages:
    """The methods of a node, each stage run by all of them in turn."""

    methods: Sequence[Stage[Any]] = ()

    def begin(self) -> None:
        for each in self.methods:
            each.begin()

    @property
    def acted(self) -> dict[str, int]:
        """Times that each method acted in this round."""
        return {each.set_to.kind: each.acted for each in self.methods if each.acted}

    @property
    def ahead(self) -> int:
        return max((each.ahead for each in self.methods), default=1)

    def choose(self, due: Sequence[Due], count: int, rng: Random, at: View) -> Sequence[Due]:
        for each in self.methods:
            if (chosen := each.choose(due, count, rng, at)) is not None:
                return chosen
        return due[:count]

    def plan(self, wanted: Sequence[Wanted], at: View) -> Sequence[Wanted]:
        for each in self.methods:
            wanted = each.plan(wanted, at)
        return wanted

    def lease(self, width: int, limit: int, at: View) -> tuple[int, int]:
        for each in self.methods:
            width, limit = each.lease(width, limit, at)
        return width, limit

    def feed(self, intake: Intake, at: View) -> None:
        for each in self.methods:
            each.feed(intake, at)

    async def generate(self, wanted: Sequence[Wanted], at: View, sample: Sample) -> list[Outcome]:
        """The first method calls the second as its `sample`, and so on."""
        for each in reversed(self.methods):
            sample = _around(each, at, sample)
        return await sample(wanted)

    def more(self, made: Sequence[BatchGroup], at: View) -> More:
        found = [each.more(made, at) for each in self.methods]
        return More([w for each in found for w in each.wanted], sum(each.tasks for each in found))

    def foreign_wanted(self, wanted: int, at: View) -> int:
        for each in self.methods:
            wanted = each.foreign_wanted(wanted, at)
        return wanted

    async def draw(self, candidates: Sequence[Candidate], wanted: int, at: View) -> list[GroupId]:
        each_max = ceil(at.config.foreign_share_max * wanted)
        for each in self.methods:
            if (drawn := await each.draw(candidates, wanted, each_max, at)) is not None:
                return drawn
        return draw_foreign(candidates, wanted, at.rng("draw"), each_max)

    def reward(self, batch: Sequence[BatchGroup], at: View) -> Sequence[BatchGroup]:
        for each in self.methods:
            batch = each.reward(batch, at)
        return batch

    def replay(self, batch: Sequence[BatchGroup], at: View) -> Sequence[BatchGroup]:
        for each in self.methods:
            batch = each.replay(batch, at)
        return batch

    def select(self, batch: Sequence[BatchGroup], at: View) -> Sequence[BatchGroup]:
        for each in self.methods:
            batch = each.select(batch, at)
        return batch

    async def advantage(self, batch: Sequence[BatchGroup], at: View) -> Advantages:
        for each in self.methods:
            if (worth := await each.advantage(batch, at)) is not None:
                return worth
        return advantages([each.scored for each in batch], at.config.advantage)

    def weigh(
        self, batch: Sequence[BatchGroup], worth: Advantages, at: View
    ) -> tuple[Sequence[BatchGroup], Advantages]:
        for each in self.methods:
            batch, worth = each.weigh(batch, worth, at)
        return batch, worth

    def learn(self, outcome: RoundOutcome, at: View) -> None:
        for each in self.methods:
            each.learn(outcome, at)

    def evaluated(self, gain: float | None, rng: Random) -> None:
        for each in self.methods:
            each.evaluated(gain, rng)

    def to_record(self) -> dict[str, Any]:
        """The methods' records by name."""
        found = {each.set_to.kind: each.to_record() for each in self.methods}
        return {name: record for name, record in found.items() if record is not None}

    def restore(self, records: Mapping[str, Any]) -> None:
        """Give each method its record. Records of methods that are not in use are dropped.

        Raises:
            ConfigError: a record is not of this version of its method.
        """
        for each in self.methods:
            kind = each.set_to.kind
            try:
                if (record := records.get(kind)) is not None:
                    each.restore(record)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"the checkpoint's record of {kind} is not of this version of it "
                    f"({first_line(error)}); a round without {kind} forgets the record"
                ) from error


def _around(method: Stage[Any], at: View, sample: Sample) -> Sample:
    async def generate(wanted: Sequence[Wanted], noise: float = 0.0) -> list[Outcome]:
        return await method.generate(wanted, at, partial(sample, noise=noise) if noise else sample)

    return generate
