"""Cores and free memory of this machine within its control group, and the number of nodes sharing
them.

Each node locks a file in shared memory; files of killed nodes are removed by the next node that
counts.
"""

import ctypes
import fcntl
import gc
import os
import platform
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final

import psutil

SHARED_MEMORY: Final = Path("/dev/shm")
THREADS_DEFAULT_MAX: Final = 8  # small models hardly gain from more
NODES_MAX: Final = 64  # counted at most
LARGE_PIECE_BYTES: Final = 2**20  # see `give_back_at_once`
_M_MMAP_THRESHOLD: Final = -3  # glibc's mallopt
_CONTROL_GROUP: Final = Path("/sys/fs/cgroup")
_PROCESS: Final = Path("/proc/self")
_FILE_CACHE: Final = frozenset({"inactive_file", "active_file"})  # in `memory.stat`, without shmem


def threads_of(cores: int, nodes: int) -> int:
    """Default threads of trainer and of engine if this many nodes share the cores. A single node
    leaves one core free. Pure."""
    share = cores - 1 if nodes <= 1 else cores // nodes
    return max(1, min(share, THREADS_DEFAULT_MAX))


def disk_free_bytes(directory: Path) -> int | None:
    """Free bytes of a directory's disk. None: unknown. Blocking."""
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None


def core_count() -> int:
    """Cores that this process may use, by affinity and control group quota."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    for group in _groups("cpu"):
        quota, _, period = _read(group, "cpu.max").partition(" ")
        if not quota:  # version 1
            quota, period = _read(group, "cpu.cfs_quota_us"), _read(group, "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def processor() -> str:
    """The name of the processor's model."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def give_back_at_once() -> None:
    """Return large pieces of memory to the system when they are freed. Otherwise glibc takes them
    from a heap that fragments: a third of the peak of a step on 2,048 tokens. No effect without
    glibc."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, LARGE_PIECE_BYTES)


def free_memory_bytes() -> int:
    """Available memory. File caches count as free, shared memory does not."""
    free = int(psutil.virtual_memory().available)
    for group in _groups("memory"):
        limit, used = _read(group, "memory.max"), _read(group, "memory.current")
        if not limit:  # version 1
            limit = _read(group, "memory.limit_in_bytes")
            used = _read(group, "memory.usage_in_bytes")
        if limit.isdigit() and used.isdigit():
            held = max(0, int(used) - _file_cache_bytes(group))
            free = min(free, max(0, int(limit) - held))
    return free


@contextmanager
def counted(directory: Path | None = None) -> Iterator[Callable[[], int]]:
    """Count as a node of this user within the block. Yields a blocking function that counts live
    nodes, this one included, up to `NODES_MAX`.

    `directory`: of the locks; None: shared memory, else the temporary directory. A node that cannot
    lock counts itself only.
    """
    if directory is None:
        directory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    mark = f"swarm-node-{os.getuid()}-"
    try:
        path, descriptor = _locked(directory, mark)
    except OSError:
        yield lambda: 1
        return

    def others() -> list[Path]:
        found = sorted(directory.glob(f"{mark}*"))
        return [each for each in found if each != path][:NODES_MAX]

    try:
        yield lambda: min(1 + sum(_lives(each) for each in others()), NODES_MAX)
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(directory: Path, mark: str) -> tuple[Path, int]:
    while True:
        path = directory / f"{mark}{secrets.token_hex(8)}"
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                return path, descriptor
        except (BlockingIOError, FileNotFoundError):
            pass  # another node removed it as stale
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lives(path: Path) -> bool:
    """True if a node holds this lock; else it is removed. Shared memory is writable for all:
    foreign files are neither followed nor counted."""
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


def _groups(controller: str) -> list[Path]:
    """The directories of this process's control group and of those around it, whose limits all
    hold: of version 2, and of a controller of version 1. In a container some are out of view."""
    found = []
    for line in _read(_PROCESS, "cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        mount = _CONTROL_GROUP / controller if names else _CONTROL_GROUP
        group = mount / path.lstrip("/")
        found += [each for each in (group, *group.parents) if each.is_relative_to(mount)]
    return found


def _read(directory: Path, name: str) -> str:
    try:
        return (directory / name).read_text().strip()
    except OSError:
        return ""


def _file_cache_bytes(group: Path) -> int:
    lines = (line.split() for line in _read(group, "memory.stat").splitlines())
    found = {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}
    # Version 1 counts those of groups below apart
    return sum(found.get(f"total_{name}", found.get(name, 0)) for name in _FILE_CACHE)


# Garbage collection and return of freed memory.

GIVE_BACK_EVERY_S: Final = 20.0


def freeze_garbage_collector() -> None:
    """Exclude everything loaded so far from garbage collection; each full collection would take 100
    ms."""
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Return freed memory to the system; glibc keeps memory below any live allocation. Blocks for
    milliseconds without the GIL. No effect without glibc."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    if platform.libc_ver()[0] != "glibc":
        return None
    trim = ctypes.CDLL(None).malloc_trim
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim
