"""A gate that work passes in pieces, and that can be shut between them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


class Gate:
    """Open at first. What is inside when it is shut comes out; nothing more goes in."""

    def __init__(self) -> None:
        self._opened = trio.Event()
        self._opened.set()
        self._left = trio.Event()  # since it was last waited for
        self._inside = 0

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Be inside for the length of the block, once the gate is open."""
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
        """Whether anything may go in."""
        return self._opened.is_set()

    async def pause(self) -> None:
        """Shut the gate; return once nothing is inside. Cancelled, it stays shut."""
        if self._opened.is_set():
            self._opened = trio.Event()
        await trio.lowlevel.checkpoint()
        while self._inside:
            if self._left.is_set():
                self._left = trio.Event()
            await self._left.wait()

    def resume(self) -> None:
        """Open the gate, if it is shut."""
        self._opened.set()
