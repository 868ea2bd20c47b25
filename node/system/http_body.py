"""The body of an HTTP request that may be cancelled."""

import httpx


class WholeBody(httpx.AsyncByteStream):
    """One piece. httpx would make an async generator of it, and a request that is cancelled leaves
    such a one to the garbage collector, outside of the loop."""

    def __init__(self, content: bytes) -> None:
        self._left = [content]

    def __aiter__(self) -> "WholeBody":
        return self

    async def __anext__(self) -> bytes:
        if not self._left:
            raise StopAsyncIteration
        return self._left.pop()
