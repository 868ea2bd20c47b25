"""Linux system calls without a Python function, by number.

Only x86_64 and aarch64 (untested) are known; other machines get no layers.
"""

import ctypes
import os
import platform
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

AUDIT_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Their numbers on each machine, and the names in each part of a filter.
_CALLS: Final = tomllib.loads(Path(__file__).with_name("system_calls.toml").read_text("utf-8"))
REFUSED: Final[Mapping[str, Sequence[str]]] = _CALLS["refused"]
MORE: Final[Mapping[str, Sequence[str]]] = _CALLS["more"]
_NUMBERS: Final[Mapping[str, Mapping[str, int]]] = _CALLS["numbers"]

PR_SET_PDEATHSIG: Final = 1
_PR_CAPBSET_DROP: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITY_VERSION: Final = 0x20080522
_CAPABILITIES: Final = 64

libc = ctypes.CDLL(None, use_errno=True)
machine: Final = platform.machine() if sys.platform == "linux" and sys.maxsize > 2**32 else ""
NUMBERS: Final = {**_NUMBERS["common"], **_NUMBERS[machine]} if machine in AUDIT_ARCH else {}


def call(name: str, *arguments: object) -> int:
    """Make a system call by name; OSError if it fails, or is unknown on this machine."""
    if name not in NUMBERS:
        raise OSError(f"no system call {name} on this machine")
    result = int(libc.syscall(ctypes.c_long(NUMBERS[name]), *arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int = 0) -> None:
    """Set a property of this process."""
    call("prctl", option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), 0)


def give_up_privileges() -> None:
    """Drop all capabilities, and gain none from programs; OSError if the kernel is too old."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(_CAPABILITIES):
        try:
            prctl(_PR_CAPBSET_DROP, capability)
        except OSError:  # unknown capability, or not permitted
            break
    prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
