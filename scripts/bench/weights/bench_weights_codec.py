"""Deltas of real consecutive checkpoints: their size beside other ways, and the codec's speed.

    python bench_weights_codec.py            # some three minutes on two cores
    FULL=1 python bench_weights_codec.py     # a longer warm-up, and 16 steps at each rate

Trains a small transformer (some 23 million parameters, bf16 weights with fp32 masters, Adam) on
synthetic text: a warm-up at 1e-3, and from there some steps at each learning rate. After every step
the weights are saved as a safetensors directory; each is encoded against the one before.

    bound    first order: n * (H2(p) + p * h) / 8 bytes, where p of n elements changed and h is the
             entropy of the signed steps in the integer view. It knows no magnitudes, so a code
             that does can go below it.
    XOR      of both states, zstd
    index    32-bit indices and bf16 values of what changed, raw and zstd

Speeds are raw model bytes over CPU time of the one thread that works, medians over the steps:
`codec` with blocks in memory, `files` from directories to chunks and from chunks to a new directory
(without hashing, which is a column of its own).
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
import zstandard
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from swarm.weights.artifacts import (
    Patcher,
    encode_artifact,
    estimated_bytes,
    suggested_chunk_bytes,
)
from swarm.weights.delta import Payload, choose_classes, decode_block, encode_delta, ordered
from swarm.weights.manifest import WeightsDirectory, open_weights

FULL = os.environ.get("FULL") == "1"
RATES = (1e-6, 1e-5, 1e-4)
WARM_UP, SETTLE, STEPS = (200, 20, 16) if FULL else (30, 4, 8)
SKIPS = (1, 2, 4, 8)
WORDS, WIDTH, LAYERS, HEADS, ROWS, LENGTH = 4096, 512, 6, 8, 8, 64
LEVELS = (1, 3)  # of zstd for the others; the codec's own settings are those of level 1, or less

Units = NDArray[np.uint16]
T = TypeVar("T")


def new_policy() -> nn.Module:
    """A decoder; weights begin as N(0, 0.02), as those of large models do."""
    config = Qwen3Config(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=4 * WIDTH * 2 // 3,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        head_dim=WIDTH // HEADS, tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def text(rng: np.random.Generator) -> torch.Tensor:
    """Words of a long tail, half of which follow from the word before: (rows, length + 1)."""
    words = np.minimum(rng.zipf(1.2, (ROWS, LENGTH + 1)) - 1, WORDS - 1)
    for at in range(1, LENGTH + 1):
        follows = rng.random(ROWS) < 0.5
        words[follows, at] = (words[follows, at - 1] * 31 + 7) % WORDS
    return torch.from_numpy(words.astype(np.int64))


class Training:
    """bf16 weights of which the optimizer never sees the rounding: it has masters in fp32."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._rng = np.random.default_rng(0)
        self._policy = new_policy()
        self._masters = [weight.detach().clone() for weight in self._policy.parameters()]
        self._adam = torch.optim.Adam(self._masters)

    def step(self, rate: float) -> None:
        """One update."""
        self._adam.param_groups[0]["lr"] = rate
        weights = list(self._policy.parameters())
        with torch.no_grad():
            for weight, master in zip(weights, self._masters, strict=True):
                weight.copy_(master.bfloat16())
        words = text(self._rng)
        logits = self._policy(input_ids=words[:, :-1]).logits.flatten(0, 1)
        self._policy.zero_grad()
        F.cross_entropy(logits, words[:, 1:].flatten()).backward()
        for weight, master in zip(weights, self._masters, strict=True):
            master.grad = weight.grad
        nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._adam.step()

    def save(self, path: Path) -> WeightsDirectory:
        """The weights as they would be used, in bf16."""
        path.mkdir(parents=True)
        names = [name for name, _ in self._policy.named_parameters()]
        tensors = dict(zip(names, (each.bfloat16() for each in self._masters), strict=True))
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return open_weights(path)

    def state(self) -> tuple[list[torch.Tensor], dict[str, object]]:
        """To come back to."""
        return [each.clone() for each in self._masters], deepcopy(self._adam.state_dict())

    def restore(self, state: tuple[list[torch.Tensor], dict[str, object]]) -> None:
        """Back to a state."""
        for master, saved in zip(self._masters, state[0], strict=True):
            master.copy_(saved)
        self._adam.load_state_dict(deepcopy(state[1]))


