"""Workers on this machine: each a process in its own session with its own data directory.

They outlive the coordinator; the next one finds them by their files.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil
import trio

from coordinator.fleet_file import Fleet, Machine
from coordinator.providers.base import (
    QUOTED_CHARS_MAX,
    Condition,
    Instance,
    KeyedWorkers,
    ProviderFailed,
)
from swarm.errors import ConfigError
from swarm.leases.coordination import ReportedWorker
from swarm.storage import shared_umask, write_whole
from swarm.telemetry.broker_address import PASSWORD_VARIABLE
from swarm.texts import printable

PROCESS_FILE: Final = "coordinator.json"
LOG_FILE: Final = "worker.log"
LOG_BYTES_MAX: Final = 4_194_304  # a longer log is removed at the next start
LEAVE_S: Final = 20.0  # from SIGTERM to SIGKILL
LOOK_S: Final = 0.2  # between two checks for its end
TAIL_BYTES: Final = 4_096  # of the log, read for its last line


# Variables that workers inherit, by name and prefix; the coordinator's secrets are not among them.
PASSED: Final = frozenset((
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR",
    "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY",
))  # fmt: skip
PASSED_PREFIXES: Final = (
    "LC_", "XDG_", "PYTHON", "SWARM_NODE_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH",
    "PYTORCH_", "CUDA", "NVIDIA_", "NCCL_", "OMP_", "MKL_", "OPENBLAS_", "VLLM_", "TRITON_",
)  # fmt: skip
SECRETS: Final = frozenset({"SWARM_NODE_PASSPHRASE", "SWARM_NODE_INVITE", PASSWORD_VARIABLE})


class LocalProvider(KeyedWorkers):
    """The provider of workers on this machine."""

    def __init__(self, directory: Path, fleet: Fleet, invite: str | None = None) -> None:
        """`directory`: holds the workers' data directories. `invite`: to a private swarm."""
        super().__init__(directory, fleet)
        self._invite = invite
        self._children: dict[str, subprocess.Popen[bytes]] = {}  # to be reaped

    async def look(self, reported: Iterable[ReportedWorker]) -> Mapping[str, Instance]:
        return await trio.to_thread.run_sync(self._look)

    def _look(self) -> dict[str, Instance]:
        found = {}
        for name in [name for name, each in self._children.items() if each.poll() is not None]:
            del self._children[name]
        self._find_keys()
        for record in sorted(self._directory.glob(f"*/{PROCESS_FILE}")):
            name = record.parent.name
            condition, detail = Condition.UP, ""
            if self._process(name) is None:
                condition, detail = Condition.FAILED, _last_line(record.parent / LOG_FILE)
            found[name] = Instance(name, condition, self._peer_ids.get(name), detail)
        return found

    def _process(self, name: str) -> psutil.Process | None:
        """The worker's process, if it lives. The creation time tells it from a reused id."""
        child = self._children.get(name)
        if child is not None and child.poll() is not None:
            return None
        try:
            record = json.loads((self._directory / name / PROCESS_FILE).read_text())
            process = psutil.Process(int(record["pid"]))
            is_same = abs(process.create_time() - float(record["created_s"])) < 1.0
            alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except (OSError, ValueError, KeyError, TypeError, psutil.Error):
            return None
        return process if is_same and alive else None

    async def start(self, machine: Machine) -> None:
        try:
            await trio.to_thread.run_sync(self._start, machine)
        except (OSError, ConfigError) as error:
            raise ProviderFailed(f"{machine.name}: {error}") from None

    def _start(self, machine: Machine) -> None:
        if self._process(machine.name) is not None:
            return
        directory = self._directory / machine.name
        directory.mkdir(parents=True, exist_ok=True)
        key = self._make_key(machine.name)
        log = directory / LOG_FILE
        with contextlib.suppress(FileNotFoundError):
            if log.stat().st_size > LOG_BYTES_MAX:
                log.unlink()
        command = [sys.executable, "-m", "node.cli", "join", "--run", str(self._run_file)]
        command += ["--data-dir", str(directory), "--key-file", str(key)]
        for peer in self._peers:
            command += ["--peer", peer]
        with log.open("ab") as output:
            child = subprocess.Popen(
                [*command, *machine.arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=shared_umask(),  # the user's; it makes its own directory private
                env=worker_environ(os.environ, machine.arguments, self._invite),
            )
        self._children[machine.name] = child
        try:
            created_s = psutil.Process(child.pid).create_time()
        except psutil.Error:
            created_s = 0.0  # it has ended; the next look finds that
        try:
            write_whole(
                directory / PROCESS_FILE, json.dumps({"pid": child.pid, "created_s": created_s})
            )
        except OSError:  # without the record it would never be found
            child.kill()
            child.wait()
            raise

    async def release(self, name: str) -> None:
        process = await trio.to_thread.run_sync(self._process, name)
        if process is not None:
            await trio.to_thread.run_sync(_signal, process, signal.SIGTERM)
            for _ in range(int(LEAVE_S / LOOK_S)):
                if await trio.to_thread.run_sync(self._process, name) is None:
                    break
                await trio.sleep(LOOK_S)
            left = await trio.to_thread.run_sync(self._process, name)
            if left is not None:
                await trio.to_thread.run_sync(_signal, left, signal.SIGKILL)
        try:
            (self._directory / name / PROCESS_FILE).unlink(missing_ok=True)
        except OSError as error:
            raise ProviderFailed(f"{name}: {error}") from None


def worker_environ(
    environ: Mapping[str, str], arguments: Sequence[str], invite: str | None
) -> dict[str, str]:
    """A worker's environment. It handles strangers' bytes, so it gets two secrets only: the
    invitation, which other users could read in a flag, and the broker's password if it reports."""
    passed = {
        name: value
        for name, value in environ.items()
        if name not in SECRETS and (name.upper() in PASSED or name.startswith(PASSED_PREFIXES))
    }
    reports = any(each.partition("=")[0] == "--telemetry" for each in arguments)
    if PASSWORD_VARIABLE in environ and (reports or "SWARM_NODE_TELEMETRY" in environ):
        passed[PASSWORD_VARIABLE] = environ[PASSWORD_VARIABLE]
    return passed | ({"SWARM_NODE_INVITE": invite} if invite else {})


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def _last_line(log: Path) -> str:
    """The last line of a log, for a message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return "it has ended"
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    text = printable(last, QUOTED_CHARS_MAX)
    return f"it has ended: {text}" if text else "it has ended"
