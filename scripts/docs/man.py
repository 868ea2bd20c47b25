"""Manual pages of both programs, from the code that reads their commands.

    python scripts/docs/man.py DIRECTORY

`make wheel` calls it.
"""

import argparse
import sys
from pathlib import Path

from argparse_manpage.manpage import Manpage
from reference import PARSERS, commands

from node.commands.arguments import Parser


def page(program: str) -> str:
    """The page of one program in roff: each setting has its whole meaning."""
    parser = PARSERS[program]()
    for _, command, _ in commands(parser):
        if isinstance(command, Parser):
            command.help_text(whole=True)
    what = (parser.description or "").rstrip(".")
    parser.man_short_description = what[:1].lower() + what[1:]  # type: ignore[attr-defined]
    return str(Manpage(parser, {"project_name": "swarm-node", "manual_title": "swarm-node"}))


def main() -> None:
    """Write both."""
    parser = argparse.ArgumentParser(description="Write the manual pages.")
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for program in PARSERS:
        (directory / f"{program}.1").write_text(page(program))


if __name__ == "__main__":
    sys.exit(main())
