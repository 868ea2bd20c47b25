from collections.abc import Awaitable, Callable

import trio


async def unless(leaving: trio.Event, step: Callable[[], Awaitable[None]]) -> None:
    """Run a step; cancel it when the node is to stop."""
    async with trio.open_nursery() as nursery:

        async def cancel_on_leaving() -> None:
            await leaving.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(cancel_on_leaving)
        await step()
        nursery.cancel_scope.cancel()
