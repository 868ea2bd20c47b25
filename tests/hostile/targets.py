"""The real processes of a siege and of a soak, started as a user starts them.

What is known of one comes from `swarm-node status`, from /proc, and from what its peers notice.
"""

import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import trio

from swarm.identity import Identity
from tests.hostile.wire import Door

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 180.0
LEAVE_TIMEOUT_S = 20.0
LIFE_S_MAX = 14_400  # after which a node ends by itself, whatever became of us
STATUS_TIMEOUT_S = 30.0
STATUS_BYTES_MAX = 16 * 2**20
LOG_NAME = "console.log"
LOG_TAIL_BYTES = 2_000
MIB = 2**20
REFUSALS = re.compile(r"refused|turned_away|dropped")

# Nothing is looked up on the network; a small machine gets no more threads than it has cores.
ENVIRON = {
    **{name: value for name, value in os.environ.items() if not name.startswith("SWARM_NODE_")},
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}
JOIN = ("join", "--local", "4", "--external", "2", "--group-size", "4", "--evaluate-every", "0")
TOKENS_PER_S = "200"  # of the honest worker
LEARNER_SEED = b"the learner of the siege".ljust(32)  # always the same: its policy is cached
LEARNER_REST = 2.5  # times as long in peace as others: its pace is measured in it
PACE_KEPT = 0.5  # of it, that strangers must leave to it
REASONER_RUN = """
name = "siege-reasoner"
sampling = {max_new_tokens = 4}
held_out = {tasks = 20}
environments = [
  {name = "scripted_sum", parameters = {max = 9}, weight = 8.0},
  {name = "propositional_logic", weight = 1.0, parameters = {prompt = "terse"}},
]
"""
LEARNER_RUN = """
name = "siege-learner"
sampling = {{max_new_tokens = 4}}
held_out = {{tasks = 20}}
environments = [{{name = "scripted_sum", parameters = {{max = 9}}}}]

[learner]
peer = "{peer}"
staleness_max = 3
groups_per_step = 2
group_size = 4
lease_life_s = 30
"""


class TargetFailed(Exception):
    """A process did not start, or ended; the message names it."""


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
        return self.process.poll() is None and self.watched.is_running()

    def figures(self) -> Figures | None:
        """Memory, descriptors and processor time so far; None: the process is gone."""
        try:
            with self.watched.oneshot():
                times = self.watched.cpu_times()
                memory_bytes = self.watched.memory_info().rss
                return Figures(memory_bytes, self.watched.num_fds(), times.user + times.system)
        except psutil.Error:
            return None

    async def status(self) -> dict[str, Any] | None:
        """The node's status; None: no answer in time."""
        return await trio.to_thread.run_sync(ask_status, self.data_dir)

    async def end(self) -> None:
        """Ask it to leave, then insist, and end what it started."""
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


def status_socket(data_dir: Path) -> Path:
    """The status socket of a node; a long path is kept in a file."""
    with suppress(OSError):
        return Path((data_dir / "status.path").read_text().strip())
    return data_dir.absolute() / "status.sock"


def ask_status(data_dir: Path) -> dict[str, Any] | None:
    """Ask as `swarm-node status --json` does."""
    answer = bytearray()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(STATUS_TIMEOUT_S)
            client.connect(str(status_socket(data_dir)))
            while (block := client.recv(65_536)) and len(answer) < STATUS_BYTES_MAX:
                answer += block
        found: dict[str, Any] = json.loads(answer)
    except (OSError, ValueError):
        return None
    return found


def refused_of(told: object, counts: bool = False) -> int:
    """The sum of all figures of a status whose names speak of refusing or dropping."""
    if isinstance(told, Mapping):
        return sum(
            refused_of(value, counts or REFUSALS.search(str(name)) is not None)
            for name, value in told.items()
        )
    return int(told) if counts and isinstance(told, int | float) else 0


