"""A ridge regression on running sums, of bounded size. Pure."""

from collections.abc import Sequence
from functools import lru_cache
from math import hypot
from operator import mul
from random import Random
from typing import Any


def sketched(state: Sequence[float], width: int) -> list[float]:
    """A state (H,) as `width` numbers of length 1 in all, and a constant 1. Each number of the
    state is added to one place with a sign, always the same ones."""
    found = [0.0] * width
    for value, (place, sign) in zip(state, _places(len(state), width), strict=True):
        found[place] += sign * value
    scale = hypot(*found) or 1.0
    return [*(value / scale for value in found), 1.0]


@lru_cache(8)
def _places(count: int, width: int) -> tuple[tuple[int, int], ...]:
    rng = Random(0)
    return tuple((rng.randrange(width), rng.choice((-1, 1))) for _ in range(count))


class Ridge:
    """Rows of `width` numbers and their targets, as the sums that a regression needs."""

    def __init__(self, width: int) -> None:
        self.rows = 0
        self._products = [[0.0] * (at + 1) for at in range(width)]  # lower triangle
        self._targets = [0.0] * width

    def fade(self, kept: float) -> None:
        """Let all rows so far count by this share."""
        self._products = [[kept * each for each in line] for line in self._products]
        self._targets = [kept * each for each in self._targets]

    def add(self, row: Sequence[float], target: float) -> None:
        self.rows += 1
        for at, (line, value) in enumerate(zip(self._products, row, strict=True)):
            for place in range(at + 1):
                line[place] += value * row[place]
            self._targets[at] += value * target

    def weights(self, penalty: float) -> list[float]:
        """(X'X + penalty I)^-1 X'y, by Cholesky's factors. `penalty` > 0."""
        lower: list[list[float]] = []
        for at, line in enumerate(self._products):
            row: list[float] = []
            for place, value in enumerate(line):
                other = lower[place] if place < at else row
                left = value + penalty * (place == at) - sum(map(mul, row, other))
                row.append(left**0.5 if place == at else left / other[place])
            lower.append(row)
        half: list[float] = []
        for row, target in zip(lower, self._targets, strict=True):
            half.append((target - sum(map(mul, row, half))) / row[-1])
        found = half
        for at in reversed(range(len(half))):
            rest = sum(lower[later][at] * found[later] for later in range(at + 1, len(half)))
            found[at] = (half[at] - rest) / lower[at][at]
        return found

    def to_record(self) -> Any:
        return [self.rows, self._products, self._targets]

    def restore(self, record: Any) -> None:
        """Take back a record; ValueError if it is of another width."""
        rows, products, targets = record
        if list(map(len, products)) != list(map(len, self._products)):
            raise ValueError("of another width")
        self.rows, self._products, self._targets = int(rows), products, targets
