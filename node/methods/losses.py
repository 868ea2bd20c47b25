"""Losses of tokens (T,), and the weights by which token losses become one number.

The loss of each name is in `OBJECTIVES`, its settings are in `loss_settings.py`."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch

from node.methods import loss_settings as settings
from node.methods.loss_settings import Aggregation
from node.methods.own import told

LOG_RATIO_MAX = 20.0  # clamp before exp, so that an absurd ratio stays finite
HACPO_LOG_RATIO_MAX: Final = 10.0  # the same of whole completions, in HACPO


def log_ratio(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """log(above / below) from log-probs, within +-`LOG_RATIO_MAX`."""
    return (above - below).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def clipped_surrogate(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A) of each token, r = exp(logprob - old logprob)."""
    ratio = log_ratio(logprobs, old_logprobs).exp()
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
    ratio = log_ratio(logprobs, old_logprobs).exp()
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
    """Clipped surrogate, at most `dual_clip` |A| where A < 0 (dual-clip PPO, arXiv 1912.09729)."""
    each = clipped_surrogate(logprobs, old_logprobs, advantages, clip_low, clip_high)
    if math.isinf(dual_clip):
        return each
    return torch.where(advantages < 0, torch.minimum(each, -dual_clip * advantages), each)


def dual_clipped_tokens(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, dual_clip: float
) -> torch.Tensor:
    """Mask of the tokens whose gradient the dual clip removes."""
    ratio = log_ratio(logprobs, old_logprobs).exp()
    return (advantages < 0) & (ratio > dual_clip)


def token_weights(
    lengths: Sequence[int], aggregation: Aggregation, tokens_max: int | None = None
) -> list[float]:
    """The weight of each completion's tokens, from the lengths of the whole batch. `token_mean`
    (DAPO): each token weighs the same. `sequence_mean` (GRPO): each completion does.
    `sequence_sum`: its tokens are added up. `constant_norm` (Dr.GRPO): the sum over `tokens_max`,
    or over the longest completion."""
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
    """Log-prob of each target (...,) under its logits (..., V), and mean and variance of a sample's
    log-prob there: (..., 3), in fp32."""
    logs = torch.log_softmax(logits.float(), dim=-1)
    probs = logs.exp()
    mean = torch.where(probs > 0, probs * logs, 0.0).sum(dim=-1)
    squares = torch.where(probs > 0, probs * (logs - mean.unsqueeze(-1)).square(), 0.0)
    chosen = logs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return torch.stack([chosen, mean, squares.sum(dim=-1)], dim=-1)


# Off-policy losses, and the distance of the policy that generated the data. Pure functions.


class TokenLosses(NamedTuple):
    """Columns (T,). A masked token has loss 0 and still counts in the denominator."""

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
    truncates: bool = False,
) -> TokenLosses:
    """w (-min(r A, clip(r, 1 - low, 1 + high) A)), r = current / proximal, w = proximal / behaviour
    (decoupled PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298). Tokens with w above
    `behaviour_weight_max` are masked, as in AReaL, or w is cut there (`truncates`, TIS)."""
    weights = behaviour_weights(proximal, behaviour)
    masked = weights > behaviour_weight_max
    each = clipped_surrogate(logprobs, proximal, advantages, clip_low, clip_high)
    clipped = clipped_tokens(logprobs, proximal, advantages, clip_low, clip_high)
    if truncates:
        return _unmasked(weights.clamp(max=behaviour_weight_max) * each, clipped)
    return TokenLosses((weights * each).masked_fill(masked, 0.0), clipped & ~masked, masked)


