"""`swarm-coordinator`: parse flags, hand over, turn errors into one line. No logic lives here."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from swarm.errors import ConfigError

EXIT_OK, EXIT_NO_PLAN, EXIT_USAGE = 0, 1, 2


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="swarm-coordinator",
        description="The optional control plane of a swarm: how many rollout workers a learner "
        "needs, and which are the cheapest that suffice.",
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {version('swarm-node')}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    plan = commands.add_parser(
        "plan",
        help="what would be run for given inputs, and why; touches no network",
        description="Exit status 0: there is a plan; 1: no set of workers suffices; 2: bad input.",
    )
    source = plan.add_mutually_exclusive_group(required=True)
    source.add_argument("--file", type=Path, metavar="FILE", help="a learner and workers, as TOML")
    source.add_argument("--example", action="store_true", help="print such a file, with comments")
    plan.add_argument("--json", action="store_true", help="everything as JSON")
    plan.set_defaults(run_command=_plan)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. 0: done; 1: there is no plan; 2: the input was wrong."""
    options = parser().parse_args(arguments)
    try:
        return int(options.run_command(options))
    except ConfigError as error:
        print(f"swarm-coordinator: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:  # the reader of our output left, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def _plan(options: argparse.Namespace) -> int:
    from coordinator.plan import make_report, plan_json, render_plan
    from coordinator.plan_file import EXAMPLE, load_plan

    if options.example:
        print(EXAMPLE, end="")
        return EXIT_OK
    report = make_report(load_plan(options.file))
    if options.json:
        print(json.dumps(plan_json(report), indent=2, allow_nan=False))
    else:
        print(render_plan(report))
    return EXIT_OK if plan_json(report)["feasible"] else EXIT_NO_PLAN


if __name__ == "__main__":
    sys.exit(main())
