"""Deterministic runs under a virtual clock.

Trio shuffles the ready tasks, so a virtual clock alone does not fix the order of simultaneous
events. Only this file touches trio's private scheduler; it refuses an unknown trio. `Freezer` holds
up the tasks of one host. Runs must not use threads, processes, sockets, the wall clock, or the
order of sets.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from random import Random
from typing import Any, TypeVar

import trio
import trio._core._run as scheduler
from trio.testing import MockClock

from swarm.errors import LocalProtocolError
from swarm.identity import PeerId
from swarm.transport.memory.network import RUNS_ON

T = TypeVar("T")
_FLAG = "_ALLOW_DETERMINISTIC_SCHEDULING"
_RANDOM = "_r"
_QUEUE = "runq"


def deterministic_run(async_fn: Callable[..., Awaitable[T]], *args: Any, seed: int | str) -> T:
    """`trio.run` under a virtual clock, with scheduling drawn from `seed`.

    Raises:
        LocalProtocolError: this trio's scheduler cannot be seeded.
    """
    rng = getattr(scheduler, _RANDOM, None)
    before = getattr(scheduler, _FLAG, None)
    if not isinstance(rng, Random) or not isinstance(before, bool):
        raise LocalProtocolError(f"trio {version('trio')} cannot be seeded: use another version")
    state = rng.getstate()
    rng.seed(f"{seed}/scheduler")
    setattr(scheduler, _FLAG, True)
    try:
        return trio.run(async_fn, *args, clock=MockClock(autojump_threshold=0.0))
    finally:
        setattr(scheduler, _FLAG, before)
        rng.setstate(state)


class Freezer:
    """Suspends all tasks that run a host's code. Answers and timeouts in between take effect on
    waking. Use only inside a running trio."""

    def __init__(self) -> None:
        self._frozen: dict[PeerId, list[Any]] = {}

    def freeze(self, host: PeerId) -> None:
        """Suspend the host's tasks.

        Raises:
            LocalProtocolError: this trio's run queue cannot be replaced.
        """
        self._frozen.setdefault(host, [])
        runner = scheduler.GLOBAL_RUN_CONTEXT.runner
        before = getattr(runner, _QUEUE, None)
        if not isinstance(before, deque):
            raise LocalProtocolError(f"trio {version('trio')} cannot hold up tasks")
        queue = _RunQueue(self._frozen)
        for task in before:  # suspend ready tasks as well
            queue.append(task)
        setattr(runner, _QUEUE, queue)

    def thaw(self, host: PeerId) -> None:
        """Resume the host's tasks."""
        held = self._frozen.pop(host, [])
        getattr(scheduler.GLOBAL_RUN_CONTEXT.runner, _QUEUE).extend(held)


class _RunQueue(deque[Any]):
    """Trio's run queue, without the tasks of frozen hosts."""

    def __init__(self, frozen: dict[PeerId, list[Any]]) -> None:
        super().__init__()
        self._frozen = frozen

    def append(self, task: Any) -> None:
        if self._frozen and (held := self._frozen.get(task.context.get(RUNS_ON))) is not None:
            held.append(task)
        else:
            super().append(task)


def stop_at_once(nursery: trio.Nursery) -> None:
    """End all tasks in a nursery like a killed process: shielded work is not finished."""
    todo = list(nursery.child_tasks)
    while todo:
        task = todo.pop()
        for inner in task.child_nurseries:
            todo.extend(inner.child_tasks)
        status: Any = task._cancel_status
        while status is not None and status is not nursery._cancel_status:
            status._scope.shield = False
            status = status.parent
    nursery.cancel_scope.cancel()
