"""The rules that all nodes of a run share. The run's id contains their fingerprint, so nodes with
different rules never meet."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from functools import cached_property
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    model_validator,
)

from node.config.described import METHOD, Flag, PublisherId
from node.envs.answers import FORMAT_REWARD_MAX, AnswerFormat, AnswerRule, answer_in
from node.envs.answers import REVISION as ANSWERS_REVISION
from node.envs.base import Settles
from node.envs.groups import expanded
from node.envs.registry import environment, how_to_get, interaction
from node.interfaces.engine import Sampling
from node.interfaces.prompts import DATE, THOUGHT_MARKS, TemplateRules, Thinking
from node.methods.choices import RunLoss
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
    """JSON with sorted keys and no spaces: equal values give equal text, 1 and 1.0 included."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def _plain(value: Any) -> Any:
    """The value with each whole float as an integer."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _parameters_text(value: Any) -> Any:
    """Canonical JSON from a table or JSON text."""
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


def _date(value: Any) -> str:
    """A date of TOML, or as text."""
    try:
        return date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise ValueError("must be a date, as in 2026-11-28") from None


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


_Instruction = Annotated[str, Field(max_length=INSTRUCTION_CHARS_MAX)]
_FormatReward = Annotated[float, Field(ge=0, le=FORMAT_REWARD_MAX)]


class Example(Frozen):
    """A question, and a completion that answers it in the run's format."""

    question: Annotated[_Instruction, Field(min_length=1)]
    """The question."""
    completion: Annotated[_Instruction, Field(min_length=1)]
    """A completion that answers it."""


_Examples = Annotated[tuple[Example, ...], Field(max_length=EXAMPLES_MAX)]


class AnswerRules(Frozen):
    """The answer in a completion (`node.envs.answers`), and the instructions for the policy."""

    format: AnswerFormat = "whole"
    """The place of the answer: the `whole` completion, the `last_line`, in `tags`, `boxed`, the
    `last_number`, or the last block of `code`."""
    format_reward: _FormatReward = 0.0
    """The reward of a wrong answer in the right format. It needs `reward = "exact"`."""
    system: _Instruction = ""
    """The system message before each question."""
    examples: _Examples = ()
    """Worked examples that the policy sees before each question."""


class EnvironmentAnswers(Frozen):
    """The answer rules of one environment; None: the run's."""

    format: AnswerFormat | None = None
    """The place of the answer."""
    format_reward: _FormatReward | None = None
    """The reward of a wrong answer in the right format."""
    system: _Instruction | None = None
    """The system message before each question."""
    examples: _Examples | None = None
    """Worked examples before each question."""

    def over(self, rules: AnswerRules) -> AnswerRules:
        """The run's rules with these in their places."""
        own = {name: value for name, value in self if value is not None}
        return rules.model_copy(update=own)


class EnvironmentSpec(Frozen):
    """One environment of a run. Its version is filled in, and must be the installed one."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    """The name of a built-in environment, a plug-in or a group."""
    weight: Annotated[float, Field(ge=WEIGHT_MIN, le=WEIGHT_MAX)] = 1.0
    """Its share of the tasks, relative to the other weights."""
    parameters: Annotated[
        str, Field(max_length=PARAMETERS_CHARS_MAX), BeforeValidator(_parameters_text)
    ] = "{}"
    """A table of the environment's own parameters; for a group, such tables by member."""
    version: Annotated[str, Field(max_length=64)] = ""
    """The required version. By default the installed one; another version makes another run."""
    answer: EnvironmentAnswers | None = None
    """Differences from the table `[answer]` for this environment."""

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, value: Any, info: ValidationInfo) -> Any:
        """`info.context`: the folder of the user's run file."""
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
    """Entries with each group replaced by its members."""
    if not isinstance(value, list | tuple):
        return value
    return [each for entry in value for each in expanded(entry)]


class SamplingRules(Frozen):
    """The sampling of every node of the run."""

    temperature: Annotated[float, Field(ge=TEMPERATURE_MIN, le=10)] = 1.0
    """The sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that together have this probability."""
    max_new_tokens: Annotated[int, Field(ge=1, le=TOKENS_MAX)] = 64
    """The tokens of a completion at most."""


class ChatRules(Frozen):
    """Values for chat templates, so that prompts are alike on all nodes."""

    arguments: Annotated[
        str, Field(max_length=PARAMETERS_CHARS_MAX), BeforeValidator(_parameters_text)
    ] = "{}"
    """A table of names that a chat template may use, such as `enable_thinking`."""
    date: Annotated[str, BeforeValidator(_date)] = DATE
    """The date for templates that tell it."""


