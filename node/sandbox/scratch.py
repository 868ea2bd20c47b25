"""Empty the scratch folder that one text's code after another is given."""

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
    """Leave a folder as it was when it was new, whatever its last user made of it: nothing in it,
    and no word in its mode, times, attributes or flags. This process is in `/` afterwards.

    Raises:
        OSError: something stays.
    """
    folder.chmod(0o700)
    os.chdir(folder)
    _empty()
    for name in os.listxattr("."):
        os.removexattr(".", name)
    opened = os.open(".", os.O_RDONLY | os.O_CLOEXEC)
    with suppress(OSError):  # a kernel without any
        fcntl.ioctl(opened, _SET_FLAGS, _NO_FLAGS)
    os.close(opened)
    os.utime(".", (0, 0))
    os.chdir("/")


def _empty() -> None:
    """Remove all that is in the working folder, step by step: folders may be in each other deeper
    than any path or recursion goes, and closed to all."""
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
