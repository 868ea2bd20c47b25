"""`swarm-node service`, `pause` and `resume`: run a node without a terminal, and pause it."""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from node.commands.arguments import add_command, add_data_dir, say
from node.system.caches import home_directory
from swarm.command import EXIT_CANNOT_HEAL, EXIT_USAGE
from swarm.errors import ConfigError, SwarmError
from swarm.storage import write_whole

STOP_TIMEOUT_S: Final = 180  # a node that is told to leave saves first
RESTART_S: Final = 30
MENDED_BY_NO_START: Final = (EXIT_USAGE, EXIT_CANNOT_HEAL)  # exit statuses
STARTS_S: Final = 3600  # within which a unit is started at most `STARTS_MAX` times
STARTS_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class Service:
    """One installed node. `words`: the command. `environment`: a file of lines `NAME=value`."""

    name: str
    title: str
    words: Sequence[str]
    directory: Path  # where it runs
    environment: Path
    log: Path  # of macOS; systemd has its journal


def systemd_unit(service: Service) -> str:
    """The text of a user unit; see systemd.service(5)."""
    command = " ".join(_quoted(word) for word in service.words)
    return f"""\
[Unit]
Description={_escaped(" ".join(service.title.split()))}
StartLimitIntervalSec={STARTS_S}
StartLimitBurst={STARTS_MAX}

[Service]
WorkingDirectory={_escaped(str(service.directory))}
EnvironmentFile=-{_escaped(str(service.environment))}
ExecStart={command}
KillMode=mixed
KillSignal=SIGINT
TimeoutStopSec={STOP_TIMEOUT_S}
Restart=on-failure
RestartSec={RESTART_S}
RestartPreventExitStatus={" ".join(map(str, MENDED_BY_NO_START))}

[Install]
WantedBy=default.target
"""


def launch_agent(service: Service) -> bytes:
    """The property list of a launch agent; see launchd.plist(5)."""
    import plistlib  # brings a parser of XML in, on macOS alone

    # launchd reads no file of variables; a shell does, and is then the node itself
    script = 'set -a; [ -r "$0" ] && . "$0"; set +a; exec "$@"'
    return plistlib.dumps(
        {
            "Label": service.name,
            "ProgramArguments": [
                "/bin/sh", "-c", script, str(service.environment), *service.words
            ],
            "WorkingDirectory": str(service.directory),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": RESTART_S,
            "ExitTimeOut": STOP_TIMEOUT_S,
            "StandardOutPath": str(service.log),
            "StandardErrorPath": str(service.log),
        }
    )  # fmt: skip


def _escaped(text: str) -> str:
    """Double the `%`, which begins a specifier in a unit."""
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    """One argument of a unit's command. `$` begins a variable, and `\\` an escape."""
    text = _escaped(word).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return '"' + text.replace("\n", "\\n") + '"'


# `swarm-node service`: install, remove and watch a node that runs without a terminal.

NAME: Final = "swarm-node"
RUNS: Final = ("join", "learn")
COMMAND_TIMEOUT_S: Final = 300.0  # to stop, a node saves first
LOG_LINES: Final = 50
_NAMES: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")

Check = Callable[[list[str]], object]


def add_service(commands: Any, check: Check) -> None:
    """`check` raises `ConfigError` if the command could not start."""
    service = commands.add_parser(
        "service", help="run a node whenever this machine is on: install, remove, logs"
    )
    actions = service.add_subparsers(required=True, metavar="ACTION")
    told = "install and start it: swarm-node service install join --peer <addr>"
    install = add_command(actions, "install", partial(_install, check), told)
    told = "stop it and remove it; what it learned stays"
    remove = add_command(actions, "remove", _remove, told)
    logs = add_command(actions, "logs", _logs, "what it says, as it says it")
    for parser in (install, remove, logs):
        parser.add_argument(
            "--name", default=NAME, help=f"which service, where there are several (default: {NAME})"
        )
    install.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="COMMAND", help=f"{', '.join(RUNS)}, with flags"
    )


