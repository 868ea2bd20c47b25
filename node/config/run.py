"""What all nodes of a run must share: environments, rules, limits. Its fingerprint is part of the
run's id, so that nodes with different rules never meet."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    model_validator,
)

from node.config.described import PublisherId
from node.envs.answers import FORMAT_REWARD_MAX, AnswerFormat, AnswerRule, answer_in
from node.envs.base import Settles
from node.envs.groups import expanded
from node.envs.registry import environment, how_to_get, interaction
from node.interfaces.engine import Sampling
from node.methods.choices import Loss
from node.methods.loss_settings import SapoLoss
from swarm.errors import ConfigError
from swarm.wire.messages import (
    COMPLETIONS_MAX,
    GROUP_BYTES_MAX,
    LARGE_GROUP_BYTES_MAX,
    LEASE_MS_MAX,
    PARAMETERS_CHARS_MAX,
    TEXT_CHARS_MAX,
    TOKENS_MAX,
)

RUN_HASH_CHARS = 32  # of 4 bits: no two sets of rules with one id are found by search
_RUN_NAME = r"[a-z0-9][a-z0-9-]{0,39}"
RUN_ID = re.compile(rf"{_RUN_NAME}-[0-9a-f]{{{RUN_HASH_CHARS}}}")
GROUP_OVERHEAD_BYTES = 8_192  # of a signed record without its completions, parameters included
COMPLETION_OVERHEAD_BYTES = 128
SEGMENT_BYTES = 12
PUBLISHERS_MAX = 64
EXAMPLES_MAX = 8
COMMON_TASKS_MAX = 4096
EPOCH_MAX = 65_536  # tasks of a node; their order is worked out at once
INSTRUCTION_CHARS_MAX = 4096  # of a system prompt, and of either side of a worked example
WEIGHT_MIN, WEIGHT_MAX = 1e-9, 1e9  # of an environment: their sum and each share of it are numbers
TEMPERATURE_MIN = 0.001  # logits are divided by it
CHARS_PER_TOKEN_MAX = 8  # in the mean over a completion; English text has four to five

Count = Annotated[int, Field(ge=1)]


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text, 1 and 1.0 among them."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def _plain(value: Any) -> Any:
    """The same with each whole number as an integer: a float has many spellings of it."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _parameters_text(value: Any) -> Any:
    """Canonical JSON from a table, or from JSON text as a dumped run holds it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("must be a table") from None
    if not isinstance(value, Mapping):
        raise ValueError("must be a table")  # noqa: TRY004 - what pydantic asks of validators
    try:
        return canonical_json(value)
    except (TypeError, ValueError, RecursionError):
        raise ValueError("may hold only numbers, texts, booleans, lists and tables") from None


def _run_name(text: str) -> str:
    if not re.fullmatch(_RUN_NAME, text):
        raise ValueError("must be up to 40 lower-case letters, digits and hyphens")
    return text


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


_Instruction = Annotated[str, Field(max_length=INSTRUCTION_CHARS_MAX)]
_FormatReward = Annotated[float, Field(ge=0, le=FORMAT_REWARD_MAX)]


class Example(Frozen):
    """A question, and a completion that answers it in the run's format."""

    question: Annotated[_Instruction, Field(min_length=1)]
    """What is asked."""
    completion: Annotated[_Instruction, Field(min_length=1)]
    """What answers it."""


_Examples = Annotated[tuple[Example, ...], Field(max_length=EXAMPLES_MAX)]


class AnswerRules(Frozen):
    """What of a completion is its answer (`node.envs.answers`), and what a policy is told
    about that."""

    format: AnswerFormat = "whole"
    """Where the answer stands: it is the `whole` completion, the `last_line`, in `tags`, `boxed`,
    the `last_number`, or the last block of `code`."""
    format_reward: _FormatReward = 0.0
    """What a wrong answer in the right format is worth. It needs `reward = "exact"`."""
    system: _Instruction = ""
    """What the policy is told before each question."""
    examples: _Examples = ()
    """Questions with completions that answer them, which the policy is shown before
    each question."""


class EnvironmentAnswers(Frozen):
    """What of these rules is another for one environment; None: the run's."""

    format: AnswerFormat | None = None
    """Where the answer stands."""
    format_reward: _FormatReward | None = None
    """What a wrong answer in the right format is worth."""
    system: _Instruction | None = None
    """What the policy is told before each question."""
    examples: _Examples | None = None
    """Questions with completions that answer them."""

    def over(self, rules: AnswerRules) -> AnswerRules:
        """The rules of the run with these in their places."""
        own = {name: value for name, value in self if value is not None}
        return rules.model_copy(update=own)


