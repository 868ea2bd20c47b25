"""Completions of one prompt in the making, at an engine that hands back what it has when it is
interrupted. Pure.

What was handed back is kept, with the policy version that made it, and the engine is asked for the
rest. So a completion may be made of pieces by several versions, and an engine that dies takes with
it what it made since it was asked last, and no more.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarm.rollouts import Completion, FinishReason


@dataclass(frozen=True, slots=True)
class Piece:
    """What an engine made of one completion."""

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
        """What a completion may come to, with its prompt."""
        return len(self._prompt_ids) + self._tokens_max

    @property
    def done(self) -> bool:
        """Whether every completion has ended."""
        return all(row.finish_reason is not None for row in self._rows)

    @property
    def tokens(self) -> int:
        """How many there are of all completions, so far."""
        return sum(len(row.tokens) for row in self._rows)

    def asks(self) -> list[Ask]:
        """What to ask for next. Untouched, it is one request, which gives the same completions each
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
        """What that version made for an ask, one piece for each of its rows."""
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
