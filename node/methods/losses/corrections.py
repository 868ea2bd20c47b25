"""Off-policy losses, and the distance of the policy that generated the data. Pure functions.

Of every token there are up to three log-probs: under the policy that is trained (`logprobs`, with
gradient), under that policy right before the update (`proximal`), and under the one that generated
the token (`behaviour`). All tensors are (T,), one entry for a token. Where nobody knows the
behaviour's, `filled` puts the proximal ones in their place: every weight there is one exactly.

A weight or a ratio never exceeds exp(`LOG_RATIO_MAX`), so that an absurd claim stays finite.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from node.methods.losses.clip import LOG_RATIO_MAX, clipped_surrogate, clipped_tokens


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
