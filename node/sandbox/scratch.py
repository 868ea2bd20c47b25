"""Empty the scratch folder between texts."""

import fcntl
import os
import stat
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

_SET_FLAGS: Final = 0x40086602  # FS_IOC_SETFLAGS
_NO_FLAGS: Final = struct.pack("l", 0)


def clear(folder: Path) -> None:
    """Reset a folder to its initial state: empty, default mode, times, attributes and flags. The
    working directory is `/` afterwards.

    Raises:
        OSError: something cannot be removed.
    """
    folder.chmod(0o700)
    os.chdir(folder)
    _empty()
    for name in os.listxattr("."):
        os.removexattr(".", name)
    opened = os.open(".", os.O_RDONLY | os.O_CLOEXEC)
    with suppress(OSError):  # a file system without flags
        fcntl.ioctl(opened, _SET_FLAGS, _NO_FLAGS)
    os.close(opened)
    os.utime(".", (0, 0))
    os.chdir("/")


def _empty() -> None:
    """Empty the working folder iteratively: nesting may exceed any path length or recursion, and
    folders may be closed."""
    left, above = [os.listdir()], [""]
    while left:
        if not left[-1]:
            left.pop()
            if name := above.pop():
                os.chdir("..")
                os.rmdir(name)
        elif stat.S_ISDIR(os.lstat(name := left[-1].pop()).st_mode):
            os.chmod(name, 0o700)
            os.chdir(name)
            left.append(os.listdir())
            above.append(name)
        else:
            os.unlink(name)
