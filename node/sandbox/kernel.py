"""Linux system calls without a Python function, by number.

Only x86_64 and aarch64 (untested) are known; other machines get no layers.
"""

import ctypes
import os
import platform
import sys
from typing import Final

AUDIT_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# From 424 on the numbers are the same on all machines.
_COMMON: Final = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431,
    "fsmount": 432, "fspick": 433, "pidfd_open": 434, "clone3": 435, "pidfd_getfd": 438,
    "faccessat2": 439, "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443,
    "landlock_create_ruleset": 444, "landlock_add_rule": 445, "landlock_restrict_self": 446,
    "memfd_secret": 447, "process_mrelease": 448, "fchmodat2": 452, "setxattrat": 463,
    "removexattrat": 466, "open_tree_attr": 467, "file_setattr": 469,
}  # fmt: skip
_X86_64: Final = {
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "lseek": 8,
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14,
    "rt_sigreturn": 15, "ioctl": 16, "pread64": 17, "access": 21, "mremap": 25, "madvise": 28,
    "shmget": 29, "shmat": 30, "shmctl": 31, "dup": 32, "getpid": 39, "socket": 41, "connect": 42,
    "accept": 43, "bind": 49, "listen": 50, "clone": 56, "fork": 57, "vfork": 58, "execve": 59,
    "exit": 60, "kill": 62, "uname": 63, "semget": 64, "msgget": 68, "fcntl": 72, "truncate": 76,
    "getdents": 78, "getcwd": 79, "readlink": 89, "chmod": 90, "fchmod": 91, "chown": 92,
    "fchown": 93, "lchown": 94, "gettimeofday": 96, "getrusage": 98, "sysinfo": 99, "times": 100,
    "ptrace": 101, "getuid": 102, "syslog": 103, "getgid": 104, "geteuid": 107, "getegid": 108,
    "setpgid": 109, "getppid": 110, "setsid": 112, "capset": 126, "rt_sigqueueinfo": 129,
    "sigaltstack": 131, "utime": 132, "mknod": 133, "personality": 135, "setpriority": 141,
    "sched_setparam": 142, "sched_setscheduler": 144, "vhangup": 153, "modify_ldt": 154,
    "pivot_root": 155, "prctl": 157, "adjtimex": 159, "chroot": 161, "acct": 163,
    "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168,
    "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173,
    "init_module": 175, "delete_module": 176, "quotactl": 179, "gettid": 186, "setxattr": 188,
    "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198,
    "fremovexattr": 199, "tkill": 200, "time": 201, "futex": 202, "sched_setaffinity": 203,
    "sched_getaffinity": 204, "getdents64": 217, "clock_settime": 227, "clock_gettime": 228,
    "clock_getres": 229, "exit_group": 231, "tgkill": 234, "utimes": 235, "mq_open": 240,
    "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "ioprio_set": 251,
    "inotify_init": 253, "inotify_add_watch": 254, "migrate_pages": 256, "openat": 257,
    "mknodat": 259, "fchownat": 260, "futimesat": 261, "newfstatat": 262, "readlinkat": 267,
    "fchmodat": 268, "faccessat": 269, "unshare": 272, "move_pages": 279, "utimensat": 280,
    "accept4": 288, "inotify_init1": 294, "rt_tgsigqueueinfo": 297, "perf_event_open": 298,
    "fanotify_init": 300, "prlimit64": 302, "name_to_handle_at": 303, "open_by_handle_at": 304,
    "clock_adjtime": 305, "setns": 308, "getcpu": 309, "process_vm_readv": 310,
    "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "sched_setattr": 314,
    "seccomp": 317, "getrandom": 318, "memfd_create": 319, "kexec_file_load": 320, "bpf": 321,
    "execveat": 322, "userfaultfd": 323, "statx": 332,
}  # fmt: skip
_AARCH64: Final = {
    "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15,
    "fremovexattr": 16, "getcwd": 17, "dup": 23, "fcntl": 25, "inotify_init1": 26,
    "inotify_add_watch": 27, "ioctl": 29, "ioprio_set": 30, "mknodat": 33, "umount2": 39,
    "mount": 40, "pivot_root": 41, "truncate": 45, "faccessat": 48, "chroot": 51, "fchmod": 52,
    "fchmodat": 53, "fchownat": 54, "fchown": 55, "openat": 56, "close": 57, "vhangup": 58,
    "quotactl": 60, "getdents64": 61, "lseek": 62, "read": 63, "write": 64, "pread64": 67,
    "readlinkat": 78, "newfstatat": 79, "fstat": 80, "utimensat": 88, "acct": 89, "capset": 91,
    "personality": 92, "exit": 93, "exit_group": 94, "unshare": 97, "futex": 98, "kexec_load": 104,
    "init_module": 105, "delete_module": 106, "clock_settime": 112, "clock_gettime": 113,
    "clock_getres": 114, "syslog": 116, "ptrace": 117, "sched_setparam": 118,
    "sched_setscheduler": 119, "sched_setaffinity": 122, "sched_getaffinity": 123, "kill": 129,
    "tkill": 130, "tgkill": 131, "sigaltstack": 132, "rt_sigaction": 134, "rt_sigprocmask": 135,
    "rt_sigqueueinfo": 138, "rt_sigreturn": 139, "setpriority": 140, "reboot": 142, "times": 153,
    "setpgid": 154, "setsid": 157, "uname": 160, "sethostname": 161, "setdomainname": 162,
    "getrusage": 165, "prctl": 167, "getcpu": 168, "gettimeofday": 169, "settimeofday": 170,
    "adjtimex": 171, "getpid": 172, "getppid": 173, "getuid": 174, "geteuid": 175, "getgid": 176,
    "getegid": 177, "gettid": 178, "sysinfo": 179, "mq_open": 180, "msgget": 186, "semget": 190,
    "shmget": 194, "shmctl": 195, "shmat": 196, "socket": 198, "bind": 200, "listen": 201,
    "accept": 202, "connect": 203, "brk": 214, "munmap": 215, "mremap": 216, "add_key": 217,
    "request_key": 218, "keyctl": 219, "clone": 220, "execve": 221, "mmap": 222, "swapon": 224,
    "swapoff": 225, "mprotect": 226, "madvise": 233, "migrate_pages": 238, "move_pages": 239,
    "rt_tgsigqueueinfo": 240, "perf_event_open": 241, "accept4": 242, "prlimit64": 261,
    "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265, "clock_adjtime": 266,
    "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
    "finit_module": 273, "sched_setattr": 274, "seccomp": 277, "getrandom": 278,
    "memfd_create": 279, "bpf": 280, "execveat": 281, "userfaultfd": 282, "statx": 291,
    "kexec_file_load": 294,
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
