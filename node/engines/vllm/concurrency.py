"""A limit on completions in flight: as many as the engine's key-value cache holds.

Too few leave an engine idle; too many have it throw completions out of its cache and compute them
again. So the limit grows by a share while everything fits, more is waiting, and completions end:
before, nobody knows how much room they take. But on a large GPU long completions take minutes to
end: up to what the cache holds however long they become, the limit doubles at once, while the cache
is nearly empty. When something was thrown out, the cache is full, and what runs then is what it
holds: the limit goes there, and no further. What is in flight comes down only as completions end,
and meanwhile more are thrown out: a limit that went down for each of them would end far too low. A
few that are thrown out cost less than room that nobody uses.
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
    """The load that an engine reports."""

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
    """The limit from now on.

    Args:
        preempted: completions thrown out since the last look.
        wanted: whether anything waits for a place.
        ended: whether any completion has ended since the last look.
        holds: completions that the cache has room for, however long they become; 0: not known.
    """
    if preempted > 0:
        return max(LIMIT_MIN, int(limit * (1 - SHRINK_MAX)), min(limit, load.running - 1))
    if not wanted or load.waiting > 0 or load.cache_share >= CACHE_FULL:
        return limit
    grown = limit + max(1, int(limit * GROWTH)) if ended else limit
    if load.cache_share < CACHE_NEARLY_EMPTY:
        grown = max(grown, min(2 * limit, holds))
    return min(limit_max, grown)


class Flow:
    """Places in flight, given in the order in which they are asked for."""

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
        """Have so many completions in flight within the block. More than the limit at once are let
        in when nothing else is in flight. `longest_tokens`: room in the cache that one of them may
        come to take, with its prompt."""
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
        """Go by what the engine says now. A total that went back is of an engine started anew."""
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