def second_moment_kept(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    second_moment_max: float,
    sources: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mask of the tokens that M2PO trains on (arXiv 2510.01161). Among tokens that the update would
    push further from the behaviour policy, the largest (log r)^2 go until the mean of the rest is
    at most `second_moment_max`; of equal ones the earlier goes first.

    Give all tokens of the batch. With `sources` (T,), integers, each source has a threshold of its
    own, so that none moves another's."""
    log_ratios = log_ratio(logprobs.detach(), behaviour).double()
    outward = (advantages > 0) & (log_ratios > 0) | (advantages < 0) & (log_ratios < 0)
    kept = torch.ones_like(outward)
    squares = log_ratios.square()
    for source in [None] if sources is None else sources.unique():
        place = (outward if source is None else outward & (sources == source)).nonzero().squeeze(-1)
        kept[place[_dropped(squares[place], second_moment_max)]] = False
    return kept


def _dropped(squares: torch.Tensor, mean_max: float) -> torch.Tensor:
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
    """-r A with r = current / behaviour on the `kept` tokens (M2PO), without a clip. Tokens with r
    above `ratio_max` are masked too. The paper has no such bound: in a mean, many tokens that fit
    hide a few with made-up log-probs."""
    log_ratios = log_ratio(logprobs, behaviour)
    masked = ~kept | (log_ratios.detach() > math.log(ratio_max))
    each = (-log_ratios.exp() * advantages).masked_fill(masked, 0.0)
    return TokenLosses(each, torch.zeros_like(masked), masked)


def mismatch(proximal: torch.Tensor, behaviour: torch.Tensor) -> Mismatch:
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


def expected(behaviours: Sequence[torch.Tensor]) -> float:
    """log(sum q^2 / sum q) over a group's completions (GEPO, arXiv 2508.17850), q the geometric
    mean of a completion's behaviour probabilities. In place of each completion's own q it bounds
    the weights of unlikely completions."""
    if not behaviours or not all(len(each) for each in behaviours):
        raise ValueError("an expectation needs completions with tokens")
    means = torch.stack([each.double().mean() for each in behaviours])
    return float(torch.logsumexp(2.0 * means, 0) - torch.logsumexp(means, 0))


def guided(logprobs: torch.Tensor, advantages: torch.Tensor, shaping: float) -> TokenLosses:
    """-A p / (p + shaping), p the token's probability, for tokens of another policy (LUFFY, arXiv
    2504.14945). Its gradient, that of log p times p shaping / (p + shaping)^2, also teaches
    unlikely tokens."""
    likely = logprobs.clamp(min=-20.0).exp()
    return _unmasked(-advantages * likely / (likely + shaping))


def supervised(logprobs: torch.Tensor, weight: float) -> TokenLosses:
    """-weight log p of tokens that are to be learned as they are, without a ratio."""
    return _unmasked(-weight * logprobs)


def taught(
    advantages: torch.Tensor, behaviour: torch.Tensor, teacher: torch.Tensor, weight: float
) -> torch.Tensor:
    """A + weight (log q - log p) of tokens (T,), of a teacher and the policy that generated. It
    is the reverse KL by token (on-policy distillation, as Tinker has it without a discount)."""
    return advantages + weight * log_ratio(teacher, behaviour)


def divergence(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """k3 of each token (T,), q / p - 1 - log(q / p) of the reference's q. It estimates
    KL(policy || reference) and is never below zero (GRPO, arXiv 2402.03300)."""
    logs = log_ratio(reference, logprobs)
    return logs.exp() - 1.0 - logs


def preferred(margins: torch.Tensor, set_to: settings.Dpo) -> torch.Tensor:
    """-log sigmoid(beta x margin) of pairs (P,), a margin being by how much more the policy favours
    the better completion than the reference does, in nats (DPO, arXiv 2305.18290)."""
    return -torch.nn.functional.logsigmoid(set_to.beta * margins)


# Losses by name.


@dataclass(frozen=True, slots=True)
class Tokens:
    """T tokens, by columns (T,)."""

    logprobs: torch.Tensor  # under the policy that is trained; with gradient
    proximal: torch.Tensor  # under that policy before the update
    behaviour: torch.Tensor  # under the one that generated them; proximal where that is unknown
    advantages: torch.Tensor
    kept: torch.Tensor | None = None  # what `Objective.keep` decided
    own: bool = True  # False: another node's completion
    update: int = 0  # number of the update on this batch
    whitened: torch.Tensor | None = None  # entropies before the update, by `whiten`
    averaged: torch.Tensor | None = None  # log-probs under the average of past weights


@dataclass(frozen=True, slots=True)
class Objective:
    """One loss. `losses` takes one completion at a time. `keep`, if any, gets all tokens of a batch
    and their sources (T,), integers, before each update and returns a mask of the tokens to train
    on."""

    losses: Callable[[Tokens, Any], TokenLosses]
    uses_behaviour: bool = True
    keep: Callable[[Tokens, torch.Tensor, Any], torch.Tensor] | None = None
    by_group: bool = False  # `Tokens.behaviour` is `expected` of the completion's group
    by_entropy: bool = False  # it takes `Tokens.whitened`
    by_mean: bool = False  # the mean over the source's own tokens will do for `Tokens.behaviour`


def _sapo(tokens: Tokens, set_to: settings.SapoLoss) -> TokenLosses:
    columns = (tokens.logprobs, tokens.proximal, tokens.advantages)
    bounds = (set_to.clip_low, set_to.clip_high)
    return _unmasked(clipped_surrogate(*columns, *bounds), clipped_tokens(*columns, *bounds))


def _clip(tokens: Tokens, set_to: settings.GrpoLoss) -> TokenLosses:
    columns, dual = _stale(tokens), set_to.dual_clip
    bounds = (set_to.clip_low, set_to.clip_high)
    clipped = clipped_tokens(*columns, *bounds) | dual_clipped_tokens(*columns, dual)
    return _unmasked(dual_clipped_surrogate(*columns, *bounds, dual), clipped)


def _decoupled(tokens: Tokens, set_to: settings.DecoupledLoss) -> TokenLosses:
    columns = (tokens.logprobs, tokens.proximal, tokens.behaviour, tokens.advantages)
    bounds = (set_to.clip_low, set_to.clip_high, set_to.behaviour_weight_max)
    return decoupled(*columns, *bounds, truncates=isinstance(set_to, settings.TisLoss))


def _m2po(tokens: Tokens, set_to: settings.M2poLoss) -> TokenLosses:
    assert tokens.kept is not None
    return second_moment(*_stale(tokens), tokens.kept, set_to.behaviour_weight_max)


def _m2po_kept(tokens: Tokens, sources: torch.Tensor, set_to: settings.M2poLoss) -> torch.Tensor:
    return second_moment_kept(*_stale(tokens), set_to.second_moment_max, sources)


def _sequence(tokens: Tokens, set_to: settings.GrpoLoss) -> TokenLosses:
    """-min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean log-ratio), at most `dual_clip` |A|
    where A < 0. Each token has the gradient as if s were its own ratio (GSPO-token, arXiv
    2507.18071)."""
    logprobs, behaviour, advantages = _stale(tokens)
    whole = log_ratio(logprobs, behaviour).mean().detach().exp()
    ratios = whole * (logprobs - logprobs.detach()).exp()
    cut = ratios.clamp(1.0 - set_to.clip_low, 1.0 + set_to.clip_high)
    above, below = whole > 1.0 + set_to.clip_high, whole < 1.0 - set_to.clip_low
    clipped = (advantages > 0) & above | (advantages < 0) & (below | (whole > set_to.dual_clip))
    each = -torch.minimum(ratios * advantages, cut * advantages)
    bounded = torch.minimum(each, -set_to.dual_clip * advantages)
    return _unmasked(torch.where(advantages < 0, bounded, each), clipped)


def _hacpo(tokens: Tokens, set_to: settings.HacpoLoss) -> TokenLosses:
    """As `_sequence` for own completions. For foreign ones -c sg(c)^alpha A, c = clip(s, low, 1),
    low = 1 - delta + delta_step x update (HACPO, arXiv 2603.02604). s is of mean log-probs, each
    over its own tokenizer's tokens. Outside of the bounds there is no gradient. The
    source counts the mini-batches of a step where `update` counts passes over the batch."""
    if tokens.own:
        return _sequence(tokens, set_to)
    moved = tokens.logprobs.detach().mean() - tokens.behaviour.mean()
    whole = moved.clamp(-HACPO_LOG_RATIO_MAX, HACPO_LOG_RATIO_MAX).exp()
    low = min(1.0, 1.0 - set_to.delta + set_to.delta_step * tokens.update)
    clipped = ((whole < low) | (whole > 1.0)).expand_as(tokens.logprobs)
    grows = (tokens.logprobs - tokens.logprobs.detach()).exp().masked_fill(clipped, 1.0)
    return _unmasked(
        -(whole.clamp(low, 1.0) ** (1.0 + set_to.alpha)) * grows * tokens.advantages, clipped
    )


def _ewma(tokens: Tokens, set_to: settings.EwmaLoss) -> TokenLosses:
    """max(-A e^(now - b), -A e^(clip(now - prox, ln(1 - e), ln(1 + e)) + prox - b))
    (PPO-EWMA, arXiv 2110.00641). Log-probs are the policy's, the average's and what generated's. b
    is at least now - ln `ratio_max`, without gradient. The average: `node.train.kept_weights`."""
    logprobs, behaviour, advantages = _stale(tokens)
    proximal = tokens.proximal if tokens.averaged is None else tokens.averaged
    behaviour = torch.maximum(behaviour, logprobs.detach() - math.log(set_to.ratio_max))
    moved = log_ratio(logprobs, proximal)
    cut = moved.clamp(math.log(1.0 - set_to.clip), math.log(1.0 + set_to.clip))
    plain = -log_ratio(logprobs, behaviour).exp() * advantages
    bound = -log_ratio(cut + proximal, behaviour).exp() * advantages
    return _unmasked(torch.maximum(plain, bound), (bound > plain) & (cut != moved))


def whiten(column: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """A column in standard deviations (n - 1) from the mean of the numbers `among` which it is."""
    deviation = among.std() if among.numel() > 1 else among.new_zeros(())
    return (column - among.mean()) / (deviation + 1e-8)


def _aepo(tokens: Tokens, set_to: settings.AepoLoss) -> TokenLosses:
    """`_clip`, but where r > 1 + high and A > 0 the bound is (1 + high) r / sg(r), which keeps its
    gradient (AEPO, arXiv 2510.14545). A is first multiplied by 1 + `entropy_weight` z, z a token's
    whitened entropy. z below -1 / `entropy_weight` turns the sign, as in the source."""
    logprobs, behaviour, advantages = _stale(tokens)
    if tokens.whitened is not None:
        advantages = advantages * (1.0 + set_to.entropy_weight * tokens.whitened)
    found = _clip(replace(tokens, advantages=advantages), set_to)
    high = 1.0 + set_to.clip_high
    above = (advantages > 0) & (log_ratio(logprobs, behaviour).exp() > high)
    kept = -high * (logprobs - logprobs.detach()).exp() * advantages
    return _unmasked(torch.where(above, kept, found.each), found.clipped & ~above)


def _cispo(tokens: Tokens, set_to: settings.CispoLoss) -> TokenLosses:
    """-min(r, ratio_max) A log p, the weight without gradient (CISPO, arXiv 2506.13585)."""
    logprobs, behaviour, advantages = _stale(tokens)
    weights = log_ratio(logprobs, behaviour).exp().detach().clamp(max=set_to.ratio_max)
    return _unmasked(-weights * advantages * logprobs)


def _soft_gate(tokens: Tokens, set_to: settings.SoftGateLoss) -> TokenLosses:
    """-(4 / k) sigmoid(k (r - 1)) A, k by the sign of A (soft adaptive policy optimization, arXiv
    2511.20347). At r = 1 its gradient is that of the plain policy gradient."""
    logprobs, behaviour, advantages = _stale(tokens)
    ratios = log_ratio(logprobs, behaviour).exp()
    sharpness = torch.full_like(ratios, set_to.sharpness_negative)
    sharpness = sharpness.masked_fill(advantages > 0, set_to.sharpness_positive)
    return _unmasked(-(4.0 / sharpness) * torch.sigmoid(sharpness * (ratios - 1.0)) * advantages)


def _topr(tokens: Tokens, set_to: settings.ToprLoss) -> TokenLosses:
    """-A log p where A > 0, else -min(r, 1) A log p, r the ratio of the whole completion without
    gradient (TOPR, arXiv 2503.14286)."""
    logprobs, behaviour, advantages = _stale(tokens)
    whole = log_ratio(logprobs, behaviour).detach().sum().clamp(max=0.0).exp()
    weights = torch.where(advantages > 0, torch.ones_like(advantages), whole)
    return _unmasked(-weights * advantages * logprobs)


def _bapo(tokens: Tokens, set_to: settings.BapoLoss) -> TokenLosses:
    """-r A of the tokens that `_bapo_kept` keeps, at most `dual_clip` |A| where A < 0."""
    logprobs, behaviour, advantages = _stale(tokens)
    assert tokens.kept is not None
    each = -log_ratio(logprobs, behaviour).exp() * advantages
    each = torch.where(advantages < 0, torch.minimum(each, -set_to.dual_clip * advantages), each)
    return _unmasked(each.masked_fill(~tokens.kept, 0.0), ~tokens.kept)


def _bapo_kept(tokens: Tokens, sources: torch.Tensor, set_to: settings.BapoLoss) -> torch.Tensor:
    """Mask of the tokens that keep their gradient under BAPO's clip (arXiv 2510.18927).

    Per source, the lower bound of the ratio rises by `step`, then the upper one, until positive
    tokens bring `positive_share` of the r |A| of tokens with a gradient. As in the authors' code
    this counts over all tokens.
    """
    logprobs, behaviour, advantages = _stale(tokens)
    ratios = log_ratio(logprobs.detach(), behaviour).double().exp()
    brought = ratios * advantages.abs()
    kept = torch.ones_like(advantages, dtype=torch.bool)
    for source in sources.unique():
        here = sources == source
        low, high = set_to.ratio_low, set_to.ratio_high
        while True:
            inside = torch.where(advantages > 0, ratios <= high, ratios >= low)
            positive = float(brought[here & inside & (advantages > 0)].sum())
            whole = float(brought[here & inside].sum())
            if positive >= set_to.positive_share * whole:
                break
            if low < set_to.ratio_low_max:
                low = min(low + set_to.step, set_to.ratio_low_max)
            elif high < set_to.ratio_high_max:
                high = min(high + set_to.step, set_to.ratio_high_max)
            else:
                break
        kept[here] = inside[here]
    return kept


def _unmasked(each: torch.Tensor, clipped: torch.Tensor | None = None) -> TokenLosses:
    """Losses of which no token is masked; without `clipped` none is clipped either."""
    nothing = torch.zeros_like(each, dtype=torch.bool)
    return TokenLosses(each, nothing if clipped is None else clipped, nothing)


def _stale(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tokens.logprobs, tokens.behaviour, tokens.advantages


def _own(tokens: Tokens, set_to: settings.LossSettings) -> TokenLosses:
    """A user's own loss: columns as those of a built-in one, or its losses (T,) alone."""
    with told(set_to):
        found = set_to.own(tokens, set_to)
        found = found if isinstance(found, TokenLosses) else _unmasked(found)
        shapes = [tuple(each.shape) for each in found]
        if shapes != [tuple(tokens.logprobs.shape)] * len(found):
            raise ValueError(f"gives {shapes[0]} losses for {tuple(tokens.logprobs.shape)} tokens")
        if not bool(found.each.isfinite().all()):
            raise ValueError("gives losses that are not finite")
    return found


OBJECTIVES: Final[Mapping[str, Objective]] = {
    "sapo": Objective(_sapo, uses_behaviour=False),
    "grpo": Objective(_clip),
    "dapo": Objective(_clip),
    "decoupled": Objective(_decoupled),
    "tis": Objective(_decoupled),
    "m2po": Objective(_m2po, keep=_m2po_kept),
    "gspo": Objective(_sequence),
    "gepo": Objective(_sequence, by_group=True),
    "hacpo": Objective(_hacpo, by_mean=True),
    "ppo_ewma": Objective(_ewma),
    "aepo": Objective(_aepo, by_entropy=True),
    "cispo": Objective(_cispo),
    "soft_gate": Objective(_soft_gate),
    "topr": Objective(_topr),
    "bapo": Objective(_bapo, keep=_bapo_kept),
}


def objective_of(set_to: settings.LossSettings) -> Objective:
    return OBJECTIVES[set_to.kind] if set_to.own is None else Objective(_own)
