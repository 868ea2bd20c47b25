"""What people want of a coordinator while it works: who shall not, and how stale to plan.

Small files in its data directory, which it reads at each look.
"""

import json
from pathlib import Path
from typing import Final

from coordinator.pacing import check_depth
from swarm.errors import ConfigError
from swarm.files import write_whole

DRAINED_FILE: Final = "drained.json"
DRAINED_MAX: Final = 4_096
DEPTH_FILE: Final = "depth.json"


def read_drained(data_dir: Path) -> frozenset[str]:
    """Machines that shall not work, by name or peer id.

    Raises:
        ConfigError: the list is damaged.
    """
    path = data_dir / DRAINED_FILE
    try:
        names = json.loads(path.read_text())
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; delete it to drain nobody") from None
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise ConfigError(f"{path}: is no list of names; delete it to drain nobody")
    return frozenset(names)


def drain(data_dir: Path, name: str, *, undo: bool) -> None:
    """Have a machine hand in what it has and work no more, or work again. It takes effect with the
    coordinator's next look, or its next start.

    Raises:
        ConfigError: there are too many, or the list is damaged.
    """
    names = set(read_drained(data_dir))
    (names.discard if undo else names.add)(name)
    if len(names) > DRAINED_MAX:
        raise ConfigError(f"{DRAINED_MAX} are drained already")
    data_dir.mkdir(parents=True, exist_ok=True)
    write_whole(data_dir / DRAINED_FILE, json.dumps(sorted(names)))


def read_depth(data_dir: Path) -> int | None:
    """The pacing depth that was asked for; None: the coordinator finds its own.

    Raises:
        ConfigError: the file is damaged.
    """
    path = data_dir / DEPTH_FILE
    try:
        depth = json.loads(path.read_text())
        return None if depth is None else check_depth(depth)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}; delete it to have the depth found") from None


def set_depth(data_dir: Path, depth: int | None) -> None:
    """Plan for groups of this staleness, at most the run's bound; None: find what is best. It takes
    effect as a drain does.

    Raises:
        ConfigError: no depth.
    """
    if depth is not None:
        check_depth(depth)
    data_dir.mkdir(parents=True, exist_ok=True)
    write_whole(data_dir / DEPTH_FILE, json.dumps(depth))
