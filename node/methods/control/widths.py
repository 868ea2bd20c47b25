"""The number of rollouts of a task, from its pass rate."""

import math
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from annotated_types import Ge, Gt, Le, Lt

from node.methods.checked import probability, right_of
from node.methods.filters.informative import informative_probability
from node.methods.method import MethodSettings

ROUNDING: Final = 1e-9  # what a quotient may lie above a whole number and still be that number
ROLLOUTS_MAX: Final = {"equal": 32, "hardness": 64}
SOLVED: Final = 0.5  # tasks that go this well get no more


@dataclass(frozen=True, slots=True)
class Dars(MethodSettings):
    """More rollouts of hard tasks, so that their advantages sum up to what those of middling ones
    do."""

    kind: Literal["dars"] = "dars"
    treatment: Literal["equal", "hardness"] = "equal"
    """`equal`: every task as much as the middling one; `hardness`: the harder the more."""
    over_std: bool = False
    """Whether advantages are divided by the group's standard deviation."""
    rollouts_max: Annotated[int, Ge(1)] | None = None
    """Of one task, the first ones among them; None: 32 where treated equally, else 64."""


def dars(right: int, rollouts: int, set_to: Dars) -> int:
    """Further rollouts of a task after its first ones (DARS, arXiv 2508.13755): as many as lift N S
    to the aim. S = 2 a (1 - a), or 2 sqrt(a (1 - a)) where advantages are over the standard
    deviation. a is the share of right ones, and half a rollout where none was right.

    Raises:
        ValueError: a task without rollouts, or with more right ones than rollouts.
    """
    right_of(right, rollouts)
    share = (right or 0.5) / rollouts
    if share >= SOLVED:
        return 0
    each = 2.0 * (math.sqrt(share * (1.0 - share)) if set_to.over_std else share * (1.0 - share))
    aim = rollouts * (1.0 if set_to.over_std else 0.5)
    if set_to.treatment == "hardness":
        aim *= 2.0 * (1.0 - share)
    wanted = math.ceil((aim - rollouts * each) / each - ROUNDING)
    most = set_to.rollouts_max or ROLLOUTS_MAX[set_to.treatment]
    return max(0, min(wanted, most - rollouts))


@dataclass(frozen=True, slots=True)
class Brorl(MethodSettings):
    """As many rollouts of a task as make it likely that it teaches."""

    kind: Literal["brorl"] = "brorl"
    by: Literal["informative", "mass"] = "informative"
    """What is to be likely: that rewards differ, or that what is right was seen at all."""
    chance: Annotated[float, Gt(0), Lt(1)] = 0.9
    """How likely; not published."""
    rollouts_min: Annotated[int, Ge(1)] = 16
    rollouts_max: Annotated[int, Ge(1), Le(65_536)] = 512


def unseen_mass(success: float, rollouts: int) -> float:
    """(1 - p)^N: how likely none of N rollouts finds what is right. It is what pulls the policy
    away from right answers, and it shrinks with N.

    Raises:
        ValueError: p is no probability.
    """
    return float((1.0 - probability(success, "success")) ** rollouts)


def brorl(success: float, set_to: Brorl) -> int:
    """The least number of rollouts with which the task teaches with probability `chance` (the
    widths of BroRL, arXiv 2510.01180, are 16 to 512 for all tasks alike), within the bounds. A
    task that is never solved, or always, has rewards that never differ and gets the least.

    Raises:
        ValueError: `success` is no probability, or the bounds are the wrong way round.
    """
    if set_to.rollouts_min > set_to.rollouts_max:
        raise ValueError(f"rollouts_min {set_to.rollouts_min}: over {set_to.rollouts_max}")
    if probability(success, "success") in (0.0, 1.0):
        return set_to.rollouts_min
    low, high = set_to.rollouts_min, set_to.rollouts_max
    while low < high:
        middle = (low + high) // 2
        told = (
            informative_probability(success, middle)
            if set_to.by == "informative"
            else 1.0 - unseen_mass(success, middle)
        )
        low, high = (low, middle) if told >= set_to.chance else (middle + 1, high)
    return low
