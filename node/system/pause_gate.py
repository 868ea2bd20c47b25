"""A gate that work passes in pieces and that can be closed between them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


class Gate:
    """Open at first. Work inside finishes after closing; no more enters."""

    def __init__(self) -> None:
        self._opened = trio.Event()
        self._opened.set()
        self._left = trio.Event()  # set when the last one has left
        self._inside = 0

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Be inside during the block, once the gate is open."""
        while not self._opened.is_set():
            await self._opened.wait()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self._left.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    async def pause(self) -> None:
        """Close the gate and wait until nothing is inside. If cancelled, it stays closed."""
        if self._opened.is_set():
            self._opened = trio.Event()
        await trio.lowlevel.checkpoint()
        while self._inside:
            if self._left.is_set():
                self._left = trio.Event()
            await self._left.wait()

    def resume(self) -> None:
        self._opened.set()
