"""System calls of Linux for which Python has no function, by their numbers.

The tables hold what `seccomp` refuses and what the other layers call. Only these two machines are
known; on others there are no layers. That of aarch64 was not run.
"""

import ctypes
import os
import platform
import sys
from typing import Final

AUDIT_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# From 424 on all machines have the same numbers.
_COMMON: Final = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431,
    "fsmount": 432, "fspick": 433, "pidfd_open": 434, "clone3": 435, "pidfd_getfd": 438,
    "process_madvise": 440, "epoll_pwait2": 441, "mount_setattr": 442, "quotactl_fd": 443,
    "landlock_create_ruleset": 444, "landlock_add_rule": 445, "landlock_restrict_self": 446,
    "memfd_secret": 447, "process_mrelease": 448, "futex_waitv": 449, "fchmodat2": 452,
    "futex_wait": 455, "setxattrat": 463,
    "removexattrat": 466, "open_tree_attr": 467, "file_setattr": 469,
}  # fmt: skip
_X86_64: Final = {
    "poll": 7, "select": 23, "pause": 34, "nanosleep": 35, "alarm": 37, "setitimer": 38,
    "rt_sigtimedwait": 128, "rt_sigsuspend": 130, "futex": 202, "semtimedop": 220,
    "timer_create": 222, "clock_nanosleep": 230, "epoll_wait": 232, "pselect6": 270, "ppoll": 271,
    "epoll_pwait": 281, "timerfd_create": 283,
    "shmget": 29, "shmat": 30, "shmctl": 31, "socket": 41, "connect": 42, "accept": 43,
    "bind": 49, "listen": 50, "clone": 56, "fork": 57, "vfork": 58, "execve": 59, "kill": 62,
    "semget": 64, "msgget": 68, "fcntl": 72, "truncate": 76, "chmod": 90, "chown": 92,
    "lchown": 94, "ptrace": 101, "syslog": 103, "setpgid": 109, "setsid": 112, "capset": 126,
    "rt_sigqueueinfo": 129, "utime": 132, "mknod": 133, "personality": 135, "setpriority": 141,
    "sched_setparam": 142, "sched_setscheduler": 144, "vhangup": 153, "modify_ldt": 154,
    "pivot_root": 155, "prctl": 157, "adjtimex": 159, "chroot": 161, "acct": 163,
    "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168,
    "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173,
    "init_module": 175, "delete_module": 176, "quotactl": 179, "setxattr": 188, "lsetxattr": 189,
    "removexattr": 197, "lremovexattr": 198, "tkill": 200, "sched_setaffinity": 203,
    "clock_settime": 227, "tgkill": 234, "utimes": 235, "mq_open": 240, "kexec_load": 246,
    "add_key": 248, "request_key": 249, "keyctl": 250, "ioprio_set": 251, "migrate_pages": 256,
    "mknodat": 259, "fchownat": 260, "futimesat": 261, "fchmodat": 268, "unshare": 272,
    "move_pages": 279, "utimensat": 280, "accept4": 288, "rt_tgsigqueueinfo": 297,
    "perf_event_open": 298, "fanotify_init": 300, "prlimit64": 302, "name_to_handle_at": 303,
    "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310,
    "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "sched_setattr": 314,
    "seccomp": 317, "memfd_create": 319, "kexec_file_load": 320, "bpf": 321, "execveat": 322,
    "userfaultfd": 323,
}  # fmt: skip
_AARCH64: Final = {
    "epoll_pwait": 22, "pselect6": 72, "ppoll": 73, "timerfd_create": 85, "futex": 98,
    "nanosleep": 101, "setitimer": 103, "timer_create": 107, "clock_nanosleep": 115,
    "rt_sigsuspend": 133, "rt_sigtimedwait": 137, "semtimedop": 192,
    "setxattr": 5, "lsetxattr": 6, "removexattr": 14, "lremovexattr": 15, "fcntl": 25,
    "ioprio_set": 30, "mknodat": 33, "umount2": 39, "mount": 40, "pivot_root": 41, "truncate": 45,
    "chroot": 51, "fchmodat": 53, "fchownat": 54, "vhangup": 58, "quotactl": 60, "utimensat": 88,
    "acct": 89, "capset": 91, "personality": 92, "unshare": 97, "kexec_load": 104,
    "init_module": 105, "delete_module": 106, "clock_settime": 112, "syslog": 116, "ptrace": 117,
    "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122, "kill": 129,
    "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "setpriority": 140, "reboot": 142,
    "setpgid": 154, "setsid": 157, "sethostname": 161, "setdomainname": 162, "prctl": 167,
    "settimeofday": 170, "adjtimex": 171, "mq_open": 180, "msgget": 186, "semget": 190,
    "shmget": 194, "shmctl": 195, "shmat": 196, "socket": 198, "bind": 200, "listen": 201,
    "accept": 202, "connect": 203, "add_key": 217, "request_key": 218, "keyctl": 219,
    "clone": 220, "execve": 221, "swapon": 224, "swapoff": 225, "migrate_pages": 238,
    "move_pages": 239, "rt_tgsigqueueinfo": 240, "perf_event_open": 241, "accept4": 242,
    "prlimit64": 261, "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265,
    "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271,
    "kcmp": 272, "finit_module": 273, "sched_setattr": 274, "seccomp": 277, "memfd_create": 279,
    "bpf": 280, "execveat": 281, "userfaultfd": 282, "kexec_file_load": 294,
}  # fmt: skip

PR_SET_PDEATHSIG: Final = 1
_PR_CAPBSET_DROP: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITY_VERSION: Final = 0x20080522
_CAPABILITIES: Final = 64

libc = ctypes.CDLL(None, use_errno=True)
machine: Final = platform.machine() if sys.platform == "linux" and sys.maxsize > 2**32 else ""
NUMBERS: Final = {"x86_64": _COMMON | _X86_64, "aarch64": _COMMON | _AARCH64}.get(machine, {})


def call(name: str, *arguments: object) -> int:
    """Call it by name.

    Raises:
        OSError: it failed, or this machine's number of it is not known.
    """
    if name not in NUMBERS:
        raise OSError(f"no system call {name} on this machine")
    result = int(libc.syscall(ctypes.c_long(NUMBERS[name]), *arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int = 0) -> None:
    """Set something of this process, as far as the kernel knows it.

    Raises:
        OSError: it does not.
    """
    call("prctl", option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), 0)


def give_up_privileges() -> None:
    """Have no capability from here on, and get none by running another program.

    Raises:
        OSError: the kernel is older than these rules.
    """
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(_CAPABILITIES):
        try:
            prctl(_PR_CAPBSET_DROP, capability)
        except OSError:  # there is none of that number, or nothing to drop it with
            break
    prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
