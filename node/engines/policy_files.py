"""Versions of the policy as model directories, from the trainer to an engine in another process.

They are in shared memory if it has room, else in the data directory. Each is written as
`policy-<version>.partial` and renamed when whole; those that the engine no longer reads are
removed. Shared memory of a node that was killed is freed when its engine ends or the same user's
next node starts; a lock shows which nodes live.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

import trio

from node.interfaces.trainer import Trainer
from node.interfaces.trainer_spec import Precision
from node.system.machine import SHARED_MEMORY
from swarm.errors import ChildFailed

COPIES: Final = 2.2  # that shared memory must have room for: the old one, the new one, and a little
_PREFIX = "policy-"
_PARTIAL = ".partial"
_LOCK = "lock"


class PolicyFiles:
    """The directories of one node. Made by `policy_files`."""

    def __init__(
        self, parent: Path, data_directory: Path, policy_bytes: int, precision: Precision
    ) -> None:
        """`parent`: shared memory or the data directory, which also takes what no longer fits.
        `precision`: in which the engine holds the policy."""
        self.parent = parent.absolute()
        self._data = data_directory.absolute()
        self._export_bytes = COPIES / 2 * policy_bytes
        self._precision = precision
        self._remove_but(None)

    async def export(self, trainer: Trainer, policy_version: int) -> Path:
        """Write the trainer's present policy, with an adapter merged into it; its directory."""
        name = f"{_PREFIX}{policy_version}"
        if self.parent != self._data and await self._fits():
            try:
                return await self._export(trainer, self.parent / name)
            except ChildFailed:
                partly = self.parent / (name + _PARTIAL)
                full = not await self._fits()  # asked while what was written still takes its room
                await trio.to_thread.run_sync(partial(shutil.rmtree, partly, ignore_errors=True))
                if not full:
                    raise
        return await self._export(trainer, self._data / name)

    async def _export(self, trainer: Trainer, final: Path) -> Path:
        partial = final.with_name(final.name + _PARTIAL)
        await trio.to_thread.run_sync(_make_empty, partial)
        await trainer.export_whole(partial, self._precision)
        await trio.to_thread.run_sync(_replace, partial, final)
        return final

    async def _fits(self) -> bool:
        return await trio.to_thread.run_sync(_has_room, self.parent, self._export_bytes)

    async def keep_only(self, directory: Path) -> None:
        """Remove all other versions; the engine has loaded this one."""
        await trio.to_thread.run_sync(self._remove_but, directory)

    def _remove_but(self, kept: Path | None) -> None:
        for parent in {self.parent, self._data}:
            for path in parent.glob(f"{_PREFIX}[0-9]*"):
                if path != kept:
                    shutil.rmtree(path)


@contextmanager
def policy_files(
    data_directory: Path,
    policy_bytes: int,
    memory: Path = SHARED_MEMORY,
    precision: Precision = "float32",
) -> Iterator[PolicyFiles]:
    """Room for a policy of about that size; freed at the end of the block."""
    remove_abandoned(memory)
    with ExitStack() as stack:
        parent = data_directory
        if _has_room(memory, COPIES * policy_bytes):
            new = Path(tempfile.mkdtemp(prefix="swarm-new-", dir=memory))
            lock = stack.enter_context((new / _LOCK).open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            parent = new.rename(new.with_name(new.name.replace("swarm-new-", _mark())))
            stack.callback(shutil.rmtree, parent, ignore_errors=True)
        files = PolicyFiles(parent, data_directory, policy_bytes, precision)
        stack.callback(files._remove_but, None)
        yield files


def remove_abandoned(memory: Path = SHARED_MEMORY) -> None:
    """Remove the directories of this user's dead nodes from shared memory."""
    for parent in memory.glob(f"{_mark()}*"):
        try:
            with _opened_lock(parent) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(parent, ignore_errors=True)
        except OSError:  # its node lives, or it is not ours, or somebody else removes it
            continue


def _opened_lock(parent: Path) -> BinaryIO:
    """The lock in a directory of this user. Anybody may write to shared memory, so directories of
    other users and links are refused by an OSError."""
    status = parent.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{parent} is not ours")
    return os.fdopen(os.open(parent / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+b", 0)


def _mark() -> str:
    return f"swarm-policy-{os.getuid()}-"


def _has_room(memory: Path, size_bytes: float) -> bool:
    return os.access(memory, os.W_OK | os.X_OK) and shutil.disk_usage(memory).free >= size_bytes


def _make_empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _replace(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    source.rename(target)
