"""`swarm-node`: parse flags, call the command, turn errors into one line."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from node.commands.arguments import (
    Parser,
    add_command,
    add_data_dir,
    add_runs,
    add_tools,
    fill_all,
    given,
    say,
)
from node.commands.data import add_data
from node.commands.methods import add_methods
from node.commands.service import add_pausing, add_service
from swarm.command import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, status_of
from swarm.errors import ConfigError
from swarm.telemetry.broker_address import PASSWORD_VARIABLE

BROKER_FORM = "mqtt[s]://[user@]host:port"
PASSWORD = f"A broker's password comes from {PASSWORD_VARIABLE}."
CHECKPOINT = ("run", "model", "yes", "data_dir", "lora_rank", "threads")
FINE_TUNING = (
    *("run", "model", "yes", "threads", "seed", "learning_rate", "lora_rank"),
    "context_tokens_max",
)
DOCTORED = (
    *("run", "model", "data_dir", "lora_rank", "device", "peers", "invite", "listen"),
    *("telemetry", "telemetry_ca", "engine", "engine_url", "engine_key_env", "engine_quantization"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns what `status_of` does, or 130: interrupted."""
    before = signal.signal(signal.SIGINT, _leave_at_once)
    try:
        return status_of("swarm-node", partial(_run, arguments))
    finally:
        signal.signal(signal.SIGINT, before)


def _leave_at_once(*_: object) -> None:
    """End on Ctrl-C until a running node watches for it: an import could swallow an exception.
    Files are written whole or not at all, so nothing is lost."""
    os._exit(EXIT_INTERRUPTED)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        options = _parser().parse_args(arguments)
        return int(options.run_command(options) or EXIT_OK)
    except ModuleNotFoundError as error:
        from node.system.extras import EXTRAS, missing

        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise  # a fault of ours
        raise ConfigError(missing(str(error.name))) from None


