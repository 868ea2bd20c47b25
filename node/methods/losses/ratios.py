"""Losses that treat the ratio to what generated a token in another way than a clip of it.

Of every token: its log-prob under the policy that is trained, with gradient, that of the policy
which generated it, and its advantage; all tensors are (T,). A ratio is within exp(+-20), so that an
absurd claim stays finite. Pure functions.
"""

import math
from collections.abc import Sequence

import torch

from node.methods.losses.corrections import TokenLosses, log_ratio


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
    completion's own q, it keeps the weights of unlikely completions small.

    Raises:
        ValueError: there is none, or one has no tokens.
    """
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
