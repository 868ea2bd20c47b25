"""Advantages where one task was asked in several ways, or by several nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Annotated, Final, Literal

from annotated_types import Ge

from node.methods.advantages.group import is_flat
from node.methods.groups import Advantages
from node.methods.method import MethodSettings
from swarm.rollouts import VerifiedGroup

WHITEN_EPSILON: Final = 1e-5
BARE: Final = ""  # the context of a completion to the bare prompt


@dataclass(frozen=True, slots=True)
class Contexts(MethodSettings):
    """r less the mean of its context, and so much of that context's lead over all."""

    kind: Literal["contexts"] = "contexts"
    between: Annotated[float, Ge(0)] = 1.1
    """How much the gap between contexts counts; 0: each source has a baseline of its own."""


def contexts(groups: Sequence[VerifiedGroup], set_to: Contexts) -> Advantages:
    """(r - mean of context) + between (mean of context - mean of all), whitened over the task's
    completions (NudgeRL, arXiv 2605.15726). A context is who generated, and the hint under which;
    bare completions of this node are measured against all.

    Groups of one prompt are one task. A task with a single context is plain GRPO but for the
    population's standard deviation.
    """
    found: Advantages = [()] * len(groups)
    tasks: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        tasks.setdefault(group.prompt or f"\x00{place}", []).append(place)
    for places in tasks.values():
        rewards = [each for at in places for each in groups[at].rewards]
        if is_flat(rewards):
            values = [0.0] * len(rewards)
        else:
            keys = [key for at in places for key in _contexts_of(groups[at])]
            values = _whitened(_raw(rewards, keys, set_to.between))
        rest = iter(values)
        for at in places:
            found[at] = tuple(next(rest) for _ in groups[at].rewards)
    return found


def _contexts_of(group: VerifiedGroup) -> list[tuple[str, str]]:
    named = group.contexts or (BARE,) * len(group.rewards)
    return [(group.source, each) for each in named]


def _raw(rewards: Sequence[float], keys: Sequence[tuple[str, str]], between: float) -> list[float]:
    overall = fmean(rewards)
    means = {
        key: fmean(reward for reward, its in zip(rewards, keys, strict=True) if its == key)
        for key in set(keys)
    }
    return [
        reward - overall
        if key == ("", BARE)
        else reward - means[key] + between * (means[key] - overall)
        for reward, key in zip(rewards, keys, strict=True)
    ]


def _whitened(values: Sequence[float]) -> list[float]:
    mean, scale = fmean(values), pstdev(values) + WHITEN_EPSILON
    return [(each - mean) / scale for each in values]
