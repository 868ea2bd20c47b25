"""Ways to bring one file from a publisher to all others, each in processes of its own on the hosts
of a lab: ours, libtorrent, shardcast and HTTP. For bench_weights_real.py.

Each `Contender` starts everything that can be ready beforehand, gives the word, and says when the
file was announced and when each receiver had all of it, verified and on disk.
"""

import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from swarm.simulation.socket_lab import Lab

HERE = Path(__file__).parent
PACKAGES = ("libtorrent==2.1.1", "shardcast==0.3.2")
INSTALL_TIMEOUT_S = 300.0
READY_TIMEOUT_S = 240.0
MESH_TIMEOUT_S = 90.0
LISTEN_PORT = 4001
LINES_KEPT = 50
ESTABLISHED = "01"  # in /proc/net/tcp


class RivalFailed(Exception):
    """A contender did not get through; the message says why in one line."""


def install(directory: Path) -> Path | None:
    """The interpreter of a throw-away environment with the others in it; None: PyPI is away."""
    python = directory / "venv" / "bin" / "python"
    try:
        subprocess.run(
            [sys.executable, "-m", "venv", str(directory / "venv")],
            check=True, capture_output=True, timeout=INSTALL_TIMEOUT_S,
        )  # fmt: skip
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run(
            [*command, "--only-binary=:all:", *PACKAGES],
            check=True, capture_output=True, timeout=INSTALL_TIMEOUT_S,
        )  # fmt: skip
    except (subprocess.SubprocessError, OSError):
        return None
    return python


class Child:
    """A process on a host, and the lines that it prints, with the time of each."""

    def __init__(self, lab: Lab, host: str, command: Sequence[str], **variables: str) -> None:
        self.host = host
        own = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables}
        pipe = subprocess.PIPE
        self.process: subprocess.Popen[str] = lab.start(
            host, command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True,
            env=os.environ | own,
        )  # fmt: skip
        self._lines: queue.SimpleQueue[tuple[float, str | None]] = queue.SimpleQueue()
        self._last: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put((time.monotonic(), line.strip()))
        self._lines.put((time.monotonic(), None))

    def until(self, wanted: Callable[[str], bool], timeout_s: float) -> tuple[float, str]:
        """When it printed the first line that is wanted, and the line.

        Raises:
            RivalFailed: it ended, or the time did.
        """
        limit_s = time.monotonic() + timeout_s
        while True:
            try:
                at_s, line = self._lines.get(timeout=max(0.0, limit_s - time.monotonic()))
            except queue.Empty:
                last = self._last[-1] if self._last else "it said nothing"
                raise RivalFailed(f"host {self.host}, {timeout_s:.0f} s: {last}") from None
            if line is None:
                said = " / ".join(self._last[-3:]) or "it said nothing"
                raise RivalFailed(f"host {self.host} ended: {said}")
            self._last = [*self._last, line][-LINES_KEPT:]
            if wanted(line):
                return at_s, line

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def cpu_s(self) -> float:
        """Of the process and its children, so far."""
        try:
            process = psutil.Process(self.process.pid)
            own = process.cpu_times()
            total = own.user + own.system + own.children_user + own.children_system
            for each in process.children(recursive=True):
                times = each.cpu_times()
                total += times.user + times.system
        except psutil.NoSuchProcess:
            return 0.0
        return float(total)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and what: the first host publishes `file`, which is in a directory of its own."""

    lab: Lab
    hosts: tuple[str, ...]
    file: Path
    weights_bytes: int  # in the file, which has a header too
    sha256: str
    work: Path  # an empty directory
    python: Path | None  # of the others' environment
    timeout_s: float

    @property
    def size_bytes(self) -> int:
        return self.file.stat().st_size


@dataclass(slots=True)
class Arrived:
    """One file's way. Times are on one clock."""

    announced_s: float
    done_s: list[float] = field(default_factory=list)


@contextmanager
def ending(opened: list[Child]) -> Iterator[None]:
    """End all of them at the end."""
    try:
        yield
    finally:
        for child in opened:
            child.end()


# --- ours ------------------------------------------------------------------------------------


class Ours:
    """`swarm-node weights publish --follow`, and `fetch --follow` on each other host.

    A version of 4 kB is published first, so that all processes run and have found each other. The
    versions that are timed have nothing in common with it or with each other.
    """

    def __init__(self, setting: Setting, make: Callable[[Path, int], None]) -> None:
        self._setting = setting
        self._make = make
        self.children: list[Child] = []
        self._version = 1
        self._directory = setting.work / "published"

    def start(self) -> None:
        setting, directory = self._setting, self._directory
        directory.mkdir()
        self._make(directory / "model.safetensors", 4096)
        first, *others = setting.hosts
        node = [sys.executable, "-m", "node.cli", "weights"]
        listen = ["--listen", f"/ip4/0.0.0.0/tcp/{LISTEN_PORT}"]
        home = setting.lab.address(first)

        def home_of(name: str) -> list[str]:
            return [*listen, "--follow", "--data-dir", str(setting.work / f"host-{name}")]

        command = [*node, "publish", str(directory), *home_of("publisher")]
        self.children.append(Child(setting.lab, first, command))
        _, line = self.children[0].until(lambda line: f"/ip4/{home}/" in line, READY_TIMEOUT_S)
        words = line.split()
        publisher = words[words.index("--publisher") + 1]
        address = words[words.index("--peer") + 1]
        for host in others:
            command = [*node, "fetch", "--publisher", publisher, "--peer", address, *home_of(host)]
            self.children.append(Child(setting.lab, host, command))
        for child in self.children[1:]:
            child.until(lambda line: line.startswith("version 1 from"), READY_TIMEOUT_S)
        self._await_mesh()

    def _await_mesh(self) -> None:
        """Until each is connected to all others, as far as it gets."""
        limit_s = time.monotonic() + MESH_TIMEOUT_S
        while time.monotonic() < limit_s:
            if all(len(_remotes(c.process.pid)) >= len(self.children) - 1 for c in self.children):
                break
            time.sleep(1.0)

    def send(self, file: Path) -> Arrived:
        """Publish a file as the next version; it is moved."""
        self._version += 1
        file.replace(self._directory / "model.safetensors")
        start = f"version {self._version}"
        limit_s = self._setting.timeout_s
        announced_s, _ = self.children[0].until(
            lambda line: line.startswith(f"{start} of "), READY_TIMEOUT_S
        )
        arrived = Arrived(announced_s)
        for child in self.children[1:]:
            at_s, line = child.until(
                lambda line: line.startswith((f"{start} from", f"{start} failed")), limit_s
            )
            if "failed" in line:
                raise RivalFailed(f"host {child.host}: {line}")
            arrived.done_s.append(at_s)
        return arrived


