"""`swarm-node pause` and `swarm-node resume`."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from swarm.errors import ConfigError, SwarmError

Say = Callable[[str], None]


def add_pausing(commands: Any, say: Say) -> None:
    """Both subcommands."""
    pause = commands.add_parser("pause", help="have the node do nothing after its present round")
    pause.set_defaults(run_command=partial(_pause, say))
    resume = commands.add_parser("resume", help="have a node that was paused go on")
    resume.set_defaults(run_command=partial(_resume, say))
    for parser in (pause, resume):
        parser.add_argument("--data-dir", type=Path, default=Path("swarm-data"), metavar="DIR")


def _pause(say: Say, options: argparse.Namespace) -> int:
    from node.system.guest import PAUSED_FILE

    data_dir: Path = options.data_dir
    if not data_dir.is_dir():
        raise ConfigError(f"--data-dir {data_dir}: no node has been here")
    (data_dir / PAUSED_FILE).touch(mode=0o600)
    runs = _role(data_dir)
    if runs is None:
        say("no node runs here now; one that starts waits until: swarm-node resume")
    elif runs == "learner":
        (data_dir / PAUSED_FILE).unlink()
        raise ConfigError("a learner is not paused, for its workers would wait: stop it instead")
    else:
        say("it pauses after its present round, and serves what it has: swarm-node resume")
    return 0


def _resume(say: Say, options: argparse.Namespace) -> int:
    from node.system.guest import PAUSED_FILE

    data_dir: Path = options.data_dir
    try:
        (data_dir / PAUSED_FILE).unlink()
    except FileNotFoundError:
        raise ConfigError(f"--data-dir {data_dir}: no node is paused here") from None
    say("it goes on")
    return 0


def _role(data_dir: Path) -> str | None:
    from node.monitor.status import fetch_status

    try:
        return fetch_status(data_dir).role
    except SwarmError:
        return None
