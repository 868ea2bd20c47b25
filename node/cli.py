"""`swarm-node`: parse flags, hand over, turn errors into one line. No logic lives here."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from node.commands.arguments import (
    ANY_ADDRESS,
    Parser,
    add_engine,
    add_lora,
    add_policy,
    add_runs,
    add_switch,
    add_threads,
    add_tools,
    given,
)
from node.commands.data import add_data
from node.commands.methods import add_methods
from node.service.command import add_service
from node.service.pausing import add_pausing
from swarm.errors import ConfigError, IdentityInUse, SwarmError
from swarm.peers.invite_flags import add_invitation
from swarm.telemetry.broker_address import PASSWORD_VARIABLE

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. 0: done; 1: it failed on the way; 2: the input was wrong; 130: interrupted."""
    before = signal.signal(signal.SIGINT, _leave_at_once)
    try:
        return _run(arguments)
    finally:
        signal.signal(signal.SIGINT, before)


def _leave_at_once(*_: object) -> None:
    """Ctrl-C until a running node watches for it. As an exception it could strike within an import
    whose library swallows it; nothing is lost, for what counts is written whole or not at all."""
    os._exit(EXIT_INTERRUPTED)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        options = _parser().parse_args(arguments)
        return int(options.run_command(options))
    except (ConfigError, IdentityInUse) as error:
        print(f"swarm-node: {error}", file=sys.stderr)
        return EXIT_USAGE
    except SwarmError as error:
        print(f"swarm-node: {error}", file=sys.stderr)
        return EXIT_FAILED
    except ModuleNotFoundError as error:
        from node.system.extras import EXTRAS, missing

        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise  # a fault of ours
        print(f"swarm-node: {missing(str(error.name))}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:  # the reader of our output left, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="swarm-node",
        description="Train a language model by reinforcement learning in a swarm of peers.",
        epilog="Every setting can also come from SWARM_NODE_<NAME> or a run file's [node] table.",
    )
    parser.add_argument("--version", action="version", version=version("swarm-node"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_join(commands)
    _add_learn(commands)
    _add_invite(commands)
    _add_doctor(commands)
    _add_keygen(commands)
    _add_config(commands)
    _add_status(commands)
    _add_samples(commands)
    _add_top(commands)
    _add_monitor(commands)
    _add_eval(commands)
    _add_export(commands)
    _add_chat(commands)
    _add_report(commands)
    _add_prepare(commands)
    add_runs(commands, _config)
    add_tools(commands, parser)
    add_pausing(commands, _say)
    add_service(commands, lambda words: _config(_parser().parse_args(words), joins=True), _say)
    _add_simulate(commands)
    _add_weights(commands)
    add_data(commands, _say)
    add_methods(commands, _say)
    return parser


def _add_join(commands: Any) -> None:
    join = commands.add_parser(
        "join", help="start a swarm, or join one with --peer; work for its learner, if it has one"
    )
    _add_network(join)
    add_policy(join)
    add_lora(join)
    add_engine(join)
    join.add_argument(
        "--engine-update",
        metavar="MODE",
        help="keep (default), drain or abort what vLLM has begun when new weights come",
    )
    join.add_argument("--local", dest="local_groups", metavar="I", help="own groups a round")
    join.add_argument("--external", dest="external_groups", metavar="J", help="foreign groups")
    join.add_argument("--group-size", metavar="G", help="completions for each task")
    join.add_argument(
        "--over-provision", metavar="X", help="begin X times I groups, take the first that are done"
    )
    for family in ("control", "draw", "external-rule", "generate", "replay"):
        join.add_argument(f"--{family}", metavar="NAME", help="see swarm-node methods")
    join.add_argument("--share", help="all (default) or none")
    join.add_argument("--role", help="with a learner: worker (default), or node to learn by itself")
    join.add_argument(
        "--tokens-per-s-max", metavar="N", help="what a worker generates at most, in the mean"
    )
    _add_telemetry(join)
    _add_course(join, "rounds")
    join.set_defaults(run_command=_join)
    join.shows_settings = True


def _add_learn(commands: Any) -> None:
    learn = commands.add_parser("learn", help="be the central learner of a run that names this key")
    _add_network(learn)
    add_policy(learn)
    add_lora(learn)
    learn.add_argument("--coordinator", metavar="PEER", help="who may plan its workers")
    _add_telemetry(learn)
    _add_course(learn, "steps")
    learn.set_defaults(run_command=_learn)
    learn.shows_settings = True


def _add_network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer", dest="peers", action="append", metavar="ADDR", help="a node to join; repeatable"
    )
    add_invitation(parser, "join by an invitation")
    add_switch(parser, "--private", help="start a swarm for the invited alone")
    parser.add_argument("--allow", metavar="FILE", help="peer ids, one a line; refuse all others")
    parser.add_argument(
        "--no-lan", dest="lan", action="store_false", default=None, help="no local discovery"
    )
    parser.add_argument(
        "--no-relay", dest="relay", action="store_false", default=None, help="relay for nobody"
    )
    parser.add_argument(
        "--no-upnp", dest="upnp", action="store_false", default=None, help="leave the router alone"
    )
    parser.add_argument(
        "--no-dht", dest="dht", action="store_false", default=None, help="no distributed hash table"
    )
    parser.add_argument("--listen", action="append", metavar="ADDR", help=f"default: {ANY_ADDRESS}")
    parser.add_argument(
        "--announce", action="append", metavar="ADDR", help="address that others shall dial"
    )
    parser.add_argument("--key-file", metavar="FILE", help="default: identity.pem in the data dir")


def _add_telemetry(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--telemetry", metavar="URL", help="report to a broker: mqtt[s]://[user@]host:port"
    )
    parser.add_argument("--telemetry-ca", metavar="FILE", help="certificates that mqtts:// trusts")
    parser.add_argument(
        "--telemetry-interval", dest="telemetry_interval_s", metavar="S", help="default: 2"
    )
    parser.add_argument(
        "--log-json", dest="log", action="store_const", const="json", help="print JSON lines"
    )
    add_switch(parser, "-v", "--verbose", help="say what the network does, too")
    parser.add_argument(
        "--report-to", metavar="TRACKER", help="each round's figures: tensorboard, wandb or trackio"
    )
    parser.add_argument("--metrics-listen", metavar="HOST:PORT", help="answer Prometheus there")
    parser.add_argument(
        "--web-name", dest="web_names", action="append", metavar="NAME", help="a name to ask by"
    )


def _add_course(parser: argparse.ArgumentParser, rounds: str) -> None:
    parser.add_argument(
        f"--{rounds}", dest="rounds", metavar="N", help="stop after this many; default: go on"
    )
    parser.add_argument(
        "--stop-after", dest="stop_after_s", metavar="S", help="stop after seconds; default: go on"
    )
    parser.add_argument("--seed", metavar="N", help="seed of this node's sampling")
    parser.add_argument(
        "--learning-rate", metavar="LR", help="of the trainer; default: by the model"
    )
    parser.add_argument("--advantage", metavar="NAME", help="see swarm-node methods")
    for family in ("loss", "correction"):
        parser.add_argument(
            f"--{family}", metavar="NAME", help="see swarm-node methods; default: the run's"
        )
    add_threads(parser)
    parser.add_argument(
        "--evaluate-every", dest="evaluate_every_rounds", metavar="N", help="rounds; 0: never"
    )
    parser.add_argument(
        "--checkpoint-every",
        dest="checkpoint_every_rounds",
        metavar="N",
        help="rounds; default: as many as leave 2 %% of the time to writing",
    )


def _add_invite(commands: Any) -> None:
    invite = commands.add_parser("invite", help="print a line with which others can join")
    invite.add_argument("--data-dir", type=Path, default=Path("swarm-data"), metavar="DIR")
    invite.set_defaults(run_command=_invite)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser("doctor", help="what works from here, and what to do about it")
    doctor.add_argument(
        "--peer", dest="peers", action="append", metavar="ADDR", help="a node to test with"
    )
    add_invitation(doctor, "test with the nodes of an invitation")
    doctor.add_argument("--listen", action="append", metavar="ADDR", help=f"default: {ANY_ADDRESS}")
    add_engine(doctor)
    doctor.add_argument("--model", help="test whether it can be read and fits")
    add_lora(doctor)
    doctor.add_argument("--telemetry", metavar="URL", help="a broker to test")
    doctor.add_argument("--telemetry-ca", metavar="FILE", help="certificates that mqtts:// trusts")
    doctor.add_argument(
        "--run", metavar="FILE", help="a run file, a packaged run, or a run's id; default: demo"
    )
    doctor.add_argument("--data-dir", metavar="DIR", help="default: swarm-data")
    doctor.set_defaults(run_command=_doctor)


def _add_keygen(commands: Any) -> None:
    keygen = commands.add_parser("keygen", help="make an Ed25519 key, print its peer id")
    keygen.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="where the key goes"
    )
    keygen.add_argument(
        "--passphrase-env", metavar="NAME", help="encrypt with the passphrase in this variable"
    )
    keygen.set_defaults(run_command=_keygen)


