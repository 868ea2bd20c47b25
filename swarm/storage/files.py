"""Small files written atomically."""

import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

RunSync = Callable[..., Awaitable[Any]]
"""Runs a blocking call off the event loop: `trio.to_thread.run_sync`, or inline in simulation."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a part of a node needs of its process: the time, chance, and a place for what blocks."""

    now_s: Callable[[], float]  # unix seconds
    rng: Random
    run_sync: RunSync


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o600) -> None:
    """Write a file atomically; of concurrent writers one wins.

    Raises:
        OSError: the old content is still there.
    """
    writer = f"{os.getpid()}-{threading.get_ident()}"  # own file per writer
    partial = path.with_name(f"{path.name}.{writer}.partial")
    partial.unlink(missing_ok=True)  # it may have another mode
    try:
        partial.touch(mode=mode)
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
