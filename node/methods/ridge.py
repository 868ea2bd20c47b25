"""A ridge regression on running sums, of bounded size. Pure."""

from collections.abc import Sequence
from functools import lru_cache
from math import hypot
from random import Random
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.float64]]


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
        self._products: Numbers = np.zeros((width, width))
        self._targets: Numbers = np.zeros(width)

    def fade(self, kept: float) -> None:
        """Let all rows so far count by this share."""
        self._products *= kept
        self._targets *= kept

    def add(self, row: Sequence[float] | Numbers, target: float, weight: float = 1.0) -> None:
        self.rows += 1
        numbers = np.asarray(row, dtype=np.float64)
        self._products += weight * np.outer(numbers, numbers)
        self._targets += weight * target * numbers

    def weights(self, penalty: float) -> list[float]:
        """(X'X + penalty I)^-1 X'y. `penalty` > 0."""
        bounded = self._products + penalty * np.eye(len(self._targets))
        found: list[float] = np.linalg.solve(bounded, self._targets).tolist()
        return found

    def to_record(self) -> Any:
        return [self.rows, self._products.tolist(), self._targets.tolist()]

    def restore(self, record: Any) -> None:
        """Take back a record; ValueError if it is none, or of another width."""
        shapes = [np.shape(each) for each in record]
        if shapes != [(), self._products.shape, self._targets.shape]:
            raise ValueError("no record, or of another width")
        self.rows = int(record[0])
        self._products, self._targets = (np.asarray(e, dtype=np.float64) for e in record[1:])
