"""Division of a budget of rollouts or tokens among tasks."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from statistics import fmean
from typing import Annotated, Final, Literal

from annotated_types import Ge, Gt, Le, Lt

from node.methods.checked import finite, whole
from node.methods.method import MethodSettings

STD_UNKNOWN: Final = 0.5  # of rewards of 0 and 1 the largest
PRICE_LOG: Final = 20.0  # the logarithm of a price lies within +- this
HALVINGS: Final = 60  # of an interval, after which doubles are exhausted


@dataclass(frozen=True, slots=True)
class XrpoAllocation(MethodSettings):
    """More rollouts where one more narrows most what is known of a task's mean reward."""

    kind: Literal["xrpo_allocation"] = "xrpo_allocation"
    doubt: Annotated[float, Gt(0), Lt(1)] = 0.05
    """The interval around a mean holds with probability 1 - doubt (alpha); not published."""
    bonus: Annotated[float, Ge(0)] = 1.0
    """How much it counts that a task has few rollouts (lambda); not published."""
    phases: Annotated[int, Ge(1), Le(64)] = 3
    rollouts_max: Annotated[int, Ge(1), Le(4_096)] = 512
    """Of one task; not published."""


@dataclass(frozen=True, slots=True)
class RolloutStatistics:
    """Statistics of a task's rewards."""

    rollouts: int = 0
    std: float = 0.0  # unbiased; of fewer than two rollouts it is not looked at


@lru_cache(maxsize=8_192)
def student_quantile(level: float, freedom: int) -> float:
    """The bound that Student's t of so many degrees of freedom stays within, on both sides, with
    probability `level`.

    Raises:
        ValueError: the level does not lie between 0 and 1, or there is no freedom.
    """
    whole(freedom, "degrees of freedom", 1)
    if not 0.0 < level < 1.0:
        raise ValueError(f"level {level}: not between 0 and 1")
    low, high = 0.0, math.pi / 2.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        low, high = (low, middle) if _student_within(middle, freedom) >= level else (middle, high)
    return math.sqrt(freedom) * math.tan((low + high) / 2.0)


def _student_within(angle: float, freedom: int) -> float:
    """P(|t| <= sqrt(freedom) tan(angle)), by the finite series for whole degrees of freedom."""
    cosine = math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for at in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (at - 1) / at
    within = math.sin(angle) * total
    return 2.0 / math.pi * (angle + within) if odd else within


def half_width(rollouts: int, std: float, doubt: float) -> float:
    """h(n) = t std / sqrt(n): the mean reward of n rollouts is known to within it. Infinite where
    there are fewer than two."""
    if rollouts < 2:
        return math.inf
    return student_quantile(1.0 - doubt, rollouts - 1) * std / math.sqrt(rollouts)


def rollout_priority(
    task: RolloutStatistics, rollouts: int, total: int, set_to: XrpoAllocation
) -> float:
    """Priority of one more rollout after `rollouts` of a task (XRPO): h(n) - h(n + 1) and the bonus
    lambda sqrt(log(1 + T) / n). Infinite below two rollouts."""
    if rollouts < 2:
        return math.inf
    std = task.std if task.rollouts > 1 else STD_UNKNOWN
    narrowed = half_width(rollouts, std, set_to.doubt) - half_width(rollouts + 1, std, set_to.doubt)
    return narrowed + set_to.bonus * math.sqrt(math.log1p(total) / rollouts)


def xrpo_allocation(
    tasks: Sequence[RolloutStatistics], budget: int, set_to: XrpoAllocation
) -> tuple[int, ...]:
    """Further rollouts for each task within a phase's budget (XRPO, arXiv 2510.06672), given one by
    one to the highest priority. Among equals, the task with fewer rollouts is first, then the
    earlier one. Deviations stay those of the phase's begin. Budget beyond all tasks' bounds stays
    unspent.

    Raises:
        ValueError: a negative budget, a negative number of rollouts, or a deviation that is
            negative or no number.
    """
    whole(budget, "budget")
    for task in tasks:
        whole(task.rollouts, "rollouts")
        if not 0.0 <= task.std < math.inf:
            raise ValueError(f"std {task.std}: not a deviation")
    total = sum(task.rollouts for task in tasks)
    more = [0] * len(tasks)
    queue = [
        (-rollout_priority(task, task.rollouts, total, set_to), task.rollouts, place)
        for place, task in enumerate(tasks)
        if task.rollouts < set_to.rollouts_max
    ]
    heapq.heapify(queue)
    for _ in range(budget):
        if not queue:
            break
        _, rollouts, place = heapq.heappop(queue)
        more[place] += 1
        if rollouts + 1 < set_to.rollouts_max:
            priority = rollout_priority(tasks[place], rollouts + 1, total, set_to)
            heapq.heappush(queue, (-priority, rollouts + 1, place))
    return tuple(more)