def _add_config(commands: Any) -> None:
    config = commands.add_parser("config", help="all settings as they hold, and where each is from")
    add_policy(config)
    add_lora(config)
    config.add_argument("--learning-rate", metavar="LR", help="default: by the model")
    config.set_defaults(run_command=_explain_config)


def _add_status(commands: Any) -> None:
    status = commands.add_parser("status", help="ask the node that runs on a data directory")
    status.add_argument("--data-dir", type=Path, default=Path("swarm-data"), metavar="DIR")
    status.add_argument("--json", action="store_true", help="the whole answer as JSON")
    status.set_defaults(run_command=_status)


def _add_samples(commands: Any) -> None:
    samples = commands.add_parser(
        "samples", help="what the policy said lately, with the answer found in it and its reward"
    )
    samples.add_argument("--data-dir", type=Path, default=Path("swarm-data"), metavar="DIR")
    order = samples.add_mutually_exclusive_group()
    for name in ("best", "worst"):
        order.add_argument(
            f"--{name}", dest="order", action="store_const", const=name, default="newest",
            help=f"those with the {'highest' if name == 'best' else 'lowest'} rewards",
        )  # fmt: skip
    samples.add_argument("--foreign", action="store_true", help="those of other nodes")
    samples.add_argument("-n", dest="count", type=int, default=8, metavar="N", help="default: 8")
    samples.set_defaults(run_command=_samples)


