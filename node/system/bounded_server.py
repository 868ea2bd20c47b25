"""Answering whoever connects to a socket of this node's: few at a time, each within a bound.

What a client does ends nothing: it is let go, and counted by why it got no whole answer.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

CLIENTS_MAX: Final = 8  # of one socket at once; who comes besides is turned away
CROWDED: Final = "crowded"
SLOW: Final = "slow"
LEFT: Final = "left"

Answer = Callable[[trio.SocketStream], Awaitable[None]]


async def serve_answers(
    answer: Answer,
    listeners: Sequence[trio.SocketListener],
    unanswered: Counter[str],
    *,
    timeout_s: float,
) -> None:
    """Give each client its answer and the end of the stream, until cancelled.

    `unanswered` counts those that got none: `CROWDED` where `CLIENTS_MAX` were being answered,
    `SLOW` where it took over `timeout_s`, `LEFT` where the client was gone.
    """
    places = trio.CapacityLimiter(CLIENTS_MAX)

    async def take(stream: trio.SocketStream) -> None:
        try:
            places.acquire_nowait()
        except trio.WouldBlock:
            unanswered[CROWDED] += 1
            await trio.aclose_forcefully(stream)
            return
        try:
            with trio.move_on_after(timeout_s) as answering:
                await answer(stream)
            if answering.cancelled_caught:
                unanswered[SLOW] += 1
        except trio.BrokenResourceError:
            unanswered[LEFT] += 1
        finally:
            places.release()
            await trio.aclose_forcefully(stream)

    await trio.serve_listeners(take, list(listeners))
