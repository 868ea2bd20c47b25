"""Shared by the experiments: a simulated swarm, a timed trainer, figures of curves and seeds."""

import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t as student


def Timed(spec: Any) -> Any:
    """The production trainer in this process, with one virtual second for each call. It counts
    processor seconds, without those of evaluations, which generate one completion a prompt."""
    import trio

    from node.train.process import InProcessTrainer

    class TimedTrainer(InProcessTrainer):
        training_s = 0.0
        counts = True

        async def sample(self, requests: Any, sampling: Any, seed: int, noise: float = 0.0) -> Any:
            self.counts = any(each.n > 1 for each in requests)
            result = await super().sample(requests, sampling, seed, noise)
            await trio.sleep(1.0)
            return result

        async def train(self, groups: Any) -> Any:
            self.counts = True
            result = await super().train(groups)
            await trio.sleep(1.0)
            return result

        def compute(self, op: str, *arguments: Any) -> Any:
            before = time.process_time()
            try:
                return super().compute(op, *arguments)
            finally:
                if self.counts:
                    self.training_s += time.process_time() - before

    return TimedTrainer(spec)


Heard = Callable[[Any, Any, Any], Awaitable[None]]


async def train_swarm(
    config: Any,
    models: Sequence[str],
    seed: int,
    heard: Heard,
    enough: Callable[[], bool] = lambda: False,
    unlike: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Train production nodes, one for each model, until all have made their last evaluation, or
    until `enough` after one. `heard` gets each record with its node and trainer. `unlike`: the
    settings in which each node differs from `config`."""
    import trio

    from node.hosting.models import trainer_spec
    from node.observe.records import HeldOut
    from node.simulation.simulated_nodes import build, run
    from swarm.simulation.links import LinkProfile
    from swarm.simulation.world import open_world

    configs = [config.model_copy(update=each) for each in unlike or [{}] * len(models)]
    async with (
        open_world(seed, len(models), LinkProfile(latency_s=0.05)) as world,
        trio.open_nursery() as nursery,
    ):
        done, every = trio.Semaphore(0), nursery.cancel_scope

        async def live(simulated: Any) -> None:
            trainer = Timed(trainer_spec(configs[simulated.host], models[simulated.host]))

            async def on_record(record: object) -> None:
                await heard(simulated, trainer, record)
                if isinstance(record, HeldOut) and enough():
                    every.cancel()
                if isinstance(record, HeldOut) and record.round >= config.rounds:
                    done.release()

            await run(simulated, trainer, trainer, on_record)

        first = build(world, 0, configs[0])
        known = first.transport.addresses()
        others = [build(world, n, configs[n], known) for n in range(1, len(models))]
        for simulated in (first, *others):
            nursery.start_soon(live, simulated)
        for _ in models:
            await done.acquire()
        every.cancel()


async def examine_swarm(
    config: Any, models: Sequence[str], seed: int, samples: int
) -> dict[str, Any]:
    """Train a swarm. Each evaluation has greedy answers and `samples` samples of each held-out
    task, and the tokens and seconds so far: processor time between evaluations, of generating,
    scoring and training, which is of one node if the swarm has no other."""
    from node.observe.records import HeldOut, RoundDone
    from node.run.evaluation import examine

    points: list[dict[str, Any]] = []
    acted: Counter[str] = Counter()
    spent_s, mark_s = 0.0, time.process_time()

    async def heard(simulated: Any, trainer: Any, record: Any) -> None:
        nonlocal spent_s, mark_s
        if isinstance(record, RoundDone):
            acted.update(record.acted)
            spent_s += time.process_time() - mark_s
        if isinstance(record, HeldOut):
            found = await examine(config.run, trainer, simulated.node.verifier, samples)
            tokens = record.generated_tokens_total
            about = {"node": simulated.host, "round": record.round, "tokens": tokens}
            tasks = [[each.greedy, each.passed] for each in found]
            points.append({**about, "seconds": spent_s, "tasks": tasks})
        mark_s = time.process_time()

    await train_swarm(config, models, seed, heard)
    return {"points": points, "acted": dict(acted)}


def value_at(points: Sequence[tuple[float, float]], x: float) -> float:
    """Linear interpolation; the ends are held."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (max(x, x0) - x0) / (x1 - x0) if x1 > x0 else y1
    return points[-1][1]


def told(values: Sequence[float], comparisons: int = 1, sign: str = "") -> str:
    """A mean and its interval of 95 % over seeds, for so many comparisons together."""
    mean = fmean(values)
    if len(values) < 2:
        return f"{mean:{sign}.1f}"
    quantile = float(student.ppf(1 - 0.025 / comparisons, len(values) - 1))
    return f"{mean:{sign}.1f} ± {quantile * stdev(values) / math.sqrt(len(values)):.1f}"
