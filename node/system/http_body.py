"""Body of a cancellable HTTP request."""

import httpx


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
