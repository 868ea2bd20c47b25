"""Settings that change with the steps of a run: least variance of a group, greatest length."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from node.methods.checked import whole
from node.methods.method import MethodSettings


@dataclass(frozen=True, slots=True)
class VarianceCurriculum(MethodSettings):
    """A bound on the variance score of what is learned from: low at first, high later."""

    kind: Literal["variance_curriculum"] = "variance_curriculum"
    score_first: Annotated[float, Ge(0), Le(1)] = 0.3
    """The least score (kappa) of a group in the first steps; not published."""
    score_later: Annotated[float, Ge(0), Le(1)] = 0.8
    """The least score after them; not published."""
    steps_first: Annotated[int, Ge(0)] = 20
    """How many steps are the first; not published."""


def variance_curriculum(step: int, set_to: VarianceCurriculum) -> float:
    """The least variance score of a group at a step, which is counted from 0 (VCRL, arXiv
    2509.19803).

    Raises:
        ValueError: the step is negative.
    """
    is_first = whole(step, "step") < set_to.steps_first
    return set_to.score_first if is_first else set_to.score_later


@dataclass(frozen=True, slots=True)
class LengthSchedule(MethodSettings):
    """The length of completions swings between two bounds, so that what was learned in many tokens
    is learned again in few."""

    kind: Literal["length_schedule"] = "length_schedule"
    tokens_min: Annotated[int, Ge(1)] = 8_192
    tokens_max: Annotated[int, Ge(1)] = 16_384
    period_steps: Annotated[int, Ge(2)] = 200
    """From the longest over the shortest to the longest again; not published."""
    cycles: Annotated[int, Ge(1)] = 3
    """After so many the length stays the longest."""


def length_schedule(step: int, set_to: LengthSchedule) -> int:
    """The most tokens of a completion at a step, which is counted from 0 (SIRI, arXiv 2509.25176):
    a cosine that begins and ends with the longest.

    Raises:
        ValueError: the step is negative, or the bounds are the wrong way round.
    """
    if set_to.tokens_min > set_to.tokens_max:
        raise ValueError(f"tokens_min {set_to.tokens_min}: over tokens_max {set_to.tokens_max}")
    if whole(step, "step") >= set_to.cycles * set_to.period_steps:
        return set_to.tokens_max
    phase = step % set_to.period_steps / set_to.period_steps
    up = (1.0 + math.cos(2.0 * math.pi * phase)) / 2.0
    return round(set_to.tokens_min + (set_to.tokens_max - set_to.tokens_min) * up)