def checkpoints(folder: Path) -> Iterator[tuple[float, list[WeightsDirectory]]]:
    """For each learning rate consecutive versions, all from the same warmed-up state."""
    training = Training()
    for done in range(WARM_UP):
        training.step(1e-3 * min(1.0, (done + 1) / 10))
    warm = training.state()
    for rate in RATES:
        training.restore(warm)
        for _ in range(SETTLE):
            training.step(rate)
        versions = []
        for number in range(STEPS + 1):
            training.step(rate)
            versions.append(training.save(folder / f"{rate:g}" / str(number)))
        yield rate, versions


def units_of(weights: WeightsDirectory) -> dict[str, Units]:
    """All bf16 tensors, as bits."""
    return {
        spec.name: weights.read(spec, 0, spec.size_bytes).view(np.uint16)
        for spec in weights.specs
        if spec.dtype == "BF16"
    }


def entropy_bits(values: NDArray[np.int64]) -> float:
    """Of one of them."""
    _, counts = np.unique(values, return_counts=True)
    parts = counts / counts.sum()
    return float(-(parts * np.log2(parts)).sum())


@dataclass
class Sizes:
    """Bytes of one delta, in several ways."""

    raw: int
    changed: float
    ours: int
    bound: float
    others: dict[str, int]


def sizes(new: WeightsDirectory, base: WeightsDirectory) -> Sizes:
    """Everything that is compared, of one step."""
    after = np.concatenate(list(units_of(new).values()))
    before = np.concatenate(list(units_of(base).values()))
    at = np.flatnonzero(after != before)
    part = len(at) / len(after)
    steps = ordered(after[at], "BF16").view(np.int16).astype(np.int64)
    steps -= ordered(before[at], "BF16").view(np.int16)
    mask_bits = -part * np.log2(part) - (1 - part) * np.log2(1 - part)
    pairs = at.astype(np.uint32).tobytes() + after[at].tobytes()
    others = {"index raw": len(pairs)}
    for level in LEVELS:
        packed = zstandard.ZstdCompressor(level=level)
        others[f"XOR {level}"] = len(packed.compress((after ^ before).tobytes()))
        others[f"index {level}"] = len(packed.compress(pairs))
    return Sizes(
        raw=sum(spec.size_bytes for spec in new.specs),
        changed=part,
        ours=sum(map(len, chunks_of(new, base))),
        bound=len(after) * (mask_bits + part * entropy_bits(steps)) / 8,
        others=others,
    )


def chunks_of(new: WeightsDirectory, base: WeightsDirectory) -> list[bytes]:
    """As a publisher cuts them."""
    chunk_bytes = suggested_chunk_bytes(estimated_bytes(new, base))
    return list(encode_artifact(new, base, chunk_bytes))


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """The result, and the CPU seconds of this thread."""
    begin = time.thread_time()
    made = work()
    return made, time.thread_time() - begin


def speeds(new: WeightsDirectory, base: WeightsDirectory, folder: Path) -> tuple[float, ...]:
    """GB/s: codec encodes and applies, files to chunks and chunks to files, verifying."""
    before = {name: units.view(np.uint8) for name, units in units_of(base).items()}
    changed = {name: units.view(np.uint8) for name, units in units_of(new).items()}
    gigabytes = sum(each.nbytes for each in before.values()) / 1e9

    def encode() -> dict[str, Payload | None]:
        return {
            name: encode_delta(
                changed[name], old, "BF16", choose_classes(changed[name], old, "BF16")
            )
            for name, old in before.items()
        }

    payloads, encode_s = timed(encode)

    def apply() -> None:
        for name, payload in payloads.items():
            if payload is not None:
                count, view = len(after[name]) // 2, memoryview(payload.content)
                made = decode_block(payload.method, view, "BF16", count, after[name])
                after[name] = made.view(np.uint8)

    after = {name: old.copy() for name, old in before.items()}  # a block is patched in place
    _, apply_s = timed(apply)
    chunks, encode_files_s = timed(lambda: chunks_of(new, base))
    patcher = Patcher(new.specs, base, folder)
    _, apply_files_s = timed(lambda: [patcher.apply(chunk) for chunk in chunks])
    made, verify_s = timed(patcher.finish)
    assert made.specs == new.specs
    assert all(np.array_equal(after[name], each) for name, each in changed.items())
    times = (encode_s, apply_s, encode_files_s, apply_files_s, verify_s)
    return tuple(gigabytes / each for each in times)