def _remotes(pid: int) -> set[str]:
    """Addresses that a process has connections with, in its own network, in hexadecimal."""
    try:
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return set()
    rows = [line.split() for line in lines]
    return {row[2].partition(":")[0] for row in rows if row[3] == ESTABLISHED}


# --- the others ------------------------------------------------------------------------------


class Rival:
    """A contender whose processes wait for a line before they begin, and print `done`."""

    name = ""
    announces = False  # the first child says when; else it is when the word is given

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.children: list[Child] = []
        self.receivers: list[Child] = []

    def run(self, host: str, *words: object, **variables: str) -> Child:
        """Start a role of `rival_host.py` on a host, and wait until it is ready."""
        python = self.setting.python or sys.executable
        command = [str(python), str(HERE / "rival_host.py"), *map(str, words)]
        child = Child(self.setting.lab, host, command, **variables)
        self.children.append(child)
        child.until("ready".__eq__, READY_TIMEOUT_S)
        return child

    def directory(self, name: str) -> Path:
        made = self.setting.work / name
        made.mkdir()
        return made

    def start(self) -> None:
        raise NotImplementedError

    def send(self) -> Arrived:
        """Give the word, and wait for all receivers."""
        arrived = Arrived(time.monotonic())
        if self.announces:
            self.children[0].go()
            arrived.announced_s, _ = self.children[0].until("announced".__eq__, READY_TIMEOUT_S)
        for child in self.receivers:
            child.go()
        for child in self.receivers:
            arrived.done_s.append(child.until("done".__eq__, self.setting.timeout_s)[0])
        return arrived


class Torrent(Rival):
    """libtorrent: one seed, the others leech; all know all."""

    def __init__(self, setting: Setting, protocol: str, piece_bytes: int) -> None:
        super().__init__(setting)
        self.name = f"libtorrent, {protocol}"
        self._protocol, self._piece_bytes = protocol, piece_bytes

    def start(self) -> None:
        setting, protocol = self.setting, self._protocol
        addresses = {host: setting.lab.address(host) for host in setting.hosts}
        first, *others = setting.hosts
        torrent = setting.work / "file.torrent"
        self.run(
            first, "seed", protocol, setting.file, self._piece_bytes, torrent, addresses[first]
        )
        for host in others:
            where = self.directory(f"host-{host}")
            peers = [address for other, address in addresses.items() if other != host]
            child = self.run(host, "leech", protocol, where, torrent, addresses[host], *peers)
            self.receivers.append(child)


class Shardcast(Rival):
    """shardcast: an origin; some of the receivers are middle nodes, from which all others take."""

    name = "shardcast"
    announces = True

    def __init__(self, setting: Setting, middles: int, shard_bytes: int) -> None:
        super().__init__(setting)
        self._middles, self._shard_bytes = middles, shard_bytes

    def start(self) -> None:
        setting, python = self.setting, self.setting.python
        first, *others = setting.hosts
        assert python is not None
        self.run(first, "origin", setting.file, self.directory("origin"), self._shard_bytes)
        package = next(python.parent.parent.glob("lib/python*/site-packages/shardcast"))
        middles = others[: self._middles]
        for host in middles:
            upstream = f"http://{setting.lab.address(first)}:8000"
            self.run(host, "middle", upstream, self.directory(f"middle-{host}"))
        for host in others:
            # it keeps a file of its own beside the package, which is one on one machine
            where = self.directory(f"client-{host}")
            shutil.copytree(package, where / "lib" / "shardcast")
            from_hosts = [host] if host in middles else middles
            urls = [f"http://{setting.lab.address(each)}:8000" for each in from_hosts]
            variables = {"PYTHONPATH": str(where / "lib"), "SHARDCAST_LOG_LEVEL": "WARNING"}
            self.receivers.append(self.run(host, "client", where, *urls, **variables))


class Http(Rival):
    """HTTP: everybody takes the file from the origin."""

    name = "HTTP"

    def start(self) -> None:
        setting = self.setting
        first, *others = setting.hosts
        self.run(first, "serve", setting.file.parent)
        url = f"http://{setting.lab.address(first)}:8080/{setting.file.name}"
        for host in others:
            path = setting.work / f"host-{host}.safetensors"
            self.receivers.append(self.run(host, "get", url, setting.sha256, path))