def whole_parser() -> argparse.ArgumentParser:
    """The command line with the flags of all settings."""
    parser = _parser()
    fill_all(parser)
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="swarm-node",
        description="Train a language model by reinforcement learning in a swarm of peers.",
        epilog="Every setting can also come from SWARM_NODE_<NAME> or a run file's [node] table.",
    )
    parser.add_argument("--version", action="version", version=version("swarm-node"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_running(commands)
    _add_watching(commands)
    _add_monitor(commands)
    _add_policies(commands)
    add_runs(commands, _config)
    add_tools(commands, parser)
    add_pausing(commands)
    add_service(commands, lambda words: _config(_parser().parse_args(words), joins=True))
    _add_simulate(commands)
    _add_weights(commands)
    add_data(commands)
    add_methods(commands)
    return parser


def _add_running(commands: Any) -> None:
    told = "start a swarm, or join one with --peer; work for its learner, if it has one"
    join = add_command(commands, "join", _join, told)
    join.add_argument("link", nargs="?", metavar="LINK", help="a link, invitation or address")
    told = "be the central learner of a run that names this key"
    learn = add_command(commands, "learn", _learn, told)
    told = "show what the swarm of a link or --peer does; train nothing, share nothing"
    join.add_argument("--watch", action="store_true", help=told)
    for starting in (join, learn):
        starting.take_settings()
        told = "tell settings that are set, fetches and memory; start nothing"
        starting.add_argument("--dry-run", action="store_true", help=told)
    told = "print a line with which others can join"
    add_data_dir(add_command(commands, "invite", _invite, told))
    told = "what works from here, and what to do about it"
    add_command(commands, "doctor", _doctor, told).take_settings(*DOCTORED)
    keygen = add_command(commands, "keygen", _keygen, "make an Ed25519 key, print its peer id")
    keygen.add_argument("--out", type=Path, required=True, metavar="FILE", help="the key's file")
    keygen.add_argument(
        "--passphrase-env", metavar="NAME", help="encrypt with the passphrase in this variable"
    )
    told = "all settings as they hold, and where each is from"
    add_command(commands, "config", _explain_config, told).take_settings()


def _add_watching(commands: Any) -> None:
    status = add_command(commands, "status", _status, "ask the node that runs on a data directory")
    add_data_dir(status)
    status.add_argument("--json", action="store_true", help="the whole answer as JSON")
    told = "what happened to a node lately, one line each, whether it runs or not"
    logs = add_command(commands, "logs", _logs, told)
    add_data_dir(logs)
    logs.add_argument("-n", dest="count", type=int, default=10, metavar="N", help="default: 10")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until Ctrl-C")
    told = "what the policy said lately, with the answer found in it and its reward"
    samples = add_command(commands, "samples", _samples, told)
    add_data_dir(samples)
    told = "repeat a recorded round bit for bit, or name the first difference"
    replay = add_command(commands, "replay", _replay, told)
    replay.add_argument("data_dir", type=Path, metavar="DATA_DIR", help="a node's data")
    replay.add_argument(
        "--round", type=int, metavar="N", help="the round; default: all recorded ones"
    )
    order = samples.add_mutually_exclusive_group()
    for name, which in (("best", "highest"), ("worst", "lowest")):
        order.add_argument(
            f"--{name}", dest="order", action="store_const", const=name, default="newest",
            help=f"those with the {which} rewards",
        )  # fmt: skip
    samples.add_argument("--foreign", action="store_true", help="those of other nodes")
    samples.add_argument("-n", dest="count", type=int, default=8, metavar="N", help="default: 8")
    top = add_command(
        commands,
        "top",
        _top,
        "a running node, or a whole swarm, drawn anew each second",
        f"q or Ctrl-C leaves. Without a terminal it prints once. {PASSWORD}",
    )
    add_data_dir(top)
    top.add_argument("--broker", metavar="URL", help=f"all nodes that report to {BROKER_FORM}")
    top.add_argument("--broker-ca", type=Path, metavar="FILE", help="what mqtts:// trusts")


def _add_monitor(commands: Any) -> None:
    told = "a web page of the swarm, and a broker for nodes to report to"
    monitor = add_command(commands, "monitor", _monitor, told, PASSWORD)
    monitor.add_argument("--broker", metavar="URL", help=f"embedded (default), or {BROKER_FORM}")
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
    report = add_command(commands, "report", _report, "plots and a page from data directories")
    report.add_argument("data_dirs", nargs="+", type=Path, metavar="DATA_DIR", help="a node's data")
    report.add_argument("--out", type=Path, default=Path("report"), metavar="DIR", help="to write")


def _add_policies(commands: Any) -> None:
    evaluate = add_command(commands, "eval", _eval, "what a node's last checkpoint can do")
    evaluate.take_settings(*CHECKPOINT, as_joined=True)
    evaluate.add_argument("--samples", type=int, default=4, metavar="K", help="of each task")
    evaluate.add_argument("--against", metavar="WHAT", help="`before` training, or a directory")
    told = "a node's last checkpoint as a model directory"
    export = add_command(commands, "export", _export, told)
    export.add_argument("out", type=Path, metavar="DIR", help="to write; must not be there")
    export.take_settings(*CHECKPOINT, as_joined=True)
    export.add_argument("--adapter", action="store_true", help="the adapter alone, for PEFT")
    export.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of a whole model's numbers, which were trained in float32",
    )
    export.add_argument("--push", metavar="REPO", help="upload it to OWNER/NAME, private if new")
    told = "talk to a model directory, such as export writes"
    chat = add_command(commands, "chat", _chat, told)
    chat.add_argument("directory", type=Path, metavar="DIR", help="the model")
    chat.add_argument("--system", default="", metavar="TEXT", help="the system prompt")
    chat.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="in a reply")
    chat.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0: the likeliest"
    )
    chat.add_argument(
        "--chat",
        default="{}",
        metavar="JSON",
        help="arguments of its chat template, as in '{\"enable_thinking\": false}'",
    )
    told = "train a model on worked answers, before a run"
    sft = add_command(commands, "sft", _sft, told)
    sft.add_argument("data", type=Path, metavar="FILE", help="JSON lines, Parquet, saved dataset")
    sft.add_argument("--out", type=Path, required=True, metavar="DIR", help="the model to write")
    sft.take_settings(*FINE_TUNING)
    sft.add_argument("--epochs", type=int, default=3, metavar="N", help="default: 3")
    sft.add_argument("--batch", type=int, default=16, metavar="N", help="answers in an update")
    sft.add_argument("--held-out", type=float, default=0.05, metavar="X", help="share to measure")
    sft.add_argument("--system", metavar="TEXT", help="the system prompt; default: the run's")
    for use in ("question", "answer"):
        told = "its name in the file; default: one of the usual"
        sft.add_argument(f"--{use}", default="", metavar="COLUMN", help=told)
    prepare = add_command(commands, "prepare", _prepare, "make the tiny policy ahead of time")
    prepare.take_settings("run", "model", "yes", "data_dir")


