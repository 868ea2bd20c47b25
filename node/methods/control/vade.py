"""Tasks whose rewards will differ most, by what is believed of them (VADE, arXiv 2511.18902)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from node.methods.checked import probability, right_of, whole
from node.methods.method import MethodSettings


@dataclass(frozen=True, slots=True)
class Vade(MethodSettings):
    """Thompson's draw of each task's success, and those taken that promise most."""

    kind: Literal["vade"] = "vade"
    decay_global: Annotated[float, Gt(0), Le(1)] = 0.99
    """What is left of all counts after a step; not published."""
    decay_local: Annotated[float, Gt(0), Le(1)] = 0.9
    """What is left, besides, of the counts of a task with new results; not published."""
    evidence_max: Annotated[float, Gt(0)] = 64.0
    """One result counts for at most so many rollouts, whoever brings it; not published."""
    tasks_max: Annotated[int, Ge(1)] = 100_000
    """At most so many tasks are known; of more, those with results longest ago are forgotten."""
    ahead: Annotated[int, Ge(2), Le(64)] = 4
    """A node looks at so many times as many tasks of its stream as it wants, and leaves those out
    that promise less; not published."""
    prior_max: Annotated[float, Ge(0), Le(64)] = 8.0
    """What is known of all tasks of its environment counts, of a task that comes again, for at most
    so many rollouts; not published."""
    others_max: Annotated[float, Ge(0), Le(64)] = 16.0
    """What others report of a bucket counts for at most so many rollouts, however many report it.
    0: a node believes itself alone; not published."""


@dataclass(frozen=True, slots=True)
class SuccessCounts:
    """Rollouts of a task, the older the less they count."""

    right: float = 0.0
    wrong: float = 0.0


@dataclass(frozen=True, slots=True)
class SuccessBeliefs:
    """Success counts of tasks. A task without counts may have any pass rate."""

    counts: Mapping[str, SuccessCounts] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, task: str) -> SuccessCounts:
        """Its counts."""
        return self.counts.get(task, SuccessCounts())


def information(success: float) -> float:
    """p (1 - p)^2, which is largest, 4/27, where a third of the rollouts is right.

    Raises:
        ValueError: p is no probability.
    """
    return probability(success, "success") * (1.0 - success) ** 2


def vade(beliefs: SuccessBeliefs, tasks: Iterable[str], count: int, rng: Random) -> tuple[str, ...]:
    """The next step's tasks, best first: `count` of them, or all where there are fewer. Of each
    one a success is drawn from Beta(right + 1, wrong + 1), and the `information` of that counts.

    Raises:
        ValueError: `count` is negative.
    """
    whole(count, "count")
    drawn = {}
    for task in sorted(set(tasks)):
        counts = beliefs.of(task)
        drawn[task] = information(rng.betavariate(counts.right + 1.0, counts.wrong + 1.0))
    return tuple(sorted(drawn, key=lambda each: -drawn[each])[:count])


def learned(
    beliefs: SuccessBeliefs, results: Sequence[tuple[str, int, int]], set_to: Vade
) -> SuccessBeliefs:
    """The beliefs after a step: all counts decay, those of the step's tasks once more, and what
    came is added.

    Args:
        results: (task, how many were right, of how many rollouts) of each group; a task may come
            more than once, from several peers.

    Raises:
        ValueError: a result without rollouts, or with more right ones than rollouts.
    """
    fresh: dict[str, SuccessCounts] = {}
    for task, right, rollouts in sorted(results):
        right_of(right, rollouts)
        weight = min(1.0, set_to.evidence_max / rollouts)
        so_far = fresh.get(task, SuccessCounts())
        fresh[task] = SuccessCounts(
            so_far.right + weight * right, so_far.wrong + weight * (rollouts - right)
        )
    left = set_to.decay_global
    known = {
        task: SuccessCounts(each.right * left, each.wrong * left)
        for task, each in beliefs.counts.items()
    }
    for task, new in fresh.items():
        old = known.pop(task, SuccessCounts())
        known[task] = SuccessCounts(  # at the end: it has the newest results
            old.right * set_to.decay_local + new.right, old.wrong * set_to.decay_local + new.wrong
        )
    for task in list(known)[: max(0, len(known) - set_to.tasks_max)]:
        del known[task]
    return SuccessBeliefs(MappingProxyType(known))
