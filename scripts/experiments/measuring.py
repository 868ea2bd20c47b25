"""Shared by the experiments: a simulated swarm, a timed trainer, figures of curves and seeds."""

import math
import time
from collections.abc import Awaitable, Callable, Sequence
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

        async def generate(self, prompts: Any, each: int, sampling: Any, seed: int) -> Any:
            self.counts = each > 1
            result = await super().generate(prompts, each, sampling, seed)
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


async def train_swarm(config: Any, models: Sequence[str], seed: int, heard: Heard) -> None:
    """Train production nodes, one for each model, until all have made their last evaluation.
    `heard` gets each record with its node and trainer."""
    import trio

    from node.hosting.models import trainer_spec
    from node.observe.records import HeldOut
    from node.simulation.simulated_nodes import build, run
    from swarm.simulation.links import LinkProfile
    from swarm.simulation.world import open_world

    async with (
        open_world(seed, len(models), LinkProfile(latency_s=0.05)) as world,
        trio.open_nursery() as nursery,
    ):
        done = trio.Semaphore(0)

        async def live(simulated: Any) -> None:
            trainer = Timed(trainer_spec(config, models[simulated.host]))

            async def on_record(record: object) -> None:
                await heard(simulated, trainer, record)
                if isinstance(record, HeldOut) and record.round >= config.rounds:
                    done.release()

            await run(simulated, trainer, trainer, on_record)

        first = build(world, 0, config)
        known = first.transport.addresses()
        others = [build(world, n, config, known) for n in range(1, len(models))]
        for simulated in (first, *others):
            nursery.start_soon(live, simulated)
        for _ in models:
            await done.acquire()
        nursery.cancel_scope.cancel()


def value_at(points: Sequence[tuple[float, float]], x: float) -> float:
    """Linear interpolation; the ends are held."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (max(x, x0) - x0) / (x1 - x0) if x1 > x0 else y1
    return points[-1][1]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval over seeds."""
    if len(values) < 2:
        return fmean(values), math.nan
    quantile = float(student.ppf(0.975, len(values) - 1))
    return fmean(values), quantile * stdev(values) / math.sqrt(len(values))
