"""What a node was started with last, kept in its data directory: what looks at the node later need
not be told again, and others find it where it was."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from node.config.load import RUN_VARIABLE, data_dir_of
from node.config.node import NodeConfig
from node.system.child_process import ENVIRON_PREFIX
from swarm.storage import write_whole

FILE_NAME: Final = "joined.json"
FILE_BYTES_MAX: Final = 65_536
PORTS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Joined:
    """As `join` or `learn` was started."""

    run: str = ""  # as --run takes it, a file by its whole path
    model: str = ""
    lora_rank: int = 0
    ports: tuple[int, ...] = ()  # where it listened, in the order of --listen


def recall(data_dir: Path) -> Joined:
    """What is known; nothing where no node was started there, or the file is not ours."""
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        path = data_dir / FILE_NAME
        if path.stat().st_size <= FILE_BYTES_MAX:
            held = json.loads(path.read_text())
            ports = tuple(int(port) for port in held["ports"])[:PORTS_MAX]
            if all(0 < port < 65_536 for port in ports):
                return Joined(str(held["run"]), str(held["model"]), int(held["lora_rank"]), ports)
    return Joined()


def remember(config: NodeConfig, run: str, ports: Sequence[int]) -> None:
    """Keep it. `run`: as it was given."""
    joined = Joined(_lasting(run), _lasting(config.model), config.lora_rank, tuple(ports))
    write_whole(config.data_dir / FILE_NAME, json.dumps(asdict(joined)))


def _lasting(name: str) -> str:
    """A file or directory by its whole path: somebody may ask from elsewhere."""
    return os.path.abspath(name) if os.path.exists(name) else name


def as_joined(
    flags: Mapping[str, Any], environ: Mapping[str, str], run_file: Path | None
) -> tuple[dict[str, Any], Path | None]:
    """Flags and run file, with what the data directory's node was started with where neither they
    nor the environment say it."""
    joined = recall(data_dir_of(flags, environ))
    known = {name: value for name, value in flags.items() if value is not None}
    for name in ("model", "lora_rank"):
        if (value := getattr(joined, name)) and f"{ENVIRON_PREFIX}{name.upper()}" not in environ:
            known.setdefault(name, value)
    if run_file is None and RUN_VARIABLE not in environ and joined.run:
        run_file = Path(joined.run)
    return known, run_file