class ThinkingRules(Frozen):
    """Thoughts before answers. A completion that does not end its thought has no answer."""

    end: Annotated[str, Field(min_length=1, max_length=64)] = THOUGHT_MARKS[1]
    """The text that ends a thought. The answer is what follows it."""
    tokens_max: Annotated[int, Field(ge=1, le=TOKENS_MAX)] | None = None
    """The tokens of a thought at most. None: as many as of a completion."""
    force_end: bool = False
    """End longer thoughts by `end`, which is not trained on. By default the completion is cut."""

    @model_validator(mode="after")
    def _has_budget(self) -> Self:
        if self.force_end and self.tokens_max is None:
            raise ConfigError("thinking.force_end: needs thinking.tokens_max, after which it ends")
        return self


class RunLimits(Frozen):
    """Limits of what a node accepts from another."""

    group_size_max: Annotated[int, Field(ge=1, le=COMPLETIONS_MAX)] = COMPLETIONS_MAX
    """The completions of a group at most."""
    record_life_s: Annotated[int, Field(ge=1, le=604_800)] = 3600
    """The time from a group's creation to its expiry."""
    clock_skew_s: Annotated[int, Field(ge=0, le=3600)] = 120
    """The time by which a record may be ahead of the receiver's clock."""
    prompt_chars_max: Annotated[int, Field(ge=1, le=TEXT_CHARS_MAX)] = 8192
    """The characters of a prompt at most."""
    text_chars_max: Annotated[int, Field(ge=1, le=TEXT_CHARS_MAX)] = 8192
    """The characters of a completion at most."""


GREEDY_TEMPERATURE: Final = 0.01  # engines sample, and below it they all take the likeliest token


class HeldOutRules(Frozen):
    """The evaluation that all nodes of the run share."""

    tasks: Annotated[int, Field(ge=1, le=10_000)] = 200
    """The held-out tasks of an evaluation. No node trains on them."""
    greedy: bool = False
    """Judge the likeliest completion of each task instead of a sampled one."""


