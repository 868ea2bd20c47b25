"""A directory that belongs to one process."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from swarm.errors import ConfigError

LOCK_FILE: Final = "lock"


@contextmanager
def data_directory(path: Path, kind: str = "node") -> Iterator[Path]:
    """Create and lock a data directory; the lock ends with the process, however it ends. `kind` of
    process, for messages.

    Raises:
        ConfigError: another process holds it, or it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / LOCK_FILE).open("w")
    except OSError as error:
        raise ConfigError(f"--data-dir {path}: {error.strerror}; choose another") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"--data-dir {path}: another {kind} is running on it; give this one its own"
            ) from None
        yield path
