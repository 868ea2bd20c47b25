"""What several tests share."""

from collections.abc import Awaitable, Callable
from typing import Any

import trio
import trio.testing

TEST_TIMEOUT_S = 60.0


def run(
    async_fn: Callable[..., Awaitable[Any]],
    *args: Any,
    virtual: bool = False,
    timeout_s: float = TEST_TIMEOUT_S,
) -> Any:
    """Run an async test body under trio and fail it after `timeout_s` of its clock.

    With `virtual` the clock jumps ahead whenever every task waits, so a test of an hour takes
    milliseconds; such a test must use neither threads, processes nor sockets.
    """

    async def bounded() -> Any:
        with trio.fail_after(timeout_s):
            return await async_fn(*args)

    clock = trio.testing.MockClock(autojump_threshold=0.0) if virtual else None
    return trio.run(bounded, clock=clock)
