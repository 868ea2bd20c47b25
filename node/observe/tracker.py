"""Sends the metrics of rounds to TensorBoard, Weights & Biases or trackio.

Their packages block and start threads, so they run in a child process (`tracker_child.py`). A node
never waits for it: rounds that it cannot take are dropped and counted.
"""

import json
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Final

import trio

from node.system.child_process import end_with_input, start_child
from node.system.extras import need
from swarm.errors import ConfigError
from swarm.texts import printable

WAITING_MAX: Final = 256  # rounds that the tracker has not read yet
STARTS_TIMEOUT_S: Final = 120.0  # a tracker may ask its server who you are
ENDS_TIMEOUT_S: Final = 30.0  # it uploads what it has
_SAID_BYTES_MAX: Final = 4096
_LINE_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class Tracked:
    """Of what it tells. The same `run` goes on where it was, if the tracker can."""

    kind: str  # as the setting `report_to`
    project: str
    run: str  # for people
    run_id: str  # the same at each start of this node in this run
    directory: str  # for what it writes on this machine
    settings: Mapping[str, str | float | None]
    started_s: float = 0.0  # unix time


class Tracker:
    """Made by `open_tracker`."""

    def __init__(self, process: trio.Process, kind: str) -> None:
        self._process = process
        self._kind = kind
        self._send, self._receive = trio.open_memory_channel[bytes](WAITING_MAX)
        self.dropped = 0
        self.note: str | None = None  # what is wrong with it

    def put(self, step: int, unix_s: float, figures: Mapping[str, float]) -> None:
        """Tell it the figures of a round, by their metrics' names; at once."""
        line = json.dumps({"step": step, "time_s": unix_s, "figures": dict(figures)})
        try:
            self._send.send_nowait(line.encode() + b"\n")
        except (trio.WouldBlock, trio.BrokenResourceError):
            self.dropped += 1
            if self.note is None:
                self.note = f"{self._kind} is behind: some rounds are not told to it"

    async def run(self) -> None:
        """Until it ends, or `close`."""
        assert self._process.stdin is not None
        try:
            async for line in self._receive:
                await self._process.stdin.send_all(line)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._receive.close()
            with trio.move_on_after(ENDS_TIMEOUT_S):
                await self._process.wait()
            self.note = (
                f"{self._kind} has ended (status {self._process.returncode}): rounds are told to "
                "it no more"
            )

    def close(self) -> None:
        """No more comes; `run` ends when what waits has been read."""
        self._send.close()


@asynccontextmanager
async def open_tracker(tracked: Tracked, say: Callable[[str], None]) -> AsyncIterator[Tracker]:
    """A tracker that has taken the run. At the end of the block what waits is written, if that is
    soon.

    Raises:
        ConfigError: its package is not installed, or it refuses; in its words.
    """
    need(tracked.kind)
    # Trackers say much on standard error; what counts comes by standard output
    process = await start_child(["-m", "node.observe.tracker_child"], subprocess.DEVNULL)
    assert process.stdin is not None
    assert process.stdout is not None
    tracker = Tracker(process, tracked.kind)
    try:
        with trio.move_on_after(STARTS_TIMEOUT_S) as starting:
            await process.stdin.send_all(json.dumps(asdict(tracked)).encode() + b"\n")
            said = await _last_line(process.stdout)
        if starting.cancelled_caught:
            raise ConfigError(
                f"--report-to {tracked.kind}: it has not answered in {STARTS_TIMEOUT_S:g} s"
            )
        ready, _, where = said.partition(b" ")
        if ready != b"ready":
            why = printable(said.decode(errors="replace").strip() or "it ended", _LINE_CHARS)
            raise ConfigError(f"--report-to {tracked.kind}: {why}")
        if where:
            say(printable(f"{tracked.kind}: {where.decode(errors='replace').strip()}", _LINE_CHARS))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tracker.run)
            yield tracker
            tracker.close()
            nursery.cancel_scope.deadline = trio.current_time() + ENDS_TIMEOUT_S
    finally:
        await end_with_input(process, ENDS_TIMEOUT_S)


async def _last_line(stdout: trio.abc.ReceiveStream) -> bytes:
    """The first line that it says, or what it said before it ended."""
    said = b""
    while not said.endswith(b"\n") and len(said) < _SAID_BYTES_MAX:
        part = await stdout.receive_some(_SAID_BYTES_MAX)
        if not part:
            break
        said += part
    return said.strip()
