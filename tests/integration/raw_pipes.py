"""Raw connections over pipes in memory, for what stands on them: they run under a virtual clock."""

from collections.abc import Callable
from typing import Any

import trio
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection


class Pipe(trio.abc.Stream):
    """One end of a pipe. Counts its reads and writes; the next write may be spoilt on its way."""

    def __init__(self, inner: trio.StapledStream[Any, Any]) -> None:
        self._inner = inner
        self.reads = self.writes = 0
        self.spoil: Callable[[bytearray], None] | None = None

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        self.reads += 1
        return bytes(await self._inner.receive_some(max_bytes))

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.writes += 1
        data = bytearray(data)
        if self.spoil is not None:
            self.spoil(data)
            self.spoil = None
        await self._inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._inner.aclose()


class Raw(RawConnection):
    """A raw connection over one end of a pipe."""

    def __init__(self, inner: trio.StapledStream[Any, Any], *, initiator: bool) -> None:
        self.pipe = Pipe(inner)
        super().__init__(TrioTCPStream(self.pipe), initiator)  # type: ignore[arg-type]


def pipe() -> tuple[Raw, Raw]:
    left, right = trio.testing.memory_stream_pair()
    return Raw(left, initiator=True), Raw(right, initiator=False)


def lockstep_pipe() -> tuple[Raw, Raw]:
    """A write waits until all of it is read."""
    left, right = trio.testing.lockstep_stream_pair()
    return Raw(left, initiator=True), Raw(right, initiator=False)
