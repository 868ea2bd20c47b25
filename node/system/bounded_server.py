"""A socket server with few clients at a time. Beyond the limit the newest client of the largest
address is dropped. Clients cannot cause errors here; failed ones are counted by reason.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import httpx
import trio

from swarm.limits.address_blocks import OriginPath, path_of
from swarm.limits.bounded_table import BoundedTable

CLIENTS_MAX: Final = 8  # per socket at a time
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
    """Send each client its answer and close, until cancelled. `unanswered` counts `CROWDED` (over
    `CLIENTS_MAX`), `SLOW` (over `timeout_s`) and `LEFT` (client gone)."""
    clients: BoundedTable[trio.CancelScope, None] = BoundedTable(CLIENTS_MAX, newest_first=True)

    async def serve_client(stream: trio.SocketStream) -> None:
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

    await trio.serve_listeners(serve_client, list(listeners))


def _path_of(stream: trio.SocketStream) -> OriginPath:
    """Origin of a client; () on a Unix socket, or if it is gone."""
    try:
        remote = stream.socket.getpeername()
    except OSError:
        return ()
    return path_of(remote[0]) if isinstance(remote, tuple) else ()


# Body of a cancellable HTTP request.


class WholeBody(httpx.AsyncByteStream):
    """A body in one piece. httpx would use an async generator, which a cancelled request leaves to
    the garbage collector, outside the loop."""

    def __init__(self, content: bytes) -> None:
        self._left = [content]

    def __aiter__(self) -> "WholeBody":
        return self

    async def __anext__(self) -> bytes:
        if not self._left:
            raise StopAsyncIteration
        return self._left.pop()