def _add_simulate(commands: Any) -> None:
    told = "a swarm in a simulated wide-area network"
    simulate = add_command(commands, "simulate", _simulate, told)
    simulate.add_argument(
        "--scenario",
        required=True,
        metavar="FILE|NAME",
        help="what happens; chaos: the seed decides",
    )
    simulate.add_argument("--nodes", metavar="N", help="default: the scenario's")
    simulate.add_argument("--seed", default="0", metavar="S", help="decides all else")
    simulate.add_argument("--profile", metavar="NAME", help="links, e.g. volunteer, adsl, lan")
    simulate.add_argument("--json", action="store_true", help="the figures as JSON")
    simulate.add_argument("--plot", type=Path, metavar="FILE", help="draw latencies and bytes: PNG")


def _add_weights(commands: Any) -> None:
    weights = commands.add_parser("weights", help="the weights of a run's policies on this machine")
    actions = weights.add_subparsers(required=True, metavar="ACTION")
    ls = add_command(actions, "ls", _list_weights, "the versions that are here; * serves")
    ls.add_argument(
        "data_dir", nargs="?", type=Path, default=Path("swarm-data"), metavar="DIR", help="a node's"
    )
    told = "hash weights, compare them bit for bit"
    verify = add_command(actions, "verify", _verify_weights, told)
    verify.add_argument("directory", type=Path, metavar="DIR", help="with safetensors files")
    wanted = verify.add_mutually_exclusive_group()
    wanted.add_argument(
        "--manifest", type=Path, metavar="FILE", help="default: the one beside a node's version"
    )
    wanted.add_argument("--against", type=Path, metavar="DIR", help="other weights")
    told = "offer weights to a swarm, and serve them"
    publish = add_command(actions, "publish", _publish_weights, told)
    publish.add_argument("directory", type=Path, metavar="DIR", help="with safetensors files")
    publish.add_argument(
        "--once", action="store_true", help="leave when all peers that came have everything"
    )
    publish.add_argument("--follow", action="store_true", help="a new version whenever DIR changes")
    told = "get the newest weights from a swarm"
    fetch = add_command(actions, "fetch", _fetch_weights, told)
    fetch.add_argument("--publisher", metavar="PEERID", help="whose; default: as the run says")
    fetch.add_argument("--out", type=Path, metavar="DIR", help="copy them here")
    fetch.add_argument("--follow", action="store_true", help="stay, get each version, and share")
    for parser in (publish, fetch):
        parser.take_settings("run", "peers", "listen", "announce", "data_dir", "key_file")
        parser.add_argument("--policy", default="policy", metavar="NAME", help="the policy's name")
        parser.add_argument(
            "--store-bytes", type=int, metavar="N", help="of chunks at most; default: 64 GiB"
        )


def _config(options: argparse.Namespace, *, joins: bool = False) -> Any:
    from node.config import load_config
    from node.system.child_environment import withhold

    if joins:
        from node.hosting.run_data import fetch_unknown_run

        if options.run_command is _join and not options.run:
            from node.commands.doctor import run_of_peers

            options.run = run_of_peers(*given(options)[:2], say)
        fetch_unknown_run(*given(options), say)
    config = load_config(*given(options))
    withhold(config.passphrase_env)
    if config.engine_key_env is not None:
        withhold(config.engine_key_env)
    return config


