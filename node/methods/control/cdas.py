"""Tasks as hard as the policy is able (CDAS, arXiv 2505.17652)."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Annotated, Literal

from annotated_types import Ge

from node.methods.checked import probability, whole
from node.methods.method import MethodSettings


@dataclass(frozen=True, slots=True)
class Cdas(MethodSettings):
    """Half of the tasks a little below the policy's competence, half a little above it."""

    kind: Literal["cdas"] = "cdas"
    uniform_steps: Annotated[int, Ge(0)] = 1
    """So many steps draw tasks uniformly, as nothing is known of them yet."""
    tasks_max: Annotated[int, Ge(1)] = 100_000
    """A state holds at most so many tasks; of more, those rated longest ago are forgotten."""


@dataclass(frozen=True, slots=True)
class TaskDifficulty:
    """Average gap between a task's expected and actual success."""

    value: float = 0.0  # within [-1, 1]
    terms: int = 1  # of the average; the first is the 0 that every task begins with


@dataclass(frozen=True, slots=True)
class Competence:
    """Ratings of the policy and of its tasks."""

    value: float = 0.0
    steps: int = 0
    difficulties: Mapping[str, TaskDifficulty] = field(default_factory=lambda: MappingProxyType({}))

    def difficulty(self, task: str) -> float:
        """Of a task, on the scale of `value`; 0 where it was never rated."""
        return self.difficulties.get(task, TaskDifficulty()).value


def expected_rate(difficulty: float, competence: float) -> float:
    """The pass rate that a task is expected to have: 1 / (1 + e^(difficulty - competence))."""
    gap = difficulty - competence
    if gap > 0:  # so that no exponent is positive
        return math.exp(-gap) / (1.0 + math.exp(-gap))
    return 1.0 / (1.0 + math.exp(gap))


def rated(state: Competence, rates: Mapping[str, float], tasks: int, set_to: Cdas) -> Competence:
    """The state after a step. Each difficulty is the running mean of expected less observed pass
    rate, and the competence falls by the mean rise of the difficulties.

    Args:
        rates: of each task of this step its pass rate, within [0, 1].
        tasks: how many tasks there are in all, rated or not.

    Raises:
        ValueError: a rate is no share, or more tasks are rated than there are.
    """
    whole(tasks, "tasks", max(1, len(rates)))
    known = dict(state.difficulties)
    rise = 0.0
    for task in sorted(rates):
        before = known.pop(task, TaskDifficulty())
        surprise = expected_rate(before.value, state.value) - probability(rates[task], "pass rate")
        terms = before.terms + 1
        value = before.value + (surprise - before.value) / terms
        rise += value - before.value
        known[task] = TaskDifficulty(value, terms)  # at the end: rated last
    for task in list(known)[: max(0, len(known) - set_to.tasks_max)]:
        del known[task]
    return Competence(state.value - rise / tasks, state.steps + 1, MappingProxyType(known))


def cdas(
    state: Competence, tasks: Iterable[str], count: int, rng: Random, set_to: Cdas
) -> tuple[str, ...]:
    """The next step's tasks: `count` of them, or all where there are fewer.

    Half are the nearest that are at most as hard as the policy is able, the others the nearest
    that are harder; of an odd number the harder half has one more. What a side lacks the other one
    gives. Equally near tasks are drawn, as else the same ones would be first for ever.

    Raises:
        ValueError: `count` is negative.
    """
    whole(count, "count")
    drawn = sorted(set(tasks))
    rng.shuffle(drawn)
    if state.steps < set_to.uniform_steps:
        return tuple(drawn[:count])
    easier: list[str] = []
    harder: list[str] = []
    for task in sorted(drawn, key=lambda each: abs(state.difficulty(each) - state.value)):
        (easier if state.difficulty(task) <= state.value else harder).append(task)
    of_harder = min(len(harder), count - min(len(easier), count // 2))
    return tuple(easier[: count - of_harder] + harder[:of_harder])
