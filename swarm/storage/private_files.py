"""Files of a data directory are for their owner alone; what lies outside is as it always was.

A data directory holds what others on the machine are not to read, in a private swarm above all:
who said what when, texts of the pool, addresses, the policy. So while a process works on one, all
that it and its children make is private from the start (the umask), whatever makes it: SQLite, a
trainer, vLLM. What goes elsewhere is made in `shared_files`: a cache of models that users share, or
what somebody asked for by `--out`.

The umask is the whole process's. In `shared_files` another thread may make a file of the data
directory meanwhile; nobody can reach it, because the directory itself is closed.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

UMASK: Final = 0o077
UMASK_VARIABLE: Final = "SWARM_SHARED_UMASK"  # tells children what to make shared files with
OTHERS: Final = 0o077  # bits of a mode


def shared_umask() -> int:
    """The umask that the first of our processes was started with."""
    text = os.environ.get(UMASK_VARIABLE, "")
    try:
        return int(text, 8) & 0o777
    except ValueError:
        now = os.umask(UMASK)
        os.umask(now)
        return now


@contextmanager
def private_files() -> Iterator[None]:
    """All that is made in this block is for its owner alone, by children as well."""
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
    """What is made in this block is as readable as whoever started us wants new files to be."""
    before = os.umask(shared_umask())
    try:
        yield
    finally:
        os.umask(before)


def make_shared(directory: Path) -> None:
    """Give a directory, and all in it, the modes that `shared_files` would have given it."""
    umask = shared_umask()
    directory.chmod(0o777 & ~umask)
    for folder, folders, names in os.walk(directory):
        for name in folders:
            Path(folder, name).chmod(0o777 & ~umask)
        for name in names:
            Path(folder, name).chmod(0o666 & ~umask)


def make_private(directory: Path, *, was_ours: bool) -> bool:
    """Close a directory of ours to others, made here if need be. Where it `was_ours` before, so was
    all in it. Returns whether others could read it until now.

    A directory or file of another user stays as it is, and so does what a link leads to.

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
    if was_ours:  # the directory comes last: where this is cut short, it begins again
        for folder, folders, names in os.walk(directory, topdown=False):
            for name in (*folders, *names):
                _close(Path(folder, name))
    _close(directory)
    return True


def _is_open(path: Path) -> bool:
    found = path.stat()
    return found.st_uid == os.getuid() and bool(found.st_mode & OTHERS)


def _close(path: Path) -> None:
    with suppress(OSError):  # it is gone, or of a file system without modes
        found = path.lstat()
        if found.st_uid == os.getuid() and not stat.S_ISLNK(found.st_mode):
            path.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS)
