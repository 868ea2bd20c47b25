"""Answering whoever connects to a socket of this node's: few at a time, each within a bound. Where
there are too many, the newest goes of the address that has most.

What a client does ends nothing: it is let go, and counted by why it got no whole answer.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from swarm.limits.address_blocks import OriginPath, path_of
from swarm.limits.bounded_table import BoundedTable

CLIENTS_MAX: Final = 8  # of one socket at once
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

    `unanswered` counts those that got none: `CROWDED` where more than `CLIENTS_MAX` came,
    `SLOW` where it took over `timeout_s`, `LEFT` where the client was gone.
    """
    clients: BoundedTable[trio.CancelScope, None] = BoundedTable(CLIENTS_MAX, newest_first=True)

    async def take(stream: trio.SocketStream) -> None:
        try:
            with trio.move_on_after(timeout_s) as answering:
                gone = clients.put(answering, None, _path_of(stream))
                if gone is not None:
                    gone.key.cancel()
                await answer(stream)
            if answering.cancelled_caught:
                unanswered[SLOW if answering in clients else CROWDED] += 1
        except trio.BrokenResourceError:
            unanswered[LEFT] += 1
        finally:
            clients.pop(answering)
            await trio.aclose_forcefully(stream)

    await trio.serve_listeners(take, list(listeners))


def _path_of(stream: trio.SocketStream) -> OriginPath:
    """Where a client is; () on a Unix socket, or if it is gone."""
    try:
        remote = stream.socket.getpeername()
    except OSError:
        return ()
    return path_of(remote[0]) if isinstance(remote, tuple) else ()
