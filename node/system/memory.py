"""A process' memory: what Python does not search for garbage, and what goes back to the system."""

import ctypes
import gc
import platform
from collections.abc import Callable
from functools import cache
from typing import Final

GIVE_BACK_EVERY_S: Final = 20.0


def keep_what_is_loaded() -> None:
    """Take what has been imported and built so far out of Python's search for garbage: each full
    search would go through it, and take the event loop 100 ms."""
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Return to the system what has been freed. glibc keeps what lies below anything that lives on,
    so that whoever made a process hold much for a second would have it hold that for good.

    Blocks for milliseconds, without Python's lock. Nothing happens with another C library.
    """
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