@dataclass(frozen=True, slots=True)
class Manager:
    kind: str  # `systemd`, `launchd`

    def file(self, name: str) -> Path:
        if self.kind == "launchd":
            return home_directory() / "Library" / "LaunchAgents" / f"{name}.plist"
        return _config_home() / "systemd" / "user" / f"{name}.service"

    def start(self, name: str) -> None:
        if self.kind == "launchd":
            _run("launchctl", "bootstrap", f"gui/{os.getuid()}", str(self.file(name)))
            return
        self.reload()
        _run("systemctl", "--user", "enable", "--now", name)

    def stop(self, name: str) -> None:
        if self.kind == "launchd":
            _run("launchctl", "bootout", f"gui/{os.getuid()}/{name}")
            return
        _run("systemctl", "--user", "disable", "--now", name)

    def reload(self) -> None:
        """Have systemd read its descriptions again."""
        if self.kind == "systemd":
            _run("systemctl", "--user", "daemon-reload")


def manager_here() -> Manager:
    if sys.platform == "darwin":
        return Manager("launchd")
    if shutil.which("systemctl") is not None:
        try:
            _run("systemctl", "--user", "show-environment")
        except ConfigError as error:
            raise ConfigError(
                f"service: systemd has no session of this user here ({error}); log in as that "
                "user, or let what starts services on this machine run swarm-node join"
            ) from None
        return Manager("systemd")
    raise ConfigError(
        "service: there is no systemd and no launchd here; let what starts services on this "
        "machine run swarm-node join"
    )


def _config_home() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or home_directory() / ".config")


def _run(*words: str) -> str:
    """The command's standard output."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{' '.join(words)}: {error}") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise ConfigError(f"{' '.join(words)}: {said or f'status {done.returncode}'}")
    return done.stdout


def _checked(name: str) -> str:
    if not _NAMES.fullmatch(name):
        raise ConfigError(f"--name {name}: lower-case letters, digits and hyphens, at most 64")
    return name


def described(name: str, words: Sequence[str], directory: Path) -> Service:
    """The service that runs `swarm-node` with these words in that directory."""
    config = _config_home() / NAME
    return Service(
        name,
        " ".join((NAME, *words)),
        # Without -P a folder `node` in that directory would be taken for the program
        (sys.executable, "-P", "-m", "node.cli", *words),
        directory,
        config / f"{name}.env",
        config / f"{name}.log",
    )


def without_invitation(words: Sequence[str]) -> tuple[list[str], str]:
    """A command without its invitation, and the invitation. It may hold a join key, and other users
    can read a service's command. Empty: the command has none, or names a file."""
    from swarm.peers.invite import INVITE_PREFIX
    from swarm.peers.invite_flags import take_invitation

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--invite", nargs="?", const="")
    options, others = parser.parse_known_args(list(words))
    for word in others:
        if word.startswith(INVITE_PREFIX) and options.invite is None:
            others.remove(word)
            options.invite = word
            break
    if options.invite == "":
        return [*others, "--invite"], ""  # the command itself says what is missing
    return others, take_invitation(options) or ""


def _invitation_file(name: str) -> Path:
    """The file with a service's invitation, readable by its owner alone."""
    return _config_home() / NAME / f"{name}.invite"


def left_behind(environ: Mapping[str, str]) -> list[str]:
    """Settings in this terminal's variables, which the service will not see."""
    from node.system.child_environment import ENVIRON_PREFIX

    return sorted(name for name in environ if name.startswith(ENVIRON_PREFIX))


