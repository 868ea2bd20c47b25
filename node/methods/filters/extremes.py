"""Of many completions those that teach most, and of their tokens those that decide."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt, Le

from node.methods.checked import finite, whole
from node.methods.groups import Advantages
from node.methods.method import MethodSettings


@dataclass(frozen=True, slots=True)
class Extremes(MethodSettings):
    """The largest advantages and the most negative ones, and of them the tokens of high entropy."""

    kind: Literal["extremes"] = "extremes"
    samples_first: Annotated[float, Gt(0), Le(1)] = 1.0
    """Of all completions, the share that is kept at first; not published."""
    samples_last: Annotated[float, Gt(0), Le(1)] = 0.5
    """That which is kept in the end; not published."""
    tokens_first: Annotated[float, Gt(0), Le(1)] = 1.0
    """Of all their tokens, the share at first; not published."""
    tokens_last: Annotated[float, Gt(0), Le(1)] = 0.2
    """That in the end: published runs used below a fifth of all tokens."""


CompletionPlace = tuple[int, int]
"""Of a group in its batch, and of a completion in its group."""


def relaxed(first: float, last: float, progress: float) -> float:
    """A value that moves linearly from its first to its last while `progress` goes from 0 to 1.

    Raises:
        ValueError: progress is no number.
    """
    if math.isnan(progress):
        raise ValueError("progress: no number")
    done = min(max(progress, 0.0), 1.0)
    return (1.0 - done) * first + done * last


def extremes(
    advantages: Advantages, progress: float, set_to: Extremes
) -> tuple[CompletionPlace, ...]:
    """Places of the completions to learn from (D3S, arXiv 2509.22115): of all groups together,
    those that maximise the variance of advantages. Advantages stay as they are. None among them is
    left out.

    Raises:
        ValueError: an advantage is no finite number.
    """
    told = sum(value is not None for row in advantages for value in row)
    share = relaxed(set_to.samples_first, set_to.samples_last, progress)
    return most_varied(advantages, _share_of(share, told))


def most_varied(advantages: Advantages, count: int) -> tuple[CompletionPlace, ...]:
    """The `count` completions whose advantages have the largest variance, in the order of their
    places; all where there are not more.

    A choice of largest variance is always so many of the smallest and so many of the largest, as
    the variance is convex in each value. Of equally good ones it is the most balanced;
    of one completion it is that farthest from the mean.

    Raises:
        ValueError: an advantage is no finite number, or `count` is negative.
    """
    told = [
        (value, (group, at))
        for group, row in enumerate(advantages)
        for at, value in enumerate(row)
        if value is not None
    ]
    values = sorted(finite((value for value, _ in told), "advantages"))
    count = min(whole(count, "count"), len(values))
    if not count:
        return ()
    told.sort()
    lowest = _lowest(values, count)
    chosen = told[:lowest] + told[len(told) - (count - lowest) :]
    return tuple(sorted(place for _, place in chosen))


def _lowest(values: Sequence[float], count: int) -> int:
    """The number of smallest values among the `count` values that vary most."""
    middle = math.fsum(values) / len(values)  # without it, squares would drown what differs
    if count == 1:
        return int(middle - values[0] > values[-1] - middle)
    sums, squares = [0.0], [0.0]
    for value in values:
        sums.append(sums[-1] + (value - middle))
        squares.append(squares[-1] + (value - middle) ** 2)
    best, best_rank = 0, (-math.inf, 0)
    for lowest in range(count + 1):
        cut = len(values) - (count - lowest)
        total = sums[lowest] + sums[-1] - sums[cut]
        square = squares[lowest] + squares[-1] - squares[cut]
        rank = (square / count - (total / count) ** 2, -abs(2 * lowest - count))
        if rank > best_rank:
            best, best_rank = lowest, rank
    return best


def deciding_tokens(
    advantages: Sequence[float],
    entropies: Sequence[Sequence[float]],
    progress: float,
    set_to: Extremes,
) -> tuple[tuple[bool, ...], ...]:
    """Of each completion, of each token, whether it is learned from: those with the highest
    |advantage| entropy of all (D3S). Of equal ones the first are.

    Args:
        advantages: (N,) of each completion.
        entropies: (N, tokens) of each one's tokens, in nats.

    Raises:
        ValueError: a number is not finite, or there are not as many completions as advantages.
    """
    worth = [
        (abs(advantage) * entropy, (row, at))
        for row, (advantage, each) in enumerate(
            zip(finite(advantages, "advantages"), entropies, strict=True)
        )
        for at, entropy in enumerate(finite(each, "entropies"))
    ]
    share = relaxed(set_to.tokens_first, set_to.tokens_last, progress)
    best = sorted(worth, key=lambda each: -each[0])[: _share_of(share, len(worth))]
    kept = {place for _, place in best}
    return tuple(
        tuple((row, at) in kept for at in range(len(each))) for row, each in enumerate(entropies)
    )


def _share_of(share: float, whole_count: int) -> int:
    return math.ceil(share * whole_count - 1e-9)  # a product may lie a little above a whole number
