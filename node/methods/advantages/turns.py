"""Advantages of what a completion is made of: its turns, or its answers to a task's parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Literal

from annotated_types import Ge, Le

from node.methods.advantages.group import centred, grpo_advantages
from node.methods.method import MethodSettings


@dataclass(frozen=True, slots=True)
class TwoLevels(MethodSettings):
    """A turn's advantage over others' same turn, and its transcript's over others."""

    kind: Literal["two_levels"] = "two_levels"
    discount: Annotated[float, Ge(0), Le(1)] = 0.5
    of_transcript: Annotated[float, Ge(0)] = 1.0
    of_turn: Annotated[float, Ge(0)] = 1.0


def discounted(
    rewards: Sequence[float], followed: Sequence[bool], discount: float
) -> tuple[float, ...]:
    """Returns by turn: a turn's reward, and the discounted returns of later turns while turns
    `followed` what was right. A turn that did not starts a new sum (UI-S1, arXiv 2509.11543)."""
    found: list[float] = []
    later = 0.0
    for reward, was_right in zip(reversed(rewards), reversed(followed), strict=True):
        value = reward + discount * later if was_right else reward
        found.append(value)
        later = value if was_right else 0.0
    return tuple(reversed(found))


def two_levels(
    rewards: Sequence[Sequence[float]], followed: Sequence[Sequence[bool]], set_to: TwoLevels
) -> list[tuple[float, ...]]:
    """Advantages of each turn of each transcript (UI-S1). Turns are compared with the mean at their
    place, transcripts with the mean of all turns; neither is scaled. A turn that no other
    transcript has counts by its transcript alone."""
    returns = [
        discounted(each, right, set_to.discount)
        for each, right in zip(rewards, followed, strict=True)
    ]
    every = [value for each in rewards for value in each]
    baseline = fmean(every) if every else 0.0
    found: list[tuple[float, ...]] = []
    for each, values in zip(rewards, returns, strict=True):
        of_transcript = fmean(each) - baseline if each else 0.0
        row = []
        for place, value in enumerate(values):
            there = [other[place] for other in returns if len(other) > place]
            of_turn = value - fmean(there) if len(there) > 1 else 0.0
            row.append(set_to.of_transcript * of_transcript + set_to.of_turn * of_turn)
        found.append(tuple(row))
    return found


@dataclass(frozen=True, slots=True)
class SubProblems(MethodSettings):
    """Each part of an answer against others' same part."""

    kind: Literal["sub_problems"] = "sub_problems"
    over_std: bool = True


def sub_problems(right: Sequence[Sequence[bool]], set_to: SubProblems) -> list[tuple[float, ...]]:
    """Advantages of each of K parts of each completion, from whether they are right. A part counts
    while all before it are right, and is compared with others at its place (SCRL, arXiv
    2605.22074).

    Raises:
        ValueError: completions with unlike numbers of parts.
    """
    if len({len(each) for each in right}) > 1:
        raise ValueError("sub_problems: completions have unlike numbers of parts")
    rewards = [[float(all(each[: at + 1])) for at in range(len(each))] for each in right]
    columns = list(zip(*rewards, strict=True))
    of_column = [
        grpo_advantages(column) if set_to.over_std else centred(column, fmean(column))
        for column in columns
    ]
    return [tuple(column[at] for column in of_column) for at in range(len(right))]
