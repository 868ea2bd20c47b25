"""Flags that take an invitation: as text, from standard input, or from a file.

It may hold a join key, and other users of a machine can read command lines.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Final

from swarm.errors import ConfigError

LINE_CHARS_MAX: Final = 8192


def add_invitation(parser: argparse.ArgumentParser, help: str) -> None:
    """The flags by which a command takes an invitation; `take_invitation` reads them."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--invite", metavar="TEXT",
        help=f"{help}; - reads it from standard input, which other users cannot see",
    )  # fmt: skip
    either.add_argument("--invite-file", type=Path, metavar="FILE", help="the same, from a file")


def take_invitation(options: argparse.Namespace) -> str | None:
    """The invitation that a command was given, with `options.invite` set to it; None: none was.
    ConfigError: its file cannot be read, or by others too; or nothing came by standard input."""
    file, options.invite_file = getattr(options, "invite_file", None), None
    text: str | None = getattr(options, "invite", None)
    if file is not None:
        text = options.invite = _from_file(file)
    elif text == "-":
        text = options.invite = sys.stdin.readline(LINE_CHARS_MAX).strip()
        if not text:
            raise ConfigError("--invite -: no invitation came by standard input")
    return text


def _from_file(path: Path) -> str:
    from swarm.peers.invite import INVITE_CHARS_MAX, Invitation

    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(INVITE_CHARS_MAX + 1).strip()
            shared = os.fstat(file.fileno()).st_mode & 0o077
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--invite-file {path}: cannot be read: {error}") from None
    if Invitation.decode(text).key is not None and shared:
        raise ConfigError(
            f"--invite-file {path}: holds a join key and can be read by others: run "
            f"chmod 600 {path}"
        )
    return text