def _described(options: argparse.Namespace, *, is_learner: bool) -> int:
    from node.commands.starts import describe
    from node.config.load import load_with_sources

    describe(*load_with_sources(*given(options)), say, is_learner=is_learner)
    return EXIT_OK


def _join(options: argparse.Namespace) -> int:
    if ".." in (options.seed or ""):
        return _sweep(options)
    return _join_by(options, _config(options, joins=True))


def _sweep(options: argparse.Namespace) -> int:
    from node.commands.starts import sweep

    def config_of(**changed: Any) -> Any:
        vars(options).update(changed)
        return _config(options, joins=True)

    start = partial(_join_by, options)
    # `config_of` changes the options, the seeds among them
    return sweep(str(options.seed), config_of, start, say, is_dry=options.dry_run)


def _join_by(options: argparse.Namespace, config: Any) -> int:
    if options.dry_run:
        return _described(options, is_learner=False)
    if options.watch:
        from node.commands.watching import watch

        return watch(config, say)
    if config.run.learner is None or config.role == "node":
        from node.run.sapo_role import SapoRole

        return _run_app(options, config, SapoRole)
    from node.run.worker_role import WorkerRole

    return _run_app(options, config, WorkerRole)


def _learn(options: argparse.Namespace) -> int:
    from node.train.ranks import Ranks

    ranks = Ranks.of(os.environ)
    if ranks is not None and ranks.rank > 0:
        from node.train.sharded_worker import follow

        return follow(ranks, lambda line: print(line, file=sys.stderr, flush=True))
    config = _config(options)
    from node.config.node import rules_of
    from node.run.learner_role import LearnerRole

    rules_of(config)  # before anything is made on disk
    if options.dry_run:
        return _described(options, is_learner=True)
    return _run_app(options, config, LearnerRole)


def _run_app(options: argparse.Namespace, config: Any, makes: Any) -> int:
    from node.observe.log_lines import detailed, view_of
    from node.run.app import run_node

    with view_of(config.log, sys.stdout) as view, detailed(view.detail, config.verbose):
        return run_node(config, view, view.say, makes, options.run or "")


def _invite(options: argparse.Namespace) -> None:
    from node.hosting.membership import invitation_of

    invitation = invitation_of(options.data_dir)
    open_to = "keep it secret" if invitation.key else "the swarm is open: anybody can join anyway"
    print(
        f"whoever has this line can join, by swarm-node join --invite -; {open_to}",
        file=sys.stderr,
    )
    say(invitation.encode())


def _doctor(options: argparse.Namespace) -> int:
    from node.commands.doctor import examine

    return examine(_config(options, joins=True), say)


def _keygen(options: argparse.Namespace) -> None:
    from swarm.identity import Identity

    name, passphrase = options.passphrase_env, None
    if name:
        passphrase = os.environ.get(name)
        if not passphrase:
            raise ConfigError(f"--passphrase-env {name}: no such variable; set it first")
    identity = Identity.generate()
    identity.save(options.out, passphrase)
    say(identity.peer_id)


def _explain_config(options: argparse.Namespace) -> None:
    from node.config.explain import explained
    from node.config.load import load_with_sources, packaged_run_ids

    config, sources = load_with_sources(*given(options))
    if config.run.run_id not in packaged_run_ids():
        from node.commands.environments import check_tasks

        check_tasks(config)
    for line in explained(config, sources):
        say(line)


def _status(options: argparse.Namespace) -> None:
    from node.hosting.membership import JOIN_KEY_FILE
    from node.observe.status import fetch_status, render_status, snapshot_json

    snapshot = fetch_status(options.data_dir)
    private = (options.data_dir / JOIN_KEY_FILE).exists()
    say(snapshot_json(snapshot) if options.json else render_status(snapshot, private=private))


def _replay(options: argparse.Namespace) -> int:
    from node.commands.replay import replay

    return EXIT_OK if replay(options.data_dir, options.round, say) else EXIT_FAILED


def _samples(options: argparse.Namespace) -> None:
    from node.observe.samples import read_samples, render_samples

    if options.count < 1:
        raise ConfigError(f"-n {options.count}: must be at least 1")
    found = read_samples(
        options.data_dir, own=not options.foreign, order=options.order, count=options.count
    )
    say(render_samples(found))


