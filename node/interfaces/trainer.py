"""The protocol of trainers. `node.train.process` has the real one, in its own process;
`node.engines.scripted` has one for simulations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar

from node.interfaces.trainer_spec import Precision
from swarm.errors import ChildFailed, ConfigError, LocalProtocolError, SwarmError
from swarm.rollouts import Completion

T = TypeVar("T")


class DamagedCheckpoint(ConfigError):
    """The files of a checkpoint cannot be read; an older checkpoint may be good."""


# Errors that keep their class on the way from a trainer's process; others become `ChildFailed`.
_TOLD: Final[Mapping[str, type[SwarmError]]] = {
    each.__name__: each for each in (ConfigError, DamagedCheckpoint)
}


def error_name(error: BaseException) -> str:
    """The class of an error, as a trainer's process names it."""
    names = (each.__name__ for each in type(error).__mro__)
    return next((name for name in names if name in _TOLD), ChildFailed.__name__)


def error_of(name: str, message: str) -> SwarmError:
    """The error that a trainer's process named."""
    return _TOLD.get(name, ChildFailed)(message)


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """One group for the trainer. `advantages` has one entry for each completion.

    With `own_tokens` the token ids are the trainer's own and are used. Otherwise the text is
    encoded again, with EOS if the completion ended by itself, unless `tokenizer` is the trainer's;
    see `node.train.rows`. A text from another machine (`source`) that differs from its tokens is
    encoded again too.

    Log-probs are used by losses that correct for the behaviour policy. They are unknown if absent,
    of a wrong number, all zero, above zero or not finite.
    """

    prompt: str
    completions: tuple[Completion, ...]
    advantages: tuple[float, ...]
    own_tokens: bool
    source: str = ""  # who generated it; bounds made from data are made for each source alone
    tokenizer: str = ""  # fingerprint of what the token ids are of; empty: unknown
    guided: int = 0  # so many of the last completions are guidance: others' texts, encoded here
    shaping: float = 0.0  # by which guidance is learned, whatever the loss (`losses.guided`)
    guided_weight: float = 0.0  # of guidance in a supervised loss; 0: learned by `shaping`
    # Empty, or one entry for each completion; an empty entry is as none. Entries by token are of
    # the tokens that the policy sampled. Text that has other tokens here takes the mean of its
    # token advantages, and no mask.
    weights: tuple[float, ...] = ()  # that its loss is multiplied by
    token_advantages: tuple[tuple[float, ...], ...] = ()  # in place of its one advantage
    masks: tuple[tuple[bool, ...], ...] = ()  # False: the token has no loss, and is counted
    teacher_logprobs: tuple[tuple[float, ...], ...] = ()  # see `TrainerSpec.teacher_weight`

    def __post_init__(self) -> None:
        counts = [len(each.token_ids) for each in self.completions]
        if self.weights and len(self.weights) != len(counts):
            raise LocalProtocolError("a training group: not one weight for each completion")
        for column in (self.token_advantages, self.masks, self.teacher_logprobs):
            lengths = [len(each) for each in column] or [0] * len(counts)
            if len(lengths) != len(counts) or any(
                length not in (0, count) for length, count in zip(lengths, counts, strict=True)
            ):
                raise LocalProtocolError("a training group: not one entry for each token")


def training_group(
    prompt: str,
    completions: Sequence[Completion],
    advantages: Sequence[float | None],
    *,
    own_tokens: bool,
    source: str = "",
    tokenizer: str = "",
    weights: Sequence[float] = (),
    token_advantages: Sequence[tuple[float, ...]] = (),
    masks: Sequence[tuple[bool, ...]] = (),
    teacher_logprobs: Sequence[tuple[float, ...]] = (),
) -> TrainingGroup:
    """The completions to train on; those with advantage None are left out, with their entries."""

    def kept(column: Sequence[T]) -> tuple[T, ...]:
        pairs = zip(column, advantages, strict=True) if column else ()
        return tuple(each for each, advantage in pairs if advantage is not None)

    return TrainingGroup(
        prompt,
        kept(completions),
        tuple(each for each in advantages if each is not None),
        own_tokens,
        source,
        tokenizer,
        weights=kept(weights),
        token_advantages=kept(token_advantages),
        masks=kept(masks),
        teacher_logprobs=kept(teacher_logprobs),
    )


def check_scorable(groups: Sequence[TrainingGroup]) -> None:
    """Refuse groups without `own_tokens`: text that is encoded again has other tokens."""
    if not all(group.own_tokens for group in groups):
        raise LocalProtocolError("score: only token ids of our own tokenizer can be scored")


@dataclass(frozen=True, slots=True)
class LagFigures:
    """Figures of the tokens whose first version was so many updates old, as in `TrainReport`."""

    lag: int  # the last of `LAGS_MAX` holds all that are older
    tokens: int
    effective_share: float | None  # None: without log-probs of its engine
    clip_fraction: float
    mask_fraction: float


