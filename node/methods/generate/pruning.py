"""Rollouts that are given up early, so that right and wrong ones are left in equal parts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Final, Literal

from annotated_types import Ge, Gt, Le, Lt

from node.methods.checked import probability, whole
from node.methods.method import MethodSettings

SLOPE_MAX: Final = 500.0  # at which a difference of 1 % is as good as certain
HALVINGS: Final = 50
ROLLOUTS_MAX: Final = 1_024  # at once: the time grows by HALVINGS^2 for each


@dataclass(frozen=True, slots=True)
class Pruning(MethodSettings):
    """Each rollout survives with a probability that depends on its chance to come out right."""

    kind: Literal["pruning"] = "pruning"
    kept_share: Annotated[float, Gt(0), Le(1)] = 0.5
    """Of rollouts, the expected share that goes on (kappa)."""
    positive_share: Annotated[float, Gt(0), Lt(1)] = 0.5
    """Of those that go on, the expected share of right ones (rho), as far as it can be had."""
    spared: Annotated[float, Ge(0), Lt(1)] = 0.05
    """The least probability to go on: 0.05 in an independent implementation. Without one, what is
    predicted wrongly is never found out, and no weight makes up for it."""
    uniform_steps: Annotated[int, Ge(0)] = 20
    """So many steps nothing is given up, as no prediction is to be trusted yet."""
    look_at: Annotated[int, Ge(1)] = 512
    """The token at which a rollout is looked at."""


def pruning(chances: Sequence[float], step: int, set_to: Pruning) -> tuple[float, ...]:
    """The probability that each rollout goes on (ARRoL, arXiv 2603.24840). It is also the rollout's
    propensity, by which its result is divided to keep the group's mean.

    The paper asks for two expectations, which many choices fulfil. This one is that of the largest
    entropy: logistic in the chance. Where the rollouts cannot have the share of right ones that
    is asked for, it comes as near as can be.

    Args:
        chances: of each rollout, the calibrated probability that it comes out right.
        step: counted from 0.

    Raises:
        ValueError: a chance is no probability, there are over 1,024 of them, the step is
            negative, or more is spared than kept.
    """
    for each in chances:
        probability(each, "chance")
    if len(chances) > ROLLOUTS_MAX:
        raise ValueError(f"{len(chances)} rollouts: over {ROLLOUTS_MAX}")
    if set_to.spared > set_to.kept_share:
        raise ValueError(f"spared {set_to.spared}: over kept_share {set_to.kept_share}")
    if whole(step, "step") < set_to.uniform_steps:
        return tuple(1.0 for _ in chances)
    if not chances or max(chances) == min(chances) or set_to.kept_share == 1.0:
        return tuple(set_to.kept_share for _ in chances)
    low, high = -SLOPE_MAX, SLOPE_MAX
    for _ in range(HALVINGS):
        slope = (low + high) / 2.0
        found = _survivals(chances, slope, set_to)
        positive = sum(map(float.__mul__, found, map(float, chances))) / sum(found)
        low, high = (low, slope) if positive > set_to.positive_share else (slope, high)
    return _survivals(chances, (low + high) / 2.0, set_to)


def _survivals(chances: Sequence[float], slope: float, set_to: Pruning) -> tuple[float, ...]:
    """Those of one slope whose mean is the share that is kept."""
    wanted = (set_to.kept_share - set_to.spared) / (1.0 - set_to.spared)
    low, high = -SLOPE_MAX - 50.0, SLOPE_MAX + 50.0
    found: list[float] = []
    for _ in range(HALVINGS):
        shift = (low + high) / 2.0
        found = [_logistic(shift + slope * chance) for chance in chances]
        low, high = (low, shift) if sum(found) > wanted * len(found) else (shift, high)
    return tuple(set_to.spared + (1.0 - set_to.spared) * each for each in found)


def _logistic(value: float) -> float:
    if value < 0.0:  # so that no exponent is positive
        return math.exp(value) / (1.0 + math.exp(value))
    return 1.0 / (1.0 + math.exp(-value))


def survivors(propensities: Sequence[float], rng: Random) -> tuple[int, ...]:
    """The places of the rollouts that go on, each drawn by itself.

    Raises:
        ValueError: a propensity is no probability.
    """
    return tuple(
        place
        for place, each in enumerate(propensities)
        if rng.random() < probability(each, "propensity")
    )
