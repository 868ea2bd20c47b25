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

from node.methods.checked import finite, probability, right_of, whole
from node.methods.filters import informative_probability
from node.methods.method import (
    NODE,
    Count,
    MethodSettings,
    Need,
    NonNegative,
    PositiveShare,
    Share,
)

STD_UNKNOWN: Final = 0.5  # of rewards of 0 and 1 the largest
PRICE_LOG: Final = 20.0  # the logarithm of a price lies within +- this
HALVINGS: Final = 60  # of an interval, after which doubles are exhausted


class XrpoAllocation(
    MethodSettings, kind="xrpo_allocation", roles=NODE, decides={"the number of completions"}
):
    """More rollouts where one more narrows most what is known of a task's mean reward."""

    first_share: PositiveShare = 0.5  # of a round's rollouts, alike for all tasks; ours

    # the interval around a mean holds with 1 - doubt (alpha); ours
    doubt: Annotated[float, Gt(0), Lt(1)] = 0.05
    bonus: NonNegative = 1.0  # for a task with few rollouts (lambda); ours
    phases: Annotated[int, Ge(1), Le(16)] = 3  # in which the others are given
    rollouts_max: Annotated[int, Ge(1), Le(4_096)] = 512  # of one task; ours


@dataclass(frozen=True, slots=True)
class RolloutStatistics:
    rollouts: int = 0
    std: float = 0.0  # unbiased; of fewer than two rollouts it is not looked at


@lru_cache(maxsize=8_192)
def student_quantile(level: float, freedom: int) -> float:
    """The bound that |t| of Student's t with so many degrees of freedom keeps with probability
    `level`."""
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
    """h(n) = t std / sqrt(n): the mean reward of n rollouts is known to within it; infinite below
    two."""
    if rollouts < 2:
        return math.inf
    return student_quantile(1.0 - doubt, rollouts - 1) * std / math.sqrt(rollouts)


def rollout_priority(
    task: RolloutStatistics, rollouts: int, total: int, set_to: XrpoAllocation
) -> float:
    """Priority of one more rollout after `rollouts` of a task (XRPO): h(n) - h(n + 1) + lambda
    sqrt(log(1 + T) / n). Infinite below two rollouts."""
    if rollouts < 2:
        return math.inf
    std = task.std if task.rollouts > 1 else STD_UNKNOWN
    narrowed = half_width(rollouts, std, set_to.doubt) - half_width(rollouts + 1, std, set_to.doubt)
    return narrowed + set_to.bonus * math.sqrt(math.log1p(total) / rollouts)


def xrpo_allocation(
    tasks: Sequence[RolloutStatistics], budget: int, set_to: XrpoAllocation
) -> tuple[int, ...]:
    """Further rollouts for each task within a phase's budget (XRPO, arXiv 2510.06672), given one by
    one to the highest priority; among equals the task with fewer rollouts, then the earlier one.
    Budget beyond all tasks' bounds stays unspent."""
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
    """A budget in as equal parts as can be, the larger ones first."""
    each, rest = divmod(whole(budget, "budget"), set_to.phases)
    return tuple(each + (phase < rest) for phase in range(set_to.phases))


