"""Groups whose rewards vary enough, and a bank of tasks whose did."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import variance as unbiased_variance
from types import MappingProxyType
from typing import Annotated, Final, Literal

from annotated_types import Ge, Gt, Le

from node.methods.advantages.group import is_flat
from node.methods.checked import probability, right_of
from node.methods.method import MethodSettings
from swarm.rollouts import VerifiedGroup

ROUNDING: Final = 1e-9  # by which a score may lie below what it is


@dataclass(frozen=True, slots=True)
class Variance(MethodSettings):
    """Groups whose rewards vary enough; the places of others go to tasks of a bank."""

    kind: Literal["variance"] = "variance"
    momentum: Annotated[float, Ge(0), Le(1)] = 0.9
    """What is left of a task's score in the bank when a new one comes; not published."""
    bank_max: Annotated[int, Ge(0)] = 1_024
    """The bank holds at most so many tasks, those with the highest scores; not published."""
    reward_range: Annotated[float, Gt(0)] = 1.0
    """The largest reward less the smallest that there may be."""


@dataclass(frozen=True, slots=True)
class VarianceBank:
    """Tasks that varied enough, with their scores."""

    scores: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class VarianceChoice:
    """The selection from a batch."""

    kept: tuple[int, ...]  # places of groups that are learned from
    recalled: tuple[str, ...]  # tasks of the bank that take the places of others, the best first
    bank: VarianceBank  # without these


def variance_score(right: int, rollouts: int) -> float:
    """The variance of a group's rewards of 0 and 1 over the largest that so many can have, within
    [0, 1] (VCRL, arXiv 2509.19803). A group of one has none.

    Raises:
        ValueError: a group without rollouts, or with more right ones than rollouts.
    """
    right_of(right, rollouts)
    most = _largest(rollouts)
    return right * (rollouts - right) / most if most else 0.0


def reward_score(rewards: Sequence[float], reward_range: float = 1.0) -> float:
    """`variance_score` of rewards that are any numbers: their variance over that of as many at both
    ends of the range, at most 1. Equal rewards, or a single one, have none.

    Raises:
        ValueError: a reward is no finite number, or the range is not above 0.
    """
    if not reward_range > 0.0:
        raise ValueError(f"reward_range {reward_range}: not above 0")
    if is_flat(rewards):
        return 0.0
    count = len(rewards)
    most = _largest(count) / (count * (count - 1)) * reward_range**2
    return min(1.0, unbiased_variance(rewards) / most)


def _largest(rollouts: int) -> int:
    """k (G - k) of rewards that differ as much as so many can."""
    return rollouts // 2 * (rollouts - rollouts // 2)


def variance(
    groups: Sequence[VerifiedGroup], score_min: float, bank: VarianceBank, set_to: Variance
) -> VarianceChoice:
    """Groups with a score of at least `score_min` are kept, and their tasks go into the bank with
    a score that moves slowly (VCRL), but for tasks without a name. For each group that is not kept
    the best task of the bank is taken out, to be rolled out again: none of this batch, which would
    come twice. Of equal scores it is the first task by name.

    Raises:
        ValueError: `score_min` is no share, or a reward is no finite number.
    """
    probability(score_min, "score_min")
    scores = [reward_score(group.rewards, set_to.reward_range) for group in groups]
    kept = tuple(
        place for place, score in enumerate(scores) if score >= score_min - ROUNDING and score > 0.0
    )
    here = {group.prompt for group in groups}
    others = sorted(task for task in bank.scores if task not in here)
    others.sort(key=lambda task: -bank.scores[task])
    recalled = tuple(others[: len(groups) - len(kept)])
    known = dict(bank.scores)
    for task in recalled:
        del known[task]
    for prompt, score in sorted(
        (groups[place].prompt, scores[place]) for place in kept if groups[place].prompt
    ):
        before = known.get(prompt, score)
        known[prompt] = set_to.momentum * before + (1.0 - set_to.momentum) * score
    best = sorted(sorted(known), key=lambda task: -known[task])[: set_to.bank_max]
    return VarianceChoice(
        kept, recalled, VarianceBank(MappingProxyType({task: known[task] for task in best}))
    )
