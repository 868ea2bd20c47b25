"""What service managers read: a user unit of systemd, a launch agent of macOS."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

STOP_TIMEOUT_S: Final = 180  # a node that is told to leave saves first
RESTART_S: Final = 30
BAD_INPUT: Final = 2  # the exit status of wrong settings, which another start does not mend


@dataclass(frozen=True, slots=True)
class Service:
    """`words`: what is run, its program first. `environment`: a file with lines `NAME=value`."""

    name: str
    title: str
    words: Sequence[str]
    directory: Path  # where it runs
    environment: Path
    log: Path  # of macOS; systemd has its journal


def systemd_unit(service: Service) -> str:
    """As systemd.service(5) has it."""
    command = " ".join(_quoted(word) for word in service.words)
    return f"""\
[Unit]
Description={_escaped(" ".join(service.title.split()))}

[Service]
WorkingDirectory={_escaped(str(service.directory))}
EnvironmentFile=-{_escaped(str(service.environment))}
ExecStart={command}
KillMode=mixed
KillSignal=SIGINT
TimeoutStopSec={STOP_TIMEOUT_S}
Restart=on-failure
RestartSec={RESTART_S}
RestartPreventExitStatus={BAD_INPUT}

[Install]
WantedBy=default.target
"""


def launch_agent(service: Service) -> bytes:
    """As launchd.plist(5) has it."""
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
    """`%` begins a specifier."""
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    """One argument, whatever is in it: `$` begins a variable besides, and `\\` an escape."""
    text = _escaped(word).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return '"' + text.replace("\n", "\\n") + '"'
