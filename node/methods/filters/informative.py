"""Groups whose rewards differ, and how many more tasks it takes to have enough of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from node.methods.advantages.group import is_flat
from node.methods.checked import probability, whole
from node.methods.method import MethodSettings
from swarm.rollouts import VerifiedGroup


@dataclass(frozen=True, slots=True)
class ZeroAdvantage(MethodSettings):
    """Groups whose rewards are all equal are left out: nothing is learned of them."""

    kind: Literal["zero_advantage"] = "zero_advantage"


def zero_advantage(groups: Sequence[VerifiedGroup], set_to: ZeroAdvantage) -> tuple[int, ...]:
    """The places of groups whose rewards differ (DAPO's test, arXiv 2503.14476).

    Raises:
        ValueError: a reward is no finite number.
    """
    return tuple(place for place, group in enumerate(groups) if not is_flat(group.rewards))


def informative_probability(success: float, rollouts: int) -> float:
    """1 - p^G - (1 - p)^G: how likely the rewards of G rollouts differ, each right with
    probability p. A group of one has nothing to differ from.

    Raises:
        ValueError: p is no probability, or there is no rollout.
    """
    whole(rollouts, "rollouts", 1)
    rarer = min(probability(success, "success"), 1.0 - success)
    if rollouts == 1 or rarer == 0.0:
        return 0.0
    # In this order a tiny p is not lost beside 1.
    return max(0.0, -math.expm1(rollouts * math.log1p(-rarer)) - rarer**rollouts)


@dataclass(frozen=True, slots=True)
class DynamicSampling(MethodSettings):
    """Groups without advantage are left out, and others are generated in their place."""

    kind: Literal["dynamic_sampling"] = "dynamic_sampling"
    rounds_max: Annotated[int, Ge(1)] = 10
    """How often a batch is generated for, the first time among them; not published."""
    prompts_max: Annotated[int, Ge(1)] = 1_024
    """In one of these rounds; not published."""


def dynamic_sampling(
    wanted: int, kept: int, generated: int, rounds: int, set_to: DynamicSampling
) -> int:
    """Prompts of the next round of generation, so that as many groups as are wanted pass
    `zero_advantage` (DAPO, arXiv 2503.14476). 0: there are enough, or the rounds are over.

    Args:
        wanted: groups of a batch.
        kept: groups that passed so far.
        generated: groups that were generated so far.
        rounds: in so many rounds.

    Raises:
        ValueError: a count is negative, or more are kept than were generated.
    """
    for value, what in ((wanted, "wanted"), (kept, "kept"), (rounds, "rounds")):
        whole(value, what)
    whole(generated, "generated", kept)
    missing = wanted - kept
    if missing <= 0 or rounds >= set_to.rounds_max:
        return 0
    # One more of each kind than was seen: no share is taken for 0, and at first it is a half.
    return min(set_to.prompts_max, -(-missing * (generated + 2) // (kept + 1)))