class Duet(
    MethodSettings,
    kind="duet",
    needs={Need.LENGTHS, Need.LOGPROBS, Need.REVISITS, Need.REQUESTS},
    roles=NODE,
    decides={"the number of completions", "the length of completions"},
):
    """Rollouts and lengths of each task within a budget of tokens, by one price of a token."""

    budget_share: PositiveShare = 0.5  # of the tokens that all rollouts would take
    # 1 in the source, and of a single one nothing is learned; ours
    rollouts_min: Count = 2
    rollouts_max: Count = 32
    tokens_min: Count = 32  # both bounds are at most the run's max_new_tokens
    tokens_max: Count = 4_096
    halvings: Annotated[int, Ge(1), Le(HALVINGS)] = 10  # of the interval of prices
    propensity_min: PositiveShare = 0.05
    memory: Count = 16  # groups of a kind of task whose mean is kept; ours

    def __post_init__(self) -> None:
        if self.rollouts_min > self.rollouts_max or self.tokens_min > self.tokens_max:
            raise ValueError("bounds the wrong way round")


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
    sum(n length) is within `budget_share` of `full_tokens`, the cost of all rollouts of all tasks.

    `signals`: spread of each task's gradients. `lengths`: expected tokens of a rollout, at least 1.
    """
    if len(finite(signals, "signals")) != len(finite(lengths, "lengths")):
        raise ValueError(f"{len(signals)} signals and {len(lengths)} lengths")
    if any(each < 0.0 for each in signals) or any(each < 1.0 for each in lengths):
        raise ValueError("a signal below 0, or a length below 1")
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


# Settings that change with the steps of a run: least variance of a group, greatest length.


class VarianceCurriculum(MethodSettings, kind="variance_curriculum"):
    """A bound on the variance score of what is learned from: low at first, high later."""

    score_first: Share = 0.3  # least score of a group (kappa) in the first steps; ours
    score_later: Share = 0.8  # after them; ours
    steps_first: Annotated[int, Ge(0)] = 20  # ours


def variance_curriculum(step: int, set_to: VarianceCurriculum) -> float:
    """The least variance score of a group at a step, counted from 0 (VCRL, arXiv 2509.19803)."""
    is_first = whole(step, "step") < set_to.steps_first
    return set_to.score_first if is_first else set_to.score_later


class LengthSchedule(
    MethodSettings,
    kind="length_schedule",
    needs={Need.REQUESTS},
    decides={"the length of completions"},
):
    """The length of completions swings between two bounds, so that what was learned in many tokens
    is learned again in few."""

    # bounds; None: half of the run's max_new_tokens, and all of it, of which none is above
    tokens_min: Count | None = None
    tokens_max: Count | None = None
    period_steps: Annotated[int, Ge(2)] = 200  # from the longest to the longest again; ours
    cycles: Count = 3  # then the length stays the longest

    def __post_init__(self) -> None:
        if self.tokens_min and self.tokens_max and self.tokens_min > self.tokens_max:
            raise ValueError(f"tokens_min {self.tokens_min}: over tokens_max {self.tokens_max}")


def length_schedule(step: int, limit: int, set_to: LengthSchedule) -> int:
    """The most tokens of a completion at a step, counted from 0 (SIRI, arXiv 2509.25176): a cosine
    that begins and ends with the longest. `limit`: the run's; SIRI swings from it to a half."""
    most = min(limit, set_to.tokens_max or limit)
    least = min(most, set_to.tokens_min or -(-limit // 2))
    if whole(step, "step") >= set_to.cycles * set_to.period_steps:
        return most
    phase = step % set_to.period_steps / set_to.period_steps
    up = (1.0 + math.cos(2.0 * math.pi * phase)) / 2.0
    return round(least + (most - least) * up)


# The number of rollouts of a task, from its pass rate.

ROUNDING: Final = 1e-9  # what a quotient may lie above a whole number and still be that number
ROLLOUTS_MAX: Final = {"equal": 32, "hardness": 64}
SOLVED: Final = 0.5  # tasks that go this well get no more


class Dars(MethodSettings, kind="dars", roles=NODE, decides={"the number of completions"}):
    """More rollouts of hard tasks, so that their advantages sum up to what those of middling ones
    do."""

    treatment: Literal["equal", "hardness"] = "equal"  # `hardness`: the harder the more
    over_std: bool = False  # advantages are divided by the group's standard deviation
    rollouts_max: Count | None = None  # of one task; None: 32 if equal, 64 by hardness


def dars(right: int, rollouts: int, set_to: Dars) -> int:
    """Further rollouts of a task after its first ones (DARS, arXiv 2508.13755): as many as lift N S
    to the aim. S = 2 a (1 - a), or 2 sqrt(a (1 - a)) where advantages are over the standard
    deviation; a is the share of right ones, that of half a rollout where none was right."""
    right_of(right, rollouts)
    share = (right or 0.5) / rollouts
    if share >= SOLVED:
        return 0
    each = 2.0 * (math.sqrt(share * (1.0 - share)) if set_to.over_std else share * (1.0 - share))
    aim = rollouts * (1.0 if set_to.over_std else 0.5)
    if set_to.treatment == "hardness":
        aim *= 2.0 * (1.0 - share)
    wanted = math.ceil((aim - rollouts * each) / each - ROUNDING)
    most = set_to.rollouts_max or ROLLOUTS_MAX[set_to.treatment]
    return max(0, min(wanted, most - rollouts))


class Brorl(MethodSettings, kind="brorl", decides={"the number of completions"}):
    """As many rollouts of a task as make it likely that it teaches."""

    by: Literal["informative", "mass"] = "informative"  # rewards differ, or a right answer was seen
    chance: Annotated[float, Gt(0), Lt(1)] = 0.9  # ours
    rollouts_min: Count | None = None  # None: G; 16 in the source
    rollouts_max: Annotated[int, Ge(1), Le(65_536)] = 512

    def __post_init__(self) -> None:
        if (self.rollouts_min or 1) > self.rollouts_max:
            raise ValueError(f"rollouts_min {self.rollouts_min}: over {self.rollouts_max}")


def unseen_mass(success: float, rollouts: int) -> float:
    """(1 - p)^N: how likely none of N rollouts finds what is right."""
    return float((1.0 - probability(success, "success")) ** rollouts)


def brorl(success: float, group_size: int, set_to: Brorl) -> int:
    """The least number of rollouts, within the bounds, with which the task teaches with probability
    `chance` (the widths of BroRL, arXiv 2510.01180, are 16 to 512 for all tasks alike).
    `group_size`: G, which is the least unless the settings say so."""
    high = set_to.rollouts_max
    low = min(high, set_to.rollouts_min or group_size)
    if probability(success, "success") in (0.0, 1.0):
        return low
    while low < high:
        middle = (low + high) // 2
        told = (
            informative_probability(success, middle)
            if set_to.by == "informative"
            else 1.0 - unseen_mass(success, middle)
        )
        low, high = (low, middle) if told >= set_to.chance else (middle + 1, high)
    return low
