"""Runs a vLLM server for as long as the node lives: `python -m node.engines.vllm.child LOG SCRATCH
COMMAND...`, as the leader of a process group.

When the node closes standard input or dies, the server is terminated and the process group killed.
The log is bounded, and the scratch directory (sockets) is removed.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Final, NoReturn

from node.engines.policy_files import remove_abandoned

LOG_BYTES_MAX: Final = 1_048_576  # then it becomes `.old`, in place of the one before
NICENESS: Final = 10  # the node's event loop comes first
POLITE_END_S: Final = 5.0
_DRAIN_S: Final = 1.0  # for last words, after the server ended
_READ_BYTES: Final = 65_536


class _Log:
    """A file that starts anew at its size limit. Bytes that a full disk refuses are dropped and
    counted in the next line, because the server must never wait for its log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._room = 0
        self._dropped_bytes = 0  # since the last line that says how many

    def write(self, data: bytes) -> None:
        if self._dropped_bytes:
            note = (
                f"\n{self._dropped_bytes} bytes are left out here: the disk took no more\n".encode()
            )
            if self._put(note) < len(note):
                self._dropped_bytes += len(data)
                return
            self._dropped_bytes = 0
        self._dropped_bytes += len(data) - self._put(data)

    def _put(self, data: bytes) -> int:
        try:
            if self._file is None or len(data) > self._room:
                self._file = self._begin()
            taken = self._file.write(data)
        except OSError:
            return 0
        self._room -= taken
        return taken

    def _begin(self) -> FileIO:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._path.exists():
            self._path.replace(self._path.with_suffix(f"{self._path.suffix}.old"))
        file = self._path.open("wb", buffering=0)
        self._room = LOG_BYTES_MAX
        return file


def _copy(source: int, log: _Log) -> None:
    while data := os.read(source, _READ_BYTES):
        log.write(data)


def _end(server: subprocess.Popen[bytes], scratch: Path) -> NoReturn:
    """End the server, then its whole process group, this process included."""
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(POLITE_END_S)
    shutil.rmtree(scratch, ignore_errors=True)
    remove_abandoned()  # of the node, where it was killed
    os.killpg(0, signal.SIGKILL)
    raise SystemExit(1)


def main(log_path: Path, scratch: Path, command: list[str]) -> NoReturn:
    """Run the command until it ends or the input does."""
    if os.getpgrp() != os.getpid():
        raise SystemExit("vllm_child: start it as the leader of a process group")
    os.nice(NICENESS)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log = _Log(log_path)
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert server.stdout is not None
    copier = threading.Thread(target=_copy, args=(server.stdout.fileno(), log), daemon=True)
    copier.start()

    def watch() -> None:
        while os.read(sys.stdin.fileno(), _READ_BYTES):
            pass
        _end(server, scratch)

    threading.Thread(target=watch, daemon=True).start()
    try:
        status = server.wait()
        copier.join(_DRAIN_S)
        log.write(f"the server ended with status {status}\n".encode())
    finally:
        _end(server, scratch)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
