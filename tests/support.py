"""What several tests share."""

import importlib.util
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import trio
import trio.testing

TIMEOUT_S = 180.0  # of a hung test; children start after thirty seconds where all cores are taken
VIRTUAL_TIMEOUT_S = 60.0


def run(
    async_fn: Callable[..., Awaitable[Any]],
    *args: Any,
    virtual: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Run an async test body under trio and fail it after `timeout_s` of its clock; where none is
    given, after a minute of a virtual one and three of a real one.

    With `virtual` the clock jumps ahead whenever every task waits, so a test of an hour takes
    milliseconds; such a test must use neither threads, processes nor sockets.
    """
    limit_s = (VIRTUAL_TIMEOUT_S if virtual else TIMEOUT_S) if timeout_s is None else timeout_s

    async def bounded() -> Any:
        with trio.fail_after(limit_s):
            return await async_fn(*args)

    clock = trio.testing.MockClock(autojump_threshold=0.0) if virtual else None
    return trio.run(bounded, clock=clock)


def script(name: str) -> ModuleType:
    """The script of this name, in whichever room of `scripts/`, as a module; the same each time."""
    if name not in sys.modules:
        (path,) = (Path(__file__).parents[1] / "scripts").rglob(f"{name}.py")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


async def environ_of(process: psutil.Process) -> dict[str, str]:
    """The environment of a process that was started just now: until it runs its program, Linux
    tells an empty one."""
    with trio.fail_after(30.0):
        while not (environ := process.environ()):  # noqa: ASYNC110  Linux announces nothing
            await trio.sleep(0.01)
    return environ
