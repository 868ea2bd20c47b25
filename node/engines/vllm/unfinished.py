"""Unfinished completions of one prompt, at an engine that can be interrupted.

Tokens are kept with the policy version that made them, and the engine is asked for the rest. An
engine that dies loses only the tokens since its last answer.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from node.engines.vllm import probe
from node.interfaces.engine import Sampling, extend_spans
from swarm.errors import ConfigError
from swarm.rollouts import Completion, FinishReason

TEMPERATURE_MAX: Final = 2.0  # vLLM's own


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of one completion, from one request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason  # ABORT: the engine was interrupted


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for one completion of these tokens for each row."""

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
        extend_spans(self.spans, policy_version, len(piece.token_ids))
        if piece.finish_reason is not FinishReason.ABORT:
            self.finish_reason = piece.finish_reason


@dataclass(eq=False, slots=True)
class Unfinished:
    """A `PendingGroup`: one prompt and its completions."""

    prompt_ids: tuple[int, ...]
    completions_each: int
    tokens_max: int  # of a completion, at least 1, within the context
    seed: int
    sampling: Sampling = field(default_factory=Sampling)
    prompt: str = ""
    beginning: Piece | None = None  # without log-probs: those of the weights that will serve
    thought_max: int | None = None  # tokens, after which its end is looked for
    line: int = 0  # of versions, a number of the engine's
    _begun: int = 0  # tokens of the beginning that all rows have
    _rows: list[_Row] = field(init=False)

    def __post_init__(self) -> None:
        self.begin_again(self.line)

    @property
    def longest_tokens(self) -> int:
        return len(self.prompt_ids) + self.tokens_max

    @property
    def done(self) -> bool:
        return all(row.finish_reason is not None for row in self._rows)

    @property
    def untouched(self) -> bool:
        return not any(row.tokens or row.finish_reason for row in self._rows)

    def begin_with(self, beginning: Piece, policy_version: int) -> None:
        """Give untouched rows the tokens that they are to continue, and the version that their
        log-probs are of."""
        self._begun = len(beginning.token_ids)
        for row in self._rows:
            row.take(beginning, policy_version)

    def asks(self) -> list[Ask]:
        """The next requests: one for everything at first, which repeats for a seed; after an
        interruption one for each completion, with new random numbers."""
        if self.untouched:
            every = tuple(range(len(self._rows)))
            return [Ask(every, self.prompt_ids, self._room(0), self.seed)]
        return [
            Ask(
                (index,),
                (*self.prompt_ids, *row.tokens),
                self._room(len(row.tokens)),
                _derived(self.seed, index, len(row.tokens)),
            )
            for index, row in enumerate(self._rows)
            if row.finish_reason is None
        ]

    def take(self, ask: Ask, pieces: Sequence[Piece], policy_version: int) -> None:
        for index, piece in zip(ask.rows, pieces, strict=True):
            row = self._rows[index]
            if piece.finish_reason is FinishReason.LENGTH:
                tokens = len(row.tokens) + len(piece.token_ids)
                if tokens == self.thought_max and tokens < self.tokens_max:
                    piece = replace(piece, finish_reason=FinishReason.ABORT)
            row.take(piece, policy_version)

    def _room(self, tokens: int) -> int:
        """Tokens that a row of so many may be asked for at once."""
        before = self.thought_max or 0
        most = before if tokens < before else self.tokens_max
        return min(most, self.tokens_max) - tokens

    @property
    def spent(self) -> list[list[int]]:
        """The tokens of rows whose thought must have ended by now."""
        return [
            row.tokens
            for row in self._rows
            if row.finish_reason is None and len(row.tokens) == self.thought_max
        ]

    def end_thought(self, tokens: list[int], end: Piece | None, policy_version: int) -> None:
        """Continue a `spent` row with the end of its thought; None: it is cut."""
        row = next(row for row in self._rows if row.tokens is tokens)
        if end is None:
            row.finish_reason = FinishReason.LENGTH
            return
        row.take(end, policy_version)
        if len(tokens) >= self.tokens_max:
            row.finish_reason = FinishReason.LENGTH

    def begin_again(self, line: int) -> None:
        """Drop all tokens, which are of another line of versions."""
        self._rows = [_Row() for _ in range(self.completions_each)]
        self.line = line

    def completions(self, decode: Callable[[Sequence[int]], str]) -> tuple[Completion, ...]:
        """All completions, after they are done."""
        return tuple(
            Completion(
                text=decode(row.tokens),
                token_ids=tuple(row.tokens),
                logprobs=tuple(row.logprobs),
                finish_reason=row.finish_reason or FinishReason.ABORT,
                policy_version=row.spans[0][0],
                spans=tuple(row.spans) if len(row.spans) > 1 else (),
                splices=(self._begun,) if self._begun else (),
            )
            for row in self._rows
        )


def _derived(seed: int, *numbers: int) -> int:
    """A seed below 2**48 that depends on all of these."""
    text = "/".join(map(str, (seed, *numbers)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6])


@dataclass(frozen=True, slots=True)
class Update:
    policy_version: int
    tensors: int  # that were loaded
    tensors_total: int
    lent: bool  # they were taken from the trainer's own memory
    paused_s: float  # from when it began to interrupt to when it let sampling go on
    probe: probe.Difference | None  # from what it should be; None: nobody says


class Harvest:
    """Counts the groups to finish before the others are interrupted."""

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


def prompt_seeds(prompts: Sequence[str], own: Sequence[int]) -> list[int]:
    """A seed for each prompt, by its own seed, the prompt and its repetition alone."""
    seen: Counter[tuple[int, str]] = Counter()
    seeds = []
    for seed, prompt in zip(own, prompts, strict=True):
        digest = hashlib.sha256(f"{seed}/{seen[seed, prompt]}/{prompt}".encode()).digest()
        seen[seed, prompt] += 1
        seeds.append(int.from_bytes(digest[:6], "big"))
    return seeds


def check(sampling: Sampling, completions_each: int) -> None:
    sampling.check(completions_each)
    if sampling.temperature > TEMPERATURE_MAX:
        raise ConfigError(
            f"temperature {sampling.temperature:g}: vLLM takes at most {TEMPERATURE_MAX:g}; lower "
            "it in the run file, or use --engine torch"
        )
