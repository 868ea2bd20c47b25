"""Orders to a running coordinator: drained machines and the planned staleness.

It reads these files of its data directory at each look. Writers take turns by a file lock: the page
writes from threads, the command line from its own process.
"""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from coordinator.model.pacing import check_depth
from coordinator.view import load_state
from swarm.errors import ConfigError
from swarm.storage import make_private, private_files, write_whole
from swarm.texts import listed

DRAINED_FILE: Final = "drained.json"
DRAINED_MAX: Final = 4_096
DEPTH_FILE: Final = "depth.json"
LOCK_FILE: Final = "wishes.lock"
NAMES_TOLD_MAX: Final = 8


def read_drained(data_dir: Path) -> frozenset[str]:
    """Names or peer ids of drained machines.

    Raises:
        ConfigError: the list is damaged.
    """
    path, instead = data_dir / DRAINED_FILE, "drain nobody"
    names = _read(path, [], instead)
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise _damaged(path, "is no list of names", instead)
    return frozenset(names)


def order_drain(data_dir: Path, name: str, *, undo: bool) -> str:
    """As `drain`, for a worker that the coordinator has seen. Returns the outcome in words.

    Raises:
        ConfigError: as `drain`; no coordinator has worked there, or it knows no such worker.
    """
    rows = load_state(data_dir)["workers"]
    if not undo and not any(name in (row["name"], row["peer"]) for row in rows):
        known = sorted({row["name"] or row["peer"] for row in rows})
        names = listed(known, NAMES_TOLD_MAX) or "none yet"
        raise ConfigError(f"{name}: the coordinator here has seen no such worker; known: {names}")
    drain(data_dir, name, undo=undo)
    return f"{name} {'may work again' if undo else 'gets no more work'}"


def drain(data_dir: Path, name: str, *, undo: bool) -> None:
    """Drain a machine, or let it work again, from the coordinator's next look on.

    Raises:
        ConfigError: there are too many, or the list is damaged.
    """
    with _turn(data_dir):
        names = set(read_drained(data_dir))
        (names.discard if undo else names.add)(name)
        if len(names) > DRAINED_MAX:
            raise ConfigError(f"{DRAINED_MAX} are drained already")
        write_whole(data_dir / DRAINED_FILE, json.dumps(sorted(names)))


def read_depth(data_dir: Path) -> int | None:
    """The ordered pacing depth. None: the coordinator finds its own.

    Raises:
        ConfigError: the file is damaged.
    """
    path, instead = data_dir / DEPTH_FILE, "have the depth found"
    depth = _read(path, None, instead)
    try:
        return None if depth is None else check_depth(depth)
    except ConfigError as error:
        raise _damaged(path, error, instead) from None


def set_depth(data_dir: Path, depth: int | None) -> str:
    """Order a pacing depth, from the coordinator's next look on. None: withdraw it. Returns the
    outcome in words.

    Raises:
        ConfigError: no depth.
    """
    if depth is not None:
        check_depth(depth)
    with _turn(data_dir):
        write_whole(data_dir / DEPTH_FILE, json.dumps(depth))
    return "the depth is found again" if depth is None else f"planned for {depth} steps"


def _read(path: Path, unasked: Any, instead: str) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return unasked
    except (OSError, ValueError) as error:
        raise _damaged(path, error, instead) from None


def _damaged(path: Path, why: object, instead: str) -> ConfigError:
    return ConfigError(f"{path}: {why}; delete it to {instead}")


@contextmanager
def _turn(data_dir: Path) -> Iterator[None]:
    """Blocks while another thread or process writes. The lock ends with its process."""
    with private_files():
        make_private(data_dir, was_ours=False)
        lock = (data_dir / LOCK_FILE).open("w")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
