"""What this machine has for a node: cores and free memory, within its control group; and how many
nodes of this user share them.

Each node holds a lock on a file of its own in shared memory. What a node that was killed leaves
there is removed by the next one that counts.
"""

import ctypes
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

SHARED_MEMORY: Final = Path("/dev/shm")
THREADS_DEFAULT_MAX: Final = 8  # more than that, small models hardly gain by
NODES_MAX: Final = 64  # that are counted
LARGE_PIECE_BYTES: Final = 2**20  # of memory, see `give_back_at_once`
_M_MMAP_THRESHOLD: Final = -3  # of glibc
_CONTROL_GROUP: Final = Path("/sys/fs/cgroup")
_FILE_CACHE: Final = frozenset({"inactive_file", "active_file"})  # in `memory.stat`; without shmem


def threads_of(cores: int, nodes: int) -> int:
    """How many threads a node's trainer, and its engine, take by default where so many nodes share
    the cores, itself included: a node that is alone leaves one core to everything else. Pure."""
    share = cores - 1 if nodes <= 1 else cores // nodes
    return max(1, min(share, THREADS_DEFAULT_MAX))


def disk_free_bytes(directory: Path) -> int | None:
    """What is left of the disk that a directory is on; None: it cannot be told. Blocking."""
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None


def core_count() -> int:
    """How many this process may use: by its affinity, and by its control group's quota."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota, _, period = _control_group("cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def give_back_at_once() -> None:
    """From now on this process's large pieces of memory go back to the system when they are freed.
    glibc, left alone, soon takes them from one heap, in which activations of many sizes leave
    holes: of an adapter's step on 2,048 tokens a third of the peak. Nothing where there is none."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, LARGE_PIECE_BYTES)


def free_memory_bytes() -> int:
    """Memory that can be had without others losing theirs. What only caches files counts as free,
    as the kernel gives it up; what is in shared memory does not."""
    free = int(psutil.virtual_memory().available)
    limit, used = _control_group("memory.max"), _control_group("memory.current")
    if limit.isdigit() and used.isdigit():
        held = max(0, int(used) - _file_cache_bytes())
        free = min(free, max(0, int(limit) - held))
    return free


@contextmanager
def counted(directory: Path | None = None) -> Iterator[Callable[[], int]]:
    """Be counted as a node of this user within the block. Yields what counts those that live, this
    one included, at most `NODES_MAX`; it blocks on the disk. `directory`: of the locks; None: in
    shared memory, else where temporary files are.

    A node that finds no place for its lock counts itself alone.
    """
    if directory is None:
        directory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    try:
        path, descriptor = _locked(directory)
    except OSError:
        yield lambda: 1
        return
    try:
        yield lambda: min(1 + sum(_lives(each) for each in _others(path)), NODES_MAX)
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(directory: Path) -> tuple[Path, int]:
    """A new file and the descriptor that holds its lock."""
    while True:
        path = directory / f"{_mark()}{secrets.token_hex(8)}"
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                return path, descriptor
        except (BlockingIOError, FileNotFoundError):
            pass  # another node took it for one that was left behind
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _others(path: Path) -> list[Path]:
    found = sorted(path.parent.glob(f"{_mark()}*"))
    return [each for each in found if each != path][:NODES_MAX]


def _lives(path: Path) -> bool:
    """Whether a node holds that lock. Removes it if none does. Everybody may write into shared
    memory: what others put there is neither followed nor counted."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    else:
        path.unlink(missing_ok=True)
        return False
    finally:
        os.close(descriptor)


def _mark() -> str:
    return f"swarm-node-{os.getuid()}-"


def _control_group(name: str) -> str:
    try:
        return (_CONTROL_GROUP / name).read_text().strip()
    except OSError:
        return ""


def _file_cache_bytes() -> int:
    """The file cache of the control group: part of what it uses."""
    lines = (line.split() for line in _control_group("memory.stat").splitlines())
    return sum(
        int(line[1])
        for line in lines
        if len(line) == 2 and line[0] in _FILE_CACHE and line[1].isdigit()
    )