def _add_top(commands: Any) -> None:
    top = commands.add_parser(
        "top",
        help="a running node, or a whole swarm, drawn anew each second",
        description="q or Ctrl-C leaves. Without a terminal it prints once. A broker's password "
        f"comes from {PASSWORD_VARIABLE}.",
    )
    top.add_argument("--data-dir", type=Path, default=Path("swarm-data"), metavar="DIR")
    top.add_argument(
        "--broker", metavar="URL", help="all nodes that report to mqtt[s]://[user@]host:port"
    )
    top.add_argument("--broker-ca", type=Path, metavar="FILE", help="what mqtts:// trusts")
    top.set_defaults(run_command=_top)


def _add_monitor(commands: Any) -> None:
    monitor = commands.add_parser(
        "monitor",
        help="a web page of the swarm, and a broker for nodes to report to",
        description=f"A broker's password comes from {PASSWORD_VARIABLE}.",
    )
    monitor.add_argument(
        "--broker", metavar="URL", help="embedded (default), or mqtt[s]://[user@]host:port"
    )
    monitor.add_argument(
        "--broker-listen", metavar="HOST:PORT", help="the embedded one's; default: 127.0.0.1:1883"
    )
    monitor.add_argument(
        "--broker-ca", type=Path, metavar="FILE", help="certificates that mqtts:// trusts"
    )
    monitor.add_argument(
        "--listen", metavar="HOST:PORT", help="where the page is; default: 127.0.0.1:8080"
    )
    monitor.add_argument(
        "--web-name", dest="names", action="append", metavar="NAME", help="a name to call it by"
    )
    monitor.add_argument("--run-id", metavar="ID", help="default: all runs that the broker has")
    monitor.add_argument("--grafana", action="store_true", help="print a dashboard for Grafana")
    monitor.set_defaults(run_command=_monitor)


def _add_eval(commands: Any) -> None:
    evaluate = commands.add_parser("eval", help="what a node's last checkpoint can do")
    add_policy(evaluate, as_joined=True)
    add_lora(evaluate)
    add_threads(evaluate)
    evaluate.add_argument("--samples", type=int, default=4, metavar="K", help="of each task")
    evaluate.add_argument("--against", metavar="WHAT", help="`before` training, or a directory")
    evaluate.set_defaults(run_command=_eval)


