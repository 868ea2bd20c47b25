"""Garbage collection and return of freed memory."""

import ctypes
import gc
import platform
from collections.abc import Callable
from functools import cache
from typing import Final

GIVE_BACK_EVERY_S: Final = 20.0


def keep_what_is_loaded() -> None:
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
