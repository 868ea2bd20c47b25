"""seccomp filters: the system calls that a process may make.

Each filter adds to the one before:

  confined  no sockets, access to other processes, mounts, namespaces, keys, risky kernel features,
            or shared memory beyond limits
  locked    also no new process or program, no signals but faults to itself, no limits, priorities
            or process groups of others
  alone     only the calls of Python's standard library for computing and reading its files

The first two are deny-lists: a scorer may use any library, and an allow-list would break with its
releases. `alone` is an allow-list without waiting, locking, or changing files. Refused calls fail
with EPERM.
"""

import ctypes
import errno
import os
import signal
import struct
from collections.abc import Iterable
from typing import Final

from node.sandbox.kernel import AUDIT_ARCH, MORE, NUMBERS, PR_SET_PDEATHSIG, REFUSED, call, machine

_SET_MODE_FILTER: Final = 1
_X32_BIT: Final = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_AT_NUMBER, _AT_ARCH = 0, 4  # in `struct seccomp_data`
_CLONE_THREAD: Final = 0x00010000
_CLONE_NEW: Final = 0x7E020080  # all namespaces
_OWN_FAULTS: Final = (signal.SIGABRT, signal.SIGSEGV, signal.SIGFPE, signal.SIGILL, signal.SIGBUS)

_FUTEX_WAKES: Final = (1, 129)  # FUTEX_WAKE, shared and private
# Descriptors: copy, flags; their files: kind, size, bytes to read.
_FCNTL_COMPUTING: Final = (0, 1, 2, 3, 1030)
_FCNTL_SCORING: Final = (*_FCNTL_COMPUTING, 4, 5, 6, 7, 36, 37, 38, 1031, 1032)  # and locks
_IOCTL_COMPUTING: Final = (0x5401, 0x5451)  # TCGETS, FIOCLEX
_IOCTL_SCORING: Final = (*_IOCTL_COMPUTING, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450)

_Step = tuple[int, int, int, int]  # code, jump if true, jump if false, operand
_Program = list[_Step]
_REFUSED: Final[_Step] = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
_ALLOWED: Final[_Step] = (_RETURN, 0, 0, _ALLOW)


def confine(*, metadata: bool) -> None:
    """Install the filter `confined`; OSError if kernel or machine have none. `metadata`: allow
    changes of modes, owners, times, attributes and flags of files."""
    refused = [name for names in REFUSED.values() for name in names]
    clone = [*_argument(0), (_ANY_BIT, 0, 1, _CLONE_NEW), _REFUSED, _ALLOWED]
    rules = _for("clone", clone)
    if not metadata:
        refused += MORE["metadata"]
        rules += _for("ioctl", _one_of(1, _IOCTL_SCORING))  # sets inode flags
    _install([*_always(refused, _REFUSED), *rules])


def lock() -> None:
    """Install the filter `locked` on top."""
    own = os.getpid()
    clone = [*_argument(0), (_ANY_BIT, 1, 0, _CLONE_THREAD), _REFUSED, _ALLOWED]
    no_death_signal = [*_argument(0), (_EQUAL, 0, 1, PR_SET_PDEATHSIG), _REFUSED, _ALLOWED]
    to_itself = [(_EQUAL, 1, 0, own), _REFUSED]
    fault = [step for each in _OWN_FAULTS for step in ((_EQUAL, 0, 1, each), _ALLOWED)]
    limits = [*_argument(0), (_EQUAL, 2, 0, 0), *to_itself, _ALLOWED]
    _install(
        [
            *_always(MORE["locked"], _REFUSED),
            *_for("clone", clone),
            *_for("kill", [*_argument(0), *to_itself, *_argument(1), *fault, _REFUSED]),
            *_for("tgkill", [*_argument(0), *to_itself, *_argument(2), *fault, _REFUSED]),
            *_for("prlimit64", limits),
            *_for("fcntl", _one_of(1, _FCNTL_SCORING)),  # no signals, leases or hints
            *_for("prctl", no_death_signal),
        ]
    )


def restrict_to_computing() -> None:
    """Install the filter `alone` on top, for a single-threaded process."""
    _install(
        [
            *_always(MORE["computing"], _ALLOWED),
            *_for("futex", _one_of(1, _FUTEX_WAKES)),
            *_for("fcntl", _one_of(1, _FCNTL_COMPUTING)),
            *_for("ioctl", _one_of(1, _IOCTL_COMPUTING)),
            _REFUSED,
        ]
    )


def _argument(place: int) -> _Program:
    """Load the lower half of an argument; compared values have no upper half."""
    return [(_LOAD, 0, 0, 16 + 8 * place)]


def _one_of(place: int, values: Iterable[int]) -> _Program:
    checks = [step for each in values for step in ((_EQUAL, 0, 1, each), _ALLOWED)]
    return [*_argument(place), *checks, _REFUSED]


def _always(names: Iterable[str], verdict: _Step) -> _Program:
    """Rule for calls with any arguments; a machine lacks some of them."""
    numbers = [NUMBERS[name] for name in names if name in NUMBERS]
    return [step for each in numbers for step in ((_EQUAL, 0, 1, each), verdict)]


def _for(name: str, block: _Program) -> _Program:
    """Rule for one call; always returns."""
    return [(_EQUAL, 0, len(block), NUMBERS[name]), *block]


def _install(rules: _Program) -> None:
    if machine not in AUDIT_ARCH:
        raise OSError(f"no filter of system calls for {machine or 'this system'}")
    # clone3's arguments are behind a pointer: ENOSYS makes callers use clone.
    no_clone3 = [(_EQUAL, 0, 1, NUMBERS["clone3"]), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    program = [
        (_LOAD, 0, 0, _AT_ARCH),
        (_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _AT_NUMBER),
        (_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _KILL),
        *no_clone3,
        *rules,
        _ALLOWED,
    ]
    code = b"".join(struct.pack("=HBBI", *step) for step in program)
    steps = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program), ctypes.addressof(steps))
    )
    call("seccomp", _SET_MODE_FILTER, 0, ctypes.byref(header))
