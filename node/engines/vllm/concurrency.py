"""A limit on completions in flight: as many as the engine's key-value cache holds.

Too few leave the engine idle; too many are preempted (thrown out of the cache and computed again).
The limit grows by a share while everything fits, more is waiting and completions end, because only
ended ones show their size. While the cache is nearly empty, the limit doubles up to what the cache
holds at full length. After a preemption the limit becomes what runs now. It does not fall for every
preemption: in-flight completions end slowly, and it would fall far too low.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio

LIMIT_FIRST: Final = 64
LIMIT_MIN: Final = 1
GROWTH: Final = 1 / 32  # of the limit, at a look; at least one
SHRINK_MAX: Final = 0.1  # of the limit, at a look, as few run at the end of a round as well
CACHE_FULL: Final = 0.9  # share of the cache above which nothing is added
CACHE_NEARLY_EMPTY: Final = 0.25  # share of the cache below which the limit may double, at a look


@dataclass(frozen=True, slots=True)
class EngineLoad:
    running: int  # completions
    waiting: int  # completions that it has taken and not begun
    cache_share: float  # of its key-value cache that is in use
    preempted_total: int  # completions thrown out of the cache, since its start
    cache_tokens: int = 0  # that its key-value cache holds; 0: it does not say


def next_limit(
    limit: int,
    limit_max: int,
    load: EngineLoad,
    preempted: int,
    *,
    wanted: bool,
    ended: bool,
    holds: int = 0,
) -> int:
    """The new limit. `preempted` and `ended` count since the last look; `wanted`: something waits.
    `holds`: full-length completions that fit in the cache; 0: unknown."""
    if preempted > 0:
        return max(LIMIT_MIN, int(limit * (1 - SHRINK_MAX)), min(limit, load.running - 1))
    if not wanted or load.waiting > 0 or load.cache_share >= CACHE_FULL:
        return limit
    grown = limit + max(1, int(limit * GROWTH)) if ended else limit
    if load.cache_share < CACHE_NEARLY_EMPTY:
        grown = max(grown, min(2 * limit, holds))
    return min(limit_max, grown)


class Flow:
    """Slots in flight, granted in the order of the requests."""

    def __init__(self, limit_max: int) -> None:
        self.limit = min(LIMIT_FIRST, limit_max)
        self.in_flight = 0
        self.preempted = 0  # completions, as far as it was told
        self._limit_max = limit_max
        self._seen = 0  # of the engine's own total
        self._ended = False  # anything, since the last look
        self._longest_tokens = 0  # of all that ever asked for a place
        self._turn = trio.Lock()
        self._changed = trio.Event()

    @asynccontextmanager
    async def place(self, count: int, longest_tokens: int = 0) -> AsyncIterator[None]:
        """Have `count` completions in flight within the block. A larger count than the limit waits
        until nothing else is in flight. `longest_tokens`: of one completion with its prompt."""
        self._longest_tokens = max(self._longest_tokens, longest_tokens)
        async with self._turn:
            while self.in_flight and self.in_flight + count > self.limit:
                self._changed = trio.Event()
                await self._changed.wait()
            self.in_flight += count
        try:
            yield
        finally:
            self.in_flight -= count
            self._ended = True
            self._changed.set()

    def look(self, load: EngineLoad) -> None:
        """Adjust the limit by the engine's load. A smaller total means a restarted engine."""
        preempted = max(0, load.preempted_total - self._seen)
        self._seen = load.preempted_total
        self.preempted += preempted
        self.limit = next_limit(
            self.limit,
            self._limit_max,
            load,
            preempted,
            wanted=self._turn.locked(),
            ended=self._ended,
            holds=load.cache_tokens // self._longest_tokens if self._longest_tokens else 0,
        )
        self._ended = False
        self._changed.set()