@dataclass(frozen=True, slots=True)
class TrainReport:
    """The figures of one update. Means are over trained tokens.

    After an update that is not finite, or that the guard undoes, `policy_version` stays and
    `trained_tokens` is 0; `loss` and `grad_norm` are what was measured.
    """

    policy_version: int  # after the update
    loss: float
    grad_norm: float  # before clipping
    trained_tokens: int
    clip_fraction: float  # 0.0 at one update per batch: clipping is then inactive
    own_logprob: float  # mean log-prob per own token under the policy before the update
    foreign_logprob: float  # the same for foreign tokens; nan without any
    skipped_completions: int  # too long for context, run or memory; or of tokens that are none
    seconds: float
    step_kl: float = math.nan  # k3 of the largest step on its own batch; nan: not measured
    steps_taken_back: int = 0  # of the updates, by the guard
    rate_scale: float = 1.0  # the share of the rate that the next update takes, for caution
    step_rate: float = math.nan  # the learning rate of the last update; nan: there was none
    unlikely_tokens: int = 0  # foreign ones left out, below a floor of likelihood
    left_out_completions: int = 0  # foreign ones, for their advantage below zero (`positives`)
    weighted_tokens: int = 0  # foreign ones that count by the log-probs that came along
    # share of the sum of |d loss / d log p| that comes from foreign tokens, in the first update
    foreign_gradient: float = math.nan  # 0 to 1; nan: there is no gradient
    reference_kl: float = math.nan  # k3 of own tokens from the reference; nan: there is none
    preference_pairs: int = 0  # of the update on pairs; 0: there was none
    preference_loss: float = math.nan  # of that, before it
    # of losses that use behaviour log-probs
    mask_fraction: float = 0.0  # of tokens, left out by the loss
    unknown_tokens: int = 0  # trained with weight 1, for want of behaviour log-probs
    left_out_groups: int = 0  # over the share of the batch that may lack them
    # of all losses, at the first update, over tokens of ours that came with log-probs
    behaviour_tokens: int = 0
    effective_share: float = math.nan  # effective sample size of the weights over their number
    mismatch_k1: float = math.nan  # KL from the behaviour policy to the one before the update
    mismatch_k3: float = math.nan  # the same by the estimator that is never below zero
    weight_max: float = math.nan  # the largest of proximal / behaviour
    mismatch_mean: float = math.nan  # of |delta log p|
    mismatch_max: float = math.nan
    version_lag: float = math.nan  # as last measured, see `node.train.version_lag`; nan: never
    by_lag: tuple[LagFigures, ...] = ()  # of tokens of ours, at the first update, freshest first


@dataclass(frozen=True, slots=True)
class PolicyInfo:
    name: str
    parameters: int
    tokenizer: str  # fingerprint
    policy_version: int
    context_tokens: int
    clipping_active: bool
    precision: str = ""  # what it computes in
    adapted: str = ""  # what the adapter is on, in words; empty: there is none
    held_bytes: int = 0  # of memory, between updates, when it has trained
    device_bytes: int = 0  # of its GPU; 0: it computes on the CPU
    learning_rate: float = 0.0  # what was taken; 0: it does not learn
    warm_up_updates: int = 0
    rate_told: str = ""  # both in one line, and what decided them
    precision_told: str = ""  # why it computes in `precision`, where that was timed
    thoughts_told: str = ""  # what the run lacks for the policy's thoughts; empty: nothing
    arguments_told: str = ""  # names of `chat.arguments` that its template does not read, in words


class Trainer(Protocol):
    """Owns the policy and its optimizer."""

    async def info(self) -> PolicyInfo: ...

    async def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        """Train on one batch. The order of groups and micro-batching change the result by rounding
        alone.

        Raises:
            ChildFailed: out of memory or a crash; the policy is as before or the process is gone.
        """
        ...

    async def features(self, groups: Sequence[TrainingGroup]) -> list[list[tuple[float, ...]]]:
        """The last hidden state (H,) at each completion's last token under the present policy, as
        POISE reads it (arXiv 2605.07579). Empty: training would skip the completion.

        Raises:
            ChildFailed: out of memory, a crash, or a policy whose states cannot be read.
        """
        ...

    async def prompt_logprobs(self, prompts: Sequence[str]) -> list[tuple[list[str], list[float]]]:
        """The texts of the tokens of each prompt's question, and their log-probs under the present
        policy. Both are empty where a question's tokens cannot be told apart.

        Raises:
            ChildFailed: out of memory or a crash.
        """
        ...

    async def save(self, directory: Path) -> None:
        """Write model, optimizer and RNG into an existing empty directory."""
        ...

    async def roll_back(self, directory: Path) -> int:
        """Load the weights that `save` wrote, without momentum; the new policy version, one above
        the present one, because versions are unique.

        Raises:
            ConfigError: damaged, or of another model; the policy is useless now.
            ChildFailed: out of memory or a crash.
        """
        ...

    async def slow_down(self, rate_share: float) -> None:
        """Multiply the learning rate of later updates by this share, until the trainer ends."""
        ...

    async def export(self, directory: Path, precision: Precision = "float32") -> None:
        """Write the policy for an engine: a Hugging Face model directory of that precision, or the
        trained adapter in PEFT's format, in fp32."""
        ...

    async def export_whole(self, directory: Path, precision: Precision = "float32") -> None:
        """Write the policy as a Hugging Face model directory, with an adapter merged into it."""
        ...

    async def memory_bytes(self) -> int:
        """Resident memory of the trainer."""
        ...
