"""Selection of the groups, completions and tokens that teach most."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import variance as unbiased_variance
from typing import Annotated, Final

from annotated_types import Ge, Le

from node.methods.advantages import is_flat
from node.methods.checked import finite, probability, whole
from node.methods.groups import Advantages
from node.methods.method import (
    NODE,
    Count,
    MethodSettings,
    Need,
    NonNegative,
    Positive,
    PositiveShare,
    Share,
)
from swarm.rollouts import ScoredGroup

ROUNDING: Final = 1e-9  # by which a score may lie below what it is


class Extremes(MethodSettings, kind="extremes"):
    """The largest advantages and the most negative ones, and of them the tokens of high entropy,
    where the engine records entropies."""

    steps: Count = 200  # until the last shares; ours
    samples_first: PositiveShare = 1.0  # share of completions kept at first; ours
    samples_last: PositiveShare = 0.5  # in the end; ours
    tokens_first: PositiveShare = 1.0  # share of their tokens kept at first; ours
    tokens_last: PositiveShare = 0.2  # in the end; below 0.2 in published runs


CompletionPlace = tuple[int, int]
"""Of a group in its batch, and of a completion in its group."""


def relaxed(first: float, last: float, progress: float) -> float:
    """A value that moves linearly from `first` to `last` while `progress` goes from 0 to 1."""
    if math.isnan(progress):
        raise ValueError("progress: no number")
    done = min(max(progress, 0.0), 1.0)
    return (1.0 - done) * first + done * last


def extremes(
    advantages: Advantages, progress: float, set_to: Extremes
) -> tuple[CompletionPlace, ...]:
    """Places of the completions to learn from (D3S, arXiv 2509.22115): of all groups together those
    that maximise the variance of advantages, which stay as they are."""
    told = sum(value is not None for row in advantages for value in row)
    share = relaxed(set_to.samples_first, set_to.samples_last, progress)
    return most_varied(advantages, _share_of(share, told))


def most_varied(advantages: Advantages, count: int) -> tuple[CompletionPlace, ...]:
    """Places of the `count` completions whose advantages have the largest variance; all where there
    are not more. As the variance is convex in each value, these are some of the smallest and some
    of the largest. Of equally good choices it is the most balanced."""
    told = [
        (value, (group, at))
        for group, row in enumerate(advantages)
        for at, value in enumerate(row)
        if value is not None
    ]
    values = sorted(finite((value for value, _ in told), "advantages"))
    count = min(whole(count, "count"), len(values))
    if not count:
        return ()
    told.sort()
    lowest = _lowest(values, count)
    chosen = told[:lowest] + told[len(told) - (count - lowest) :]
    return tuple(sorted(place for _, place in chosen))


def _lowest(values: Sequence[float], count: int) -> int:
    """The number of smallest values among the `count` values that vary most."""
    middle = math.fsum(values) / len(values)  # without it, squares would drown what differs
    far = [middle - values[0], values[-1] - middle]
    if count == 1:
        return int(far[0] - far[1] > ROUNDING * sum(far))
    sums, squares = [0.0], [0.0]
    for value in values:
        sums.append(sums[-1] + (value - middle))
        squares.append(squares[-1] + (value - middle) ** 2)
    found = []
    for lowest in range(count + 1):
        cut = len(values) - (count - lowest)
        total = sums[lowest] + sums[-1] - sums[cut]
        square = squares[lowest] + squares[-1] - squares[cut]
        found.append(square / count - (total / count) ** 2)
    least = max(found) - ROUNDING * sum(far) ** 2
    good = [lowest for lowest, spread in enumerate(found) if spread >= least]
    return min(good, key=lambda lowest: abs(2 * lowest - count))


def deciding_tokens(
    advantages: Sequence[float],
    entropies: Sequence[Sequence[float]],
    progress: float,
    set_to: Extremes,
) -> tuple[tuple[bool, ...], ...]:
    """Mask of the tokens to learn from, by completion: those with the highest |advantage| entropy
    of all (D3S), from advantages (N,) and entropies (N, tokens) in nats."""
    worth = [
        (abs(advantage) * entropy, (row, at))
        for row, (advantage, each) in enumerate(
            zip(finite(advantages, "advantages"), entropies, strict=True)
        )
        for at, entropy in enumerate(finite(each, "entropies"))
    ]
    share = relaxed(set_to.tokens_first, set_to.tokens_last, progress)
    best = sorted(worth, key=lambda each: -each[0])[: _share_of(share, len(worth))]
    kept = {place for _, place in best}
    return tuple(
        tuple((row, at) in kept for at in range(len(each))) for row, each in enumerate(entropies)
    )


def _share_of(share: float, whole_count: int) -> int:
    return math.ceil(share * whole_count - 1e-9)  # a product may lie a little above a whole number


# Groups whose rewards differ, and how many more tasks it takes to have enough of them.


class ZeroAdvantage(MethodSettings, kind="zero_advantage"):
    """Groups whose rewards are all equal are left out: nothing is learned of them."""


def zero_advantage(groups: Sequence[ScoredGroup], set_to: ZeroAdvantage) -> tuple[int, ...]:
    """Places of the groups whose rewards differ (DAPO, arXiv 2503.14476)."""
    return tuple(place for place, group in enumerate(groups) if not is_flat(group.rewards))


def informative_probability(success: float, rollouts: int) -> float:
    """1 - p^G - (1 - p)^G: how likely the rewards of G rollouts differ, each right with probability
    p."""
    whole(rollouts, "rollouts", 1)
    rarer = min(probability(success, "success"), 1.0 - success)
    if rollouts == 1 or rarer == 0.0:
        return 0.0
    # In this order a tiny p is not lost beside 1.
    return max(0.0, -math.expm1(rollouts * math.log1p(-rarer)) - rarer**rollouts)


class DynamicSampling(MethodSettings, kind="dynamic_sampling", roles=NODE):
    """Groups without advantage are left out, and others are generated in their place."""

    # rounds of generation for a batch, the first included; ours
    rounds_max: Annotated[int, Ge(1), Le(17)] = 10
    prompts_max: Count = 1_024  # in one round; ours


def dynamic_sampling(
    wanted: int, kept: int, generated: int, rounds: int, set_to: DynamicSampling
) -> int:
    """Prompts of the next round of generation, so that `wanted` groups pass `zero_advantage` (DAPO,
    arXiv 2503.14476), after `rounds` in which `kept` of `generated` groups passed. 0: there are
    enough, or the rounds are over."""
    for value, what in ((wanted, "wanted"), (kept, "kept"), (rounds, "rounds")):
        whole(value, what)
    whole(generated, "generated", kept)
    missing = wanted - kept
    if missing <= 0 or rounds >= set_to.rounds_max:
        return 0
    # One more of each kind than was seen: no share is taken for 0, and at first it is a half.
    return min(set_to.prompts_max, -(-missing * (generated + 2) // (kept + 1)))


# Preference for foreign groups on tasks that a node hardly solves itself.


class ByNeed(MethodSettings, kind="need", needs={Need.PEERS}, roles=NODE):
    """Others' groups are drawn the more often, the rarer the node solves such tasks itself."""

    # weight of a group on tasks that the node always solves; 1 if never; ours
    floor: PositiveShare = 0.1
    # groups drawn uniformly for each wanted one, before the draw by need; ours
    looked_at: Annotated[int, Ge(1), Le(16)] = 4


