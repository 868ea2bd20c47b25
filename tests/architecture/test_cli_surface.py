"""Commands and flags, frozen: scripts and people rely on them."""

import argparse
import subprocess
import sys
from collections.abc import Iterator

from coordinator.cli import parser as coordinator_parser
from node.cli import _parser

SURFACE = {
    "join": "--advantage --allow --announce --checkpoint-every --control --correction "
    "--data-dir --draw --engine --engine-key-env --engine-quantization --engine-update "
    "--engine-url --evaluate-every --external --external-rule --generate --group-size --invite "
    "--invite-file --key-file --learning-rate --listen --local --log-json --lora-rank --loss "
    "--metrics-listen --model --no-dht --no-lan --no-relay --no-upnp --over-provision --peer "
    "--private --replay "
    "--report-to --role --rounds --run --seed --share --stop-after --telemetry --telemetry-ca "
    "--telemetry-interval --threads --tokens-per-s-max --verbose --web-name --yes -v",
    "learn": "--advantage --allow --announce --checkpoint-every --coordinator --correction "
    "--data-dir --evaluate-every --invite --invite-file --key-file --learning-rate --listen "
    "--log-json --lora-rank --loss --metrics-listen --model --no-dht --no-lan --no-relay "
    "--no-upnp --peer --private --report-to --run --seed --steps --stop-after "
    "--telemetry --telemetry-ca --telemetry-interval --threads --verbose --web-name --yes -v",
    "invite": "--data-dir",
    "data check": "--answer --choices --ignore-case --question --relative-tolerance --rule "
    "--scorer --tolerance file",
    "methods": "--engine --literature --run name",
    "doctor": "--data-dir --engine --engine-key-env --engine-quantization --engine-url --invite "
    "--invite-file --listen --lora-rank --model --peer --run --telemetry --telemetry-ca",
    "keygen": "--out --passphrase-env",
    "config": "--data-dir --learning-rate --lora-rank --model --run --yes",
    "status": "--data-dir --json",
    "samples": "--best --data-dir --foreign --worst -n",
    "top": "--broker --broker-ca --data-dir",
    "monitor": "--broker --broker-ca --broker-listen --grafana --listen --run-id --web-name",
    "eval": "--against --data-dir --lora-rank --model --run --samples --threads --yes",
    "export": "--adapter --data-dir --lora-rank --model --precision --push --run --threads --yes "
    "out",
    "chat": "--max-new-tokens --system --temperature directory",
    "report": "--out data_dirs",
    "prepare": "--data-dir --model --run --yes",
    "runs": "--invite --invite-file --peer",
    "completion": "shell",
    "clean": "--cache-dir --yes",
    "pause": "--data-dir",
    "resume": "--data-dir",
    "service install": "--name words",
    "service remove": "--name",
    "service logs": "--name",
    "model get": "--cache-dir name",
    "model ls": "--cache-dir",
    "env list": "",
    "env show": "--parameters name",
    "env try": "--max-new-tokens --model --parameters --seed name",
    "env check": "--parameters name",
    "env new": "directory",
    "simulate": "--nodes --plot --profile --scenario --seed",
    "weights ls": "data_dir",
    "weights publish": "--announce --data-dir --follow --key-file --listen --once --peer --policy "
    "--run --store-bytes directory",
    "weights fetch": "--announce --data-dir --follow --key-file --listen --out --peer --policy "
    "--publisher --run --store-bytes",
    "weights verify": "--against --manifest directory",
}
COORDINATOR = {
    "plan": "--example --file --json",
    "serve": "--data-dir --example --file --interval --invite --invite-file --keep-workers "
    "--key-file --peer --telemetry --telemetry-ca",
    "workers": "--data-dir --json",
    "drain": "--data-dir --undo worker",
    "dashboard": "--broker --broker-ca --data-dir --listen --token-env --web-name",
}


def surface(parser: argparse.ArgumentParser) -> dict[str, str]:
    return {name: " ".join(sorted(_names(command))) for name, command in _commands(parser)}


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Commands by name; one that has actions is these."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                inner = [(f"{name} {action}", each) for action, each in _commands(command)]
                yield from inner or [(name, command)]


def _names(parser: argparse.ArgumentParser) -> list[str]:
    named = [action.option_strings or [action.dest] for action in parser._actions]
    return [name for names in named for name in names if name not in ("-h", "--help")]


def test_commands_and_flags_are_as_promised() -> None:
    assert surface(_parser()) == SURFACE
    assert surface(coordinator_parser()) == COORDINATOR


LATE = {"trio", "pydantic", "psutil", "httpx", "torch", "plistlib", "rich", "starlette"}


def imported_by(statement: str) -> set[str]:
    program = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_the_command_line_is_there_before_what_takes_long_to_import() -> None:
    """Help takes a tenth of a second, and Ctrl-C within it leaves no traceback of an import."""
    assert imported_by("import node.cli") & LATE == set()
    assert imported_by("import node.cli\nimport node.monitor.status") & LATE != set()
