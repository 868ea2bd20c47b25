"""The number of foreign groups in a batch, learned from validation gains."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, log, sqrt
from random import Random
from typing import Annotated, Any, Final, Literal

from annotated_types import Ge, Gt, Le

from node.methods.checked import finite
from node.methods.method import MethodSettings

TRIALS_MIN: Final = 1e-9  # an arm with fewer is forgotten, and as good as new


@dataclass(frozen=True, slots=True)
class AdaptiveExternal(MethodSettings):
    """A bandit whose arms are shares of J, the foreign groups that a node wants: none, all, and
    what lies between. An arm is held from one evaluation on validation tasks to the next."""

    kind: Literal["adaptive_external"] = "adaptive_external"
    levels: Annotated[int, Ge(1), Le(256)] = 2
    """Arms are 0 to this, and of each arm J * arm / levels groups are drawn, rounded up."""
    rule: Literal["ucb", "thompson"] = "ucb"
    exploration: Annotated[float, Ge(0)] = 0.5
    """How much of `gain_max` an arm is given for what is not known of it."""
    gain_max: Annotated[float, Gt(0)] = 0.1
    """A gain counts for at most so much, either way: no outlier decides for long."""
    decay: Annotated[float, Gt(0), Le(1)] = 0.95
    """What is left of all gains when a new one comes: what helped early may not help late."""


@dataclass(frozen=True, slots=True)
class ExternalGains:
    """Tries and summed gains of each arm, from 0 on, both of which decay; and the arm that is being
    tried, None before the first."""

    trials: tuple[float, ...] = ()
    sums: tuple[float, ...] = ()
    arm: int | None = None

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ExternalGains":
        """Read the output of `dataclasses.asdict`, with lists for tuples.

        Raises:
            TypeError, KeyError: it is none.
        """
        return cls(tuple(fields["trials"]), tuple(fields["sums"]), fields["arm"])


def no_gains(set_to: AdaptiveExternal) -> ExternalGains:
    """The estimate before any evaluation."""
    return ExternalGains((0.0,) * (set_to.levels + 1), (0.0,) * (set_to.levels + 1))


def groups_of(state: ExternalGains, wanted: int, set_to: AdaptiveExternal) -> int:
    """Foreign groups for a batch under the present arm, of J wanted; all J before the first arm,
    and where the arms have changed."""
    if state.arm is None or len(state.trials) != set_to.levels + 1:
        return wanted
    return ceil(wanted * state.arm / set_to.levels)


def evaluated(
    state: ExternalGains, gain: float | None, rng: Random, set_to: AdaptiveExternal
) -> ExternalGains:
    """The state with the next arm, after an evaluation on validation tasks. `gain`: of the pass
    rate, in [-1, 1], since the arm that is tried now was begun; None: not known.

    Raises:
        ValueError: see `gained`.
    """
    if len(state.trials) != set_to.levels + 1:
        state = no_gains(set_to)  # it is set to something else than it was
    if gain is not None and state.arm is not None:
        state = gained(state, state.arm, gain, set_to)
    return replace(state, arm=adaptive_external(state, rng, set_to))


def adaptive_external(state: ExternalGains, rng: Random, set_to: AdaptiveExternal) -> int:
    """The next arm. Arms without a trial come first, and which of them is drawn. After that it is
    the best by mean gain and, of it, what is not known: sqrt(2 log(trials) / its trials)
    (`ucb`), or by a draw from a normal distribution that is as wide as 1 / sqrt(its trials)
    (`thompson`), both times exploration gain_max. Of equal ones it is the smallest.

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
            sqrt(2.0 * log(total) / trials)
            if set_to.rule == "ucb"
            else rng.gauss(0.0, 1.0) / sqrt(trials)
        )
        scores.append(gained / trials + width * doubt)
    return scores.index(max(scores))


def gained(state: ExternalGains, arm: int, gain: float, set_to: AdaptiveExternal) -> ExternalGains:
    """The state after this arm brought `gain` on validation tasks.

    Raises:
        ValueError: there is no such arm, the gain is no finite number, or the state is of another
            number of arms.
    """
    _fits(state, set_to)
    if not 0 <= arm <= set_to.levels:
        raise ValueError(f"arm {arm}: not within 0 and {set_to.levels}")
    finite([gain], "gain")
    kept = min(max(gain, -set_to.gain_max), set_to.gain_max)
    trials = [each * set_to.decay for each in state.trials]
    sums = [each * set_to.decay for each in state.sums]
    trials[arm] += 1.0
    sums[arm] += kept
    return replace(state, trials=tuple(trials), sums=tuple(sums))


def _fits(state: ExternalGains, set_to: AdaptiveExternal) -> None:
    if not len(state.trials) == len(state.sums) == set_to.levels + 1:
        raise ValueError(f"{len(state.trials)} arms where there are {set_to.levels + 1}")