def by_need(passes: Sequence[float], rng: Random, set_to: ByNeed) -> list[int]:
    """All places of `passes` in the order of a draw without replacement, each in proportion to 1 -
    p, at least `floor` (Efraimidis and Spirakis, 2006). p: the node's own pass rate on tasks such
    as the group's."""
    weights = [max(set_to.floor, 1.0 - probability(each, "pass rate")) for each in passes]
    keys = [rng.expovariate(weight) for weight in weights]
    return sorted(range(len(keys)), key=keys.__getitem__)


# Less for completions that come near the bound on their length.


class Overlong(MethodSettings, kind="overlong", needs={Need.LENGTHS}):
    """Completions lose the more, the deeper they reach into the last tokens that they may have."""

    tokens_max: Count | None = None  # None: the run's max_new_tokens
    # last tokens, in which the penalty grows; None: a fifth of tokens_max, as in the source
    buffer: Count | None = None
    factor: NonNegative = 1.0  # penalty of the longest

    def __post_init__(self) -> None:
        if self.buffer and self.tokens_max and self.buffer > self.tokens_max:
            raise ValueError(f"buffer {self.buffer}: over tokens_max {self.tokens_max}")


def overlong(lengths: Sequence[int], limit: int, set_to: Overlong) -> tuple[float, ...]:
    """Reward offset of each completion (DAPO, arXiv 2503.14476): 0 up to tokens_max - buffer
    tokens, then linear down to -factor at `tokens_max` and beyond. `limit`: the run's."""
    most = set_to.tokens_max or limit
    buffer = min(most, set_to.buffer or -(-most // 5))
    return tuple(
        0.0 - set_to.factor * min(1.0, max(0, whole(each, "length") - (most - buffer)) / buffer)
        for each in lengths
    )


# Groups whose rewards vary enough, and a bank of tasks whose did.


class Variance(MethodSettings, kind="variance"):
    """Groups whose rewards vary enough; the places of others go to tasks of a bank."""

    score_min: Share = 0.3  # of a group, unless `variance_curriculum` has set another; ours
    momentum: Share = 0.9  # of a task's score in the bank; ours
    # tasks in the bank, those with the highest scores; ours
    bank_max: Annotated[int, Ge(0), Le(8_192)] = 1_024
    reward_range: Positive = 1.0  # largest possible reward less the smallest


@dataclass(frozen=True, slots=True)
class VarianceChoice:
    """The selection from a batch."""

    kept: tuple[int, ...]  # places of groups that are learned from
    recalled: tuple[str, ...]  # tasks of the bank that take the places of others, the best first
    bank: Mapping[str, float]  # without these


def reward_score(rewards: Sequence[float], reward_range: float = 1.0) -> float:
    """The variance of a group's rewards over that of as many at both ends of the range, which is
    the largest (VCRL, arXiv 2509.19803), at most 1."""
    if not reward_range > 0.0:
        raise ValueError(f"reward_range {reward_range}: not above 0")
    if is_flat(rewards):
        return 0.0
    count = len(rewards)
    most = _largest(count) / (count * (count - 1)) * reward_range**2
    return min(1.0, unbiased_variance(rewards) / most)


def _largest(rollouts: int) -> int:
    """The largest k (G - k) of G rollouts, k of them right."""
    return rollouts // 2 * (rollouts - rollouts // 2)


def variance(
    groups: Sequence[ScoredGroup],
    score_min: float,
    bank: Mapping[str, float],
    set_to: Variance,
    wanted: int = 0,
) -> VarianceChoice:
    """Keep groups with a score of at least `score_min`, and put their tasks into the bank (scores
    by task) with a score that moves slowly (VCRL). Each other group is replaced by the best task of
    the bank that is not in this batch, to be rolled out again; of equal scores the first by name.
    Where `wanted` groups were to be had, so are those that are missing."""
    probability(score_min, "score_min")
    scores = [reward_score(group.rewards, set_to.reward_range) for group in groups]
    kept = tuple(
        place for place, score in enumerate(scores) if score >= score_min - ROUNDING and score > 0.0
    )
    here = {group.prompt for group in groups}
    others = sorted(task for task in bank if task not in here)
    others.sort(key=lambda task: -bank[task])
    recalled = tuple(others[: max(len(groups), wanted) - len(kept)])
    known = dict(bank)
    for task in recalled:
        del known[task]
    for prompt, score in sorted(
        (groups[place].prompt, scores[place]) for place in kept if groups[place].prompt
    ):
        before = known.get(prompt, score)
        known[prompt] = set_to.momentum * before + (1.0 - set_to.momentum) * score
    best = sorted(sorted(known), key=lambda task: -known[task])[: set_to.bank_max]
    return VarianceChoice(kept, recalled, {task: known[task] for task in best})