def start(command: Sequence[str], data_dir: Path, niceness: int = 0) -> "subprocess.Popen[bytes]":
    """Start a module of the tree, which does not outlive us; it prints into its data directory."""
    data_dir.mkdir(parents=True, exist_ok=True)
    bound = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    with (data_dir / LOG_NAME).open("ab") as log:
        return subprocess.Popen(
            [*bound, "nice", "-n", str(niceness), sys.executable, "-m", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=ENVIRON,
            cwd=ROOT,
            start_new_session=True,
        )


async def until(target: Target, ready: Callable[[], Any], what: str) -> None:
    """Wait until a process is ready.

    Raises:
        TargetFailed: it ended, or was not ready in time.
    """
    with trio.move_on_after(START_TIMEOUT_S):
        while target.process.poll() is None:
            if await trio.to_thread.run_sync(ready):
                return
            await trio.sleep(0.25)
    log = (target.data_dir / LOG_NAME).read_text(errors="replace")[-LOG_TAIL_BYTES:]
    raise TargetFailed(f"{target.name} {what}:\n{log}")


def has_worked(target: Target) -> bool:
    """Whether it has trained: what a node makes at its start is no gain of an attack's."""
    return bool((ask_status(target.data_dir) or {}).get("round", 0))


def free_port(host: str) -> int:
    """A port that nobody has now."""
    with socket.create_server((host, 0)) as taken:
        return int(taken.getsockname()[1])


@asynccontextmanager
async def running(name: str, command: Sequence[str], data_dir: Path) -> AsyncIterator[Target]:
    """A program of ours, ended with the block."""
    process = start(command, data_dir)
    target = Target(name, data_dir, process, psutil.Process(process.pid))
    try:
        yield target
    finally:
        with trio.CancelScope(shield=True):
            await target.end()


@asynccontextmanager
async def node_process(
    name: str, data_dir: Path, host: str, flags: Sequence[str], *, works: bool = True
) -> AsyncIterator[Target]:
    """`swarm-node` with these flags, which listens and, if asked for, has been at work."""
    command = ["node.cli", *flags, "--data-dir", str(data_dir), "--no-lan", "--no-upnp"]
    command += ["--listen", f"/ip4/{host}/tcp/0", "--threads", "1"]
    async with running(name, [*command, "--stop-after", str(LIFE_S_MAX)], data_dir) as target:
        found: dict[str, Any] = {}

        def listens() -> bool:
            found.update(ask_status(data_dir) or {})
            return bool(found.get("addresses"))

        await until(target, listens, "did not start")
        here = [each for each in found["addresses"] if f"/{host}/" in each]
        target.extra["door"] = Door.of((here or list(found["addresses"]))[0])
        target.extra["run_id"] = found["run_id"]
        if works:
            await until(target, lambda: has_worked(target), "did not get to work")
        yield target


@asynccontextmanager
async def node(data_dir: Path, host: str) -> AsyncIterator[Target]:
    """A node of the packaged demo run, with a metrics page."""
    port = free_port(host)
    flags = [*JOIN, "--run", "demo", "--model", "tiny", "--metrics-listen", f"{host}:{port}"]
    async with node_process("node", data_dir, host, flags) as target:
        target.extra |= {"has_status": True, "metrics_port": port}
        yield target


@asynccontextmanager
async def reasoner(data_dir: Path, host: str) -> AsyncIterator[Target]:
    """A node of a run with answers that take long to parse."""
    run_file = data_dir.with_suffix(".toml")
    run_file.write_text(REASONER_RUN)
    flags = [*JOIN, "--run", str(run_file), "--model", "tiny"]
    async with node_process("node", data_dir, host, flags) as target:
        target.extra |= {"has_status": True, "run_file": str(run_file)}
        yield target


@asynccontextmanager
async def learner(data_dir: Path, host: str) -> AsyncIterator[Target]:
    """A learner that has made a step, and its honest worker."""
    key_file, run_file = data_dir.with_suffix(".pem"), data_dir.with_suffix(".toml")
    key = Identity(LEARNER_SEED)
    key.save(key_file, None)
    run_file.write_text(LEARNER_RUN.format(peer=key.peer_id))
    flags = ["learn", "--run", str(run_file), "--key-file", str(key_file), "--evaluate-every", "0"]
    async with node_process("learner", data_dir, host, flags, works=False) as target:
        door: Door = target.extra["door"]
        words = ["join", "--run", str(run_file), "--tokens-per-s-max", TOKENS_PER_S]
        words += ["--peer", f"/ip4/{host}/tcp/{door.port}/p2p/{door.peer_id}"]
        place = data_dir.with_name(f"{data_dir.name}-worker")
        async with node_process("worker", place, host, words, works=False):
            await until(target, lambda: has_worked(target), "did not get to work")
            target.extra |= {"has_status": True, "run_file": str(run_file)}
            target.extra |= {"rest": LEARNER_REST, "pace_kept": PACE_KEPT}
            yield target


@asynccontextmanager
async def monitor(data_dir: Path, host: str, *, broker: bool) -> AsyncIterator[Target]:
    """A monitor, attacked at its broker or at its page."""
    ports = free_port(host), free_port(host)
    words = ["node.cli", "monitor", "--broker-listen", f"{host}:{ports[0]}"]
    words += ["--listen", f"{host}:{ports[1]}"]
    async with running("monitor", words, data_dir) as target:
        log = data_dir / LOG_NAME
        await until(
            target, lambda: "the page is at" in log.read_text(errors="replace"), "did not start"
        )
        if broker:
            target.watched = broker_of(target)
        target.extra["attacked"] = Door(host, ports[0] if broker else ports[1], "")
        target.extra["run_id"] = ""
        yield target


def broker_of(target: Target) -> psutil.Process:
    """The process of a monitor's own broker.

    Raises:
        TargetFailed: there is none.
    """
    for child in psutil.Process(target.process.pid).children(recursive=True):
        if "node.observe.embedded_broker" in " ".join(child.cmdline()):
            return child
    raise TargetFailed("the monitor has no broker of its own")


TARGETS: dict[str, Callable[[Path, str], AbstractAsyncContextManager[Target]]] = {
    "node": node,
    "reasoner": reasoner,
    "learner": learner,
    "broker": lambda data_dir, host: monitor(data_dir, host, broker=True),
    "page": lambda data_dir, host: monitor(data_dir, host, broker=False),
}


def prepare(run: str) -> None:
    """Make the tiny policy of a run ahead of time, so that no node's start waits for it."""
    words = [sys.executable, "-m", "node.cli", "prepare", "--run", run, "--model", "tiny"]
    subprocess.run(words, check=True, env=ENVIRON, cwd=ROOT, stdout=subprocess.DEVNULL)


# --- tables ------------------------------------------------------------------------------------


def heading(command: str) -> list[str]:
    """The command, the commit and the machine of a table."""
    commit = "unknown"
    with suppress(OSError, subprocess.CalledProcessError):
        words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
        commit = subprocess.check_output(words, text=True).strip()
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return [
        f"command: python -m tests.hostile {command} {' '.join(sys.argv[2:])}".rstrip(),
        f"commit: {commit}",
        f"machine: {os.cpu_count()} cores, {system}, load {load}",
    ]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width; the last one is not padded."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that so large a share of them does not exceed; NaN where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
