"""Runs that a seed replays, under a clock that jumps over waiting.

Trio shuffles which of several ready tasks goes first, so a virtual clock alone is not enough: as
soon as two things happen at the same moment, their order differs from run to run. This file is
the only one that touches trio's private scheduler, and it refuses a trio that looks different.

The scheduler can also leave out the tasks of a host whose processor stands still (`Freezer`).

A run is only as deterministic as what runs in it: no threads, processes, sockets or wall clock,
and no order taken from a set or from `id()`.
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
    """`trio.run` under a virtual clock, with each of the scheduler's choices drawn from `seed`.

    Raises:
        LocalProtocolError: this trio has no scheduler that can be seeded.
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
    """Holds up all tasks that run the code of a host, wherever they are, as a closed lid does.

    What happens to a frozen task meanwhile, an answer or a time limit that passed, it finds on
    waking. Only to be made and used inside a running trio.
    """

    def __init__(self) -> None:
        self._frozen: dict[PeerId, list[Any]] = {}

    def freeze(self, host: PeerId) -> None:
        """Let the host's tasks go no step further.

        Raises:
            LocalProtocolError: this trio has no run queue that can be replaced.
        """
        self._frozen.setdefault(host, [])
        runner = scheduler.GLOBAL_RUN_CONTEXT.runner
        before = getattr(runner, _QUEUE, None)
        if not isinstance(before, deque):
            raise LocalProtocolError(f"trio {version('trio')} cannot hold up tasks")
        queue = _RunQueue(self._frozen)
        for task in before:  # what is ready already is kept back as well
            queue.append(task)
        setattr(runner, _QUEUE, queue)

    def thaw(self, host: PeerId) -> None:
        """Let the host's tasks go on."""
        held = self._frozen.pop(host, [])
        getattr(scheduler.GLOBAL_RUN_CONTEXT.runner, _QUEUE).extend(held)


class _RunQueue(deque[Any]):
    """Trio's queue of tasks that are ready, which keeps back those of frozen hosts."""

    def __init__(self, frozen: dict[PeerId, list[Any]]) -> None:
        super().__init__()
        self._frozen = frozen

    def append(self, task: Any) -> None:
        if self._frozen and (held := self._frozen.get(task.context.get(RUNS_ON))) is not None:
            held.append(task)
        else:
            super().append(task)


def stop_at_once(nursery: trio.Nursery) -> None:
    """End all tasks in a nursery as a killed process ends: what they shielded from being cancelled
    is not finished."""
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
