"""The settings of a node's last start, kept in its data directory for later commands and starts."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from node.config.load import RUN_VARIABLE, data_dir_of
from node.config.node import NodeConfig
from node.system.child_environment import ENVIRON_PREFIX
from swarm.storage import write_whole

FILE_NAME: Final = "joined.json"
FILE_BYTES_MAX: Final = 65_536
PORTS_MAX: Final = 64


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
    flags: Mapping[str, Any], environ: Mapping[str, str], run_file: Path | None
) -> tuple[dict[str, Any], Path | None]:
    """Flags and run file, completed by those of the last start unless the environment sets them."""
    joined = recall(data_dir_of(flags, environ))
    known = {name: value for name, value in flags.items() if value is not None}
    for name in ("model", "lora_rank"):
        if (value := getattr(joined, name)) and f"{ENVIRON_PREFIX}{name.upper()}" not in environ:
            known.setdefault(name, value)
    if run_file is None and RUN_VARIABLE not in environ and joined.run:
        run_file = Path(joined.run)
    return known, run_file
