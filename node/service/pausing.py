"""`swarm-node pause` and `swarm-node resume`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from swarm.errors import ConfigError, SwarmError


def add_pausing(commands: Any) -> None:
    """Both subcommands."""
    pause = commands.add_parser("pause", help="have the node do nothing after its present round")
    pause.set_defaults(run_command=_pause)
    resume = commands.add_parser("resume", help="have a node that was paused go on")
    resume.set_defaults(run_command=_resume)
    for parser in (pause, resume):
        parser.add_argument("--data-dir", type=Path, default=Path("swarm-data"), metavar="DIR")


def _pause(options: argparse.Namespace) -> int:
    from node.system.guest import PAUSED_FILE

    data_dir: Path = options.data_dir
    if not data_dir.is_dir():
        raise ConfigError(f"--data-dir {data_dir}: no node has been here")
    (data_dir / PAUSED_FILE).touch(mode=0o600)
    runs = _role(data_dir)
    if runs is None:
        _say("no node runs here now; one that starts waits until: swarm-node resume")
    elif runs == "learner":
        (data_dir / PAUSED_FILE).unlink()
        raise ConfigError("a learner is not paused, for its workers would wait: stop it instead")
    else:
        _say("it pauses after its present round, and serves what it has: swarm-node resume")
    return 0


def _resume(options: argparse.Namespace) -> int:
    from node.system.guest import PAUSED_FILE

    data_dir: Path = options.data_dir
    try:
        (data_dir / PAUSED_FILE).unlink()
    except FileNotFoundError:
        raise ConfigError(f"--data-dir {data_dir}: no node is paused here") from None
    _say("it goes on")
    return 0


def _role(data_dir: Path) -> str | None:
    from node.monitor.status import fetch_status

    try:
        return fetch_status(data_dir).role
    except SwarmError:
        return None


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
