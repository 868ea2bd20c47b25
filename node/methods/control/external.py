"""How many groups of other nodes a batch takes, learned from what they bring."""

import math
from dataclasses import dataclass
from random import Random
from typing import Annotated, Final, Literal

from annotated_types import Ge, Gt, Le

from node.methods.checked import finite
from node.methods.method import MethodSettings

TRIALS_MIN: Final = 1e-9  # an arm with fewer is forgotten, and as good as new


@dataclass(frozen=True, slots=True)
class AdaptiveExternal(MethodSettings):
    """A bandit whose arms are how many foreign groups a batch takes, J."""

    kind: Literal["adaptive_external"] = "adaptive_external"
    groups_max: Annotated[int, Ge(1), Le(256)] = 8
    """J is 0 to this."""
    rule: Literal["ucb", "thompson"] = "ucb"
    exploration: Annotated[float, Ge(0)] = 0.5
    """How much of `gain_max` an arm is given for what is not known of it."""
    gain_max: Annotated[float, Gt(0)] = 0.1
    """A gain counts for at most so much, either way: no outlier decides for long."""
    decay: Annotated[float, Gt(0), Le(1)] = 0.95
    """What is left of all gains when a new one comes: what helped early may not help late."""


@dataclass(frozen=True, slots=True)
class ExternalGains:
    """What is known of each J from 0 on: how often it was tried, and the sum of what it brought.
    Both decay."""

    trials: tuple[float, ...] = ()
    sums: tuple[float, ...] = ()


def no_gains(set_to: AdaptiveExternal) -> ExternalGains:
    """What is known at first."""
    return ExternalGains((0.0,) * (set_to.groups_max + 1), (0.0,) * (set_to.groups_max + 1))


def adaptive_external(state: ExternalGains, rng: Random, set_to: AdaptiveExternal) -> int:
    """The next J. Arms without a trial come first, and which of them is drawn. After that it is
    the best by mean gain and, of it, what is not known: sqrt(2 log(trials) / its trials)
    (`ucb`), or by a draw from a normal distribution that is as wide as 1 / sqrt(its trials)
    (`thompson`), both times exploration gain_max. Of equal ones it is the smallest J.

    Raises:
        ValueError: the state is of another number of arms.
    """
    _fits(state, set_to)
    new = [arm for arm, trials in enumerate(state.trials) if trials < TRIALS_MIN]
    if new:
        return rng.choice(new)
    width = set_to.exploration * set_to.gain_max
    total = max(1.0, sum(state.trials))
    scores = []
    for trials, gained in zip(state.trials, state.sums, strict=True):
        doubt = (
            math.sqrt(2.0 * math.log(total) / trials)
            if set_to.rule == "ucb"
            else rng.gauss(0.0, 1.0) / math.sqrt(trials)
        )
        scores.append(gained / trials + width * doubt)
    return scores.index(max(scores))


def gained(
    state: ExternalGains, groups: int, gain: float, set_to: AdaptiveExternal
) -> ExternalGains:
    """The state after a batch with so many foreign groups brought `gain` on validation tasks.

    Raises:
        ValueError: there is no such arm, the gain is no finite number, or the state is of another
            number of arms.
    """
    _fits(state, set_to)
    if not 0 <= groups <= set_to.groups_max:
        raise ValueError(f"{groups} foreign groups: not within 0 and {set_to.groups_max}")
    finite([gain], "gain")
    kept = min(max(gain, -set_to.gain_max), set_to.gain_max)
    trials = [each * set_to.decay for each in state.trials]
    sums = [each * set_to.decay for each in state.sums]
    trials[groups] += 1.0
    sums[groups] += kept
    return ExternalGains(tuple(trials), tuple(sums))


def _fits(state: ExternalGains, set_to: AdaptiveExternal) -> None:
    if not len(state.trials) == len(state.sums) == set_to.groups_max + 1:
        raise ValueError(f"{len(state.trials)} arms where there are {set_to.groups_max + 1}")
