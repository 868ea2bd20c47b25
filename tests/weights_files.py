"""Directories of weights for tests, written by hand so that any dtype and any header can be had."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from swarm.weights.entropy_coding import Array
from swarm.weights.manifest import DTYPE_BITS

Tensors = Mapping[str, tuple[str, Array]]  # by name: dtype, content of any type


def header_of(table: object, metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors header, padded to eight bytes as the format's own writer does."""
    if metadata is not None and isinstance(table, dict):
        table = {"__metadata__": dict(metadata), **table}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_tensors(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file of these tensors, in this order."""
    table, parts, at = {}, [], 0
    for name, (dtype, content) in tensors.items():
        data = content.tobytes()
        count = len(data) * 8 // DTYPE_BITS[dtype]
        shape = list(content.shape) if content.size == count else [count]
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header_of(table, metadata) + b"".join(parts))


def bf16(values: Array) -> Array:
    """Floats cut to bfloat16, as their bits."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def stepped(bits: Array, rng: np.random.Generator, part: float = 0.02) -> Array:
    """The bits of floats of which some moved by a unit or two in the last place."""
    moved = bits.copy()
    chosen = rng.random(bits.shape) < part
    moved[chosen] += rng.integers(1, 3, int(chosen.sum())).astype(bits.dtype)
    return moved


def tree(path: Path) -> dict[str, bytes]:
    """All files under a directory, with their content."""
    return {
        found.relative_to(path).as_posix(): found.read_bytes()
        for found in sorted(path.rglob("*"))
        if found.is_file()
    }


def write_model(path: Path, seed: int, *, base: int | None = None, size: int = 50_000) -> None:
    """A small version: two shards with an index, all sorts of dtypes, a config.

    With `base` it is what came of the version of that seed after a step: some of `layer.*` moved,
    `frozen` stayed, `count` was added to.
    """
    start = np.random.default_rng(seed if base is None else base)
    weight = bf16(start.standard_normal(size) * 0.02)
    single = (start.standard_normal(size // 10) * 0.02).astype(np.float32)
    half = start.standard_normal(size // 10).astype(np.float16)
    frozen = bf16(start.standard_normal((64, 16)))
    count = np.arange(7, dtype=np.int64)
    if base is not None:
        rng = np.random.default_rng(seed)
        weight = stepped(weight, rng)
        single = stepped(single.view(np.uint32), rng).view(np.float32)
        half = stepped(half.view(np.uint16), rng, 0.9).view(np.float16)
        count = count + seed
    path.mkdir(parents=True)
    first = {"layer.weight": ("BF16", weight), "empty": ("F32", np.zeros((0, 4), np.float32))}
    second = {
        "layer.single": ("F32", single),
        "frozen": ("BF16", frozen),
        "layer.half": ("F16", half),
        "scalar": ("F32", np.array(1.5, np.float32)),
        "count": ("I64", count),
    }
    write_tensors(path / "model-1.safetensors", first, {"format": "pt"})
    write_tensors(path / "model-2.safetensors", second)
    where = dict.fromkeys(first, "model-1.safetensors") | dict.fromkeys(
        second, "model-2.safetensors"
    )
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (path / "config.json").write_text(json.dumps({"step": seed}))
