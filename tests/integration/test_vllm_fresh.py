"""Many updates in a row leave in an engine what one has that is built anew from the same directory.

Layouts that vLLM keeps otherwise than the files: heads tied to the embedding, query, key and value
in one, experts in one.
"""

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
import trio
from safetensors.torch import load_file, save_file

from node.engines.vllm import server as vllm_server
from node.engines.vllm.engine import VllmEngine
from node.engines.vllm.probe import LogProbs, Rows, difference
from node.interfaces.engine import Sampling
from tests.integration.failing_worker import FORGET, FORGET_EXPERTS
from tests.integration.shared_vllm import reference
from tests.integration.vllm_models import model_directory, open_model
from tests.support import run

LOGGER = logging.getLogger(__name__)
ROOT = Path(__file__).parents[2]
PROMPTS = ("3+4=", "what day is it?", "and tomorrow?")
SAMPLING = Sampling(max_new_tokens=12)
UPDATES, FEW_UPDATES = 100, 5
APART_MAX = 1e-4  # nats at most; the same kernels, but tokens one by one and in a row
FORGOTTEN_MIN = 100 * APART_MAX  # what one tensor makes that was left behind
TIMEOUT_S = 1800.0  # a busy machine is no failure
LAYOUTS = {
    "tied": {"tied": True},
    "untied": {"tied": False},
    "experts": {"tied": False, "moe": True},
    "experts-tied": {"tied": True, "moe": True},
}
pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.integration]


class FreshEngines:
    """Asks engines that are built for the question. Made by `fresh_engines`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def log_probs(self, directory: Path, rows: Rows) -> LogProbs:
        """What one says that is started on a directory."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"directory": str(directory), "rows": rows}), file=self._process.stdin)
        found: LogProbs = json.loads(self._process.stdout.readline())
        return found


@contextmanager
def fresh_engines(engine: VllmEngine, scratch: Path) -> Iterator[FreshEngines]:
    """Engines with the arguments and the environment of one's server."""
    scratch.mkdir()
    command = vllm_server._command(engine.directory, engine._settings, scratch)
    server = command.index("vllm.entrypoints.openai.api_server")
    with (
        (scratch / "log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.fresh_engine_child", *command[server + 1 :]],
            cwd=ROOT,
            env=vllm_server._environment(engine._settings, scratch),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            bufsize=1,
        ) as process,
    ):
        try:
            yield FreshEngines(process)
        finally:
            process.kill()


def change(source: Path, target: Path, rng: Random, *, whole: bool) -> None:
    """Write the weights of `source`, changed at random: all tensors, or two of them."""
    weights = load_file(source / "model.safetensors")
    some = sorted(weights) if whole else rng.sample(sorted(weights), 2)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    for name in some:
        noise = torch.randn(weights[name].shape, generator=generator)
        weights[name] = weights[name] + 0.05 * weights[name].std().clamp_min(0.1) * noise
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(source, target)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


async def apart(engine: VllmEngine, fresh: FreshEngines, seed: int) -> float:
    """How far an engine is at most from a fresh one, in nats: over rows of random tokens, and over
    tokens that it samples."""
    random_rows = list(engine._rows)
    said = await engine._each([partial(engine._logprobs, row) for row in random_rows])
    prompts = [await engine._encode(prompt) for prompt in PROMPTS]
    groups = await engine.generate(PROMPTS, 2, SAMPLING, seed)
    sampled_rows = []
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            sampled_rows.append([*prompt, *completion.token_ids])
            said.append(completion.logprobs)
    found = await trio.to_thread.run_sync(
        fresh.log_probs, engine.directory, [*random_rows, *sampled_rows]
    )
    ends = [row[-len(ours) :] for ours, row in zip(said, found, strict=True)]
    return difference(said, ends).max


@pytest.mark.parametrize(
    ("layout", "updates"),
    [
        ("tied", FEW_UPDATES),
        *(pytest.param(layout, UPDATES, marks=pytest.mark.long) for layout in LAYOUTS),
    ],
)
def test_each_update_leaves_what_a_fresh_engine_has(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    updates: int,
) -> None:
    """Full ones and deltas. The engine's own probe compares each with a forward pass of
    transformers besides; the updates in the end, which leave something behind, are made without
    it, so that only the comparison with a fresh engine can notice."""
    worker = "tests.integration.failing_worker.FailingExtension"
    monkeypatch.setattr(vllm_server, "WORKER_EXTENSION", worker)
    rng = Random(layout)
    first = model_directory(tmp_path / "v0", 1, stops=False, context_tokens=256, **LAYOUTS[layout])
    full = [number % 2 == 0 for number in range(updates)]
    rng.shuffle(full)
    faults = [FORGET, *([FORGET_EXPERTS] if "experts" in layout else [])]

    async def update(engine: VllmEngine, number: int, fault: str | None = None) -> None:
        new = tmp_path / f"v{number % 3}"  # the one before serves, and the one before that is gone
        whole = fault is not None or full[number - 1]
        await trio.to_thread.run_sync(partial(change, engine.directory, new, rng, whole=whole))
        for each in faults:
            (new / each).unlink(missing_ok=True)
        if fault is not None:
            (new / fault).touch()
        await engine.load(new, number)

    async def body() -> float:
        largest, partly = 0.0, 0
        async with open_model(first, tmp_path / "data", threads=1, reference=reference) as engine:
            with fresh_engines(engine, tmp_path / "fresh") as fresh:
                for number in range(1, updates + 1):
                    await update(engine, number)
                    assert engine.last_update is not None
                    assert engine.last_update.probe is not None
                    partly += engine.last_update.tensors < engine.last_update.tensors_total
                    found = await apart(engine, fresh, number)
                    assert found < APART_MAX, f"after update {number}"
                    largest = max(largest, found)
                assert partly == full.count(False)
                assert (engine.rolled_back, engine.restarts) == (0, 0)
                engine._reference = None
                for fault in faults:
                    number += 1
                    await update(engine, number, fault)
                    assert await apart(engine, fresh, number) > FORGOTTEN_MIN, fault
        return largest

    largest = run(body, timeout_s=TIMEOUT_S)
    LOGGER.info("%s: %d updates, at most %.2g nats apart", layout, updates, largest)
