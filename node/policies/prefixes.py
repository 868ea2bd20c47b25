"""Keys and values of prompts, run once and lent to each row of a prompt.

Padded prompts are run with pads on their right. A completion must follow its prompt at once, and
sliding windows and ALiBi count places in the cache. So each prompt is then moved to the right edge,
and its pads are masked."""

from collections.abc import Sequence

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from node.policies import lean
from node.policies.policy import Policy


def run(policy: Policy, prompts: Sequence[Sequence[int]]) -> tuple[DynamicCache, torch.Tensor]:
    """A cache of all tokens of the prompts, and their lengths (P,); a prompt may be empty."""
    ids, lengths = lean.pad_right(prompts, policy.eos_id)
    lengths = lengths.to(policy.device)
    cache = DynamicCache()  # of no kind that forgets: pads would push real tokens out of a window
    if ids.shape[1]:
        policy.model.base_model(
            input_ids=ids.to(policy.device), past_key_values=cache, use_cache=True
        )
        move_right(cache, ids.shape[1] - lengths)
    return cache, lengths


def seen(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """Mask of places that are no pads, in rows that end at the right edge: (rows, width)."""
    return torch.arange(width, device=lengths.device) >= width - lengths[:, None]


def move_right(cache: DynamicCache, gaps: torch.Tensor) -> None:
    """Move the text of each row right by its gap (rows,), the number of places behind it."""
    if not bool(gaps.any()):
        return
    width = cache.get_seq_length()
    source = (torch.arange(width, device=gaps.device) - gaps[:, None]) % width
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
            layer.keys, layer.values = _moved(layer.keys, source), _moved(layer.values, source)


def _moved(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """(rows, heads, width, size), with the places `source` (rows, width) of each row."""
    return tensor.gather(2, source[:, None, :, None].expand_as(tensor))


def windowed(policy: Policy, cache: DynamicCache) -> DynamicCache:
    """The same, without tokens that no later token of this model looks at."""
    kept = DynamicCache(config=policy.model.config)
    if not any(isinstance(layer, DynamicSlidingWindowLayer) for layer in kept.layers):
        return cache
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
            kept.update(layer.keys, layer.values, index)
    return kept
