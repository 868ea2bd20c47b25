"""Methods that change how completions are generated."""

import math
from collections.abc import Collection, Hashable, Sequence
from random import Random
from typing import Annotated, Final

from annotated_types import Ge, Gt, Le, Lt

from node.methods.checked import finite, probability, whole
from node.methods.method import (
    NODE,
    Count,
    MethodSettings,
    Need,
    Positive,
    PositiveShare,
    Share,
)

SAMPLING: Final = ("how tokens are sampled",)  # of which one method alone decides
LOOK_AHEAD_MAX: Final = 512  # the time to compare grows with its square


class Branching(
    MethodSettings,
    kind="branching",
    needs={Need.RUNNERS_UP, Need.BEGINNINGS, Need.ONE_TURN},
    roles=NODE,
    decides=SAMPLING,
):
    """A rollout branches where two tokens are almost as likely; a branch that agrees is cut."""

    second_min: Annotated[float, Ge(0), Le(0.5)] = 0.15  # probability of the second token
    lead_max: PositiveShare = 0.25  # of the first token's probability
    distance_min: Share = 0.4  # share of differing tokens below which a branch is cut
    look_ahead: tuple[int, ...] = (20, 30, 50)  # tokens after which a branch is looked at
    leaves_max: Count = 8  # of one tree; ours
    tokens_max: Count = 1_024  # no branch after so many tokens
    # (first step, share of rollouts that are trees)
    tree_shares: tuple[tuple[int, float], ...] = ((0, 1.0), (100, 0.75), (200, 0.5), (300, 0.25))


def branching(first: float, second: float, token: int, leaves: int, set_to: Branching) -> bool:
    """True if a rollout branches (LATR, arXiv 2510.24302) at a token, from the probabilities of the
    `first` and `second` likeliest, the number of the token, and the leaves so far."""
    if probability(second, "second") > probability(first, "first") or first + second > 1.0 + 1e-6:
        raise ValueError(f"{first} and {second}: not the two likeliest of one distribution")
    has_room = whole(token, "token") < set_to.tokens_max and (
        whole(leaves, "leaves") < set_to.leaves_max
    )
    return has_room and second > set_to.second_min and first - second < set_to.lead_max


