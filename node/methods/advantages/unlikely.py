"""More for right answers that are rare: by how unlikely they were, or by how few are of a kind."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Literal

from annotated_types import Ge

from node.methods.advantages.group import grpo_advantages
from node.methods.groups import Advantages, mean_logprobs
from node.methods.method import MethodSettings
from swarm.rollouts import VerifiedGroup

PASSED = 1.0  # the reward of a right answer


@dataclass(frozen=True, slots=True)
class Novelty(MethodSettings):
    """GRPO, and more for right completions that were less likely than their group."""

    kind: Literal["novelty"] = "novelty"
    strength: Annotated[float, Ge(0)] = 2.5
    share_max: Annotated[float, Ge(0)] = 0.5
    """Of its advantage a completion gains at most this share."""


def novelty(groups: Sequence[VerifiedGroup], set_to: Novelty) -> Advantages:
    """A + min(max(strength (1 - e), 0), share_max A) of right completions, e = exp(mean log-prob -
    the group's mean of these) (XRPO, arXiv 2510.06672). Groups whose log-probs are not all known
    and finite stay as they are: they are comparable within one policy alone."""
    found: Advantages = []
    for group in groups:
        values = grpo_advantages(group.rewards)
        logs = mean_logprobs(group)
        if logs:
            middle = fmean(logs)
            values = tuple(
                value + min(max(set_to.strength * (1.0 - _exp(log - middle)), 0.0),
                            set_to.share_max * value)
                if reward == PASSED and value > 0
                else value
                for value, reward, log in zip(values, group.rewards, logs, strict=True)
            )  # fmt: skip
        found.append(values)
    return found


def _exp(value: float) -> float:
    return math.exp(min(value, 20.0))


@dataclass(frozen=True, slots=True)
class Uniqueness(MethodSettings):
    """GRPO, and less for right completions of which there are many of a kind."""

    kind: Literal["uniqueness"] = "uniqueness"
    strength: Annotated[float, Ge(0)] = 1.0


def uniqueness(
    groups: Sequence[VerifiedGroup],
    set_to: Uniqueness,
    kind_of: Callable[[str], Hashable] = lambda text: " ".join(text.split()),
) -> Advantages:
    """A / f^strength of right completions, f how many right ones are of its kind (uniqueness-aware
    RL, arXiv 2601.08763, where a model sorts them). `kind_of`: here texts that are the same but for
    blanks."""
    found: Advantages = []
    for group in groups:
        values = grpo_advantages(group.rewards)
        kinds = [kind_of(each.text) for each in group.group.completions]
        counts = Counter(
            kind for kind, reward in zip(kinds, group.rewards, strict=True) if reward == PASSED
        )
        found.append(
            tuple(
                value / counts[kind] ** set_to.strength if reward == PASSED else value
                for value, reward, kind in zip(values, group.rewards, kinds, strict=True)
            )
        )
    return found
