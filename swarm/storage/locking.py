"""A data directory locked by one process and readable by its owner only."""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from swarm.errors import ConfigError
from swarm.storage.private_files import make_private, private_files

LOCK_FILE: Final = "lock"


@contextmanager
def data_directory(
    path: Path, kind: str = "node", say: Callable[[str], None] = lambda text: None
) -> Iterator[Path]:
    """Create and lock a data directory; the lock ends with the process.

    `kind` names the process in messages. Files made within the block are private; `say` is told if
    others could read the directory before.

    Raises:
        ConfigError: another process holds it, or it cannot be made.
    """
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
