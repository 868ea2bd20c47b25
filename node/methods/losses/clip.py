"""The clipped policy loss and how token losses become one number. Small pure functions.

The clipped surrogate is the one of PPO with separate bounds below and above (GRPO: 0.2 and 0.2,
DAPO and the paper on rollout sharing: 0.2 and 0.28). Losses that weigh stale data by what generated
it are in `corrections.py`; which loss has which name, `objectives.py` says. Token tensors are (T,).
"""

import math
from collections.abc import Sequence

import torch

from node.methods.losses.settings import Aggregation

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