def _add_export(commands: Any) -> None:
    export = commands.add_parser("export", help="a node's last checkpoint as a model directory")
    export.add_argument("out", type=Path, metavar="DIR", help="to write; must not be there")
    add_policy(export, as_joined=True)
    add_lora(export)
    add_threads(export)
    export.add_argument("--adapter", action="store_true", help="the adapter alone, for PEFT")
    export.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="float32",
        help="what a whole model's numbers are rounded to; default: float32, as they were trained",
    )
    export.add_argument("--push", metavar="REPO", help="upload it to OWNER/NAME, private if new")
    export.set_defaults(run_command=_export)


def _add_chat(commands: Any) -> None:
    chat = commands.add_parser("chat", help="talk to a model directory, such as export writes")
    chat.add_argument("directory", type=Path, metavar="DIR", help="the model")
    chat.add_argument("--system", default="", metavar="TEXT", help="the system prompt")
    chat.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="in a reply")
    chat.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0: the likeliest"
    )
    chat.set_defaults(run_command=_chat)


def _add_report(commands: Any) -> None:
    report = commands.add_parser("report", help="one page with curves, from data directories")
    report.add_argument("data_dirs", nargs="+", type=Path, metavar="DATA_DIR", help="a node's data")
    report.add_argument(
        "--out", type=Path, default=Path("report"), metavar="DIR", help="default: report"
    )
    report.set_defaults(run_command=_report)


def _add_prepare(commands: Any) -> None:
    prepare = commands.add_parser("prepare", help="make the tiny policy ahead of time")
    add_policy(prepare)
    prepare.set_defaults(run_command=_prepare)


def _add_simulate(commands: Any) -> None:
    simulate = commands.add_parser("simulate", help="a swarm in a simulated wide-area network")
    simulate.add_argument(
        "--scenario",
        required=True,
        metavar="FILE|NAME",
        help="what happens; chaos: the seed decides",
    )
    simulate.add_argument("--nodes", metavar="N", help="default: the scenario's")
    simulate.add_argument("--seed", default="0", metavar="S", help="decides all else; default: 0")
    simulate.add_argument("--profile", metavar="NAME", help="links, e.g. volunteer, adsl, lan")
    simulate.add_argument("--plot", type=Path, metavar="FILE", help="draw latencies and bytes: PNG")
    simulate.set_defaults(run_command=_simulate)


def _add_weights(commands: Any) -> None:
    weights = commands.add_parser("weights", help="the weights of a run's policies on this machine")
    actions = weights.add_subparsers(required=True, metavar="ACTION")
    ls = actions.add_parser("ls", help="the versions that are here; * serves")
    ls.add_argument("data_dir", nargs="?", type=Path, default=Path("swarm-data"), metavar="DIR")
    ls.set_defaults(run_command=_list_weights)
    verify = actions.add_parser("verify", help="hash weights, compare them bit for bit")
    verify.add_argument("directory", type=Path, metavar="DIR", help="with safetensors files")
    _add_publish(actions)
    _add_fetch(actions)
    wanted = verify.add_mutually_exclusive_group()
    wanted.add_argument(
        "--manifest", type=Path, metavar="FILE", help="default: the one beside a node's version"
    )
    wanted.add_argument("--against", type=Path, metavar="DIR", help="other weights")
    verify.set_defaults(run_command=_verify_weights)


def _add_transfer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", metavar="FILE", help="default: a swarm of its own")
    parser.add_argument("--policy", default="policy", metavar="NAME", help="default: policy")
    parser.add_argument("--peer", dest="peers", action="append", metavar="ADDR", help="repeatable")
    parser.add_argument("--listen", action="append", metavar="ADDR", help=f"default: {ANY_ADDRESS}")
    parser.add_argument(
        "--announce", action="append", metavar="ADDR", help="address that others shall dial"
    )
    parser.add_argument("--data-dir", metavar="DIR", help="default: swarm-data")
    parser.add_argument("--key-file", metavar="FILE", help="default: identity.pem in the data dir")
    parser.add_argument(
        "--store-bytes", type=int, metavar="N", help="the most that chunks take; default: 64 GiB"
    )


