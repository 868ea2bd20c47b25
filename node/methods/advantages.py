"""Advantages of completions from the rewards of their groups.

A group whose rewards are all equal has exactly zero: rounding in nearly equal rewards would be
blown up a millionfold."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import ceil, sqrt
from statistics import fmean, median, median_low, pstdev, stdev
from types import MappingProxyType
from typing import Annotated, Final, Literal

from annotated_types import Ge

from node.methods.groups import Advantages, by_source, by_task, lengths, mean_logprobs
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
from swarm.rollouts import REWARD_SPREAD_MIN, ScoredGroup, informative

STD_EPSILON: Final = 1e-6


def is_flat(rewards: Sequence[float]) -> bool:
    """True if a group's rewards are all equal; ValueError if one is not finite."""
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"rewards {tuple(rewards)}: not all are finite")
    return len(rewards) < 2 or not informative(rewards)


def grpo_advantages(rewards: Sequence[float]) -> tuple[float, ...]:
    """(r - mean) / (std + 1e-6), std unbiased (GRPO, arXiv 2402.03300)."""
    if is_flat(rewards):
        return tuple(0.0 for _ in rewards)
    mean, scale = fmean(rewards), stdev(rewards) + STD_EPSILON
    return tuple((reward - mean) / scale for reward in rewards)


def centred(rewards: Sequence[float], baseline: float) -> tuple[float, ...]:
    """r - baseline, and zeros where the rewards are equal."""
    if is_flat(rewards):
        return tuple(0.0 for _ in rewards)
    return tuple(reward - baseline for reward in rewards)


class Grpo(MethodSettings, kind="grpo"):
    """(r - mean) / std of the group."""


def grpo(groups: Sequence[ScoredGroup], set_to: Grpo) -> Advantages:
    """`grpo_advantages` of each group."""
    return [grpo_advantages(group.rewards) for group in groups]


class DrGrpo(MethodSettings, kind="dr_grpo"):
    """r - mean of the group, without its scale: hard and easy tasks weigh by what they teach."""


def dr_grpo(groups: Sequence[ScoredGroup], set_to: DrGrpo) -> Advantages:
    """r - mean (Dr.GRPO, arXiv 2503.20783). Its mean over tokens is the loss' to choose."""
    return [centred(group.rewards, fmean(group.rewards or (0.0,))) for group in groups]


class Rloo(MethodSettings, kind="rloo"):
    """r less the mean of the group's others."""


def rloo(groups: Sequence[ScoredGroup], set_to: Rloo) -> Advantages:
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


class ReinforcePlusPlus(MethodSettings, kind="reinforce_pp"):
    """r - mean of the group, over the spread of the whole batch."""


def reinforce_pp(groups: Sequence[ScoredGroup], set_to: ReinforcePlusPlus) -> Advantages:
    """r - mean of the group, whitened over each source's groups (REINFORCE++ with baseline, arXiv
    2501.03262). Groups without a spread stay at zero and have no part in the scale."""
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


class Opo(MethodSettings, kind="opo", needs={Need.LENGTHS}):
    """r less the mean reward by length: the baseline of least variance where tokens weigh alike."""


def opo(groups: Sequence[ScoredGroup], set_to: Opo) -> Advantages:
    """r - sum(length r) / sum(length) (OPO, arXiv 2505.23585)."""
    found: Advantages = []
    for group in groups:
        counts = lengths(group)
        weighted = sum(n * each for n, each in zip(counts, group.rewards, strict=True))
        found.append(centred(group.rewards, weighted / (sum(counts) or 1)))
    return found


class PassK(MethodSettings, kind="pass_k"):
    """The best completion alone counts, by its lead over the second best."""

    over_std: bool = False


def pass_k(groups: Sequence[ScoredGroup], set_to: PassK) -> Advantages:
    """The best gets its lead over the second, the others nothing (verl's `grpo_passk`). `over_std`:
    over the group's standard deviation."""
    found: Advantages = []
    for group in groups:
        values = [0.0] * len(group.rewards)
        if not is_flat(group.rewards):
            first, second = sorted(group.rewards, reverse=True)[:2]
            scale = stdev(group.rewards) + STD_EPSILON if set_to.over_std else 1.0
            values[group.rewards.index(first)] = (first - second) / scale
        found.append(tuple(values))
    return found


# Baselines that few outliers do not move: medians in place of means.

MAD_EPSILON: Final = 1e-3


class McGrpo(MethodSettings, kind="mc_grpo"):
    """r less the median of the group, which is left out itself: for small groups."""

    # `mad`, as published, makes a thousand of 1 where most are equal
    scale: Literal["none", "mad", "std"] = "std"
    advantage_max: Positive = 5.0


