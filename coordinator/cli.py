"""`swarm-coordinator`: parse flags, call the command, turn errors into one line."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from swarm.command import EXIT_OK, status_of
from swarm.errors import ConfigError
from swarm.peers.invite_flags import add_invitation, take_invitation
from swarm.telemetry.broker_address import PASSWORD_VARIABLE

EXIT_NO_PLAN = 1
INTERVAL_S_MIN = 1.0  # a learner answers twice a second in the long run


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="swarm-coordinator",
        description="The optional control plane of a swarm: how many rollout workers a learner "
        "needs, and which are the cheapest that suffice.",
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {version('swarm-node')}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    plan = _add(
        commands, "plan", _plan, "what would be run for given inputs, and why; touches no network",
        "Exit status 0: there is a plan; 1: no set of workers suffices; 2: bad input.",
    )  # fmt: skip
    _add_source(plan, "a learner and workers, as TOML")
    _add_serve(commands)
    workers = _add(commands, "workers", _workers, "the workers of the coordinator that runs here")
    for command in (plan, workers):
        command.add_argument("--json", action="store_true", help="everything as JSON")
    told = "have a worker hand in what it has, and give it no more"
    drain = _add(commands, "drain", _drain, told)
    drain.add_argument("worker", metavar="PEER|NAME", help="as `workers` lists it")
    drain.add_argument("--undo", action="store_true", help="let it work again")
    _add_data_dir(workers, drain, _add_dashboard(commands))
    return top


def _add(commands: Any, name: str, run: Any, help: str, about: str = "") -> Any:
    parser = commands.add_parser(name, help=help, description=about or None)
    parser.set_defaults(run_command=run)
    return parser


def _add_data_dir(*parsers: argparse.ArgumentParser) -> None:
    for parser in parsers:
        parser.add_argument(
            "--data-dir", type=Path, default=Path("coordinator-data"), metavar="DIR",
            help="default: coordinator-data",
        )  # fmt: skip


def _add_source(parser: argparse.ArgumentParser, what: str) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--file", type=Path, metavar="FILE", help=what)
    source.add_argument("--example", action="store_true", help="print such a file, with comments")


def _add_broker(parser: argparse.ArgumentParser, name: str, told: str, **options: Any) -> None:
    parser.add_argument(
        f"--{name}", dest="broker", metavar="URL", help=f"{told}mqtt[s]://[user@]host:port; its "
        f"password comes from {PASSWORD_VARIABLE}", **options,
    )  # fmt: skip
    parser.add_argument(
        f"--{name}-ca", dest="broker_ca", type=Path, metavar="FILE",
        help="certificates that mqtts:// trusts",
    )  # fmt: skip


def _add_serve(commands: Any) -> None:
    serve = _add(
        commands, "serve", _serve,
        "plan, start and stand by the workers of a learner, until interrupted",
        "The learner has to name this coordinator: swarm-node learn --coordinator PEER, with the "
        "id that is printed at the start. It goes on without one.",
    )  # fmt: skip
    _add_source(serve, "learner and machines, as TOML")
    serve.add_argument(
        "--peer", dest="peers", action="append", default=[], metavar="ADDR",
        help="where the learner listens; repeatable",
    )  # fmt: skip
    add_invitation(serve, "to the learner's private swarm")
    serve.add_argument("--key-file", type=Path, metavar="FILE", help="default: in the data dir")
    serve.add_argument(
        "--interval", type=float, default=5.0, metavar="S", help="between two looks; default: 5"
    )
    serve.add_argument(
        "--keep-workers", action="store_true", help="leave what was started at work when leaving"
    )
    _add_broker(serve, "telemetry", "report to a broker: ")
    _add_data_dir(serve)


def _add_dashboard(commands: Any) -> Any:
    dashboard = _add(
        commands, "dashboard", _dashboard,
        "a web page of all nodes that report to a broker, until interrupted",
        "Shows and changes nothing, unless --token-env is given: whoever has the token may drain "
        "workers and set the planned staleness of the coordinator on --data-dir.",
    )  # fmt: skip
    _add_broker(dashboard, "broker", "", required=True)
    dashboard.add_argument(
        "--listen", default="127.0.0.1:8080", metavar="HOST:PORT", help="default: 127.0.0.1:8080"
    )
    dashboard.add_argument(
        "--web-name", action="append", default=[], metavar="NAME", help="a name to call it by"
    )
    dashboard.add_argument(
        "--token-env", metavar="NAME", help="a variable that holds a token of 16 characters or more"
    )
    return dashboard


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Returns what `status_of` does, or 1: there is no plan."""
    return status_of("swarm-coordinator", partial(_run, arguments))


def _run(arguments: Sequence[str] | None) -> int:
    options = parser().parse_args(arguments)
    return int(options.run_command(options))


def _serve(options: argparse.Namespace) -> int:
    from coordinator.fleet_file import EXAMPLE, load_fleet
    from coordinator.serve import serve
    from swarm.peers.invite import Invitation

    if options.example:
        print(EXAMPLE, end="")
        return EXIT_OK
    if not INTERVAL_S_MIN <= options.interval <= 3600.0:
        raise ConfigError(f"--interval {options.interval:g}: must be from 1 to 3600 seconds")
    invite = take_invitation(options)
    invited = Invitation.decode(invite).addresses if invite else ()
    serve(
        lambda: load_fleet(options.file, (*options.peers, *invited)),
        options.data_dir,
        partial(print, flush=True),
        key_file=options.key_file,
        invite=invite,
        interval_s=options.interval,
        keep_workers=options.keep_workers,
        broker=_broker(options),
    )
    return EXIT_OK


def _broker(options: argparse.Namespace) -> Any:
    from swarm.telemetry.broker_address import Broker

    if options.broker is None:
        if options.broker_ca is not None:
            raise ConfigError("--telemetry-ca: of use with --telemetry mqtts://… alone")
        return None
    password = os.environ.get(PASSWORD_VARIABLE)
    return Broker.parse(options.broker, password=password, ca_file=options.broker_ca)


def _workers(options: argparse.Namespace) -> int:
    from coordinator.serve import show_state

    print(show_state(options.data_dir, as_json=options.json))
    return EXIT_OK


def _drain(options: argparse.Namespace) -> int:
    from coordinator.overrides import order_drain

    print(order_drain(options.data_dir, options.worker, undo=options.undo))
    return EXIT_OK


def _dashboard(options: argparse.Namespace) -> int:
    from coordinator.dashboard import dashboard, guarded_by
    from swarm.telemetry.web_hosts import checked_name

    token = None
    if options.token_env is not None:
        token = os.environ.get(options.token_env)
        if not token:
            raise ConfigError(f"--token-env {options.token_env}: no such variable; set it first")
    guarded = None if token is None else guarded_by(token, options.data_dir)
    names = [checked_name(name) for name in options.web_name]
    dashboard(_broker(options), options.listen, guarded, partial(print, flush=True), names)
    return EXIT_OK


def _plan(options: argparse.Namespace) -> int:
    from coordinator.plan import make_report, render_plan
    from coordinator.plan_file import EXAMPLE, load_plan

    if options.example:
        print(EXAMPLE, end="")
        return EXIT_OK
    report = make_report(load_plan(options.file))
    if options.json:
        print(json.dumps(report, indent=2, allow_nan=False))
    else:
        print(render_plan(report))
    return EXIT_OK if report["feasible"] else EXIT_NO_PLAN


if __name__ == "__main__":
    sys.exit(main())