def _logs(options: argparse.Namespace) -> None:
    from node.observe.log_lines import show_log

    if options.count < 0:
        raise ConfigError(f"-n {options.count}: must be at least 0")
    show_log(options.data_dir, say, options.count, follows=options.follow)


def _top(options: argparse.Namespace) -> int:
    from rich.console import Console

    from node.observe.top import look_at, top
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

        say(json.dumps(grafana_dashboard(), indent=2))
        return EXIT_OK
    from node.observe.monitoring import MonitorOptions, monitor

    names = ("broker", "broker_listen", "broker_ca", "listen", "run_id", "names")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    password = os.environ.get(PASSWORD_VARIABLE)
    return monitor(MonitorOptions(**given, password=password), say)


def _eval(options: argparse.Namespace) -> None:
    from node.commands.policy import examine_node

    examine_node(_config(options), say, samples=options.samples, against=options.against)


def _export(options: argparse.Namespace) -> None:
    from node.commands.policy import export_policy

    what = {"adapter": options.adapter, "precision": options.precision, "repository": options.push}
    round_number = export_policy(_config(options), options.out, say, **what)
    say(f"{options.out}: the policy after round {round_number}")


def _chat(options: argparse.Namespace) -> int:
    from node.commands.policy import chat

    return chat(
        options.directory,
        options.system,
        options.max_new_tokens,
        options.temperature,
        options.chat,
    )


def _sft(options: argparse.Namespace) -> None:
    from node.commands.sft import Plan, fine_tune
    from node.envs.data.worked import PromptRules, read_worked

    config = _config(options)
    plan = Plan(options.out, options.epochs, options.batch, options.held_out)
    told = config.run.answer
    system = told.system if options.system is None else options.system
    examples = tuple((each.question, each.completion) for each in told.examples)
    rules = PromptRules(options.question, options.answer, system, examples)
    fine_tune(config, plan, read_worked(options.data, rules, say), say)


def _report(options: argparse.Namespace) -> None:
    from node.observe.progress_bars import on_stderr
    from node.observe.saved_report import write_report

    for directory in options.data_dirs:
        if not directory.is_dir():
            raise ConfigError(f"{directory}: no such directory; name a node's --data-dir")
    with on_stderr().showing("drawing the report"):
        summary = write_report(options.data_dirs, options.out)
    say(str(summary))


def _prepare(options: argparse.Namespace) -> None:
    from node.hosting.models import resolve_model

    say(resolve_model(_config(options), say))


def _simulate(options: argparse.Namespace) -> int:
    from node.observe.progress_bars import Work, on_stderr
    from node.simulation.simulate import replay_of, simulate
    from node.simulation.simulation_report import plot, render, report_json

    replay = replay_of(options.scenario, options.seed, nodes=options.nodes, profile=options.profile)
    name = f"simulating {replay.nodes} nodes for {replay.scenario.duration_s:g} virtual seconds"
    print(f"{name}; this may take minutes", file=sys.stderr, flush=True)
    with on_stderr().showing(name) as show:
        report = simulate(replay, lambda share: show(Work(name, share, 1.0)))
    say(report_json(report) if options.json else render(report))
    if options.plot is not None:
        plot(report, options.plot)
    return EXIT_FAILED if report.violation_count else EXIT_OK


def _list_weights(options: argparse.Namespace) -> None:
    from node.hosting.policy_weights import list_weights

    for line in list_weights(options.data_dir):
        say(line)


def _verify_weights(options: argparse.Namespace) -> int:
    from node.hosting.policy_weights import verify

    verdict = verify(options.directory, options.manifest, options.against)
    for line in verdict.lines:
        say(line)
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
        _transfer(options), options.directory, say, once=options.once, follow=options.follow
    )


def _fetch_weights(options: argparse.Namespace) -> int:
    from node.commands.weights_transfer import fetch

    return fetch(_transfer(options), options.out, say, follow=options.follow)


if __name__ == "__main__":
    sys.exit(main())