class EnvironmentSpec(Frozen):
    """One environment of a run. `version` is filled in from what is installed; a run file may pin
    it, and then another installed version is an error instead of another run."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    """The environment's name, built in or plugged in, or that of a group."""
    weight: Annotated[float, Field(ge=WEIGHT_MIN, le=WEIGHT_MAX)] = 1.0
    """Its share of the tasks, relative to the other environments' weights."""
    parameters: Annotated[
        str, Field(max_length=PARAMETERS_CHARS_MAX), BeforeValidator(_parameters_text)
    ] = "{}"
    """A table of the environment's own parameters; of a group, such tables by member."""
    version: Annotated[str, Field(max_length=64)] = ""
    """The version that must be installed. Left out, the installed one counts, and another
    version makes another run."""
    answer: EnvironmentAnswers | None = None
    """What of the table `[answer]` is another for this environment's tasks."""

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, value: Any, info: ValidationInfo) -> Any:
        """`info.context`: the folder of a run file of the user's."""
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            return value
        source = environment(value["name"])
        if isinstance(source, Settles):
            table = json.loads(_parameters_text(value.get("parameters", {})))
            value = {**value, "parameters": source.settled(table, info.context)}
        installed = source.version
        wanted = value.get("version") or installed
        if wanted != installed:
            raise ConfigError(
                f"environment {value['name']}: this run needs version {wanted}, installed is "
                f"{installed}; {how_to_get(value['name'], wanted)}"
            )
        return {**value, "version": installed}


def _without_groups(value: Any) -> Any:
    """Entries with the members of a group in its place."""
    if not isinstance(value, list | tuple):
        return value
    return [each for entry in value for each in expanded(entry)]


class SamplingRules(Frozen):
    """How every node of the run samples."""

    temperature: Annotated[float, Field(ge=TEMPERATURE_MIN, le=10)] = 1.0
    """The temperature that completions are sampled at."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that together have this probability."""
    max_new_tokens: Annotated[int, Field(ge=1, le=TOKENS_MAX)] = 64
    """How many tokens a completion has at most."""


class RunLimits(Frozen):
    """What a node of the run accepts from another."""

    group_size_max: Annotated[int, Field(ge=1, le=COMPLETIONS_MAX)] = COMPLETIONS_MAX
    """How many completions a group may have."""
    record_life_s: Annotated[int, Field(ge=1, le=604_800)] = 3600
    """The seconds from a group's creation to its expiry."""
    clock_skew_s: Annotated[int, Field(ge=0, le=3600)] = 120
    """By how many seconds a record may be dated ahead of the receiver's clock."""
    prompt_chars_max: Annotated[int, Field(ge=1, le=TEXT_CHARS_MAX)] = 8192
    """How many characters a prompt may have."""
    text_chars_max: Annotated[int, Field(ge=1, le=TEXT_CHARS_MAX)] = 8192
    """How many characters a completion may have."""


GREEDY_TEMPERATURE: Final = 0.01  # engines sample, and below it they all take the likeliest token


class HeldOutRules(Frozen):
    """The evaluation that all nodes of the run share."""

    tasks: Annotated[int, Field(ge=1, le=10_000)] = 200
    """How many held-out tasks an evaluation has. No node trains on them."""
    greedy: bool = False
    """Judge the likeliest completion of each task instead of a sampled one."""


class CommonRules(Frozen):
    """Tasks that all nodes of the run have, beside those that each has for itself: on them nodes
    meet, whose groups can then be compared, and who fails at one may see how others solved it."""

    tasks: Annotated[int, Field(ge=1, le=COMMON_TASKS_MAX)] = 256
    """How many tasks the run has in common. A node does all of them before it does one again."""
    share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Their share of each node's tasks."""

    @property
    def epoch(self) -> int:
        """Of so many tasks in a row of a node each common one is done once; share > 0."""
        return max(self.tasks, round(self.tasks / self.share))

    @model_validator(mode="after")
    def _returns_in_time(self) -> Self:
        if self.share and self.tasks / self.share > EPOCH_MAX:
            raise ConfigError(
                f"common.tasks = {self.tasks}: with common.share = {self.share:g} a node would "
                f"meet each once in {self.tasks / self.share:.0f} tasks; take fewer, or a larger "
                f"share, for at most {EPOCH_MAX}"
            )
        return self


