"""Successes that are kept, for tasks on which there are none or few."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Annotated, Literal

from annotated_types import Ge, Le

from node.methods.advantages.unlikely import PASSED
from node.methods.checked import finite
from node.methods.method import MethodSettings


@dataclass(frozen=True, slots=True)
class PoolOfSuccesses(MethodSettings):
    """A task that nobody solves now gets successes of before."""

    kind: Literal["pool_of_successes"] = "pool_of_successes"
    injected: Annotated[int, Ge(1), Le(64)] = 1
    """How many such a group gets; not published."""
    task_max: Annotated[int, Ge(1), Le(1_024)] = 8
    """The pool holds so many of a task, the newest; not published."""
    tasks_max: Annotated[int, Ge(1)] = 10_000
    """It holds so many tasks, those with a success last; not published."""


@dataclass(frozen=True, slots=True)
class ReplayedSuccesses(MethodSettings):
    """A task that is rarely solved gets own successes of before."""

    kind: Literal["replayed_successes"] = "replayed_successes"
    replayed: Annotated[int, Ge(1), Le(64)] = 2
    """How many are added to a group; not published."""
    success_max: Annotated[float, Ge(0), Le(1)] = 0.25
    """The largest share of right ones at which a task is solved rarely; not published."""


@dataclass(frozen=True, slots=True)
class SuccessPool:
    """Of each task the names of its successes, the oldest first."""

    stored: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, task: str) -> tuple[str, ...]:
        """Those of a task."""
        return self.stored.get(task, ())


def with_success(pool: SuccessPool, task: str, name: str, set_to: PoolOfSuccesses) -> SuccessPool:
    """The pool with one more success, the newest; one that it holds already becomes the newest."""
    known = dict(pool.stored)
    names = [each for each in known.pop(task, ()) if each != name]
    known[task] = (*names, name)[-set_to.task_max :]
    for other in list(known)[: max(0, len(known) - set_to.tasks_max)]:
        del known[other]
    return SuccessPool(MappingProxyType(known))


def pool_of_successes(
    pool: SuccessPool, task: str, rewards: Sequence[float], rng: Random, set_to: PoolOfSuccesses
) -> tuple[str, ...]:
    """Stored successes that join a task's group (DART, arXiv 2509.23866): a draw without
    replacement if none of its own completions passed, else none.

    Raises:
        ValueError: a reward is no finite number.
    """
    if any(each >= PASSED for each in finite(rewards, "rewards")):
        return ()
    return _drawn(pool.of(task), set_to.injected, rng)


def replayed_successes(
    pool: SuccessPool, task: str, rewards: Sequence[float], rng: Random, set_to: ReplayedSuccesses
) -> tuple[str, ...]:
    """Earlier own successes that join a task's group (RLEP, arXiv 2507.07451, which adds them to
    every group): a draw without replacement if few enough of the group passed, else none. An empty
    group gets none: nothing could be compared with them.

    Raises:
        ValueError: a reward is no finite number.
    """
    right = sum(each >= PASSED for each in finite(rewards, "rewards"))
    if not rewards or right > set_to.success_max * len(rewards):
        return ()
    return _drawn(pool.of(task), set_to.replayed, rng)


def _drawn(names: Sequence[str], count: int, rng: Random) -> tuple[str, ...]:
    return tuple(rng.sample(sorted(names), min(count, len(names))))
