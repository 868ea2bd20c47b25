"""The settings of a node's starts, kept in its data directory for later commands and starts.

`joined.json` has what the next start needs. `starts` has a file for each of the last starts with
all settings as they held. The user's cache lists the data directories of this machine.
"""

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from node.config.explain import effective
from node.config.load import RUN_VARIABLE, data_dir_of
from node.config.node import NodeConfig
from node.system.caches import cache_directory
from node.system.child_environment import ENVIRON_PREFIX
from swarm.storage import write_whole

FILE_NAME: Final = "joined.json"
FILE_BYTES_MAX: Final = 65_536
PORTS_MAX: Final = 64
STARTS: Final = "starts"
STARTS_KEPT: Final = 100
START_BYTES_MAX: Final = 1_048_576
DIRECTORIES_FILE: Final = "data-directories"
DIRECTORIES_KEPT: Final = 256


@dataclass(frozen=True, slots=True)
class Joined:
    """Settings of the last `join` or `learn`."""

    run: str = ""  # as --run takes it, a file by its whole path
    model: str = ""
    lora_rank: int = 0
    ports: tuple[int, ...] = ()  # where it listened, in the order of --listen


def recall(data_dir: Path) -> Joined:
    """The last start; empty if none is known or the file is damaged."""
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        path = data_dir / FILE_NAME
        if path.stat().st_size <= FILE_BYTES_MAX:
            held = json.loads(path.read_text())
            ports = tuple(int(port) for port in held["ports"])[:PORTS_MAX]
            if all(0 < port < 65_536 for port in ports):
                return Joined(str(held["run"]), str(held["model"]), int(held["lora_rank"]), ports)
    return Joined()


def remember(config: NodeConfig, run: str, model: str, ports: Sequence[int]) -> None:
    """Keep the settings of this start. `run`: as the user gave it; `model`: its lasting name."""
    joined = Joined(lasting(run), model, config.lora_rank, tuple(ports))
    write_whole(config.data_dir / FILE_NAME, json.dumps(asdict(joined)))


def lasting(name: str) -> str:
    """A path as an absolute one, because a later command may run elsewhere."""
    return os.path.abspath(name) if os.path.exists(name) else name


def as_joined(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    run_file: Path | None,
    data_dir: Path | None = None,
) -> tuple[dict[str, Any], Path | None]:
    """Flags and run file, completed by those of the last start unless the environment sets them.
    `data_dir`: of that start; None: the node's."""
    joined = recall(data_dir or data_dir_of(flags, environ))
    known = {name: value for name, value in flags.items() if value is not None}
    for name in ("model", "lora_rank"):
        if (value := getattr(joined, name)) and f"{ENVIRON_PREFIX}{name.upper()}" not in environ:
            known.setdefault(name, value)
    if run_file is None and RUN_VARIABLE not in environ and joined.run:
        run_file = Path(joined.run)
    return known, run_file


Settings = Mapping[str, str | float | None]


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a node, as it is kept."""

    number: int  # in its data directory, from 1
    name: str  # as --name gave it
    time_s: float  # unix time
    role: str
    run_id: str
    settings: Settings  # all, as they held
    data_dir: str = ""  # where it was found

    @property
    def label(self) -> str:
        """The start's name for people, and for commands that take one."""
        return self.name or f"{Path(self.data_dir).name}/{self.number}"


def keep_start(config: NodeConfig, role: str, time_s: float) -> Start:
    """Keep the settings of a start, and the place of its data directory. OSError: they are not."""
    folder = config.data_dir / STARTS
    folder.mkdir(mode=0o700, exist_ok=True)
    kept = sorted(folder.glob("[0-9]*.json"))
    number = 1 + max((int(each.stem) for each in kept if each.stem.isdigit()), default=0)
    settings = effective(config, is_learner=role == "learner")
    start = Start(number, config.start_name, round(time_s, 3), role, config.run.run_id, settings)
    held = {name: value for name, value in asdict(start).items() if name != "data_dir"}
    write_whole(folder / f"{number:06d}.json", json.dumps(held, indent=1))
    for each in kept[: max(0, len(kept) + 1 - STARTS_KEPT)]:
        each.unlink(missing_ok=True)
    _note_directory(cache_directory(config.cache_dir), str(config.data_dir.absolute()))
    return start


def _note_directory(cache: Path, directory: str) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / DIRECTORIES_FILE).open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = [each for each in file.read().splitlines() if each != directory]
        file.seek(0)
        file.truncate()
        file.writelines(f"{each}\n" for each in [*known, directory][-DIRECTORIES_KEPT:])


def starts_of(data_dir: Path) -> list[Start]:
    """The kept starts of a data directory, oldest first; damaged files are left out."""
    found = []
    for path in sorted((data_dir / STARTS).glob("[0-9]*.json")):
        with suppress(OSError, ValueError, TypeError, RecursionError):
            if path.stat().st_size <= START_BYTES_MAX:
                found.append(Start(**{**json.loads(path.read_text()), "data_dir": str(data_dir)}))
    return found


def starts_here(cache_dir: Path | None) -> list[Start]:
    """The kept starts of all data directories on this machine, oldest first."""
    try:
        text = (cache_directory(cache_dir) / DIRECTORIES_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    found = [start for each in text.splitlines() for start in starts_of(Path(each))]
    return sorted(found, key=lambda start: start.time_s)