def edit_distance(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Levenshtein distance, in time of the product of the lengths."""
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
    """True if a branch repeats its parent (LATR): too small a share of the tokens after they parted
    differs. Asked at the lengths of `look_ahead`, each from 1 to 512."""
    if not all(1 <= each <= LOOK_AHEAD_MAX for each in set_to.look_ahead):
        raise ValueError(f"look_ahead {set_to.look_ahead}: not within 1 and {LOOK_AHEAD_MAX}")
    if len(branch) not in set_to.look_ahead:
        return False
    differing = edit_distance(parent[: len(branch)], branch)
    return differing / len(branch) < set_to.distance_min


def tree_share(step: int, set_to: Branching) -> float:
    """The share of rollouts that are trees at a step, counted from 0."""
    whole(step, "step")
    begun = [each for each in sorted(set_to.tree_shares) if each[0] <= step]
    return probability(begun[-1][1], "tree share") if begun else 0.0


# Noise in a policy's weights, so that it tries what it would not.


class WeightNoise(MethodSettings, kind="noise", needs={Need.NOISE}, roles=NODE, decides=SAMPLING):
    """Noise that shrinks by stages is added to the scales of normalisation layers."""

    sigma_first: Positive = 1e-2  # standard deviation in the first stage with noise
    sigma_last: Positive = 1e-4  # in the last stage
    stages: Annotated[int, Ge(1), Le(10_000)] = 10  # of equal lengths; the first is without noise
    steps: Count = 500  # of all stages; ours


def stage_noise(stage: int, set_to: WeightNoise) -> float:
    """The standard deviation in a stage, counted from 0 (QeRL, arXiv 2510.11696): 0 in stage 0,
    then from `sigma_first` to `sigma_last` by equal factors."""
    if not 0 <= stage < set_to.stages:
        raise ValueError(f"stage {stage} of {set_to.stages}")
    if stage == 0:
        return 0.0
    factors = max(1, set_to.stages - 2)
    return float(
        set_to.sigma_first * (set_to.sigma_last / set_to.sigma_first) ** ((stage - 1) / factors)
    )


def noise(step: int, steps: int, set_to: WeightNoise) -> float:
    """The standard deviation at a step, counted from 0, of a run of `steps`; that of the last stage
    from the run's end on."""
    whole(steps, "steps", 1)
    return stage_noise(min(set_to.stages - 1, whole(step, "step") * set_to.stages // steps), set_to)


# Rollouts that are given up early, so that right and wrong ones are left in equal parts.

SLOPE_MAX: Final = 500.0  # at which a difference of 1 % is as good as certain
HALVINGS: Final = 50
ROLLOUTS_MAX: Final = 1_024  # at once: the time grows by HALVINGS^2 for each


class Pruning(
    MethodSettings,
    kind="pruning",
    needs={Need.HIDDEN, Need.BEGINNINGS, Need.ONE_TURN},
    roles=NODE,
    decides=SAMPLING,
):
    """Each rollout survives with a probability that depends on its chance to come out right."""

    kept_share: PositiveShare = 0.5  # expected share of rollouts that go on (kappa)
    # expected share of right ones among these (rho)
    positive_share: Annotated[float, Gt(0), Lt(1)] = 0.5
    # least probability to go on; without one, wrong predictions are never found out
    spared: Annotated[float, Ge(0), Lt(1)] = 0.05
    uniform_steps: Annotated[int, Ge(0)] = 20  # steps before predictions are trusted
    # share of a rollout's limit after which it is judged; ours, for 512 tokens
    look_at: Annotated[float, Gt(0), Lt(1)] = 0.25


def pruning(chances: Sequence[float], step: int, set_to: Pruning) -> tuple[float, ...]:
    """The probability that each rollout goes on (ARRoL, arXiv 2603.24840), from its calibrated
    `chances` to come out right and the step, counted from 0. A result is divided by it.

    The paper's two expectations fit many choices; this one is that of the largest entropy: logistic
    in the chance."""
    for each in chances:
        probability(each, "chance")
    if len(chances) > ROLLOUTS_MAX:
        raise ValueError(f"{len(chances)} rollouts: over {ROLLOUTS_MAX}")
    if set_to.spared > set_to.kept_share:
        raise ValueError(f"spared {set_to.spared}: over kept_share {set_to.kept_share}")
    if whole(step, "step") < set_to.uniform_steps:
        return tuple(1.0 for _ in chances)
    if not chances or max(chances) == min(chances) or set_to.kept_share == 1.0:
        return tuple(set_to.kept_share for _ in chances)
    low, high = -SLOPE_MAX, SLOPE_MAX
    for _ in range(HALVINGS):
        slope = (low + high) / 2.0
        found = _survivals(chances, slope, set_to)
        positive = sum(map(float.__mul__, found, map(float, chances))) / sum(found)
        low, high = (low, slope) if positive > set_to.positive_share else (slope, high)
    return _survivals(chances, (low + high) / 2.0, set_to)


def _survivals(chances: Sequence[float], slope: float, set_to: Pruning) -> tuple[float, ...]:
    """Probabilities of one slope whose mean is `kept_share`."""
    wanted = (set_to.kept_share - set_to.spared) / (1.0 - set_to.spared)
    low, high = -SLOPE_MAX - 50.0, SLOPE_MAX + 50.0
    found: list[float] = []
    for _ in range(HALVINGS):
        shift = (low + high) / 2.0
        found = [_logistic(shift + slope * chance) for chance in chances]
        low, high = (low, shift) if sum(found) > wanted * len(found) else (shift, high)
    return tuple(set_to.spared + (1.0 - set_to.spared) * each for each in found)


def _logistic(value: float) -> float:
    if value < 0.0:  # so that no exponent is positive
        return math.exp(value) / (1.0 + math.exp(value))
    return 1.0 / (1.0 + math.exp(-value))


def survivors(propensities: Sequence[float], rng: Random) -> tuple[int, ...]:
    """Places of the rollouts that go on, each drawn by itself."""
    return tuple(
        place
        for place, each in enumerate(propensities)
        if rng.random() < probability(each, "propensity")
    )


# Prompts without the tokens that lead the policy astray.


class Purify(MethodSettings, kind="purify", needs={Need.REVISITS, Need.REFERENCE}, roles=NODE):
    """The tokens of a prompt that the policy sees most unlike a reference are taken out, and what
    succeeds without them replaces what failed with them."""

    # of a prompt's tokens, taken out (gamma); 0.01 to 0.05 in published runs
    share: Annotated[float, Gt(0), Le(0.5)] = 0.03
    success_min: Share = 0.5  # prompts that go this well stay as they are (tau); ours
    original_weight: Share = 0.5  # a, of successes with the whole prompt; all else has 1 - a; ours


def purify(
    policy: Sequence[float],
    reference: Sequence[float],
    set_to: Purify,
    fixed: Collection[int] = (),
) -> tuple[int, ...]:
    """Places of the prompt's tokens that stay, in order (LENS, arXiv 2601.21244). Of n tokens the
    ceil(share n) with the largest |policy - reference|, log-probs (n,), go, but never all. `fixed`:
    places that stay, such as those of a chat's frame."""
    if len(finite(policy, "policy")) != len(finite(reference, "reference")):
        raise ValueError(f"{len(policy)} log-probs of the policy, {len(reference)} of a reference")
    free = [place for place in range(len(policy)) if place not in fixed]
    free.sort(key=lambda place: -abs(policy[place] - reference[place]))
    wanted = math.ceil(set_to.share * len(policy) - 1e-9)
    taken = set(free[: max(0, min(wanted, len(policy) - 1))])
    return tuple(place for place in range(len(policy)) if place not in taken)


def is_purified(right: Sequence[bool], set_to: Purify) -> bool:
    """True if a prompt is tried without some tokens: too few of its completions are right."""
    return bool(right) and sum(right) < set_to.success_min * len(right)


def replaced(
    original: Sequence[bool], purified: Sequence[bool], rng: Random
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Places of the failures with the whole prompt that leave a group, and of the successes with
    the shortened one that replace them: as many of each, drawn if there are more."""
    failures = [place for place, right in enumerate(original) if not right]
    successes = [place for place, right in enumerate(purified) if right]
    count = min(len(failures), len(successes))
    return (
        tuple(sorted(rng.sample(failures, count))),
        tuple(sorted(rng.sample(successes, count))),
    )


def success_weight(is_original: bool, set_to: Purify) -> float:
    """Weight of a completion: a for a success with the whole prompt, 1 - a for any other."""
    weight = probability(set_to.original_weight, "original_weight")
    return weight if is_original else 1.0 - weight


# Earlier completions, of which the present policy keeps a part.


class Speculative(
    MethodSettings,
    kind="speculative",
    needs={Need.BEHAVIOUR, Need.REVISITS, Need.DRAFTS, Need.ONE_TURN},
    roles=NODE,
    decides={*SAMPLING, "the length of completions"},  # drafts have the run's
):
    """Keep the beginning of an earlier completion, as far as the present policy agrees with it."""

    # log of the loss in probability that a token may have; best: GRPO 0.5, PPO 0.3, DAPO 0.15.
    # Learning suffers from 1 on.
    lenience: Annotated[float, Ge(-20), Le(20)] = 0.5
    probability_min: Share = 0.0  # less likely tokens are never kept; ours


def keeping_probabilities(
    old: Sequence[float], new: Sequence[float], set_to: Speculative
) -> tuple[float, ...]:
    """min(1, e^(lenience + new - old)) of each token: how likely it is kept where those before it
    are (SPEC-RL, arXiv 2509.23232). `old`: (tokens,) log-probs where it was generated; `new`: those
    under the present policy, -inf where impossible. ValueError: no token has these."""
    if len(old) != len(new):
        raise ValueError(f"{len(old)} log-probs of before and {len(new)} of now")
    found = []
    for before, now in zip(old, new, strict=True):
        if not math.isfinite(before) or math.isnan(now) or now == math.inf:
            raise ValueError(f"log-probs {before} and {now}: no token has these")
        is_too_rare = math.exp(min(now, 0.0)) < set_to.probability_min
        ratio = math.exp(min(0.0, set_to.lenience + now - before))
        found.append(0.0 if is_too_rare else ratio)
    return tuple(found)


def speculative(
    old: Sequence[float], new: Sequence[float], uniforms: Sequence[float], set_to: Speculative
) -> int:
    """Number of tokens that are kept (SPEC-RL): those before the first that is not kept by
    `keeping_probabilities` and `uniforms` (tokens,), random numbers in [0, 1). The present policy
    goes on from there, which biases the result a little even without lenience."""
    probabilities = keeping_probabilities(old, new, set_to)
    if len(uniforms) < len(probabilities):
        raise ValueError(f"{len(uniforms)} random numbers for {len(probabilities)} tokens")
    for kept, (keeps, uniform) in enumerate(zip(probabilities, uniforms, strict=False)):
        if not 0.0 <= uniform < 1.0:
            raise ValueError(f"{uniform}: not in [0, 1)")
        # Not "at most": a random number may be 0, and an impossible token would be kept.
        if not uniform < keeps:
            return kept
    return len(probabilities)
