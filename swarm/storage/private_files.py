"""File modes: private in a data directory, as the user wants elsewhere.

A data directory holds texts, addresses and the policy, which other users must not read. So while a
process works on one, the umask makes all new files private, whatever makes them: SQLite, a trainer,
vLLM. Files elsewhere, such as a shared model cache or `--out`, are made in `shared_files`.

The umask is per process: another thread may make a file of the data directory within
`shared_files`. The closed directory still protects it.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

UMASK: Final = 0o077
UMASK_VARIABLE: Final = "SWARM_SHARED_UMASK"  # tells child processes the user's umask
OTHERS: Final = 0o077  # mode bits of group and others


def shared_umask() -> int:
    """The umask of the user who started the first of our processes."""
    text = os.environ.get(UMASK_VARIABLE, "")
    try:
        return int(text, 8) & 0o777
    except ValueError:
        now = os.umask(UMASK)
        os.umask(now)
        return now


@contextmanager
def private_files() -> Iterator[None]:
    """Make all files in this block private, in child processes too."""
    outer = os.environ.get(UMASK_VARIABLE)
    before = os.umask(UMASK)
    os.environ.setdefault(UMASK_VARIABLE, f"{before:o}")
    try:
        yield
    finally:
        os.umask(before)
        if outer is None:
            del os.environ[UMASK_VARIABLE]


@contextmanager
def shared_files() -> Iterator[None]:
    """Make files in this block with the user's own umask."""
    before = os.umask(shared_umask())
    try:
        yield
    finally:
        os.umask(before)


def make_shared(directory: Path) -> None:
    """Give a directory and its content the modes of `shared_files`."""
    umask = shared_umask()
    directory.chmod(0o777 & ~umask)
    for folder, folders, names in os.walk(directory):
        for name in folders:
            Path(folder, name).chmod(0o777 & ~umask)
        for name in names:
            Path(folder, name).chmod(0o666 & ~umask)


def make_private(directory: Path, *, was_ours: bool) -> bool:
    """Create a directory if needed and close it to other users. If it `was_ours`, its content, too.
    Returns True if others could read it before.

    Other users' files and targets of links stay as they are.

    Raises:
        OSError: it cannot be made.
    """
    try:
        directory.mkdir(parents=True, mode=0o700)
    except FileExistsError:
        if not _is_open(directory):
            return False
    else:
        return False
    if was_ours:  # the directory last, so that an interrupted run starts again
        for folder, folders, names in os.walk(directory, topdown=False):
            for name in (*folders, *names):
                _close(Path(folder, name))
    _close(directory)
    return True


def _is_open(path: Path) -> bool:
    found = path.stat()
    return found.st_uid == os.getuid() and bool(found.st_mode & OTHERS)


def _close(path: Path) -> None:
    with suppress(OSError):  # gone, or a file system without modes
        found = path.lstat()
        if found.st_uid == os.getuid() and not stat.S_ISLNK(found.st_mode):
            path.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS)
