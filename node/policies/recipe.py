"""The recipe of the tiny preset. Free of torch, so that the node's own process can hold it."""

import hashlib
import json
from dataclasses import asdict, dataclass

TINY_VERSION = 1  # goes into the cache key: raise it when `tiny` makes something else of a recipe


@dataclass(frozen=True, slots=True)
class TinyRecipe:
    """Everything but the pairs that decides the tiny model's weights."""

    hidden: int = 192
    layers: int = 2
    heads: int = 6
    key_value_heads: int = 2
    head_size: int = 32
    intermediate: int = 704
    context_tokens: int = 1024
    seed: int = 0
    batch: int = 32
    learning_rate: float = 3e-3
    ramp_steps: int = 30
    steps: int = 600
    target: float = 0.18  # stop early once this share of fresh answers would be sampled right
    prompt_loss: float = 0.1  # weight of prompt tokens against answer tokens


def recipe_key(recipe: TinyRecipe, source: str) -> str:
    """Cache key of a warmed model; `source` names all that decides the pairs."""
    content = json.dumps([TINY_VERSION, asdict(recipe), source], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]
