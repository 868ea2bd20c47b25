"""Landlock: refuses files that no rule allows. Needs no privilege and works in containers. From
revision 4 it refuses TCP, from revision 6 signals and abstract sockets to outside."""

import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from node.sandbox.kernel import call

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_FIRST_RIGHTS: Final = (1 << 13) - 1
_REFER, _TRUNCATE, _DEVICE_IOCTL = 1 << 13, 1 << 14, 1 << 15  # of revisions 2, 3 and 5
_OF_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_READ: Final = _EXECUTE | _READ_FILE | _READ_DIR
_TCP: Final = 3  # to bind and to connect
_SCOPES: Final = 3  # abstract sockets, signals
_TCP_REVISION, _SCOPES_REVISION = 4, 6
_VERSION_FLAG: Final = 1
_PATH_BENEATH: Final = 1


def revision() -> int:
    """Landlock's revision in this kernel; 0: none or disabled."""
    try:
        return call("landlock_create_ruleset", None, ctypes.c_size_t(0), _VERSION_FLAG)
    except OSError:
        return 0


def confine(read: Iterable[Path], listed: Iterable[Path], write: Iterable[Path]) -> int:
    """Restrict this process and its children to these paths; OSError if there is no Landlock.
    `listed`: folders whose names may be read, no files. Returns the revision."""
    known = revision()
    if not known:
        raise OSError("no Landlock")
    rights = _FIRST_RIGHTS
    for least, right in ((2, _REFER), (3, _TRUNCATE), (5, _DEVICE_IOCTL)):
        rights |= right if known >= least else 0
    attributes = struct.pack("=Q", rights)
    if known >= _TCP_REVISION:
        attributes += struct.pack("=Q", _TCP)
    if known >= _SCOPES_REVISION:
        attributes += struct.pack("=Q", _SCOPES)
    ruleset = call("landlock_create_ruleset", attributes, ctypes.c_size_t(len(attributes)), 0)
    try:
        for paths, allowed in ((read, _READ), (listed, _READ_DIR), (write, rights)):
            for path in paths:
                with suppress(FileNotFoundError, PermissionError):
                    _allow(ruleset, path, allowed & rights)
        call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)
    return known


def _allow(ruleset: int, path: Path, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= _OF_FILES
        if rights:
            rule = struct.pack("=Qi", rights, place)
            call("landlock_add_rule", ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(place)
