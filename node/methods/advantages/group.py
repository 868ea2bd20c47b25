"""Advantages from the rewards of one group, and of a batch's scale. A group whose rewards are all
equal has none, exactly: without that test, rounding in nearly equal rewards would be blown up a
millionfold."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Final, Literal

from node.methods.groups import Advantages, by_source, lengths
from node.methods.method import MethodSettings
from swarm.rollouts import VerifiedGroup, informative

STD_EPSILON: Final = 1e-6


def is_flat(rewards: Sequence[float]) -> bool:
    """True if a group's rewards are all equal and teach nothing.

    Raises:
        ValueError: one of them is no finite number.
    """
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"rewards {tuple(rewards)}: not all are finite")
    return len(rewards) < 2 or not informative(rewards)


def grpo_advantages(rewards: Sequence[float]) -> tuple[float, ...]:
    """(r - mean) / (std + 1e-6) with the unbiased standard deviation (GRPO, arXiv 2402.03300)."""
    if is_flat(rewards):
        return tuple(0.0 for _ in rewards)
    mean, scale = fmean(rewards), stdev(rewards) + STD_EPSILON
    return tuple((reward - mean) / scale for reward in rewards)


def centred(rewards: Sequence[float], baseline: float) -> tuple[float, ...]:
    """r - baseline, and zeros where the rewards are equal."""
    if is_flat(rewards):
        return tuple(0.0 for _ in rewards)
    return tuple(reward - baseline for reward in rewards)


@dataclass(frozen=True, slots=True)
class Grpo(MethodSettings):
    """(r - mean) / std of the group."""

    kind: Literal["grpo"] = "grpo"


def grpo(groups: Sequence[VerifiedGroup], set_to: Grpo) -> Advantages:
    """`grpo_advantages` of each group."""
    return [grpo_advantages(group.rewards) for group in groups]


@dataclass(frozen=True, slots=True)
class DrGrpo(MethodSettings):
    """r - mean of the group, without its scale: hard and easy tasks weigh by what they teach."""

    kind: Literal["dr_grpo"] = "dr_grpo"


def dr_grpo(groups: Sequence[VerifiedGroup], set_to: DrGrpo) -> Advantages:
    """r - mean (Dr.GRPO, arXiv 2503.20783). Its mean over tokens is the loss' to choose."""
    return [centred(group.rewards, fmean(group.rewards or (0.0,))) for group in groups]


@dataclass(frozen=True, slots=True)
class Rloo(MethodSettings):
    """r less the mean of the group's others."""

    kind: Literal["rloo"] = "rloo"


def rloo(groups: Sequence[VerifiedGroup], set_to: Rloo) -> Advantages:
    """r - mean of the others = G / (G - 1) (r - mean) (RLOO, arXiv 2402.14740)."""
    return [
        tuple(
            each * len(group.rewards) / (len(group.rewards) - 1)
            for each in centred(group.rewards, fmean(group.rewards))
        )
        if len(group.rewards) > 1
        else tuple(0.0 for _ in group.rewards)
        for group in groups
    ]


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlus(MethodSettings):
    """r - mean of the group, over the spread of the whole batch."""

    kind: Literal["reinforce_pp"] = "reinforce_pp"


def reinforce_pp(groups: Sequence[VerifiedGroup], set_to: ReinforcePlusPlus) -> Advantages:
    """r - mean of the group, whitened over the batch (REINFORCE++ with baseline, arXiv
    2501.03262), each source's over its own groups. Groups without a spread stay at zero and have
    no part in the scale."""
    found: Advantages = [centred(group.rewards, fmean(group.rewards or (0.0,))) for group in groups]
    for places in by_source(groups).values():
        told = [at for at in places if not is_flat(groups[at].rewards)]
        values = [each for at in told for each in found[at] if each is not None]
        if len(values) < 2:
            continue
        mean, scale = fmean(values), stdev(values) + STD_EPSILON
        for at in told:
            found[at] = tuple((each - mean) / scale for each in found[at] if each is not None)
    return found


@dataclass(frozen=True, slots=True)
class Opo(MethodSettings):
    """r less the mean reward by length: the baseline of least variance where tokens weigh alike."""

    kind: Literal["opo"] = "opo"


def opo(groups: Sequence[VerifiedGroup], set_to: Opo) -> Advantages:
    """r - sum(length r) / sum(length) (OPO, arXiv 2505.23585)."""
    found: Advantages = []
    for group in groups:
        counts = lengths(group)
        weighted = sum(n * each for n, each in zip(counts, group.rewards, strict=True))
        found.append(centred(group.rewards, weighted / (sum(counts) or 1)))
    return found


@dataclass(frozen=True, slots=True)
class PassK(MethodSettings):
    """The best completion alone counts, by its lead over the second best."""

    kind: Literal["pass_k"] = "pass_k"
    over_std: bool = False


def pass_k(groups: Sequence[VerifiedGroup], set_to: PassK) -> Advantages:
    """The best gets its lead over the second, the others nothing (verl's `grpo_passk`); of equal
    ones nobody leads. `over_std`: over the group's standard deviation."""
    found: Advantages = []
    for group in groups:
        values = [0.0] * len(group.rewards)
        if not is_flat(group.rewards):
            first, second = sorted(group.rewards, reverse=True)[:2]
            scale = stdev(group.rewards) + STD_EPSILON if set_to.over_std else 1.0
            values[group.rewards.index(first)] = (first - second) / scale
        found.append(tuple(values))
    return found
