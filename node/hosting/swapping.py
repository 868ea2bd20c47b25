"""A rollout engine as a swap of versions sees it: pause, load a directory, resume."""

from collections.abc import Callable
from pathlib import Path

import trio

from node.interfaces.engine import RolloutEngine
from swarm.weights.store.versions import version_of


class SwappingEngine:
    """`swarm.weights.hot_swap.Engine` over a rollout engine, whose `generate` may be running."""

    def __init__(self, engine: RolloutEngine, version: Callable[[Path], int] = version_of) -> None:
        """`version` tells which version a directory holds; it may block."""
        self._engine = engine
        self._version = version

    async def pause(self) -> None:
        """See `RolloutEngine.pause`."""
        await self._engine.pause()

    async def load(self, directory: Path) -> None:
        """Serve a version's weights from the next segment on.

        Raises:
            ChildFailed: the load failed; the version before serves on.
            LocalProtocolError: the directory is no version's.
        """
        policy_version = await trio.to_thread.run_sync(self._version, directory)
        await self._engine.load(directory, policy_version)

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        await self._engine.resume()