def _add_publish(actions: Any) -> None:
    publish = actions.add_parser("publish", help="offer weights to a swarm, and serve them")
    publish.add_argument("directory", type=Path, metavar="DIR", help="with safetensors files")
    publish.add_argument(
        "--once", action="store_true", help="leave when all peers that came have everything"
    )
    publish.add_argument("--follow", action="store_true", help="a new version whenever DIR changes")
    _add_transfer(publish)
    publish.set_defaults(run_command=_publish_weights)


def _add_fetch(actions: Any) -> None:
    fetch = actions.add_parser("fetch", help="get the newest weights from a swarm")
    fetch.add_argument("--publisher", metavar="PEERID", help="whose; default: as the run says")
    fetch.add_argument("--out", type=Path, metavar="DIR", help="copy them here")
    fetch.add_argument("--follow", action="store_true", help="stay, get each version, and share")
    _add_transfer(fetch)
    fetch.set_defaults(run_command=_fetch_weights)


def _config(options: argparse.Namespace, *, joins: bool = False) -> Any:
    from node.config import load_config
    from node.system.child_environment import withhold

    if joins:
        from node.hosting.handed_on_runs import fetch_unknown_run

        fetch_unknown_run(*given(options), _say)
    config = load_config(*given(options))
    withhold(config.passphrase_env)
    if config.engine_key_env is not None:
        withhold(config.engine_key_env)
    return config


def _say(line: str) -> None:
    print(line, flush=True)


def _join(options: argparse.Namespace) -> int:
    config = _config(options, joins=True)
    if config.run.learner is None or config.role == "node":
        from node.roles.sapo import SapoRole

        return _run_app(options, config, SapoRole)
    from node.roles.worker import WorkerRole

    return _run_app(options, config, WorkerRole)


def _learn(options: argparse.Namespace) -> int:
    from node.training.ranks import Ranks

    ranks = Ranks.of(os.environ)
    if ranks is not None and ranks.rank > 0:
        from node.training.sharded.worker import follow

        return follow(ranks, lambda line: print(line, file=sys.stderr, flush=True))
    config = _config(options)
    from node.config.node import rules_of
    from node.roles.learner import LearnerRole

    rules_of(config)  # before anything is made on disk
    return _run_app(options, config, LearnerRole)


def _run_app(options: argparse.Namespace, config: Any, makes: Any) -> int:
    from node.monitor.console.details import detailed
    from node.monitor.console.json_lines import view_of
    from node.roles.app import run_node

    with view_of(config.log, sys.stdout) as view, detailed(view.detail, config.verbose):
        return run_node(config, view, view.say, makes, options.run or "")


def _invite(options: argparse.Namespace) -> int:
    from node.hosting.membership import invitation_of

    invitation = invitation_of(options.data_dir)
    open_to = "keep it secret" if invitation.key else "the swarm is open: anybody can join anyway"
    print(
        f"whoever has this line can join, by swarm-node join --invite -; {open_to}",
        file=sys.stderr,
    )
    _say(invitation.encode())
    return EXIT_OK


def _doctor(options: argparse.Namespace) -> int:
    from node.commands.doctor import examine_here

    return examine_here(_config(options, joins=True), _say)


def _keygen(options: argparse.Namespace) -> int:
    from node.commands.keygen import make_key

    _say(make_key(options.out, options.passphrase_env))
    return EXIT_OK


def _explain_config(options: argparse.Namespace) -> int:
    from node.config.explain import explained
    from node.config.load import load_with_sources

    for line in explained(*load_with_sources(*given(options))):
        _say(line)
    return EXIT_OK


def _status(options: argparse.Namespace) -> int:
    from node.hosting.membership import JOIN_KEY_FILE
    from node.monitor.status import fetch_status, render_status, snapshot_json

    snapshot = fetch_status(options.data_dir)
    private = (options.data_dir / JOIN_KEY_FILE).exists()
    _say(snapshot_json(snapshot) if options.json else render_status(snapshot, private=private))
    return EXIT_OK


def _samples(options: argparse.Namespace) -> int:
    from node.records.samples import read_samples, render_samples

    if options.count < 1:
        raise ConfigError(f"-n {options.count}: must be at least 1")
    found = read_samples(
        options.data_dir, own=not options.foreign, order=options.order, count=options.count
    )
    _say(render_samples(found))
    return EXIT_OK