def phase_budgets(budget: int, set_to: XrpoAllocation) -> tuple[int, ...]:
    """A budget in as equal parts as can be, the larger ones first.

    Raises:
        ValueError: the budget is negative.
    """
    each, rest = divmod(whole(budget, "budget"), set_to.phases)
    return tuple(each + (phase < rest) for phase in range(set_to.phases))


@dataclass(frozen=True, slots=True)
class Duet(MethodSettings):
    """Rollouts and lengths of each task within a budget of tokens, by one price of a token."""

    kind: Literal["duet"] = "duet"
    budget_share: Annotated[float, Gt(0), Le(1)] = 0.5
    """Of the tokens that all rollouts would take."""
    rollouts_min: Annotated[int, Ge(1)] = 1
    rollouts_max: Annotated[int, Ge(1)] = 32
    tokens_min: Annotated[int, Ge(1)] = 32
    tokens_max: Annotated[int, Ge(1)] = 4_096
    halvings: Annotated[int, Ge(1), Le(HALVINGS)] = 10
    """Of the interval in which the price is looked for."""
    propensity_min: Annotated[float, Gt(0), Le(1)] = 0.05


@dataclass(frozen=True, slots=True)
class Spending:
    """The share of each task."""

    rollouts: tuple[int, ...]
    tokens: tuple[int, ...]  # the most of one rollout
    propensities: tuple[float, ...]  # by which what came of a task is divided


def duet(
    signals: Sequence[float], lengths: Sequence[float], full_tokens: float, set_to: Duet
) -> Spending:
    """Rollouts n = signal / sqrt(price length) and at most signal sqrt(length / price) tokens of
    each, both within bounds (DUET, arXiv 2605.08441). The price is the lowest one found at which
    sum(n length) stays within the budget; where even the fewest rollouts cost more, it is these.

    Args:
        signals: of each task, how far its gradients are spread.
        lengths: of each task, the tokens that a rollout is expected to take.
        full_tokens: what all tasks with all their rollouts would take.

    Raises:
        ValueError: a signal is below 0, a length below 1, or one of them no finite number;
            there are more of one than of the other; or bounds are the wrong way round.
    """
    if len(finite(signals, "signals")) != len(finite(lengths, "lengths")):
        raise ValueError(f"{len(signals)} signals and {len(lengths)} lengths")
    if any(each < 0.0 for each in signals) or any(each < 1.0 for each in lengths):
        raise ValueError("a signal below 0, or a length below 1")
    if set_to.rollouts_min > set_to.rollouts_max or set_to.tokens_min > set_to.tokens_max:
        raise ValueError("bounds the wrong way round")
    (full,) = finite([full_tokens], "full_tokens")
    low, high = -PRICE_LOG, PRICE_LOG
    for _ in range(set_to.halvings):
        middle = (low + high) / 2.0
        counts = _rollouts_at(math.exp(middle), signals, lengths, set_to)
        fits = sum(map(mul, counts, lengths)) <= set_to.budget_share * full
        low, high = (low, middle) if fits else (middle, high)
    price = math.exp(high)
    rollouts = _rollouts_at(price, signals, lengths, set_to)
    mean = fmean(rollouts) if rollouts else 1.0
    return Spending(
        rollouts,
        tuple(
            round(_within(signal * math.sqrt(length / price), set_to.tokens_min, set_to.tokens_max))
            for signal, length in zip(signals, lengths, strict=True)
        ),
        tuple(_within(each / mean, set_to.propensity_min, 1.0) for each in rollouts),
    )


def _rollouts_at(
    price: float, signals: Sequence[float], lengths: Sequence[float], set_to: Duet
) -> tuple[int, ...]:
    return tuple(
        round(_within(signal / math.sqrt(price * length), set_to.rollouts_min, set_to.rollouts_max))
        for signal, length in zip(signals, lengths, strict=True)
    )


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)
