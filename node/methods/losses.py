"""The clipped policy loss and how token losses become one number. Small pure functions.

The clipped surrogate is the one of PPO with separate bounds below and above (GRPO: 0.2 and 0.2,
DAPO and the paper on rollout sharing: 0.2 and 0.28). Losses that weigh stale data by what generated
it are in `corrections.py`; which loss has which name, `objectives.py` says. Token tensors are (T,).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from node.methods import loss_settings as settings
from node.methods.loss_settings import Aggregation

LOG_RATIO_MAX = 20.0  # clamp before exp, so that an absurd ratio stays finite


def clipped_surrogate(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A) of each token, r = exp(logprob - old logprob)."""
    ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def clipped_tokens(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """Mask of the tokens whose gradient the clip removes."""
    ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    above = (advantages > 0) & (ratio > 1.0 + clip_high)
    below = (advantages < 0) & (ratio < 1.0 - clip_low)
    return above | below


def dual_clipped_surrogate(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> torch.Tensor:
    """The clipped surrogate, and at most `dual_clip` |A| where A < 0 (dual-clip PPO, arXiv
    1912.09729; DAPO's recipe takes 10). Without it a negative token weighs as much as its ratio
    is large, without bound."""
    each = clipped_surrogate(logprobs, old_logprobs, advantages, clip_low, clip_high)
    if math.isinf(dual_clip):
        return each
    return torch.where(advantages < 0, torch.minimum(each, -dual_clip * advantages), each)


def dual_clipped_tokens(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, dual_clip: float
) -> torch.Tensor:
    """Mask of the tokens whose gradient the dual clip removes."""
    ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    return (advantages < 0) & (ratio > dual_clip)


def token_weights(
    lengths: Sequence[int], aggregation: Aggregation, tokens_max: int | None = None
) -> list[float]:
    """The weight of each token of each completion, from the lengths of the whole batch.

    `token_mean` (DAPO): every token counts the same. `sequence_mean` (the GRPO paper): every
    completion counts the same, whatever its length. `sequence_sum`: its tokens are added up.
    `constant_norm` (Dr.GRPO): that over `tokens_max`, the most that a completion may have; None:
    the longest of the batch. The loss is the weighted sum of token losses, so it does not depend on
    how the batch is cut.
    """
    if aggregation == "token_mean":
        total = sum(lengths)
        return [1.0 / total for _ in lengths]
    if aggregation == "sequence_mean":
        return [1.0 / (len(lengths) * length) for length in lengths]
    over = 1 if aggregation == "sequence_sum" else tokens_max or max(lengths, default=1)
    return [1.0 / (len(lengths) * over) for _ in lengths]


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log-prob of each target (...,) under its logits (..., V), in fp32."""
    return torch.log_softmax(logits.float(), dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def token_moments(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of each target (...,) under its logits (..., V), in fp32: its log-prob, and the mean and the
    variance that the log-prob of a sample has there (..., 3)."""
    logs = torch.log_softmax(logits.float(), dim=-1)
    probs = logs.exp()
    mean = torch.where(probs > 0, probs * logs, 0.0).sum(dim=-1)
    squares = torch.where(probs > 0, probs * (logs - mean.unsqueeze(-1)).square(), 0.0)
    chosen = logs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return torch.stack([chosen, mean, squares.sum(dim=-1)], dim=-1)


# Off-policy losses, and the distance of the policy that generated the data. Pure functions.


class TokenLosses(NamedTuple):
    """Of each token (T,): its loss, whether the clip leaves it no gradient, and whether it is left
    out. What is left out has loss zero and still counts in the denominator."""

    each: torch.Tensor
    clipped: torch.Tensor
    masked: torch.Tensor


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Distance of the behaviour policy from the proximal one, over tokens with known behaviour
    log-probs; nan without any."""

    tokens: int
    effective_share: float  # effective sample size of the weights, in (0, 1] of the tokens
    k1: float  # KL(behaviour || proximal) by the mean of -log w: unbiased, may be below zero
    k3: float  # the same by the mean of w - 1 - log w: never below zero
    weight_max: float  # the largest w = proximal / behaviour
    mean: float  # of |log w|
    max: float


def filled(
    proximal: torch.Tensor, behaviour: torch.Tensor, known: torch.Tensor | bool
) -> torch.Tensor:
    """Behaviour log-probs, and the proximal ones where they are not `known` (booleans)."""
    if isinstance(known, bool):
        return behaviour if known else proximal
    return torch.where(known, behaviour, proximal)


def log_ratio(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """log(above / below) from log-probs, within +-`LOG_RATIO_MAX`."""
    return (above - below).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def behaviour_weights(proximal: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """w = proximal / behaviour of each token, without gradient."""
    return log_ratio(proximal, behaviour).exp().detach()


def decoupled(
    logprobs: torch.Tensor,
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    behaviour_weight_max: float,
) -> TokenLosses:
    """Decoupled PPO (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298): the clip is around
    the proximal policy, and w corrects for what generated the data.

    w (-min(r A, clip(r, 1 - low, 1 + high) A)) with r = current / proximal. Tokens with w above
    `behaviour_weight_max` are left out, as AReaL does: so far from the policy that their weight
    alone would decide the step.
    """
    weights = behaviour_weights(proximal, behaviour)
    masked = weights > behaviour_weight_max
    each = clipped_surrogate(logprobs, proximal, advantages, clip_low, clip_high)
    clipped = clipped_tokens(logprobs, proximal, advantages, clip_low, clip_high)
    return TokenLosses((weights * each).masked_fill(masked, 0.0), clipped & ~masked, masked)


def truncated_importance(
    logprobs: torch.Tensor,
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    behaviour_weight_max: float,
) -> TokenLosses:
    """Truncated importance sampling (TIS): as `decoupled`, but a weight above
    `behaviour_weight_max` becomes that, and no token is left out."""
    weights = behaviour_weights(proximal, behaviour).clamp(max=behaviour_weight_max)
    each = clipped_surrogate(logprobs, proximal, advantages, clip_low, clip_high)
    clipped = clipped_tokens(logprobs, proximal, advantages, clip_low, clip_high)
    return TokenLosses(weights * each, clipped, torch.zeros_like(clipped))


def second_moment_kept(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    second_moment_max: float,
    sources: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mask of the tokens that M2PO trains on, by the paper's definition.

    Among trust-region tokens, those that the update would push further from the behaviour policy
    (A > 0 and r > 1, or A < 0 and r < 1, r = current / behaviour), the largest (log r)^2 go until
    the mean of the rest is at most `second_moment_max`; of equal ones the earlier goes first. All
    other tokens stay.

    The threshold depends on the whole batch, so give all of its tokens. With `sources` (integers)
    each has its own, so that no source moves the bound of another.
    """
    log_ratios = log_ratio(logprobs.detach(), behaviour).double()
    outward = (advantages > 0) & (log_ratios > 0) | (advantages < 0) & (log_ratios < 0)
    kept = torch.ones_like(outward)
    squares = log_ratios.square()
    for source in [None] if sources is None else sources.unique():
        place = (outward if source is None else outward & (sources == source)).nonzero().squeeze(-1)
        kept[place[_dropped(squares[place], second_moment_max)]] = False
    return kept


def _dropped(squares: torch.Tensor, mean_max: float) -> torch.Tensor:
    """Indices of the fewest largest values without which the mean is at most `mean_max`."""
    ordered, order = squares.sort(descending=True, stable=True)
    counts = torch.arange(len(ordered), 0, -1, device=squares.device)
    rest = ordered.flip(0).cumsum(0).flip(0) / counts  # the mean from each place on
    return order[: int((rest > mean_max).sum())]  # these means fall along the order


def second_moment(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    kept: torch.Tensor,
    ratio_max: float = math.inf,
) -> TokenLosses:
    """M2PO (Second-Moment Trust Policy Optimization): -r A with r = current / behaviour on the
    tokens that are `kept` (`second_moment_kept`), and no clip of single tokens.

    `ratio_max` is no part of the paper: tokens with a larger r are left out too. Of a source that
    makes its log-probs up, many tokens that fit hide a few that do not in a mean.
    """
    log_ratios = log_ratio(logprobs, behaviour)
    masked = ~kept | (log_ratios.detach() > math.log(ratio_max))
    each = (-log_ratios.exp() * advantages).masked_fill(masked, 0.0)
    return TokenLosses(each, torch.zeros_like(masked), masked)


def mismatch(proximal: torch.Tensor, behaviour: torch.Tensor) -> Mismatch:
    """Distance of two policies on tokens of the second, both (T,)."""
    if proximal.numel() == 0:
        return Mismatch(0, *[math.nan] * 6)
    logs = log_ratio(proximal, behaviour).double()
    weights = logs.exp()
    effective = weights.sum().square() / weights.square().sum() / weights.numel()
    return Mismatch(
        tokens=weights.numel(),
        effective_share=float(effective),
        k1=float(-logs.mean()),
        k3=float((weights - 1.0 - logs).mean()),
        weight_max=float(weights.max()),
        mean=float(logs.abs().mean()),
        max=float(logs.abs().max()),
    )


# Losses that treat the ratio to what generated a token in another way than a clip of it.


def sequence_clipped(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = math.inf,
) -> TokenLosses:
    """Of one completion: -min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean log-ratio); at most
    `dual_clip` |A| where A < 0. Each token has the gradient as if s were its own ratio (GSPO-token,
    arXiv 2507.18071)."""
    whole = log_ratio(logprobs, behaviour).mean().detach().exp()
    ratios = whole * (logprobs - logprobs.detach()).exp()
    cut = ratios.clamp(1.0 - clip_low, 1.0 + clip_high)
    above, below = whole > 1.0 + clip_high, whole < 1.0 - clip_low
    clipped = (advantages > 0) & above | (advantages < 0) & below
    each = -torch.minimum(ratios * advantages, cut * advantages)
    if math.isfinite(dual_clip):
        clipped = clipped | (advantages < 0) & (whole > dual_clip)
        each = torch.where(advantages < 0, torch.minimum(each, -dual_clip * advantages), each)
    return TokenLosses(each, clipped, torch.zeros_like(clipped))


def expected(behaviours: Sequence[torch.Tensor]) -> float:
    """log(sum q^2 / sum q) over a group's completions (GEPO, arXiv 2508.17850). q is the geometric
    mean of a completion's token probabilities where it was generated. Used in place of each
    completion's own q, it keeps the weights of unlikely completions small."""
    if not behaviours or not all(len(each) for each in behaviours):
        raise ValueError("an expectation needs completions with tokens")
    means = torch.stack([each.double().mean() for each in behaviours])
    return float(torch.logsumexp(2.0 * means, 0) - torch.logsumexp(means, 0))


def cut_ratio(
    logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, ratio_max: float
) -> TokenLosses:
    """-min(r, ratio_max) A log p, the weight without gradient (CISPO, arXiv 2506.13585): no token
    loses its gradient, so none is clipped."""
    weights = log_ratio(logprobs, behaviour).exp().detach().clamp(max=ratio_max)
    each = -weights * advantages * logprobs
    nothing = torch.zeros_like(each, dtype=torch.bool)
    return TokenLosses(each, nothing, nothing)


def soft_gated(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    sharpness_positive: float,
    sharpness_negative: float,
) -> TokenLosses:
    """-(4 / k) sigmoid(k (r - 1)) A, k by the sign of A (soft adaptive policy optimization, arXiv
    2511.20347). At r = 1 its gradient is that of the plain policy gradient."""
    ratios = log_ratio(logprobs, behaviour).exp()
    sharpness = torch.full_like(ratios, sharpness_negative)
    sharpness = sharpness.masked_fill(advantages > 0, sharpness_positive)
    each = -(4.0 / sharpness) * torch.sigmoid(sharpness * (ratios - 1.0)) * advantages
    nothing = torch.zeros_like(each, dtype=torch.bool)
    return TokenLosses(each, nothing, nothing)


def guided(logprobs: torch.Tensor, advantages: torch.Tensor, shaping: float) -> TokenLosses:
    """-A p / (p + shaping), p the token's probability (LUFFY, arXiv 2504.14945), for tokens that
    another policy wrote. The gradient is that of log p times p shaping / (p + shaping)^2: unlikely
    tokens are learned too, and likely ones hardly move."""
    likely = logprobs.clamp(min=-20.0).exp()
    each = -advantages * likely / (likely + shaping)
    nothing = torch.zeros_like(each, dtype=torch.bool)
    return TokenLosses(each, nothing, nothing)


def tapered(
    logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor
) -> TokenLosses:
    """Of one completion -A log p where A > 0, else -min(r, 1) A log p, r the ratio of the whole
    completion without gradient (TOPR, arXiv 2503.14286). Right completions are learned however
    unlikely they are, wrong ones only as far as this policy might still say them."""
    whole = log_ratio(logprobs, behaviour).detach().sum().clamp(max=0.0).exp()
    weights = torch.where(advantages > 0, torch.ones_like(advantages), whole)
    each = -weights * advantages * logprobs
    nothing = torch.zeros_like(each, dtype=torch.bool)
    return TokenLosses(each, nothing, nothing)


def balanced_kept(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    positive_share: float,
    low: tuple[float, float],
    high: tuple[float, float],
    step: float,
    sources: torch.Tensor,
) -> torch.Tensor:
    """Mask of the tokens that keep their gradient under BAPO's clip (arXiv 2510.18927).

    `low` and `high`: where the bounds of the ratio begin, and how far they go. The lower one rises
    by `step`, then the upper one, until positive tokens bring `positive_share` of all that is
    brought, r |A|, by tokens with a gradient (counted over all tokens, as the authors' code has it,
    a higher lower bound would bring more of the negative ones). Each source, an integer, has bounds
    of its own, so that none moves another's.
    """
    ratios = log_ratio(logprobs.detach(), behaviour).double().exp()
    brought = ratios * advantages.abs()
    kept = torch.ones_like(advantages, dtype=torch.bool)
    for source in sources.unique():
        here = sources == source
        bound_low, bound_high = low[0], high[0]
        while True:
            inside = torch.where(advantages > 0, ratios <= bound_high, ratios >= bound_low)
            positive = float(brought[here & inside & (advantages > 0)].sum())
            whole = float(brought[here & inside].sum())
            if positive >= positive_share * whole:
                break
            if bound_low < low[1]:
                bound_low = min(bound_low + step, low[1])
            elif bound_high < high[1]:
                bound_high = min(bound_high + step, high[1])
            else:
                break
        kept[here] = inside[here]
    return kept


def balanced(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    kept: torch.Tensor,
    dual_clip: float,
) -> TokenLosses:
    """-r A of the tokens that are `kept` (`balanced_kept`), at most `dual_clip` |A| where A < 0."""
    each = -log_ratio(logprobs, behaviour).exp() * advantages
    each = torch.where(advantages < 0, torch.minimum(each, -dual_clip * advantages), each)
    masked = ~kept
    return TokenLosses(each.masked_fill(masked, 0.0), masked, torch.zeros_like(masked))


# Losses by name.


@dataclass(frozen=True, slots=True)
class Tokens:
    """T tokens, by columns (T,)."""

    logprobs: torch.Tensor  # under the policy that is trained; with gradient
    proximal: torch.Tensor  # under that policy before the update
    behaviour: torch.Tensor  # under the one that generated them; proximal where that is unknown
    advantages: torch.Tensor
    kept: torch.Tensor | None = None  # what `Objective.keep` decided


@dataclass(frozen=True, slots=True)
class Objective:
    """One loss. `keep`, if any, gets all tokens of a batch and their sources (T,), integers, before
    each update, and returns a mask of the tokens to train on. `losses` then takes one completion at
    a time."""

    losses: Callable[[Tokens, Any], TokenLosses]
    uses_behaviour: bool = True
    keep: Callable[[Tokens, torch.Tensor, Any], torch.Tensor] | None = None
    by_group: bool = False  # `Tokens.behaviour` is `expected` of the completion's group


def _sapo(tokens: Tokens, set_to: settings.SapoLoss) -> TokenLosses:
    bounds = (set_to.clip_low, set_to.clip_high)
    columns = (tokens.logprobs, tokens.proximal, tokens.advantages)
    clipped = clipped_tokens(*columns, *bounds)
    return TokenLosses(clipped_surrogate(*columns, *bounds), clipped, torch.zeros_like(clipped))


def _clip(tokens: Tokens, set_to: settings.GrpoLoss | settings.DapoLoss) -> TokenLosses:
    bounds, dual = (set_to.clip_low, set_to.clip_high), set_to.dual_clip
    columns = _stale(tokens)
    clipped = clipped_tokens(*columns, *bounds)
    clipped = clipped | dual_clipped_tokens(*columns, dual)
    each = dual_clipped_surrogate(*columns, *bounds, dual)
    return TokenLosses(each, clipped, torch.zeros_like(clipped))


def _decoupled(tokens: Tokens, set_to: settings.DecoupledLoss) -> TokenLosses:
    return decoupled(*_columns(tokens), *_bounds(set_to))


def _tis(tokens: Tokens, set_to: settings.TisLoss) -> TokenLosses:
    return truncated_importance(*_columns(tokens), *_bounds(set_to))


def _m2po(tokens: Tokens, set_to: settings.M2poLoss) -> TokenLosses:
    assert tokens.kept is not None
    return second_moment(*_stale(tokens), tokens.kept, set_to.behaviour_weight_max)


def _m2po_kept(tokens: Tokens, sources: torch.Tensor, set_to: settings.M2poLoss) -> torch.Tensor:
    return second_moment_kept(*_stale(tokens), set_to.second_moment_max, sources)


def _gspo(tokens: Tokens, set_to: settings.GspoLoss) -> TokenLosses:
    bounds = (set_to.clip_low, set_to.clip_high, set_to.dual_clip)
    return sequence_clipped(*_stale(tokens), *bounds)


def _gepo(tokens: Tokens, set_to: settings.GepoLoss) -> TokenLosses:
    bounds = (set_to.clip_low, set_to.clip_high, set_to.dual_clip)
    return sequence_clipped(*_stale(tokens), *bounds)


def _cispo(tokens: Tokens, set_to: settings.CispoLoss) -> TokenLosses:
    return cut_ratio(*_stale(tokens), set_to.ratio_max)


def _soft_gate(tokens: Tokens, set_to: settings.SoftGateLoss) -> TokenLosses:
    sharpness = (set_to.sharpness_positive, set_to.sharpness_negative)
    return soft_gated(*_stale(tokens), *sharpness)


def _topr(tokens: Tokens, set_to: settings.ToprLoss) -> TokenLosses:
    return tapered(*_stale(tokens))


def _bapo(tokens: Tokens, set_to: settings.BapoLoss) -> TokenLosses:
    assert tokens.kept is not None
    return balanced(*_stale(tokens), tokens.kept, set_to.dual_clip)


def _bapo_kept(tokens: Tokens, sources: torch.Tensor, set_to: settings.BapoLoss) -> torch.Tensor:
    low = (set_to.ratio_low, set_to.ratio_low_max)
    high = (set_to.ratio_high, set_to.ratio_high_max)
    return balanced_kept(*_stale(tokens), set_to.positive_share, low, high, set_to.step, sources)


def _stale(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tokens.logprobs, tokens.behaviour, tokens.advantages


def _columns(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return tokens.logprobs, tokens.proximal, tokens.behaviour, tokens.advantages


def _bounds(set_to: settings.DecoupledLoss | settings.TisLoss) -> tuple[float, float, float]:
    return set_to.clip_low, set_to.clip_high, set_to.behaviour_weight_max


OBJECTIVES: Final[Mapping[str, Objective]] = {
    "sapo": Objective(_sapo, uses_behaviour=False),
    "grpo": Objective(_clip),
    "dapo": Objective(_clip),
    "decoupled": Objective(_decoupled),
    "tis": Objective(_tis),
    "m2po": Objective(_m2po, keep=_m2po_kept),
    "gspo": Objective(_gspo),
    "gepo": Objective(_gepo, by_group=True),
    "cispo": Objective(_cispo),
    "soft_gate": Objective(_soft_gate),
    "topr": Objective(_topr),
    "bapo": Objective(_bapo, keep=_bapo_kept),
}
