"""Which system calls a process may make: a filter that the kernel runs before each (seccomp).

Filters, of which the next comes on top of the one before:

    confined  no sockets, no look into other processes, no mounts, namespaces, keys or kernel
              features that few need and many holes were in; no shared memory beyond limits
    locked    besides: no new process or program, no signal but a fault to itself, no limits,
              priorities or process groups of others
    awake     besides: no waiting for a time; who waits holds others up and uses nothing

What is refused fails with EPERM. Calls that nobody named stay allowed: a scorer may stand on any
library, and an allow-list would break with each release of one.
"""

import ctypes
import errno
import os
import signal
import struct
from collections.abc import Iterable
from typing import Final

from node.sandbox.kernel import AUDIT_ARCH, NUMBERS, PR_SET_PDEATHSIG, call, machine

_SET_MODE_FILTER: Final = 1
_X32_BIT: Final = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_AT_NUMBER, _AT_ARCH = 0, 4  # in `struct seccomp_data`
_CLONE_THREAD: Final = 0x00010000
_CLONE_NEW: Final = 0x7E020080  # all namespaces
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15  # by which another process gets a signal
_OWN_FAULTS: Final = (signal.SIGABRT, signal.SIGSEGV, signal.SIGFPE, signal.SIGILL, signal.SIGBUS)

_NETWORK: Final = ("socket", "connect", "accept", "accept4", "bind", "listen")
_OTHER_PROCESSES: Final = (
    "ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_open", "pidfd_getfd",
    "pidfd_send_signal", "process_madvise", "process_mrelease", "migrate_pages", "move_pages",
    "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "perf_event_open",
)  # fmt: skip
_MOUNTS: Final = (
    "mount", "umount2", "pivot_root", "chroot", "unshare", "setns", "open_tree", "open_tree_attr",
    "move_mount", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr", "mknod", "mknodat",
    "name_to_handle_at", "open_by_handle_at", "fanotify_init",
)  # fmt: skip
_KERNEL: Final = (
    "bpf", "keyctl", "add_key", "request_key", "userfaultfd", "io_uring_setup", "io_uring_enter",
    "io_uring_register", "init_module", "finit_module", "delete_module", "kexec_load",
    "kexec_file_load", "reboot", "swapon", "swapoff", "acct", "quotactl", "quotactl_fd", "iopl",
    "ioperm", "modify_ldt", "personality", "syslog", "settimeofday", "clock_settime", "adjtimex",
    "clock_adjtime", "sethostname", "setdomainname", "vhangup",
)  # fmt: skip
_MEMORY: Final = (
    "memfd_create", "memfd_secret", "shmget", "shmat", "shmctl", "msgget", "semget", "mq_open",
)  # fmt: skip
# Landlock leaves these alone, on files that may not even be read.
_METADATA: Final = (
    "truncate", "chmod", "fchmodat", "fchmodat2", "chown", "lchown", "fchownat", "utime", "utimes",
    "futimesat", "utimensat", "setxattr", "lsetxattr", "removexattr", "lremovexattr", "setxattrat",
    "removexattrat", "file_setattr",
)  # fmt: skip
_LOCKED: Final = (
    "fork", "vfork", "execve", "execveat", "setsid", "setpgid", "sched_setaffinity",
    "sched_setparam", "sched_setscheduler", "sched_setattr", "setpriority", "ioprio_set",
)  # fmt: skip

_WAITING: Final = (
    "poll", "select", "pause", "nanosleep", "alarm", "setitimer", "rt_sigtimedwait",
    "rt_sigsuspend", "semtimedop", "timer_create", "clock_nanosleep", "epoll_wait", "pselect6",
    "ppoll", "epoll_pwait", "epoll_pwait2", "timerfd_create", "futex_waitv", "futex_wait",
)  # fmt: skip
# FUTEX_WAIT and FUTEX_WAIT_BITSET, each as it is, private, and by the wall's clock.
_FUTEX_WAITS: Final = tuple(wait | flags for wait in (0, 9) for flags in (0, 128, 256, 384))

_Program = list[tuple[int, int, int, int]]  # code, where to if so, if not, operand


def confine(*, metadata: bool) -> None:
    """Install the filter `confined`. `metadata`: whether modes, owners and times may be changed.

    Raises:
        OSError: this kernel has no such filters, or this machine's calls are not known.
    """
    refused = [*_NETWORK, *_OTHER_PROCESSES, *_MOUNTS, *_KERNEL, *_MEMORY]
    clone = [*_argument(0), (_ANY_BIT, 0, 1, _CLONE_NEW), _refusal(), _allowed()]
    _install([*_refused(refused if metadata else [*refused, *_METADATA]), *_for("clone", clone)])


def lock(*, threads: bool) -> None:
    """Install the filter `locked` on top. `threads`: whether this process may start any.

    Raises:
        OSError: as `confine`.
    """
    own = os.getpid()
    clone: _Program = [(_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    if threads:
        clone = [*_argument(0), (_ANY_BIT, 1, 0, _CLONE_THREAD), _refusal(), _allowed()]
    to_itself = [(_EQUAL, 1, 0, own), _refusal()]
    fault = [step for each in _OWN_FAULTS for step in ((_EQUAL, 0, 1, each), _allowed())]
    limits = [*_argument(0), (_EQUAL, 2, 0, 0), *to_itself, _allowed()]
    _install(
        [
            *_refused(_LOCKED),
            *_for("clone", clone),
            *_for("kill", [*_argument(0), *to_itself, *_argument(1), *fault, _refusal()]),
            *_for("tgkill", [*_argument(0), *to_itself, *_argument(2), *fault, _refusal()]),
            *_for("prlimit64", limits),
            *_for("fcntl", _none_of(1, (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX))),
            *_for("prctl", _none_of(0, (PR_SET_PDEATHSIG,))),
        ]
    )


def stay_awake() -> None:
    """Install the filter `awake` on top, for a process of one thread: a lock that it waits for is
    never let go.

    Raises:
        OSError: as `confine`.
    """
    _install([*_refused(_WAITING), *_for("futex", _none_of(1, _FUTEX_WAITS))])


def _refusal() -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, _ERRNO | errno.EPERM)


def _allowed() -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, _ALLOW)


def _argument(place: int) -> _Program:
    """Load the lower half of an argument; what is compared with it has no upper one."""
    return [(_LOAD, 0, 0, 16 + 8 * place)]


def _none_of(place: int, values: Iterable[int]) -> _Program:
    checks = [step for each in values for step in ((_EQUAL, 0, 1, each), _refusal())]
    return [*_argument(place), *checks, _allowed()]


def _refused(names: Iterable[str]) -> _Program:
    """Calls that fail whatever their arguments are; a machine lacks some of them."""
    numbers = [NUMBERS[name] for name in names if name in NUMBERS]
    return [step for each in numbers for step in ((_EQUAL, 0, 1, each), _refusal())]


def _for(name: str, block: _Program) -> _Program:
    """What decides about one call; it always returns."""
    return [(_EQUAL, 0, len(block), NUMBERS[name]), *block]


def _install(rules: _Program) -> None:
    if machine not in AUDIT_ARCH:
        raise OSError(f"no filter of system calls for {machine or 'this system'}")
    # The arguments of clone3 are behind a pointer: whoever calls it is told to take clone.
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
        _allowed(),
    ]
    code = b"".join(struct.pack("=HBBI", *step) for step in program)
    steps = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program), ctypes.addressof(steps))
    )
    call("seccomp", _SET_MODE_FILTER, 0, ctypes.byref(header))
