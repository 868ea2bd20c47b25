"""The processes that `bench_node.py` asks: a real node that trains, and a peer that only echoes.

Run as a program this is the echo: it says where it listens and echoes until its input ends.
"""

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import trio

from node.monitor.status import fetch_status
from node.records.records import StatusSnapshot
from swarm.errors import ConfigError
from swarm.identity import Identity, PeerId
from swarm.transport.base import ServeLimits
from swarm.transport.libp2p.host import open_libp2p

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
ECHO_PROTOCOL = "/bench/echo/1.0.0"
ECHO_BYTES_MAX = 2 * 2**20
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.5


@asynccontextmanager
async def _child(command: Sequence[str], **pipes: Any) -> AsyncIterator[trio.Process]:
    """A process that is asked to leave at the end of the block, and killed if it stays."""
    process = await trio.lowlevel.open_process([sys.executable, *command], **pipes)
    try:
        yield process
    finally:
        with trio.CancelScope(shield=True):
            process.terminate()
            with trio.move_on_after(STOP_TIMEOUT_S):
                await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()


@asynccontextmanager
async def echo_process() -> AsyncIterator[str]:
    """The echo's address."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    async with _child([__file__], **pipes) as process:
        assert process.stdout is not None
        line = b""
        with trio.fail_after(START_TIMEOUT_S):
            while not line.endswith(b"\n"):
                line += await process.stdout.receive_some()
        yield line.decode().strip()


@asynccontextmanager
async def training_node(
    model: str, data_dir: Path, group_size: int
) -> AsyncIterator[psutil.Process]:
    """A node that has finished its first round; gives its trainer's process."""
    command = ["-m", "node.cli", "join", "--model", model, "--data-dir", str(data_dir)]
    command += ["--listen", LOOPBACK, "--evaluate-every", "0", "--group-size", str(group_size)]
    with (data_dir.parent / "node.log").open("wb") as log:
        async with _child(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process:
            with trio.fail_after(START_TIMEOUT_S):
                await _first_round(data_dir)
            trainer = _trainer_of(process.pid)
            try:
                yield trainer
            finally:
                trainer.send_signal(signal.SIGCONT)  # a stopped one could not leave


async def _first_round(data_dir: Path) -> None:
    while True:
        now = await status(data_dir)
        if now is not None and now.round >= 1:
            return
        await trio.sleep(POLL_S)


async def status(data_dir: Path) -> StatusSnapshot | None:
    """What the node on a data directory says; None while it does not run."""
    try:
        return await trio.to_thread.run_sync(fetch_status, data_dir)
    except ConfigError:
        return None


def _trainer_of(pid: int) -> psutil.Process:
    for child in psutil.Process(pid).children():
        if "node.training.worker" in child.cmdline():
            return child
    raise AssertionError("the node has no trainer process")


async def _echo() -> None:
    async def echo(peer: PeerId, payload: bytes) -> bytes:
        return payload

    async with open_libp2p(Identity.generate(), [LOOPBACK]) as transport:
        transport.serve(ECHO_PROTOCOL, echo, ServeLimits(ECHO_BYTES_MAX, ECHO_BYTES_MAX))
        print(transport.addresses()[0], flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    trio.run(_echo)