def _top(options: argparse.Namespace) -> int:
    from rich.console import Console

    from node.monitor.console.top import look_at, top
    from swarm.telemetry.broker_address import Broker

    broker = None
    if options.broker is not None:
        password = os.environ.get(PASSWORD_VARIABLE)
        broker = Broker.parse(options.broker, password=password, ca_file=options.broker_ca)
    elif options.broker_ca is not None:
        raise ConfigError("--broker-ca: of use with --broker mqtts://… alone")
    return top(look_at(options.data_dir, broker), Console())


def _monitor(options: argparse.Namespace) -> int:
    if options.grafana:
        from swarm.telemetry.dashboard.grafana import grafana_dashboard

        _say(json.dumps(grafana_dashboard(), indent=2))
        return EXIT_OK
    from node.monitor.monitoring import MonitorOptions, monitor

    names = ("broker", "broker_listen", "broker_ca", "listen", "run_id", "names")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    password = os.environ.get(PASSWORD_VARIABLE)
    return monitor(MonitorOptions(**given, password=password), _say)


def _eval(options: argparse.Namespace) -> int:
    from node.commands.policy import examine_node

    examine_node(_config(options), _say, samples=options.samples, against=options.against)
    return EXIT_OK


def _export(options: argparse.Namespace) -> int:
    from node.commands.policy import export_policy

    what = {"adapter": options.adapter, "precision": options.precision, "repository": options.push}
    round_number = export_policy(_config(options), options.out, _say, **what)
    _say(f"{options.out}: the policy after round {round_number}")
    return EXIT_OK


def _chat(options: argparse.Namespace) -> int:
    from node.commands.policy import chat

    return chat(options.directory, options.system, options.max_new_tokens, options.temperature)


def _report(options: argparse.Namespace) -> int:
    from node.monitor.console.progress import on_stderr
    from node.monitor.report.report import write_report

    for directory in options.data_dirs:
        if not directory.is_dir():
            raise ConfigError(f"{directory}: no such directory; name a node's --data-dir")
    with on_stderr().showing("drawing the report"):
        summary = write_report(options.data_dirs, options.out)
    _say(str(summary))
    return EXIT_OK


def _prepare(options: argparse.Namespace) -> int:
    from node.hosting.models import resolve_model

    _say(resolve_model(_config(options), _say))
    return EXIT_OK


def _simulate(options: argparse.Namespace) -> int:
    from node.monitor.console.progress import on_stderr
    from node.simulation.report import plot, render
    from node.simulation.simulate import replay_of, simulate

    replay = replay_of(options.scenario, options.seed, nodes=options.nodes, profile=options.profile)
    with on_stderr().showing(f"simulating {options.scenario}"):
        report = simulate(replay)
    _say(render(report))
    if options.plot is not None:
        plot(report, options.plot)
    return EXIT_FAILED if report.violation_count else EXIT_OK


def _list_weights(options: argparse.Namespace) -> int:
    from node.hosting.weights import list_weights

    for line in list_weights(options.data_dir):
        _say(line)
    return EXIT_OK


def _verify_weights(options: argparse.Namespace) -> int:
    from node.hosting.weights import verify

    verdict = verify(options.directory, options.manifest, options.against)
    for line in verdict.lines:
        _say(line)
    return EXIT_OK if verdict.is_same else EXIT_FAILED


def _transfer(options: argparse.Namespace) -> Any:
    from node.commands.weights_transfer import TransferOptions
    from node.config.load import RUN_VARIABLE
    from node.hosting.policy_weights import STORE_BYTES_MAX

    return TransferOptions(
        _config(options),
        run_given=bool(options.run) or RUN_VARIABLE in os.environ,
        policy=options.policy,
        publisher=getattr(options, "publisher", None),
        store_bytes=STORE_BYTES_MAX if options.store_bytes is None else options.store_bytes,
    )


def _publish_weights(options: argparse.Namespace) -> int:
    from node.commands.weights_transfer import publish

    return publish(
        _transfer(options), options.directory, _say, once=options.once, follow=options.follow
    )


def _fetch_weights(options: argparse.Namespace) -> int:
    from node.commands.weights_transfer import fetch

    return fetch(_transfer(options), options.out, _say, follow=options.follow)


if __name__ == "__main__":
    sys.exit(main())
