"""A mean and how sure it is, two-sided, at 95 %: by Student's t, and of shares by Wilson. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Final

NODES_MIN: Final = 3  # of fewer an interval says next to nothing
NORMAL_95: Final = 1.96
# Quantiles of Student's distribution at 0.975 for 1, 2, 3... degrees of freedom.
_T: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Band:
    """Means over nodes at each x, and between what 95 % of such intervals hold the true mean."""

    nodes: int
    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of independent values, at least two.

    Beyond 31 values the quantile of 31 counts: it is a little too wide, never too narrow.
    """
    mean = fmean(values)
    quantile = _T[min(len(values) - 2, len(_T) - 1)]
    half = quantile * stdev(values) / sqrt(len(values))
    return mean, mean - half, mean + half


def share_interval(passed: int, of: int) -> tuple[float, float, float]:
    """(share, low, high) of independent trials, at least one, by Wilson's score: it says something
    where all of them or none passed, too."""
    share, square = passed / of, NORMAL_95**2 / of
    middle = (share + square / 2) / (1 + square)
    half = sqrt(share * (1 - share) * square + square**2 / 4) / (1 + square)
    return share, max(0.0, middle - half), min(1.0, middle + half)


def band_of(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Band | None:
    """Over curves of (x, y), where all of them have a point; None where that is in fewer than two
    places, or there are fewer than `NODES_MIN` curves.

    Nodes of one swarm train on each other's groups, so they are not quite independent: the interval
    is for the nodes of such a swarm, not for swarms.
    """
    if len(curves) < NODES_MIN:
        return None
    points = [dict(zip(x, y, strict=True)) for x, y in curves]
    shared = sorted(set.intersection(*(set(each) for each in points)))
    if len(shared) < 2:
        return None
    made = [interval([each[x] for each in points]) for x in shared]
    mean, low, high = zip(*made, strict=True)
    return Band(len(curves), tuple(shared), mean, low, high)
