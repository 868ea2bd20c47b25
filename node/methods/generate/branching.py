"""A second continuation where the policy is of two minds."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from annotated_types import Ge, Gt, Le

from node.methods.checked import probability, whole
from node.methods.method import MethodSettings

LOOK_AHEAD_MAX: Final = 512  # the time to compare grows with its square


@dataclass(frozen=True, slots=True)
class Branching(MethodSettings):
    """A rollout branches where two tokens are nearly as likely, and a branch that says the same is
    cut."""

    kind: Literal["branching"] = "branching"
    second_min: Annotated[float, Ge(0), Le(0.5)] = 0.15
    """The second token is likelier than this."""
    lead_max: Annotated[float, Gt(0), Le(1)] = 0.25
    """The first one leads by less than this."""
    distance_min: Annotated[float, Ge(0), Le(1)] = 0.4
    """A branch is cut where a smaller share of its tokens differs."""
    look_ahead: tuple[int, ...] = (20, 30, 50)
    """After so many tokens a branch is looked at."""
    leaves_max: Annotated[int, Ge(1)] = 8
    """Of one tree, as many as a group has completions; not published."""
    tokens_max: Annotated[int, Ge(1)] = 1_024
    """There is no branch after so many tokens."""
    tree_shares: tuple[tuple[int, float], ...] = ((0, 1.0), (100, 0.75), (200, 0.5), (300, 0.25))
    """From which step on what share of rollouts are trees."""


def branching(first: float, second: float, token: int, leaves: int, set_to: Branching) -> bool:
    """True if a rollout branches (LATR, arXiv 2510.24302).

    Args:
        first: the probability of the likeliest token.
        second: that of the second one.
        token: how many tokens there are before it.
        leaves: how many the tree has so far.

    Raises:
        ValueError: they are no probabilities of two tokens, the likelier one first; or a count
            is negative.
    """
    if probability(second, "second") > probability(first, "first") or first + second > 1.0 + 1e-6:
        raise ValueError(f"{first} and {second}: not the two likeliest of one distribution")
    has_room = whole(token, "token") < set_to.tokens_max and (
        whole(leaves, "leaves") < set_to.leaves_max
    )
    return has_room and second > set_to.second_min and first - second < set_to.lead_max


def edit_distance(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Least number of insertions, deletions and replacements that make one of the other
    (Levenshtein). Time grows with the product of the lengths."""
    row = list(range(len(second) + 1))
    for at, one in enumerate(first, 1):
        above, row[0] = row[0], at
        for place, other in enumerate(second, 1):
            above, row[place] = (
                row[place],
                min(row[place] + 1, row[place - 1] + 1, above + (one != other)),
            )
    return row[-1]


def is_cut(parent: Sequence[int], branch: Sequence[int], set_to: Branching) -> bool:
    """True if a branch repeats its parent (LATR): the tokens after they parted differ by too small
    a share. Ask it when the branch has one of the lengths of `look_ahead`; of a longer parent only
    as many tokens count.

    Raises:
        ValueError: a length of `look_ahead` is below 1, or over 512.
    """
    if not all(1 <= each <= LOOK_AHEAD_MAX for each in set_to.look_ahead):
        raise ValueError(f"look_ahead {set_to.look_ahead}: not within 1 and {LOOK_AHEAD_MAX}")
    if len(branch) not in set_to.look_ahead:
        return False
    differing = edit_distance(parent[: len(branch)], branch)
    return differing / len(branch) < set_to.distance_min


def tree_share(step: int, set_to: Branching) -> float:
    """The share of rollouts that are trees at a step, which is counted from 0. None before the
    first step that has one.

    Raises:
        ValueError: the step is negative, or a share is none.
    """
    whole(step, "step")
    begun = [each for each in sorted(set_to.tree_shares) if each[0] <= step]
    return probability(begun[-1][1], "tree share") if begun else 0.0
