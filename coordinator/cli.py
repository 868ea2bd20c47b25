"""swarm-coordinator: parse only."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

NOT_YET = "swarm-coordinator: planning arrives in a later release; a swarm runs without it"


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="swarm-coordinator",
        description="The optional control plane of a swarm. Planning arrives in a later release; "
        "a swarm runs without it.",
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {version('swarm-node')}")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 2: there is nothing to run yet."""
    parser().parse_args(arguments)
    print(NOT_YET, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