def mc_grpo(groups: Sequence[ScoredGroup], set_to: McGrpo) -> Advantages:
    """(r - lower median) / scale, within +-`advantage_max`; one completion that is the median is
    left out (MC-GRPO, arXiv 2601.22582). Zeros in groups of one or two."""
    found: Advantages = []
    for group in groups:
        rewards = group.rewards
        if is_flat(rewards) or len(rewards) < 3:
            found.append(tuple(0.0 for _ in rewards))
            continue
        middle = median_low(rewards)
        scale = 1.0
        if set_to.scale == "mad":
            scale = median_low([abs(each - middle) for each in rewards]) + MAD_EPSILON
        elif set_to.scale == "std":
            scale = stdev(rewards) + STD_EPSILON
        most = set_to.advantage_max
        values = [max(-most, min(most, (each - middle) / scale)) for each in rewards]
        left_out = rewards.index(middle)
        found.append(tuple(None if at == left_out else v for at, v in enumerate(values)))
    return found


def is_least(value: float, values: Iterable[float]) -> bool:
    """True if it is the least of the values but for rounding."""
    return value - min(values) <= REWARD_SPREAD_MIN


class Gapo(MethodSettings, kind="gapo"):
    """r less the median of where rewards are densest: for shares, with outliers."""

    window_share: PositiveShare = 0.5  # of the rewards; of equally dense windows the lowest


def gapo(groups: Sequence[ScoredGroup], set_to: Gapo) -> Advantages:
    """(r - Q) / (sqrt(sum (r - Q)^2 / (G - 1)) + 1e-6), Q the median of the densest window (GAPO,
    arXiv 2510.21830)."""
    found: Advantages = []
    for group in groups:
        rewards = group.rewards
        if is_flat(rewards):
            found.append(tuple(0.0 for _ in rewards))
            continue
        ordered = sorted(rewards)
        size = ceil(len(ordered) * set_to.window_share)
        widths = [last - first for first, last in zip(ordered, ordered[size - 1 :], strict=False)]
        begin = next(at for at, width in enumerate(widths) if is_least(width, widths))
        base = median(ordered[begin : begin + size])
        spread = sqrt(sum((each - base) ** 2 for each in rewards) / (len(rewards) - 1))
        found.append(tuple((each - base) / (spread + STD_EPSILON) for each in rewards))
    return found


# Advantages of what a completion is made of: its turns, or its answers to a task's parts.


class TwoLevels(MethodSettings, kind="two_levels", needs={Need.TURNS}, roles=NODE):
    """A turn's advantage over others' same turn, and its transcript's over others."""

    discount: Share = 0.5
    of_transcript: NonNegative = 1.0
    of_turn: NonNegative = 1.0


def discounted(
    rewards: Sequence[float], followed: Sequence[bool], discount: float
) -> tuple[float, ...]:
    """Returns by turn (UI-S1, arXiv 2509.11543): a turn's reward, and the discounted return of the
    next one if the turn `followed` what was right."""
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
    """Advantages of each turn of each transcript (UI-S1, arXiv 2509.11543): its return less the
    mean at its place, and its transcript's mean reward less that of all turns. A turn that no other
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


class SubProblems(MethodSettings, kind="sub_problems", needs={Need.TURNS}, roles=NODE):
    """Each part of an answer against others' same part."""

    over_std: bool = True


def sub_problems(right: Sequence[Sequence[bool]], set_to: SubProblems) -> list[tuple[float, ...]]:
    """Advantages of each of K parts of each completion (SCRL, arXiv 2605.22074). A part counts
    while all before it are right, and is compared with others at its place."""
    if len({len(each) for each in right}) > 1:
        raise ValueError("sub_problems: completions have unlike numbers of parts")
    rewards = [[float(all(each[: at + 1])) for at in range(len(each))] for each in right]
    columns = list(zip(*rewards, strict=True))
    of_column = [
        grpo_advantages(column) if set_to.over_std else centred(column, fmean(column))
        for column in columns
    ]
    return [tuple(column[at] for column in of_column) for at in range(len(right))]


# More for right answers that are rare: by how unlikely they were, or by how few are of a kind.

PASSED = 1.0  # the reward of a right answer


class Novelty(MethodSettings, kind="novelty", needs={Need.LOGPROBS}):
    """GRPO, and more for right completions that were less likely than their group."""

    strength: NonNegative = 2.5
    share_max: NonNegative = 0.5  # largest gain, as a share of the advantage


def novelty(groups: Sequence[ScoredGroup], set_to: Novelty) -> Advantages:
    """A + min(max(strength (1 - e), 0), share_max A) of right completions, e = exp(mean log-prob -
    the group's mean) (XRPO, arXiv 2510.06672). Groups without known log-probs get A."""
    found: Advantages = []
    for group in groups:
        values = grpo_advantages(group.rewards)
        logs = mean_logprobs(group)
        if logs:
            middle = fmean(logs)
            values = tuple(
                value + min(max(set_to.strength * (1.0 - math.exp(min(log - middle, 20.0))), 0.0),
                            set_to.share_max * value)
                if reward == PASSED and value > 0
                else value
                for value, reward, log in zip(values, group.rewards, logs, strict=True)
            )  # fmt: skip
        found.append(values)
    return found


