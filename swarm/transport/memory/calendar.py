"""Things that happen in the simulated network at a time of their own, without a task for each."""

import heapq
from collections.abc import Callable
from itertools import count
from math import inf
from random import Random

import trio


class Post:
    """Calls things at their time, by one task for all of them. What falls on the same moment is
    called in an order that the seed draws."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._numbers = count()
        self._due: list[tuple[float, float, int, Callable[[], object]]] = []
        self._sooner = trio.Event()

    def at(self, time_s: float, do: Callable[[], object]) -> None:
        """Call `do` at that time."""
        if not self._due or time_s < self._due[0][0]:
            self._sooner.set()
        heapq.heappush(self._due, (time_s, self._rng.random(), next(self._numbers), do))

    async def run(self) -> None:
        """Call what is due, for ever."""
        while True:
            while self._due and self._due[0][0] <= trio.current_time():
                heapq.heappop(self._due)[-1]()
            self._sooner = trio.Event()
            with trio.move_on_at(self._due[0][0] if self._due else inf):
                await self._sooner.wait()
