"""Linux namespaces: a minimal view of the machine.

The process gets an in-memory root with the given paths read-only and an optional scratch folder, a
network without interfaces, and no System V memory of others. There is no PID namespace: it would
need one more process, `/proc` is not in the view, and `seccomp` refuses calls to other processes.
"""

import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from node.sandbox.kernel import call

SCRATCH: Final = Path("/scratch")  # in the view; covers no path of the machine
_NEW_USER, _NEW_MOUNTS, _NEW_NETWORK = 0x10000000, 0x00020000, 0x40000000
_NEW_IPC, _NEW_NAMES = 0x08000000, 0x04000000
_OTHERS: Final = _NEW_MOUNTS | _NEW_NETWORK | _NEW_IPC | _NEW_NAMES
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _NO_EXECUTION = 1, 2, 4, 8
_REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
_DETACH: Final = 2
_AT_RECURSIVE: Final = 0x8000
_AT_FDCWD: Final = -100
_BASES: Final = ("/mnt", "/media", "/opt", "/tmp")  # mount point of the new root
_FILES_MAX: Final = 4096  # in the scratch folder


def enter(paths: Iterable[Path], scratch_bytes: int) -> None:
    """Move this single-threaded process into such a view. `scratch_bytes`: size of the scratch
    folder; 0: none. After an OSError the process may still have left its network and users."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        call("unshare", _NEW_USER | _OTHERS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    except OSError:
        call("unshare", _OTHERS)  # root needs no user namespace
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    sources = []
    for path in _outermost(paths):
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            sources.append((path, os.open(path, os.O_PATH | os.O_CLOEXEC)))
    base = next(Path(each) for each in _BASES if os.path.isdir(each))
    _mount("root", base, "tmpfs", _NO_SETUID | _NO_DEVICES, f"mode=755,nr_inodes={_FILES_MAX}")
    for path, source in sources:
        _show(source, base / path.relative_to("/"))
    if scratch_bytes:
        scratch = base / SCRATCH.relative_to("/")
        scratch.mkdir(exist_ok=True)
        flags = _NO_SETUID | _NO_DEVICES | _NO_EXECUTION
        size = f"mode=700,size={scratch_bytes},nr_inodes={_FILES_MAX}"
        _mount("scratch", scratch, "tmpfs", flags, size)
    os.chdir(base)
    call("pivot_root", b".", b".")
    call("umount2", b".", _DETACH)
    os.chdir("/")
    _mount(None, "/", None, _REMOUNT | _BIND | _READ_ONLY | _NO_SETUID | _NO_DEVICES)


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """Paths that are not inside others."""
    chosen: list[Path] = []
    for path in sorted(set(paths), key=lambda each: len(each.parts)):
        if not any(path.is_relative_to(each) for each in chosen):
            chosen.append(path)
    return chosen


def _show(source: int, target: Path) -> None:
    """Bind a file or folder read-only with its mounts."""
    mode = os.fstat(source).st_mode
    target.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISDIR(mode):
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    _mount(f"/proc/self/fd/{source}", target, None, _BIND | _RECURSIVE)
    os.close(source)
    flags = _READ_ONLY | _NO_SETUID | (0 if stat.S_ISCHR(mode) else _NO_DEVICES)
    attributes = struct.pack("=QQQQ", flags, 0, 0, 0)
    size = ctypes.c_size_t(len(attributes))
    call("mount_setattr", _AT_FDCWD, os.fsencode(target), _AT_RECURSIVE, attributes, size)


def _mount(
    what: str | None, where: str | Path, kind: str | None, flags: int, options: str | None = None
) -> None:
    source, kind_bytes, data = (
        None if each is None else each.encode() for each in (what, kind, options)
    )
    call("mount", source, os.fsencode(where), kind_bytes, ctypes.c_ulong(flags), data)