class LearnerRules(Frozen):
    """A central learner, and what it and its workers must agree on."""

    peer: PublisherId
    """The learner's peer id. Its workers generate with the weights that it publishes."""
    model: Annotated[str, Field(min_length=1)] = "tiny"
    """The model that learner and workers start from."""
    staleness_max: Annotated[int, Field(ge=0, le=1024)] = 4
    """S: how many steps old a group may be when the learner trains on it."""
    publish_every_steps: Annotated[int, Field(ge=1, le=1024)] | None = None
    """κ: how many steps there are from one published version to the next. None: S - 1, or 1 if
    that is 0."""
    groups_per_step: Annotated[int, Field(ge=1, le=4096)] = 16
    """R: how many groups one step trains on."""
    group_size: Annotated[int, Field(ge=2, le=COMPLETIONS_MAX)] = 8
    """G: how many completions a group has."""
    lease_life_s: Annotated[int, Field(ge=1, le=LEASE_MS_MAX // 1000)] = 300
    """The seconds that a worker has for a lease."""
    pool_groups_per_step: Annotated[int, Field(ge=0, le=1024)] = 0
    """J: how many groups the learner also draws, in each step, from what nodes share."""
    rescored_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The share of groups of workers in good standing whose log-probs the learner computes
    again."""

    @property
    def publish_every(self) -> int:
        """How many steps there are from one published version to the next."""
        return self.publish_every_steps or max(1, self.staleness_max - 1)

    @model_validator(mode="after")
    def _published_in_time(self) -> Self:
        if self.publish_every > max(1, self.staleness_max):
            raise ConfigError(
                f"learner.publish_every_steps = {self.publish_every}: with staleness_max = "
                f"{self.staleness_max} no group would be fresh enough; take at most "
                f"{max(1, self.staleness_max)}"
            )
        return self


class TrainingRules(Frozen):
    """The training of nodes that do not set their own."""

    loss: Annotated[Loss | None, PlainSerializer(lambda loss: loss and str(loss))] = None
    """The loss, and what it is set to, as in `tis, behaviour_weight_max=3`. None: `dapo` for a
    learner, `sapo` for every other node. `swarm-node methods` lists them."""


class RunConfig(Frozen):
    """What all nodes of a run share; any difference makes another run id."""

    name: Annotated[str, AfterValidator(_run_name)]
    """The run's name: up to 40 lower-case letters, digits and hyphens."""
    environments: Annotated[
        tuple[EnvironmentSpec, ...],
        Field(min_length=1, max_length=128),
        BeforeValidator(_without_groups),
    ]
    """The environments that tasks come from."""
    sampling: SamplingRules = SamplingRules()
    """How every node of the run samples."""
    limits: RunLimits = RunLimits()
    """What a node of the run accepts from another."""
    held_out: HeldOutRules = HeldOutRules()
    """The evaluation that all nodes share."""
    training: TrainingRules = TrainingRules()
    """The loss and its parameters."""
    models: tuple[str, ...] = ()
    """The models that nodes may start from. With none named, any."""
    reward: Literal["exact", "partial"] = "exact"
    """`exact`: a full score is worth 1, anything else 0. `partial`: the environment's own score."""
    publishers: Annotated[
        tuple[PublisherId, ...],
        Field(max_length=PUBLISHERS_MAX),
        AfterValidator(lambda ids: tuple(sorted(set(ids)))),
    ] = ()
    """The peer ids of those who may publish weights. With none named, only the learner may."""
    learner: LearnerRules | None = None
    """The central learner, if the run has one."""
    answer: AnswerRules = AnswerRules()
    """What of a completion is its answer."""
    common: CommonRules = CommonRules()
    """The tasks that all nodes have."""

    @property
    def has_turns(self) -> bool:
        """Whether tasks of the run may have several turns."""
        return any(interaction(spec.name) is not None for spec in self.environments)

    @property
    def group_bytes_max(self) -> int:
        """How large a signed group of the run may be: an ordinary one at least, and more where the
        tokens that it can have need that. Tokens take 8 bytes, and of text as much at most."""
        limits, tokens = self.limits, 8 * self.sampling.max_new_tokens
        each = COMPLETION_OVERHEAD_BYTES + tokens + min(tokens, 4 * limits.text_chars_max)
        wanted = GROUP_OVERHEAD_BYTES + limits.group_size_max * each
        return min(max(wanted, GROUP_BYTES_MAX), LARGE_GROUP_BYTES_MAX)

    @model_validator(mode="after")
    def _turns_fit(self) -> Self:
        for spec in self.environments:
            rules = self._answers_of(spec)
            if interaction(spec.name) is not None and rules.format != "whole":
                raise ConfigError(
                    f"environment {spec.name}: its tasks say themselves what ends a transcript; "
                    "take answer.format = whole for it"
                )
        return self

    @model_validator(mode="after")
    def _answers_fit_together(self) -> Self:
        """One rule for each task, examples that obey it, and fractions from one source alone."""
        known: dict[tuple[str, str], AnswerRules] = {}
        for spec in self.environments:
            rules = self._answers_of(spec)
            if known.setdefault((spec.name, spec.parameters), rules) != rules:
                raise ConfigError(
                    f"environment {spec.name}: listed twice with unlike answers; keep one of them"
                )
            for example in rules.examples:
                if answer_in(rules.format, example.completion) is None:
                    raise ConfigError(
                        f"environment {spec.name}: the example {example.completion[:40]!r} has no "
                        f"answer of the format {rules.format}; write one that has"
                    )
            if rules.format_reward and self.reward != "exact":
                raise ConfigError(
                    f"answer.format_reward = {rules.format_reward}: only with reward = exact; "
                    "remove it"
                )
        return self

    def _answers_of(self, spec: EnvironmentSpec) -> AnswerRules:
        return self.answer if spec.answer is None else spec.answer.over(self.answer)

    @cached_property
    def _rule_by_environment(self) -> Mapping[tuple[str, str], AnswerRule]:
        found = {}
        for spec in self.environments:
            rules = self._answers_of(spec)
            examples = tuple((each.question, each.completion) for each in rules.examples)
            found[spec.name, spec.parameters] = AnswerRule(
                rules.format, rules.format_reward, rules.system, examples
            )
        return found

    def answer_rule(self, environment: str, parameters: str) -> AnswerRule:
        """What the run says about completions of that environment's tasks. Of one that is not the
        run's, whose tasks are refused elsewhere, what it says of all."""
        rule = self._rule_by_environment.get((environment, parameters))
        return rule or AnswerRule(self.answer.format, self.answer.format_reward)

    @property
    def weights_publishers(self) -> tuple[str, ...]:
        """Whose weights are believed."""
        learner = (self.learner.peer,) if self.learner else ()
        return tuple(sorted({*self.publishers, *learner}))

    @cached_property
    def run_id(self) -> str:
        """`<name>-<fingerprint of everything in here>`, 128 bits of SHA-256."""
        rules = self.model_dump(mode="json")
        rules["training"]["loss"] = str(self.training.loss or SapoLoss())  # the default of nodes
        for spec, told in zip(self.environments, rules["environments"], strict=True):
            told["answer"] = self._answers_of(spec).model_dump(mode="json")
        digest = hashlib.sha256(canonical_json(rules).encode()).hexdigest()
        return f"{self.name}-{digest[:RUN_HASH_CHARS]}"

    def as_json(self) -> bytes:
        """These rules as one line of canonical JSON, without what has its default: what
        a peer hands on, and `RunConfig.model_validate` takes when it was parsed."""
        return canonical_json(self.model_dump(mode="json", exclude_defaults=True)).encode()

    @property
    def completion_chars_max(self) -> int:
        """How long the text of a completion may be that is trained on: what so many tokens of any
        tokenizer may come to. In a node's own tokens the limit would leave out the long answers of
        others where these are bytes."""
        return min(self.limits.text_chars_max, CHARS_PER_TOKEN_MAX * self.sampling.max_new_tokens)

    @property
    def engine_sampling(self) -> Sampling:
        """The sampling rules as an engine takes them."""
        rules = self.sampling
        return Sampling(rules.temperature, rules.top_p, rules.max_new_tokens)

    @property
    def held_out_sampling(self) -> Sampling:
        """How completions of held-out tasks are sampled."""
        rules = self.engine_sampling
        return replace(rules, temperature=GREEDY_TEMPERATURE) if self.held_out.greedy else rules
