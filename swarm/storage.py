"""Files written atomically, file modes, and the lock of a data directory."""

import fcntl
import os
import stat
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from swarm.errors import ConfigError

RunSync = Callable[..., Awaitable[Any]]
"""Runs a blocking call off the event loop: `trio.to_thread.run_sync`, or inline in simulation."""


@dataclass(frozen=True, slots=True)
class Runtime:
    now_s: Callable[[], float]  # unix seconds
    rng: Random
    run_sync: RunSync


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o600) -> None:
    """Write a file atomically; of concurrent writers one wins. OSError: the old content stays."""
    writer = f"{os.getpid()}-{threading.get_ident()}"  # own file per writer
    partial = path.with_name(f"{path.name}.{writer}.partial")
    partial.unlink(missing_ok=True)  # it may have another mode
    try:
        partial.touch(mode=mode)
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise _named(error, path) from None


def write_new(path: Path, content: bytes) -> None:
    """Write a file with mode 0600, atomically; FileExistsError: it is never overwritten."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError as error:
        raise _named(error, path) from None
    finally:
        partial.unlink()


def _named(error: OSError, path: Path) -> OSError:
    """The error with the file that was to be written; that of a full disk has none."""
    return OSError(error.errno, error.strerror, str(path))


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
    """Create a directory or close it to other users, with its content if it `was_ours`. True:
    others could read it before. Other users' files and targets of links stay as they are."""
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


LOCK_FILE: Final = "lock"


@contextmanager
def data_directory(
    path: Path, kind: str = "node", say: Callable[[str], None] = lambda text: None
) -> Iterator[Path]:
    """Create and lock a data directory; files made within the block are private. `say` is told
    if others could read the directory before. ConfigError: another process holds it."""
    try:
        was_open = make_private(path, was_ours=(path / LOCK_FILE).exists())
        with private_files():
            lock = (path / LOCK_FILE).open("w")
    except OSError as error:
        raise ConfigError(f"--data-dir {path}: {error.strerror}; choose another") from None
    if was_open:
        say(f"{path} was open to other users of this machine: it is for you alone from now on")
    with lock, private_files():
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"--data-dir {path}: another {kind} is running on it; give this one its own"
            ) from None
        yield path
