"""Token values from hidden states without all of their logits at once.

2,048 tokens of 49,152 words take 400 MB of logits in fp32, and a backward pass three times that. A
chunk's are computed, used, dropped, and computed again for the gradient."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch.utils.checkpoint import checkpoint

LOGITS_MAX: Final = 2**23  # numbers in one chunk: 32 MiB in fp32

OfLogits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # logits, targets


def chunk_tokens(vocabulary: int, logits_max: int = LOGITS_MAX) -> int:
    return max(1, logits_max // vocabulary)


def in_chunks(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    of_logits: OfLogits,
    tokens: int,
) -> torch.Tensor:
    """`of_logits` of the logits that `head` makes of hidden states (T, d), and targets (T,), so
    many tokens at a time. A single chunk keeps its logits for the backward pass."""

    def part(here: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        return of_logits(head(here), there)

    if hidden.shape[0] <= tokens:
        return part(hidden, targets)
    found = []
    for here, there in zip(hidden.split(tokens), targets.split(tokens), strict=True):
        if torch.is_grad_enabled():
            found.append(
                checkpoint(part, here, there, use_reentrant=False, preserve_rng_state=False)
            )
        else:
            found.append(part(here, there))
    return torch.cat(found)


def recompute_layers(model: torch.nn.Module) -> bool:
    """Make the layers of a Hugging Face model keep only their inputs and run again in the backward
    pass. Not for passes that fill a cache: it would be filled twice. False: it names no layers."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward)
    return bool(layers)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
