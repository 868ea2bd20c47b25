"""Noise in a policy's weights, so that it tries what it would not."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from node.methods.checked import whole
from node.methods.method import MethodSettings


@dataclass(frozen=True, slots=True)
class WeightNoise(MethodSettings):
    """Noise that shrinks by stages is added to the scales of normalisation layers."""

    kind: Literal["noise"] = "noise"
    sigma_first: Annotated[float, Gt(0)] = 1e-2
    """Standard deviation in the first stage with noise."""
    sigma_last: Annotated[float, Gt(0)] = 1e-4
    """Standard deviation in the last stage."""
    stages: Annotated[int, Ge(1), Le(10_000)] = 10
    """Of equal lengths; the first one is without noise."""


def stage_noise(stage: int, set_to: WeightNoise) -> float:
    """The standard deviation in a stage, counted from 0 (QeRL, arXiv 2510.11696): none in stage 0,
    and from the first to the last one by equal factors after it. A single stage with noise has the
    first one's.

    Raises:
        ValueError: there is no such stage.
    """
    if not 0 <= stage < set_to.stages:
        raise ValueError(f"stage {stage} of {set_to.stages}")
    if stage == 0:
        return 0.0
    factors = max(1, set_to.stages - 2)
    return float(
        set_to.sigma_first * (set_to.sigma_last / set_to.sigma_first) ** ((stage - 1) / factors)
    )


def noise(step: int, steps: int, set_to: WeightNoise) -> float:
    """The standard deviation at a step, which is counted from 0, of a run of so many. From the
    run's end on it stays that of the last stage.

    Raises:
        ValueError: the step is negative, or the run has none.
    """
    whole(steps, "steps", 1)
    return stage_noise(min(set_to.stages - 1, whole(step, "step") * set_to.stages // steps), set_to)