class Uniqueness(MethodSettings, kind="uniqueness", needs={Need.TEXTS}):
    """GRPO, and less for right completions of which there are many of a kind."""

    strength: NonNegative = 1.0


def uniqueness(
    groups: Sequence[ScoredGroup],
    set_to: Uniqueness,
    kind_of: Callable[[str], Hashable] = lambda text: " ".join(text.split()),
) -> Advantages:
    """A / f^strength of right completions, f the number of right ones of their kind
    (uniqueness-aware RL, arXiv 2601.08763, where a model sorts them). Here a kind is a text but for
    blanks."""
    found: Advantages = []
    for group in groups:
        values = grpo_advantages(group.rewards)
        kinds = [kind_of(each.text) for each in group.group.completions]
        counts = Counter(
            kind for kind, reward in zip(kinds, group.rewards, strict=True) if reward == PASSED
        )
        found.append(
            tuple(
                value / counts[kind] ** set_to.strength if reward == PASSED else value
                for value, reward, kind in zip(values, group.rewards, kinds, strict=True)
            )
        )
    return found


# Advantages where one task was asked in several ways, or by several nodes.

WHITEN_EPSILON: Final = 1e-5
BARE: Final = ""  # the context of a completion to the bare prompt


class Contexts(MethodSettings, kind="contexts", needs={Need.CONTEXTS}):
    """r - mean(context) + between (mean(context) - mean(all))."""

    # weight of the gap between contexts; 0: each source has a baseline of its own
    between: NonNegative = 1.1


def contexts(groups: Sequence[ScoredGroup], set_to: Contexts) -> Advantages:
    """(r - mean of context) + between (mean of context - mean of all), whitened over the task's
    completions (NudgeRL, arXiv 2605.15726). A context is a source and a hint; bare completions of
    this node are measured against all. Groups of one prompt are one task."""
    found: Advantages = [()] * len(groups)
    for places in by_task(groups):
        rewards = [each for at in places for each in groups[at].rewards]
        if is_flat(rewards):
            values = [0.0] * len(rewards)
        else:
            keys = [
                (groups[at].source, context)
                for at in places
                for context in groups[at].contexts or (BARE,) * len(groups[at].rewards)
            ]
            raw = _raw(rewards, keys, set_to.between)
            mean, scale = fmean(raw), pstdev(raw) + WHITEN_EPSILON
            values = [(each - mean) / scale for each in raw]
        rest = iter(values)
        for at in places:
            found[at] = tuple(next(rest) for _ in groups[at].rewards)
    return found


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


OWN: Final = ""  # the source of this node's groups
CAPABILITY_MIN: Final = 1e-8
NOBODY: Final[Mapping[str, float]] = MappingProxyType({})


class Hacpo(MethodSettings, kind="hacpo", needs={Need.PEERS}):
    """Against all who tried the task, each by its mean reward lately beside this node's."""

    rounds: Count = 5  # that a capability is a mean of
    weight_max: Annotated[float, Ge(1)] = 10.0  # of one capability over another, either way


def hacpo(
    groups: Sequence[ScoredGroup], set_to: Hacpo, capability: Mapping[str, float] = NOBODY
) -> Advantages:
    """(r - mu) / (std + 1e-6) over all completions of a task, mu the mean of w(own, source) r, and
    those of others times w(source, own) (HACPO, arXiv 2603.02604). w(a, b) is a's capability over
    b's, within 1 / `weight_max` and `weight_max`; 1 where one is unknown. With mu > 1 the baseline
    is the mean of own rewards, and equal rewards give zeros.

    The paper has two agents on the same tasks. Here any number may have tried a task. One that this
    node did not try, or it alone, has the plain mean. Own completions keep the weight 1.
    """

    def weight(one: str, other: str) -> float:
        if one not in capability or other not in capability:
            return 1.0
        lead = max(capability[one], CAPABILITY_MIN) / max(capability[other], CAPABILITY_MIN)
        return min(max(lead, 1.0 / set_to.weight_max), set_to.weight_max)

    found: Advantages = [()] * len(groups)
    for places in by_task(groups):
        of_task = [groups[at] for at in places]
        rewards = [each for group in of_task for each in group.rewards]
        own = [each for group in of_task if group.source == OWN for each in group.rewards]
        base = fmean(rewards) if rewards else 0.0
        if 0 < len(own) < len(rewards):
            base = fmean(weight(OWN, g.source) * each for g in of_task for each in g.rewards)
            base = fmean(own) if base > 1.0 else base
        scale = math.inf if is_flat(rewards) else stdev(rewards) + STD_EPSILON
        for at in places:
            factor = weight(groups[at].source, OWN)
            found[at] = tuple(factor * (each - base) / scale for each in groups[at].rewards)
    return found
