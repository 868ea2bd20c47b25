"""Raw connections over pipes in memory, for what stands on them: they run under a virtual clock."""

from collections.abc import Callable
from typing import Any

import trio
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection


class Raw(RawConnection):
    """One end of a pipe. Counts its reads and writes; the next write may be spoilt on its way."""

    def __init__(self, pipe: trio.StapledStream[Any, Any], *, initiator: bool) -> None:
        super().__init__(TrioTCPStream(pipe), initiator)  # type: ignore[arg-type]
        self.reads = self.writes = 0
        self.spoil: Callable[[bytearray], None] | None = None

    async def read(self, n: int | None = None) -> bytes:
        self.reads += 1
        return await super().read(n)

    async def write(self, data: bytes) -> None:
        self.writes += 1
        if self.spoil is not None:
            data = bytearray(data)  # type: ignore[assignment]
            self.spoil(data)  # type: ignore[arg-type]
            self.spoil = None
        await super().write(data)


def pipe() -> tuple[Raw, Raw]:
    left, right = trio.testing.memory_stream_pair()
    return Raw(left, initiator=True), Raw(right, initiator=False)


def lockstep_pipe() -> tuple[Raw, Raw]:
    """A write waits until all of it is read."""
    left, right = trio.testing.lockstep_stream_pair()
    return Raw(left, initiator=True), Raw(right, initiator=False)
