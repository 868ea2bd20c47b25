"""Checks of methods' arguments. Each returns what it checked, or raises ValueError."""

import math
from collections.abc import Iterable


def probability(value: float, what: str) -> float:
    """The value, within [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{what} {value}: not within 0 and 1")
    return value


def finite(values: Iterable[float], what: str) -> tuple[float, ...]:
    found = tuple(values)
    if not all(map(math.isfinite, found)):
        raise ValueError(f"{what}: not all are finite")
    return found


def whole(value: int, what: str, least: int = 0) -> int:
    if value < least:
        raise ValueError(f"{what} {value}: below {least}")
    return value


def right_of(right: int, rollouts: int) -> tuple[int, int]:
    if rollouts < 1 or not 0 <= right <= rollouts:
        raise ValueError(f"{right} right ones of {rollouts} rollouts")
    return right, rollouts
