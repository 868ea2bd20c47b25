"""Completions of one prompt in the making, at an engine that hands back what it has when it is
interrupted; and how many of them have to be done.

What was handed back is kept, with the policy version that made it, and the engine is asked for the
rest. So a completion may be made of pieces by several versions, and an engine that dies takes with
it what it made since it was asked last, and no more.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from node.engines.vllm import probe
from node.interfaces.engine import Sampling
from swarm.errors import ConfigError
from swarm.rollouts import Completion, FinishReason

TEMPERATURE_MAX: Final = 2.0  # vLLM's own


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of one completion, from one request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason  # ABORT: the engine was interrupted


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: as many completions of these tokens as there are rows."""

    rows: tuple[int, ...]
    token_ids: tuple[int, ...]
    tokens_max: int
    seed: int


@dataclass(slots=True)
class _Row:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)  # (policy version, tokens)
    finish_reason: FinishReason | None = None

    def take(self, piece: Piece, policy_version: int) -> None:
        self.tokens += piece.token_ids
        self.logprobs += piece.logprobs
        count = len(piece.token_ids)
        if count and self.spans and self.spans[-1][0] == policy_version:
            self.spans[-1] = (policy_version, self.spans[-1][1] + count)
        elif count:
            self.spans.append((policy_version, count))
        if piece.finish_reason is not FinishReason.ABORT:
            self.finish_reason = piece.finish_reason


class Unfinished:
    """One prompt and its completions."""

    def __init__(
        self, prompt_ids: Sequence[int], completions_each: int, tokens_max: int, seed: int
    ) -> None:
        """`tokens_max`: of a completion, at least 1; the context has room for them."""
        self._prompt_ids = tuple(prompt_ids)
        self._tokens_max = tokens_max
        self._seed = seed
        self._rows = [_Row() for _ in range(completions_each)]
        self.line = 0  # of versions, a number of the engine's

    @property
    def longest_tokens(self) -> int:
        """The most tokens of a completion with its prompt."""
        return len(self._prompt_ids) + self._tokens_max

    @property
    def done(self) -> bool:
        """True if every completion has ended."""
        return all(row.finish_reason is not None for row in self._rows)

    @property
    def tokens(self) -> int:
        """The tokens of all completions so far."""
        return sum(len(row.tokens) for row in self._rows)

    def asks(self) -> list[Ask]:
        """The next requests. Untouched, it is one request, which gives the same completions each
        time; the rest of what was interrupted is asked for by completion, with random numbers that
        none of its tokens was drawn with."""
        if not any(row.tokens or row.finish_reason for row in self._rows):
            every = tuple(range(len(self._rows)))
            return [Ask(every, self._prompt_ids, self._tokens_max, self._seed)]
        return [
            Ask(
                (index,),
                (*self._prompt_ids, *row.tokens),
                self._tokens_max - len(row.tokens),
                _derived(self._seed, index, len(row.tokens)),
            )
            for index, row in enumerate(self._rows)
            if row.finish_reason is None
        ]

    def take(self, ask: Ask, pieces: Sequence[Piece], policy_version: int) -> None:
        """Add what a version made for a request: one piece for each of its rows."""
        for index, piece in zip(ask.rows, pieces, strict=True):
            self._rows[index].take(piece, policy_version)

    def begin_again(self, line: int) -> None:
        """Forget all that was made: it is of another line of versions than what will be."""
        self._rows = [_Row() for _ in self._rows]
        self.line = line

    def completions(self, decode: Callable[[Sequence[int]], str]) -> tuple[Completion, ...]:
        """All of them, once they are done."""
        return tuple(
            Completion(
                text=decode(row.tokens),
                token_ids=tuple(row.tokens),
                logprobs=tuple(row.logprobs),
                finish_reason=row.finish_reason or FinishReason.ABORT,
                policy_version=row.spans[0][0],
                spans=tuple(row.spans) if len(row.spans) > 1 else (),
            )
            for row in self._rows
        )


def _derived(seed: int, *numbers: int) -> int:
    """A seed that depends on all of these, below 2**48."""
    text = "/".join(map(str, (seed, *numbers)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6])


@dataclass(eq=False, slots=True)
class VllmWork:
    """See `PendingGroup`."""

    rows: Unfinished
    completions: int
    sampling: Sampling
    prompt: str = ""

    @property
    def done(self) -> bool:
        return self.rows.done


@dataclass(frozen=True, slots=True)
class Update:
    """The figures of one load."""

    policy_version: int
    tensors: int  # that were loaded
    tensors_total: int
    lent: bool  # they were taken from the trainer's own memory
    paused_s: float  # from when it began to interrupt to when it let sampling go on
    probe: probe.Difference | None  # from what it should be; None: nobody says


class Harvest:
    """Counts the groups that are still to be done before the others are interrupted."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self.full = trio.Event()

    @property
    def is_full(self) -> bool:
        return self._wanted <= 0

    def count(self, done: bool) -> None:
        self._wanted -= done
        if self._wanted == 0:
            self.full.set()


def prompt_seeds(prompts: Sequence[str], seed: int) -> list[int]:
    """A seed for each prompt that depends on the seed, the prompt and its repetition alone."""
    seen: Counter[str] = Counter()
    seeds = []
    for prompt in prompts:
        digest = hashlib.sha256(f"{seed}/{seen[prompt]}/{prompt}".encode()).digest()
        seen[prompt] += 1
        seeds.append(int.from_bytes(digest[:6], "big"))
    return seeds


def check(sampling: Sampling, completions_each: int) -> None:
    """
    Raises:
        ConfigError: vLLM samples no such thing.
    """
    if sampling.temperature <= 0 or not 0 < sampling.top_p <= 1 or sampling.max_new_tokens < 1:
        raise ConfigError(
            f"sampling {sampling}: take temperature > 0, 0 < top_p <= 1, max_new_tokens >= 1"
        )
    if sampling.temperature > TEMPERATURE_MAX:
        raise ConfigError(
            f"temperature {sampling.temperature:g}: vLLM takes at most {TEMPERATURE_MAX:g}; lower "
            "it in the run file, or use --engine torch"
        )
    if completions_each < 1:
        raise ConfigError(f"completions_each = {completions_each}: take at least 1")
