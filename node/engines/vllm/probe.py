"""Checks an engine's weights by comparing its log-probs with the trainer's. Pure.

The rows of random tokens are always the same. A log-prob is over the whole vocabulary and depends
on every weight, so a tensor that was not loaded shows.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

ROWS: Final = 4
ROW_TOKENS: Final = 32
MOVED_MIN: Final = 1e-4  # nats in the mean; what moves less, an engine in bfloat16 may not show
STALE_SHARE: Final = 0.1  # of that
_SEED: Final = 20_260_101  # any: what matters is that it stays

Rows = Sequence[Sequence[int]]
LogProbs = Sequence[Sequence[float]]  # of each row's tokens but its first, given those before

# What a trainer says of rows under the weights of a directory.
Reference = Callable[[Path, Rows], Awaitable[LogProbs]]


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean and maximum of |delta log p| over the same tokens, in nats."""

    mean: float
    max: float

    def __str__(self) -> str:
        return f"by {self.mean:.2g} in the mean and {self.max:.2g} at most"


# Rounding differences of other kernels, some three times the measured means (maxima in brackets):
# 1e-5 (4.8e-5) in fp32, 0.067 (0.33) in bfloat16 against fp32, 0.03 in int8, 0.1 in fp8. With
# sharpened weights fp8 made 0.21 (1.5). One packed tensor that was not loaded makes 0.7.
FP32: Final = Difference(mean=5e-5, max=1e-3)
BF16: Final = Difference(mean=0.15, max=1.5)
QUANTISED: Final = {
    "fp8": Difference(mean=0.3, max=3.0),
    "int8": Difference(mean=0.15, max=1.5),
}


def tolerance_of(precision: str) -> Difference:
    """The difference that rounding explains at a precision (see `EngineInfo`)."""
    return FP32 if precision == "float32" else QUANTISED.get(precision, BF16)


def probe_rows(vocabulary: int, context_tokens: int) -> list[list[int]]:
    """Rows (ROWS, up to ROW_TOKENS) of token ids, with room for one more token in the context."""
    rng = Random(_SEED)
    length = max(2, min(ROW_TOKENS, context_tokens - 1))
    return [[rng.randrange(vocabulary) for _ in range(length)] for _ in range(ROWS)]


def difference(ours: LogProbs, theirs: LogProbs) -> Difference:
    """The difference of two sets of log-probs; infinite for missing or not finite values."""
    if [len(row) for row in ours] != [len(row) for row in theirs]:
        return Difference(math.inf, math.inf)
    each = [
        abs(one - other)
        for row, other_row in zip(ours, theirs, strict=True)
        for one, other in zip(row, other_row, strict=True)
    ]
    if not each or not all(map(math.isfinite, each)):
        return Difference(math.inf, math.inf)
    return Difference(sum(each) / len(each), max(each))


def is_stale(
    before: LogProbs, after: LogProbs, expected_before: LogProbs, expected_after: LogProbs
) -> bool:
    """True if an engine still gives the log-probs of `before` although the weights changed.

    One engine rounds equal weights equally, so this detects an update that was not loaded even if
    it is far smaller than the difference between two kernels or dtypes.
    """
    wanted = difference(expected_after, expected_before).mean
    return wanted > MOVED_MIN and difference(after, before).mean < STALE_SHARE * wanted


def agrees(found: Difference, tolerance: Difference) -> bool:
    return found.mean <= tolerance.mean and found.max <= tolerance.max