def main() -> int:
    """Train, measure, print."""
    rows: dict[float, list[Sizes]] = {}
    rates: dict[float, list[tuple[float, ...]]] = {}
    skips: dict[float, dict[int, Sizes]] = {}
    with tempfile.TemporaryDirectory() as name:
        for rate, versions in checkpoints(Path(name)):
            pairs = list(zip(versions[1:], versions, strict=False))
            rows[rate] = [sizes(new, base) for new, base in pairs]
            rates[rate] = [
                speeds(new, base, Path(name) / "made" / f"{rate:g}" / str(number))
                for number, (new, base) in enumerate(pairs)
            ]
            skips[rate] = {back: sizes(versions[-1], versions[-1 - back]) for back in SKIPS}
            print(f"learning rate {rate:g}: done", file=sys.stderr, flush=True)
    print_sizes(rows)
    print_skips(skips, rows)
    print_speeds(rates)
    return 0


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print("| " + " | ".join(heads) + " |")
    print("|---" + "|---:" * (len(heads) - 1) + "|")
    for cells in rows:
        print("| " + " | ".join(cells) + " |")


def print_sizes(rows: dict[float, list[Sizes]]) -> None:
    """One step each, medians; factors are of raw bytes over that way's."""
    raw = next(iter(rows.values()))[0].raw
    print(f"\n{raw:,} raw bytes, {STEPS} consecutive steps; times smaller than raw, medians\n")
    names = list(next(iter(rows.values()))[0].others)
    heads = ["rate", "changed", "delta B", "delta", "bound", "delta/bound", *names, "index 1/delta"]

    def cells(rate: float, found: list[Sizes]) -> list[str]:
        def middle(of: Callable[[Sizes], float]) -> float:
            return median(of(each) for each in found)

        return [
            f"{rate:g}",
            f"{100 * middle(lambda s: s.changed):.2f} %",
            f"{middle(lambda s: s.ours):,.0f}",
            f"{middle(lambda s: s.raw / s.ours):.1f}",
            f"{middle(lambda s: s.raw / s.bound):.1f}",
            f"{middle(lambda s: s.ours / s.bound):.3f}",
            *(f"{middle(lambda s, name=name: s.raw / s.others[name]):.1f}" for name in names),
            f"{middle(lambda s: s.others['index 1'] / s.ours):.2f}",
        ]

    print_table(heads, (cells(rate, found) for rate, found in rows.items()))


def print_skips(skips: dict[float, dict[int, Sizes]], rows: dict[float, list[Sizes]]) -> None:
    """Deltas against older versions, beside all single steps between."""
    print()
    print_table(
        ("rate", "against", "changed", "bytes", "delta/bound", "steps replayed / delta"),
        (
            (
                f"{rate:g}",
                f"v-{back}",
                f"{100 * each.changed:.2f} %",
                f"{each.ours:,}",
                f"{each.ours / each.bound:.3f}",
                f"{sum(step.ours for step in rows[rate][-back:]) / each.ours:.2f}",
            )
            for rate, found in skips.items()
            for back, each in found.items()
        ),
    )


def print_speeds(rates: dict[float, list[tuple[float, ...]]]) -> None:
    """Medians."""
    names = ("codec encode", "codec apply", "files encode", "files apply", "verify, sync")
    print("\nGB/s of raw model bytes per core, medians\n")
    print_table(
        ("rate", *names),
        (
            (f"{rate:g}", *(f"{median(column):.2f}" for column in zip(*found, strict=True)))
            for rate, found in rates.items()
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
