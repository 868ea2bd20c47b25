"""Small files that are there whole or not at all."""

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
    """Of several that write at the same time, threads or processes, one is the last.

    Raises:
        OSError: what was there before is there still.
    """
    writer = f"{os.getpid()}-{threading.get_ident()}"  # its own file: none takes another's away
    partial = path.with_name(f"{path.name}.{writer}.partial")
    partial.unlink(missing_ok=True)  # whose mode may be another
    try:
        partial.touch(mode=mode)
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
