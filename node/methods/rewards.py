"""Rewards where no verifier says what is right, or where it misses what is wrong."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, Final

from annotated_types import Ge, Le

from node.methods.advantages import is_least
from node.methods.method import (
    Count,
    MethodSettings,
    Need,
    NonNegative,
    Positive,
    PositiveShare,
    Share,
)
from node.methods.step_judge import JudgeName

CONFIDENCE_EPSILON: Final = 1e-6


class Majority(MethodSettings, kind="majority", needs={Need.TEXTS, Need.ONE_TURN}):
    """1 for the answer that most give."""


def majority(
    answers: Sequence[str | None], voters: Sequence[str], set_to: Majority
) -> tuple[float, ...]:
    """1 for completions with the answer of most votes, 0 for others (TTRL, arXiv 2504.16084); of
    equal ones the answer that came first. A voter is a producer with one vote, divided among its
    answers. Completions without an answer have no vote and no reward."""
    votes = _votes(answers, voters)
    if not votes:
        return tuple(0.0 for _ in answers)
    lacking = {answer: -count for answer, count in votes.items()}
    best = next(each for each, count in lacking.items() if is_least(count, lacking.values()))
    return tuple(float(answer == best) for answer in answers)


class Distribution(
    MethodSettings, kind="distribution", needs={Need.TEXTS, Need.ENTROPY, Need.ONE_TURN}
):
    """By the answer's share of the votes, counted by certainty; rare sure ones gain."""

    share_min: Share = 0.0  # answers with a smaller share are worth nothing
    bonus: NonNegative = 0.1


def distribution(
    answers: Sequence[str | None],
    entropies: Sequence[float],
    voters: Sequence[str],
    set_to: Distribution,
) -> tuple[float, ...]:
    """p + bonus (1 - n) (1 - u), after DARE (arXiv 2601.21804): n the answer's share of votes, as
    `majority` counts them, u the mean entropy of its tokens within [0, 1], p ~ n / u."""
    votes = _votes(answers, voters)
    total = sum(votes.values())
    shares: dict[str, float] = {}
    doubts: dict[str, float] = {}
    for answer, count in votes.items():
        told = [e for e, each in zip(entropies, answers, strict=True) if each == answer]
        doubts[answer] = min(max(fmean(told), 0.0), 1.0)
        shares[answer] = count / total / (doubts[answer] + CONFIDENCE_EPSILON)
    for _ in range(2):  # all of them, then those that are left
        whole = sum(shares.values())
        shares = {a: s / whole for a, s in shares.items() if s / whole >= set_to.share_min}
    return tuple(
        shares[answer] + set_to.bonus * (1 - votes[answer] / total) * (1 - doubts[answer])
        if answer is not None and answer in shares
        else 0.0
        for answer in answers
    )


def _votes(answers: Sequence[str | None], voters: Sequence[str]) -> dict[str, float]:
    each = Counter(
        voter for voter, answer in zip(voters, answers, strict=True) if answer is not None
    )
    votes: dict[str, float] = {}
    for voter, answer in zip(voters, answers, strict=True):
        if answer is not None:
            votes[answer] = votes.get(answer, 0.0) + 1.0 / each[voter]
    return votes


class Flawed(MethodSettings, kind="flawed", needs={Need.TEXTS, Need.ONE_TURN}):
    """Right answers with a flaw on the way are worth less."""

    judge: JudgeName = "arithmetic"
    penalty: NonNegative = 1.0


def flawed(right: Sequence[bool], has_flaw: Sequence[bool], set_to: Flawed) -> tuple[float, ...]:
    """1 for right, -1 for wrong, less `penalty` for right ones in which a judge finds a flaw (FAPO,
    arXiv 2510.22543)."""
    return tuple(
        1.0 - set_to.penalty * flaw if is_right else -1.0
        for is_right, flaw in zip(right, has_flaw, strict=True)
    )


class CrossValue(MethodSettings, kind="cross_value", needs={Need.FEATURES}):
    """r less what a probe on the other completion's inner states expects."""

    ridge: Positive = 0.01
    width: Annotated[int, Ge(1), Le(128)] = 64  # numbers that states are projected to; ours
    kept: PositiveShare = 0.9  # of the weight of earlier pairs, each round; ours
    pairs_min: Count = 64  # before which the group's mean is expected; ours


def cross_value(rewards: tuple[float, float], expected: tuple[float, float]) -> tuple[float, float]:
    """Advantages of a pair (POISE, arXiv 2605.07579). `expected`: the OTHER completion's reward, as
    a ridge regression on earlier pairs predicts it from this one's inner states, cut to [0, 1]."""
    first, second = (min(max(each, 0.0), 1.0) for each in expected)
    return rewards[0] - second, rewards[1] - first
