"""Prompts without the tokens that lead the policy astray."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from node.methods.checked import finite, probability
from node.methods.method import MethodSettings


@dataclass(frozen=True, slots=True)
class Purify(MethodSettings):
    """The tokens of a prompt that the policy sees most unlike a reference are taken out, and what
    succeeds without them takes the place of what failed with them."""

    kind: Literal["purify"] = "purify"
    share: Annotated[float, Gt(0), Le(0.5)] = 0.03
    """Of a prompt's tokens, those taken out (gamma); published runs had 0.01 to 0.05."""
    success_min: Annotated[float, Ge(0), Le(1)] = 0.5
    """Prompts that go this well stay as they are (tau); not published."""
    original_weight: Annotated[float, Ge(0), Le(1)] = 0.5
    """Of successes with the whole prompt (a); those without some of it have 1 - a; not
    published."""


def purify(
    policy: Sequence[float],
    reference: Sequence[float],
    set_to: Purify,
    fixed: Collection[int] = (),
) -> tuple[int, ...]:
    """The places of the prompt's tokens that stay, in their order (LENS, arXiv 2601.21244). Of n
    tokens the ceil(share n) with the largest |policy - reference| are taken out, of equal ones
    the first, and never all.

    Args:
        policy: (n,) log-probs of the prompt's tokens under the policy.
        reference: (n,) under the reference.
        fixed: places of tokens that stay, as those of a chat's frame; they count in n.

    Raises:
        ValueError: a log-prob is no finite number, or there are more of one than of the other.
    """
    if len(finite(policy, "policy")) != len(finite(reference, "reference")):
        raise ValueError(f"{len(policy)} log-probs of the policy, {len(reference)} of a reference")
    free = [place for place in range(len(policy)) if place not in fixed]
    free.sort(key=lambda place: -abs(policy[place] - reference[place]))
    wanted = math.ceil(set_to.share * len(policy) - 1e-9)
    taken = set(free[: max(0, min(wanted, len(policy) - 1))])
    return tuple(place for place in range(len(policy)) if place not in taken)


def is_purified(right: Sequence[bool], set_to: Purify) -> bool:
    """True if a prompt is tried without some of its tokens, because too few of its completions are
    right. A prompt without completions is not."""
    return bool(right) and sum(right) < set_to.success_min * len(right)


def replaced(
    original: Sequence[bool], purified: Sequence[bool], rng: Random
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Places of the failures with the whole prompt that leave a group, and of the successes with a
    shortened prompt that replace them: as many of each, drawn if there are more.

    Args:
        original: of each completion to the whole prompt, whether it is right.
        purified: of each one to the prompt without some of its tokens.
    """
    failures = [place for place, right in enumerate(original) if not right]
    successes = [place for place, right in enumerate(purified) if right]
    count = min(len(failures), len(successes))
    return (
        tuple(sorted(rng.sample(failures, count))),
        tuple(sorted(rng.sample(successes, count))),
    )


def success_weight(is_original: bool, set_to: Purify) -> float:
    """Weight of a success: a with the whole prompt, 1 - a with a shortened one."""
    weight = probability(set_to.original_weight, "original_weight")
    return weight if is_original else 1.0 - weight
