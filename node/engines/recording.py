"""Measurements of a policy while it samples, and noise on it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from node.policies import lean
from node.policies.policy import Policy
from swarm.errors import ConfigError

PASS_TOKENS_MAX = 8192  # rows x tokens of one pass for hidden states; ours


def entropies(probs: torch.Tensor) -> torch.Tensor:
    """In nats, of distributions (..., V)."""
    entropy: torch.Tensor = torch.special.entr(probs).sum(-1)
    return entropy


def runners_up(probs: torch.Tensor) -> list[list[tuple[int, float, float]]]:
    """For each of the distributions (R, C, V) the second likeliest token, the likeliest token's
    probability and the second's."""
    top = probs.topk(2, dim=-1)
    return [
        [(token, first, second) for token, (first, second) in zip(tokens, pairs, strict=True)]
        for tokens, pairs in zip(top.indices[..., 1].tolist(), top.values.tolist(), strict=True)
    ]


def states_after(policy: Policy, rows: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
    """The last layer's state (H,) after each row's last token, in fp32. One pass without cache for
    some rows at a time; pads are on their right and change nothing before them."""
    found: list[tuple[float, ...]] = []
    each = max(1, PASS_TOKENS_MAX // max(map(len, rows), default=1))
    for begin in range(0, len(rows), each):
        ids, lengths = lean.pad_right(rows[begin : begin + each], policy.eos_id)
        out = policy.model.base_model(input_ids=ids.to(policy.device), use_cache=False)
        last = out[0][torch.arange(len(ids)), lengths - 1]
        found += map(tuple, last.float().tolist())
    return found


@contextmanager
def noisy(model: PreTrainedModel, deviation: float, seed: int) -> Iterator[None]:
    """Within the block, Gaussian noise of this standard deviation on the scales of normalisation
    layers (QeRL, arXiv 2510.11696). A seed repeats it. Then the scales are exactly as before."""
    if deviation == 0:
        yield
        return
    scales = [
        scale
        for module in model.modules()
        for name, scale in module.named_parameters(recurse=False)
        if "norm" in type(module).__name__.lower() and name == "weight"
    ]
    if not scales:
        raise ConfigError("noise: the model has no normalisation layers with a scale")
    saved = [scale.detach().clone() for scale in scales]
    generator = torch.Generator().manual_seed(seed % 2**63)
    try:
        with torch.no_grad():
            for scale in scales:
                scale.add_((deviation * torch.randn(scale.shape, generator=generator)).to(scale))
        yield
    finally:
        with torch.no_grad():
            for scale, before in zip(scales, saved, strict=True):
                scale.copy_(before)
