"""Runs that a seed replays, under a clock that jumps over waiting.

Trio shuffles which of several ready tasks goes first, so a virtual clock alone is not enough: as
soon as two things happen at the same moment, their order differs from run to run. This file is
the only one that touches trio's private scheduler, and it refuses a trio that looks different.

A run is only as deterministic as what runs in it: no threads, processes, sockets or wall clock,
and no order taken from a set or from `id()`.
"""

from collections.abc import Awaitable, Callable
from importlib.metadata import version
from random import Random
from typing import Any, TypeVar

import trio
import trio._core._run as scheduler
from trio.testing import MockClock

from swarm.errors import LocalProtocolError

T = TypeVar("T")
_FLAG = "_ALLOW_DETERMINISTIC_SCHEDULING"
_RANDOM = "_r"


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
