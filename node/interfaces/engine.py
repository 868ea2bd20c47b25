"""What a rollout engine is: prompts in, sampled completions with their log-probs out.

`scripted` serves tests and simulations, `torch` samples inside the trainer process, `vllm` talks
to a vLLM server of its own, `openai` to a server that somebody else runs. A contract suite holds
them to one behaviour.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from node.methods.generate.drafts import Draft
from node.methods.generate.speculative import Speculative
from swarm.rollouts import Completion, FinishReason

Tell = Callable[[str], Awaitable[None]]  # says what goes on to whoever looks after the node


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. Generation stops at EOS, which is kept in the record, or at the limit."""

    temperature: float = 1.0  # > 0
    top_p: float = 1.0  # 0 < top_p <= 1
    max_new_tokens: int = 64

    @property
    def is_whole(self) -> bool:
        """Whether any token may be sampled. Trainers' log-probs are at the temperature, over the
        whole vocabulary; an engine's are of what it samples from: with top-p the two differ."""
        return self.top_p == 1.0


@dataclass(frozen=True, slots=True)
class Maker:
    """What samples, as rollout groups tell it."""

    engine: str  # `torch`, `vllm`, `openai`, `scripted`
    precision: str = ""  # `float32`, `bfloat16`, or how weights are quantised: `fp8`; empty: unsaid


@dataclass(frozen=True, slots=True)
class Context:
    """What a policy's next turn comes after: a prompt, and its turns so far."""

    prompt: str
    turns: tuple[tuple[tuple[int, ...], str], ...]  # sampled ids, end included; what was said to it
    tokens_max: int  # of the next turn


NO_TURN: Final = Completion("", (), (), FinishReason.LENGTH, 0)  # where a context has no room


class PendingGroup(Protocol):
    """The completions of one prompt in the making, at the engine that began them."""

    @property
    def done(self) -> bool:
        """Whether all have ended."""
        ...


class RolloutEngine(Protocol):
    """Generates with one policy version at a time.

    Weights that are loaded while completions are being sampled change the rest of these, or come
    into effect after them: which of the two is the engine's, and the completions' spans say it.
    """

    @property
    def maker(self) -> Maker:
        """What it is, once it has started."""
        ...

    async def generate(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[tuple[Completion, ...]]:
        """`completions_each` completions for each prompt, in the order of the prompts.

        The same policy version, arguments and seed give the same completions. Waits while the
        engine is paused.

        Raises:
            ChildFailed: the engine died or answered with an error; it may be retried.
            ConfigError: a prompt does not fit the context.
        """
        ...

    async def load(self, weights: Path, policy_version: int) -> None:
        """Replace the policy by the Hugging Face model directory `weights`.

        Raises:
            ChildFailed: the load failed; the old version serves on.
        """
        ...

    async def pause(self) -> None:
        """Return once nothing is sampled; nothing will be until `resume`, also where this call is
        cancelled. What was begun is kept, or finished first."""
        ...

    async def resume(self) -> None:
        """Sample again, if paused."""
        ...


@dataclass(slots=True)
class Serving:
    """The policy that a rollout worker generates with."""

    engine: RolloutEngine
    tokenizer: str  # fingerprint
    version: Callable[[], int]  # that serves now


@runtime_checkable
class CountingEngine(Protocol):
    """One that knows how many tokens it sampled where its completions carry none."""

    def take_sampled(self) -> int:
        """How many since the last call."""
        ...


class TurnsEngine(RolloutEngine, Protocol):
    """One that goes on where a transcript is, on the ids that were sampled."""

    async def go_on(
        self, contexts: Sequence[Context], sampling: Sampling, seed: int
    ) -> list[Completion]:
        """The next turn of each, within its own limit. Where the policy's context has no room left
        it has no tokens, and was cut by LENGTH.

        Raises:
            ChildFailed, ConfigError: as `generate`.
        """
        ...


class DraftingEngine(RolloutEngine, Protocol):
    """One that goes on from drafts."""

    async def redraft(
        self, drafts: Sequence[Draft], set_to: Speculative, sampling: Sampling, seed: int
    ) -> list[Completion]:
        """One completion of each draft. The first tokens, up to its splice, are the draft's, as far
        as `speculative` keeps them; all log-probs are of the policy of now. Drafts of one prompt
        and of no tokens are completed as by `generate`.

        Raises:
            ChildFailed: as `generate`.
            ConfigError: as `generate`, or top-p is not 1.
        """
        ...


class PartialEngine(RolloutEngine, Protocol):
    """One that can stop in the middle of completions and go on later, under the weights of then."""

    async def begin(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[PendingGroup]:
        """As `generate`, without sampling yet.

        Raises:
            ChildFailed, ConfigError: as `generate`.
        """
        ...

    async def advance(self, works: Sequence[PendingGroup], enough: int) -> None:
        """Sample until so many of these works are done, those that were before included, then
        interrupt the others, which keep their tokens.

        Raises:
            ChildFailed: as `generate`; what was made is kept.
        """
        ...

    async def collect(self, works: Sequence[PendingGroup]) -> list[tuple[Completion, ...]]:
        """The completions of works that are done, in their order."""
        ...
