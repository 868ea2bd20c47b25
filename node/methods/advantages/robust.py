"""Baselines that few outliers do not move: medians in place of means."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from statistics import median, median_low, stdev
from typing import Annotated, Final, Literal

from annotated_types import Gt, Le

from node.methods.advantages.group import STD_EPSILON, is_flat
from node.methods.groups import Advantages
from node.methods.method import MethodSettings
from swarm.rollouts import VerifiedGroup

MAD_EPSILON: Final = 1e-3


@dataclass(frozen=True, slots=True)
class McGrpo(MethodSettings):
    """r less the median of the group, which is left out itself: for small groups."""

    kind: Literal["mc_grpo"] = "mc_grpo"
    scale: Literal["none", "mad", "std"] = "std"
    """What divides: the median deviation (`mad`, as published) is 0 where most rewards are equal,
    and makes a thousand of 1."""
    advantage_max: Annotated[float, Gt(0)] = 5.0


def mc_grpo(groups: Sequence[VerifiedGroup], set_to: McGrpo) -> Advantages:
    """(r - lower median) / scale, within +-`advantage_max`; one completion that is the median is
    left out (MC-GRPO, arXiv 2601.22582). A group of one or two has no completion to spare."""
    found: Advantages = []
    for group in groups:
        rewards = group.rewards
        if is_flat(rewards) or len(rewards) < 3:
            found.append(tuple(0.0 for _ in rewards))
            continue
        middle = median_low(rewards)
        scale = 1.0
        if set_to.scale == "mad":
            scale = median_low([abs(each - middle) for each in rewards]) + MAD_EPSILON
        elif set_to.scale == "std":
            scale = stdev(rewards) + STD_EPSILON
        most = set_to.advantage_max
        values = [max(-most, min(most, (each - middle) / scale)) for each in rewards]
        left_out = rewards.index(middle)
        found.append(tuple(None if at == left_out else v for at, v in enumerate(values)))
    return found


@dataclass(frozen=True, slots=True)
class Gapo(MethodSettings):
    """r less the median of where rewards are densest: for shares, with outliers."""

    kind: Literal["gapo"] = "gapo"
    window_share: Annotated[float, Gt(0), Le(1)] = 0.5
    """Of the rewards, in order, so many are the window: that with the least spread, the lowest of
    equal ones."""


def gapo(groups: Sequence[VerifiedGroup], set_to: Gapo) -> Advantages:
    """(r - Q) / (sqrt(sum (r - Q)^2 / (G - 1)) + 1e-6), Q the median of the densest window (GAPO,
    arXiv 2510.21830)."""
    found: Advantages = []
    for group in groups:
        rewards = group.rewards
        if is_flat(rewards):
            found.append(tuple(0.0 for _ in rewards))
            continue
        ordered = sorted(rewards)
        size = ceil(len(ordered) * set_to.window_share)
        begin = min(
            range(len(ordered) - size + 1), key=lambda at: ordered[at + size - 1] - ordered[at]
        )
        base = median(ordered[begin : begin + size])
        spread = sqrt(sum((each - base) ** 2 for each in rewards) / (len(rewards) - 1))
        found.append(tuple((each - base) / (spread + STD_EPSILON) for each in rewards))
    return found
