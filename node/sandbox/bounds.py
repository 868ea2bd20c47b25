"""Limits of this process while it makes a problem: the kernel bounds memory (`MemoryError`), a
timer signal bounds CPU time (`OutOfTime`). The parent ends code that blocks the interpreter."""

import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

SCORING_BYTES: Final = 2**29  # address space to score one group, beyond the imports
IMPORTS_BYTES: Final = 2**30  # address space for the libraries of the first problem
PROBLEM_CPU_S: Final = 20.0  # per problem, imports included
_AGAIN_S: Final = 0.1  # repeats the signal in case a library caught the first


class OutOfTime(Exception):
    pass


class _Over(BaseException):
    """Not an `Exception`, so that no library catches it."""


@contextmanager
def cpu_bound(seconds: float) -> Iterator[None]:
    """Limit the block's CPU time in user mode, by OutOfTime. No effect outside the main thread,
    which gets the signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _end)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _Over:
        raise OutOfTime from None
    finally:
        signal.signal(signal.SIGVTALRM, before)


def _end(_number: int, _frame: FrameType | None) -> None:
    raise _Over


def size_bytes() -> int | None:
    """Address space of this process; None: unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return None
    return pages * resource.getpagesize()


@contextmanager
def memory_bound(size_bytes_now: int | None, more_bytes: int) -> Iterator[None]:
    """Limit the growth of this process's address space; beyond it Python raises `MemoryError`.
    `size_bytes_now`: from `size_bytes`; None: no limit."""
    if size_bytes_now is None or sys.platform == "darwin":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = size_bytes_now + more_bytes
    if before[0] != resource.RLIM_INFINITY:
        most = min(most, before[0])
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
