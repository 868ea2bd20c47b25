"""Sums of which every other one needs a container, or is added up in a way of its own."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class BoxedSum(Sum):
    NEEDS_CONTAINER = True


class StrictSum(Sum):
    async def score(self, trace: vf.Trace, runtime: Any = None) -> None:
        await super().score(trace, runtime)
        trace.record_reward("short", -float(len(trace.last_reply) > 3), 1.0)


class TwoKindsConfig(vf.TasksetConfig):
    strict: bool = False


class TwoKindsTaskset(vf.Taskset[Sum, TwoKindsConfig]):
    def load(self) -> Iterator[Sum]:
        for number in range(40):
            kind = BoxedSum if number % 2 else Sum
            if self.config.strict:
                kind = StrictSum
            yield kind(SumData(prompt=f"{number}+1?", answer=str(number + 1)), self.config.task)
