"""The processes under siege: started as a user starts them, seen from outside alone.

What is known of one comes from `swarm-node status`, from /proc, and from what its peers notice.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import trio
from siege_wire import Door

import node

ROOT = Path(node.__file__).parents[1]  # of the code under siege
START_TIMEOUT_S = 180.0
LEAVE_TIMEOUT_S = 20.0
LIFE_S_MAX = 14_400  # after which a node ends by itself, whatever became of us
STATUS_TIMEOUT_S = 30.0
STATUS_BYTES_MAX = 16 * 2**20
LOG_NAME = "console.log"
LOG_TAIL_LINES = 12
MIB = 2**20
REFUSALS = re.compile(r"refused|turned_away|dropped")

# Nothing is looked up on the network; a small machine gets no more threads than it has cores.
ENVIRON = {
    **{name: value for name, value in os.environ.items() if not name.startswith("SWARM_NODE_")},
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}


class TargetFailed(Exception):
    """What was to be attacked did not start, or ended; the message says which."""


@dataclass(slots=True)
class Figures:
    """A process at one moment."""

    memory_bytes: int
    descriptors: int
    cpu_s: float


@dataclass(eq=False, slots=True)
class Target:
    """A process under siege."""

    name: str
    data_dir: Path
    process: "subprocess.Popen[bytes]"
    watched: psutil.Process  # whose memory counts; a child of it for a monitor's broker
    extra: dict[str, Any] = field(default_factory=dict)  # what its attackers need to know

    @property
    def running(self) -> bool:
        """Whether it is alive."""
        return self.process.poll() is None and self.watched.is_running()

    def figures(self) -> Figures | None:
        """Its memory, descriptors and processor time so far; None: it is gone."""
        try:
            with self.watched.oneshot():
                times = self.watched.cpu_times()
                return Figures(
                    self.watched.memory_info().rss,
                    self.watched.num_fds(),
                    times.user + times.system,
                )
        except psutil.Error:
            return None

    async def status(self) -> dict[str, Any] | None:
        """What it says of itself; None: nothing in time."""
        return await trio.to_thread.run_sync(ask_status, self.data_dir)

    def tail(self) -> str:
        """The end of what it printed."""
        try:
            lines = (self.data_dir / LOG_NAME).read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-LOG_TAIL_LINES:])

    async def end(self) -> None:
        """Ask it to leave, then insist, and take along what it started."""
        with suppress(psutil.Error):
            children = psutil.Process(self.process.pid).children(recursive=True)
            for number in (signal.SIGINT, signal.SIGKILL):
                if self.process.poll() is None:
                    self.process.send_signal(number)
                with trio.move_on_after(LEAVE_TIMEOUT_S):
                    while self.process.poll() is None:  # noqa: ASYNC110  no event for it
                        await trio.sleep(0.1)
            for child in children:
                with suppress(psutil.Error):
                    child.kill()


def ask_status(data_dir: Path) -> dict[str, Any] | None:
    """As `swarm-node status --json`, of whatever version the node is."""
    path = data_dir.absolute() / "status.sock"
    with suppress(OSError):
        path = Path((data_dir / "status.path").read_text().strip())
    answer = bytearray()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(STATUS_TIMEOUT_S)
            client.connect(str(path))
            while (block := client.recv(65_536)) and len(answer) < STATUS_BYTES_MAX:
                answer += block
        found: dict[str, Any] = json.loads(answer)
    except (OSError, ValueError):
        return None
    return found


def refused_of(told: object, counts: bool = False) -> int:
    """All that a node says it refused or dropped, by whatever name its version has for that."""
    if isinstance(told, Mapping):
        return sum(
            refused_of(value, counts or REFUSALS.search(str(name)) is not None)
            for name, value in told.items()
        )
    return int(told) if counts and isinstance(told, int | float) else 0


def leading(niceness: int) -> list[str]:
    """What a command of ours begins with: its niceness, and that it does not outlive us."""
    bound = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    return [*bound, "nice", "-n", str(niceness), sys.executable]


def start(command: Sequence[str], data_dir: Path, niceness: int = 0) -> "subprocess.Popen[bytes]":
    """Start a program of the tree under siege; what it prints goes into its data directory."""
    data_dir.mkdir(parents=True, exist_ok=True)
    with (data_dir / LOG_NAME).open("ab") as log:
        return subprocess.Popen(
            [*leading(niceness), "-m", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=ENVIRON,
            cwd=ROOT,
            start_new_session=True,
        )


async def until_up(process: "subprocess.Popen[bytes]", data_dir: Path) -> dict[str, Any]:
    """The node's first answer that names an address.

    Raises:
        TargetFailed: there was none.
    """
    with trio.move_on_after(START_TIMEOUT_S):
        while process.poll() is None:
            status = await trio.to_thread.run_sync(ask_status, data_dir)
            if status and status.get("addresses"):
                return status
            await trio.sleep(0.25)
    raise TargetFailed((data_dir / LOG_NAME).read_text(errors="replace")[-2_000:])


async def until_works(target: Target, rounds: int = 1) -> None:
    """Wait until it has trained: what it makes at its start is no gain of an attack's."""
    with trio.move_on_after(START_TIMEOUT_S):
        while target.running:
            status = await target.status()
            if status and status.get("round", 0) >= rounds:
                return
            await trio.sleep(0.5)
    raise TargetFailed(f"{target.name} did not get to work:\n{target.tail()}")


def door_of(status: Mapping[str, Any], host: str) -> Door:
    """Where the node listens on a host."""
    found = [each for each in status["addresses"] if f"/{host}/" in each]
    return Door.of((found or list(status["addresses"]))[0])


@asynccontextmanager
async def node_target(
    name: str, data_dir: Path, host: str, flags: Sequence[str], *, rounds: int = 1
) -> AsyncIterator[Target]:
    """A node, `swarm-node` and these flags, which has been at work; ended with the block."""
    command = ["node.cli", *flags, "--data-dir", str(data_dir), "--no-lan", "--no-upnp"]
    command += ["--listen", f"/ip4/{host}/tcp/0", "--threads", "1"]
    command += ["--stop-after", str(LIFE_S_MAX)]
    process = start(command, data_dir)
    target = Target(name, data_dir, process, psutil.Process(process.pid))
    try:
        status = await until_up(process, data_dir)
        target.extra["door"] = door_of(status, host)
        target.extra["run_id"] = status["run_id"]
        if rounds:
            await until_works(target, rounds)
        yield target
    finally:
        with trio.CancelScope(shield=True):
            await target.end()
