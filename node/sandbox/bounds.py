"""Bounds that a process has for itself while it makes what somebody else's settings ask for.

A number in a run file may ask for a problem of any size. Memory is bounded by the kernel, which
makes Python raise `MemoryError`; CPU time by a timer whose signal raises `OutOfTime` here. What
holds the interpreter for longer than that is for the limits of whoever started the process.
"""

import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

SCORING_BYTES: Final = 2**29  # of address space, to score one group, beyond what is imported
IMPORTS_BYTES: Final = 2**30  # of address space, for the libraries that the first problem imports
PROBLEM_CPU_S: Final = 20.0  # of one problem, its libraries' imports among it
_AGAIN_S: Final = 0.1  # where a library caught the first


class OutOfTime(Exception):
    """The CPU time was used up."""


class _Over(BaseException):
    """No library's `except Exception` is to catch it."""


@contextmanager
def cpu_bound(seconds: float) -> Iterator[None]:
    """Let the block use so much CPU time of this process outside of the kernel. Without effect
    where a thread other than the main one calls: signals are not its own.

    Raises:
        OutOfTime: it used that up.
    """
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
    """The address space of this process; None: its system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return None
    return pages * resource.getpagesize()


@contextmanager
def memory_bound(size_bytes_now: int | None, more_bytes: int) -> Iterator[None]:
    """Let the block grow this process by so much address space; beyond it Python raises
    `MemoryError`. `size_bytes_now`: of `size_bytes`; None: there is no bound."""
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
