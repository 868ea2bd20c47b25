"""Group advantages: how much better a completion did than its group. Pure functions."""

from collections.abc import Sequence
from statistics import fmean, stdev

SPREAD_MIN = 1e-8
STD_EPSILON = 1e-6


def grpo_advantages(rewards: Sequence[float]) -> tuple[float, ...]:
    """(r - mean) / (std + 1e-6) with the unbiased standard deviation (GRPO, arXiv 2402.03300).

    All zero where the rewards are equal, exactly: without that test, rounding in nearly equal
    rewards would be blown up a millionfold.
    """
    if len(rewards) < 2 or max(rewards) - min(rewards) < SPREAD_MIN:
        return tuple(0.0 for _ in rewards)
    mean, scale = fmean(rewards), stdev(rewards) + STD_EPSILON
    return tuple((reward - mean) / scale for reward in rewards)
