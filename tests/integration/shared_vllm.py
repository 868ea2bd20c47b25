"""A vLLM engine that several tests share: to start one takes ten seconds and more.

The engine belongs to a loop in a thread of its own, which outlives the tests; they run their
bodies there.
"""

import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

from node.engines.vllm_engine import VllmEngine, open_vllm
from tests.integration.vllm_models import model_directory

TIMEOUT_S = 300.0  # for a body, and for the start


class SharedVllm:
    """An engine and its loop."""

    def __init__(self, engine: VllmEngine, token: trio.lowlevel.TrioToken, first: Path) -> None:
        self.engine = engine
        self._token = token
        self._first = first

    def run(self, async_fn: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Run a test's body on the engine's loop."""

        async def bounded() -> Any:
            with trio.fail_after(TIMEOUT_S):
                return await async_fn(*args)

        return trio.from_thread.run(bounded, trio_token=self._token)

    async def reset(self) -> VllmEngine:
        """The engine with its first weights, as version 0."""
        await self.engine.resume()
        await self.engine.load(self._first, 0)
        return self.engine


@contextmanager
def shared_vllm(directory: Path, model: Path | None = None, **options: Any) -> Iterator[SharedVllm]:
    """An engine on a model, by default on one that stops at many tokens."""
    first = model or model_directory(directory / "first", 1)
    opened: list[SharedVllm] = []
    failures: list[BaseException] = []
    ready, over = threading.Event(), trio.Event()

    async def serve() -> None:
        async with open_vllm(first, directory / "data", threads=1, **options) as engine:
            opened.append(SharedVllm(engine, trio.lowlevel.current_trio_token(), first))
            ready.set()
            await over.wait()

    def live() -> None:
        try:
            trio.run(serve)
        except BaseException as error:  # noqa: BLE001 - told to the thread of the tests
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    assert ready.wait(TIMEOUT_S)
    if failures:
        raise failures[0]
    try:
        yield opened[0]
    finally:
        trio.from_thread.run_sync(over.set, trio_token=opened[0]._token)
        thread.join(TIMEOUT_S)
    assert not failures, failures[0]