def _install(check: Check, options: argparse.Namespace) -> None:
    words, name = list(options.words), _checked(options.name)
    if not words or words[0] not in RUNS:
        raise ConfigError(
            f"service install: name the command that it runs, one of {', '.join(RUNS)}: "
            "swarm-node service install join --peer <addr>"
        )
    words, invitation = without_invitation(words)
    check([*words, *(("--invite", invitation) if invitation else ())])
    manager = manager_here()
    file = manager.file(name)
    if file.exists():
        raise ConfigError(
            f"service install: {name} is there already ({file}); swarm-node service remove "
            "comes first, or another --name"
        )
    invited = _invitation_file(name)
    if invitation:
        words += ["--invite-file", str(invited)]
    service = described(name, words, Path.cwd())
    service.environment.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if invitation:
        write_whole(invited, f"{invitation}\n")
    file.parent.mkdir(parents=True, exist_ok=True)
    text = launch_agent(service) if manager.kind == "launchd" else systemd_unit(service).encode()
    write_whole(file, text)
    try:
        manager.start(name)
    except ConfigError:
        _delete(manager, name)
        raise
    say(f"{name} runs: {file}")
    say(f"what it says: swarm-node service logs{'' if name == NAME else f' --name {name}'}")
    say(f"how it does: swarm-node status, from {service.directory}")
    if left := left_behind(os.environ):
        say(f"{', '.join(left)} of this terminal are not the service's: {service.environment} is")
    if manager.kind == "systemd" and not _lingers():
        say("it ends when you log out; this keeps it: loginctl enable-linger")


def _lingers() -> bool:
    """True if the user's services survive a logout, or if that is unknown."""
    try:
        said = _run("loginctl", "show-user", str(os.getuid()), "--property=Linger")
    except ConfigError:
        return True
    return "Linger=no" not in said


def _delete(manager: Manager, name: str) -> None:
    manager.file(name).unlink(missing_ok=True)
    _invitation_file(name).unlink(missing_ok=True)
    manager.reload()


def _installed(name: str) -> Manager:
    manager = manager_here()
    file = manager.file(_checked(name))
    if not file.exists():
        raise ConfigError(f"service: {name} is not installed ({file} is not there)")
    return manager


def _remove(options: argparse.Namespace) -> None:
    manager = _installed(options.name)
    manager.stop(options.name)
    _delete(manager, options.name)
    say(f"{options.name} is removed; its data directory is as it was")


def _logs(options: argparse.Namespace) -> None:
    if _installed(options.name).kind == "launchd":
        log = described(options.name, (), Path.cwd()).log
        words = ["tail", "-n", str(LOG_LINES), "-F", str(log)]
    else:
        words = ["journalctl", "--user", "-u", options.name, "-n", str(LOG_LINES), "-f"]
    sys.stdout.flush()
    os.execvp(words[0], words)  # it reads the keyboard and ends with Ctrl-C as usual


# `swarm-node pause` and `swarm-node resume`.


def add_pausing(commands: Any) -> None:
    told = "have the node do nothing after its present round"
    add_data_dir(add_command(commands, "pause", _pause, told))
    told = "have a node that was paused go on"
    add_data_dir(add_command(commands, "resume", _resume, told))


def _pause(options: argparse.Namespace) -> None:
    from node.system.pause_rules import PAUSED_FILE

    data_dir: Path = options.data_dir
    if not data_dir.is_dir():
        raise ConfigError(f"--data-dir {data_dir}: no node has been here")
    (data_dir / PAUSED_FILE).touch(mode=0o600)
    runs = running_role(data_dir)
    if runs is None:
        say("no node runs here now; one that starts waits until: swarm-node resume")
    elif runs == "learner":
        (data_dir / PAUSED_FILE).unlink()
        raise ConfigError("a learner is not paused, for its workers would wait: stop it instead")
    else:
        say("it pauses after its present round, and serves what it has: swarm-node resume")


def _resume(options: argparse.Namespace) -> None:
    from node.system.pause_rules import PAUSED_FILE

    data_dir: Path = options.data_dir
    try:
        (data_dir / PAUSED_FILE).unlink()
    except FileNotFoundError:
        raise ConfigError(f"--data-dir {data_dir}: no node is paused here") from None
    say("it goes on")


def running_role(data_dir: Path) -> str | None:
    """The role of the node that runs on a data directory; None: none runs."""
    from node.observe.status import fetch_status

    try:
        return fetch_status(data_dir).role
    except SwarmError:
        return None
