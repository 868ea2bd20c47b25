"""Models with random weights, for the benchmarks of engines: written straight to files, a shard at
a time, so that a model of any size takes no more memory than a shard.
"""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config, Qwen3Config

from node.policies.tiny import byte_tokenizer

SHARD_BYTES_MAX = 1 << 30
BLOCK = 4_194_301  # weights that are drawn; a model repeats them, as drawing billions takes minutes
SPREAD = 0.02
CONTEXT_TOKENS = 1024
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model that decide its speed."""

    family: Literal["qwen2", "qwen3"]
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    intermediate: int
    vocabulary: int  # 0: that of bytes
    tied: bool = True
    dtype: torch.dtype = torch.float32  # of the files

    def config(self) -> PreTrainedConfig:
        """The configuration for transformers and vLLM."""
        tokenizer = byte_tokenizer()
        common: dict[str, Any] = {
            "vocab_size": self.vocabulary or len(tokenizer),
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": CONTEXT_TOKENS,
            "tie_word_embeddings": self.tied,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "dtype": self.dtype,
        }
        if self.family == "qwen2":
            config: PreTrainedConfig = Qwen2Config(**common)
            config.architectures = ["Qwen2ForCausalLM"]
        else:
            config = Qwen3Config(**common, head_dim=self.head_size)
            config.architectures = ["Qwen3ForCausalLM"]
        return config

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what its files hold, by name."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config(), trust_remote_code=False)
        left_out = set(getattr(model, "all_tied_weights_keys", None) or ()) if self.tied else set()
        return {
            name: tuple(value.shape)
            for name, value in model.state_dict().items()
            if name not in left_out
        }

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors().values())

    @property
    def file_bytes(self) -> int:
        return self.parameters * self.dtype.itemsize


SHAPES = {
    "1m": Shape("qwen3", 192, 2, 6, 2, 32, 704, 0),
    "3m": Shape("qwen3", 256, 4, 8, 4, 32, 704, 0),
    "20m": Shape("qwen3", 512, 8, 8, 4, 64, 1408, 0),
    "100m": Shape("qwen3", 768, 12, 12, 4, 64, 2048, 32_768),
    # Those of Qwen2.5-0.5B and Qwen2.5-7B
    "500m": Shape("qwen2", 896, 24, 14, 2, 64, 4864, 151_936, True, torch.bfloat16),
    "7b": Shape("qwen2", 3584, 28, 28, 4, 128, 18_944, 152_064, False, torch.bfloat16),
}


def make_model(
    directory: Path, shape: Shape, seed: int, every: int = 0, other_seed: int = 0
) -> tuple[int, int]:
    """Write a model directory. One tensor in `every`, by name, is of `other_seed`; 0: none.

    Returns the bytes of all tensors, and of those of `other_seed`.
    """
    directory.mkdir(parents=True)
    shape.config().save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    blocks = {each: _drawn(each, shape.dtype) for each in (seed, other_seed)}
    shapes = sorted(shape.tensors().items())
    others = set([name for name, _ in shapes][::every] if every else [])
    index: dict[str, str] = {}
    total = changed = 0
    for number, names in enumerate(_shards(shapes, shape.dtype.itemsize), 1):
        shard = {}
        for name, size in names:
            block = blocks[other_seed if name in others else seed]
            shard[name] = _tensor(block, name, size, len(index))
            index[name] = f"model-{number:05d}.safetensors"
            total += shard[name].nbytes
            changed += shard[name].nbytes if name in others else 0
        save_file(shard, directory / index[name], metadata={"format": "pt"})
    if len(set(index.values())) == 1:
        (directory / index[name]).rename(directory / "model.safetensors")
    else:
        table = {"metadata": {"total_size": total}, "weight_map": index}
        (directory / "model.safetensors.index.json").write_text(json.dumps(table))
    return total, changed


def room_line(directory: Path, size: str, models: int) -> str | None:
    """Why so many models of a size do not fit a directory's disk, in one line; None: they do."""
    wanted, free = models * SHAPES[size].file_bytes, shutil.disk_usage(directory).free
    if wanted <= free:
        return None
    return (
        f"{size}: its {models} models take {wanted / GIB:.1f} GiB of {directory}, where "
        f"{free / GIB:.1f} GiB are free: set TMPDIR to a larger disk"
    )


def _drawn(seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(BLOCK, generator=generator) * SPREAD).to(dtype)


def _tensor(block: torch.Tensor, name: str, size: tuple[int, ...], place: int) -> torch.Tensor:
    """Norms are ones; others begin each at a place of its own in the block."""
    if len(size) == 1 and name.endswith("norm.weight"):
        return torch.ones(size, dtype=block.dtype)
    numbers = math.prod(size)
    made = torch.empty(numbers, dtype=block.dtype)
    at = place * 7919 % BLOCK
    for begin in range(0, numbers, BLOCK):
        part = made[begin : begin + BLOCK]
        first = min(len(part), BLOCK - at)
        part[:first] = block[at : at + first]
        part[first:] = block[: len(part) - first]
    return made.view(size)


def _shards(
    shapes: list[tuple[str, tuple[int, ...]]], item_bytes: int
) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Tensors in files of at most `SHARD_BYTES_MAX`, or of one tensor."""
    shard: list[tuple[str, tuple[int, ...]]] = []
    size_bytes = 0
    for name, size in shapes:
        count = math.prod(size) * item_bytes
        if shard and size_bytes + count > SHARD_BYTES_MAX:
            yield shard
            shard, size_bytes = [], 0
        shard.append((name, size))
        size_bytes += count
    yield shard