class CommonRules(Frozen):
    """Tasks that all nodes share, so that groups can be compared and others' solutions help."""

    tasks: Annotated[int, Field(ge=1, le=COMMON_TASKS_MAX)] = 256
    """The number of common tasks. A node does all of them before it repeats one."""
    share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Their share of each node's tasks."""

    @property
    def epoch(self) -> int:
        """The number of a node's tasks in which each common one comes once; share > 0."""
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
    """A central learner, and the rules that it shares with its workers."""

    peer: PublisherId
    """The learner's peer id. Its workers generate with the weights that it publishes."""
    model: Annotated[str, Field(min_length=1)] = "tiny"
    """The initial model of learner and workers."""
    staleness_max: Annotated[int, Field(ge=0, le=1024)] = 4
    """S: the age of a group at most when the learner trains on it, in steps."""
    publish_every_steps: Annotated[int, Field(ge=1, le=1024)] | None = None
    """κ: the steps between published versions. None: S - 1, at least 1."""
    groups_per_step: Annotated[int, Field(ge=1, le=4096)] = 16
    """R: the groups of one step."""
    group_size: Annotated[int, Field(ge=2, le=COMPLETIONS_MAX)] = 8
    """G: the completions of a group."""
    lease_life_s: Annotated[int, Field(ge=1, le=LEASE_MS_MAX // 1000)] = 300
    """The time that a worker has for a lease."""
    pool_groups_per_step: Annotated[int, Field(ge=0, le=1024)] = 0
    """J: the groups that the learner also draws from other nodes in each step."""
    rescored_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The share of trusted workers' groups whose log-probs the learner recomputes."""

    @property
    def publish_every(self) -> int:
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

    loss: Annotated[RunLoss | None, Flag(metavar=METHOD)] = None
    """The loss, by a method's name and parameters, as in `tis, behaviour_weight_max=3`. None:
    `dapo` for a learner, `sapo` for other nodes. `swarm-node methods` lists them."""


class RunConfig(Frozen):
    """The rules that all nodes of a run share; any difference makes another run id."""

    name: Annotated[str, AfterValidator(_run_name)]
    """The run's name: up to 40 lower-case letters, digits and hyphens."""
    environments: Annotated[
        tuple[EnvironmentSpec, ...],
        Field(min_length=1, max_length=128),
        BeforeValidator(_without_groups),
    ]
    """The environments of the tasks."""
    sampling: SamplingRules = SamplingRules()
    """The sampling of every node."""
    chat: ChatRules = ChatRules()
    """Values for chat templates beside messages."""
    thinking: ThinkingRules | None = None
    """Thoughts before answers, if the run has them."""
    limits: RunLimits = RunLimits()
    """Limits of what a node accepts from another."""
    held_out: HeldOutRules = HeldOutRules()
    """The evaluation that all nodes share."""
    training: TrainingRules = TrainingRules()
    """The loss and its parameters."""
    models: tuple[str, ...] = ()
    """The allowed initial models. None named: any."""
    reward: Literal["exact", "partial"] = "exact"
    """`exact`: a full score is worth 1, anything else 0. `partial`: the environment's own score."""
    publishers: Annotated[
        tuple[PublisherId, ...],
        Field(max_length=PUBLISHERS_MAX),
        AfterValidator(lambda ids: tuple(sorted(set(ids)))),
    ] = ()
    """The peer ids that may publish weights. None named: the learner alone."""
    learner: LearnerRules | None = None
    """The central learner, if the run has one."""
    answer: AnswerRules = AnswerRules()
    """The answer in a completion."""
    common: CommonRules = CommonRules()
    """The tasks that all nodes have."""

    @property
    def has_turns(self) -> bool:
        """True if a task may have several turns."""
        return any(interaction(spec.name) is not None for spec in self.environments)

    @property
    def group_bytes_max(self) -> int:
        """The size of a signed group at most: at least the ordinary limit, more if its tokens need
        it. A token takes 8 bytes, and its text as much at most."""
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
    def _thoughts_fit(self) -> Self:
        if self.thinking is None:
            return self
        budget, most = self.thinking.tokens_max, self.sampling.max_new_tokens
        if budget is not None and budget >= most:
            raise ConfigError(
                f"thinking.tokens_max = {budget}: leaves no token for the answer; take less than "
                f"sampling.max_new_tokens = {most}"
            )
        for spec in self.environments:
            if interaction(spec.name) is not None:
                raise ConfigError(
                    f"environment {spec.name}: has tasks of several turns, and thoughts are for "
                    "one turn; remove the table thinking"
                )
        return self

    @model_validator(mode="after")
    def _answers_fit_together(self) -> Self:
        """Require one rule for each task, valid examples, and one source of fractional rewards."""
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
                rules.format, rules.format_reward, rules.system, examples, self._thought_end
            )
        return found

    def answer_rule(self, environment: str, parameters: str) -> AnswerRule:
        """The answer rule of an environment, or the run's rule for environments outside the run."""
        rule = self._rule_by_environment.get((environment, parameters))
        return rule or AnswerRule(
            self.answer.format, self.answer.format_reward, thought_end=self._thought_end
        )

    @property
    def _thought_end(self) -> str:
        return "" if self.thinking is None else self.thinking.end

    @property
    def template_rules(self) -> TemplateRules:
        return TemplateRules(self.chat.arguments, self.chat.date)

    @property
    def thoughts(self) -> Thinking | None:
        rules = self.thinking
        if rules is None:
            return None
        return Thinking(rules.end, rules.tokens_max, rules.force_end)

    @property
    def weights_publishers(self) -> tuple[str, ...]:
        """The peer ids that may publish weights."""
        learner = (self.learner.peer,) if self.learner else ()
        return tuple(sorted({*self.publishers, *learner}))

    @cached_property
    def run_id(self) -> str:
        """`<name>-<fingerprint of all rules>`, 128 bits of SHA-256."""
        rules = self.model_dump(mode="json")
        rules["training"]["loss"] = str(self.training.loss or SapoLoss())  # the default of nodes
        for name in ("chat", "thinking"):  # which few runs have
            if getattr(self, name) == type(self).model_fields[name].default:
                del rules[name]
        for spec, told in zip(self.environments, rules["environments"], strict=True):
            told["answer"] = self._answers_of(spec).model_dump(mode="json")
        rules["answers"] = ANSWERS_REVISION
        digest = hashlib.sha256(canonical_json(rules).encode()).hexdigest()
        return f"{self.name}-{digest[:RUN_HASH_CHARS]}"

    def as_json(self) -> bytes:
        """The rules that differ from defaults, as canonical JSON to hand on to peers."""
        return canonical_json(self.model_dump(mode="json", exclude_defaults=True)).encode()

    @property
    def completion_chars_max(self) -> int:
        """The characters of a trained completion at most. It counts characters, because another
        node's tokens may be much longer than the own ones."""
        return min(self.limits.text_chars_max, CHARS_PER_TOKEN_MAX * self.sampling.max_new_tokens)

    @property
    def engine_sampling(self) -> Sampling:
        rules = self.sampling
        return Sampling(rules.temperature, rules.top_p, rules.max_new_tokens)

    @property
    def held_out_sampling(self) -> Sampling:
        rules = self.engine_sampling
        return replace(rules, temperature=GREEDY_TEMPERATURE) if self.held_out.greedy else rules
