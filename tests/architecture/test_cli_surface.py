"""Commands and flags, frozen: scripts and people rely on them."""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from coordinator.cli import parser as coordinator_parser
from node.cli import whole_parser
from node.config.described import settings_of
from node.config.node import NodeConfig

ROOT = Path(__file__).parents[2]
ROOMS = ("node", "swarm", "coordinator")
STYLES = {"--card", "--ink", "--line", "--page", "--soft"}
SWITCHES = (
    "clips-to-median dht engine-sleep lan pause-on-battery private relay returns-to-best "
    "step-guard upnp verbose yes"
)
SETTINGS = (
    "--activation-checkpointing --advantage --allow --announce --busy-share --cache-dir "
    "--checkpoint-every --checkpoints-kept --context-tokens-max --control --coordinator "
    "--correction --data-dir --device --draw --engine --engine-gpu-share --engine-gpus "
    "--engine-key-env "
    "--engine-prompts --engine-quantization --engine-requests-max --engine-tokenizer "
    "--engine-update --engine-url --evaluate-every --external --external-rule "
    "--fetch-bytes-per-s-max --filter --fork --foreign-logprob-min --foreign-share-max "
    "--foreign-weighting --forward --generate --group-size --help-all --invite --invite-file "
    "--key-file --kl-reset-every --kl-weight --learning-rate "
    "--listen --local --log --lora-alpha --lora-base --lora-rank --lora-targets --loss "
    "--metrics-listen --micro-batch-tokens --model --name --over-provision --passphrase-env --peer "
    "--pool-bytes-max --precision --preference --publish-precision --quiet-hours --record --replay "
    "--report-project "
    "--report-to --reward --role --rounds --run --seed --serve-bytes-per-s-max --share --steps "
    "--stop-after --task-seed "
    "--telemetry --telemetry-ca --telemetry-interval --threads --tokens-per-s-max "
    "--updates-per-batch --validation-tasks --verify-cpu-s --verify-read --verify-sandbox "
    "--warm-up-updates --web-name -v"
    + "".join(f" --{name} --no-{name}" for name in SWITCHES.split())
)
SURFACE = {
    "join": f"{SETTINGS} --dry-run --watch link",
    "learn": f"{SETTINGS} --dry-run",
    "config": SETTINGS,
    "invite": "--data-dir",
    "data check": "--answer --choices --ignore-case --model --question --relative-tolerance --rule "
    "--run --scorer --tolerance file",
    "sft": "--answer --batch --context-tokens-max --epochs --held-out --learning-rate --lora-rank "
    "--model --no-yes --out --question --run --seed --system --threads --yes data",
    "methods": "--engine --family --literature --run name words",
    "doctor": "--data-dir --device --engine --engine-key-env --engine-quantization --engine-url "
    "--invite --invite-file --listen --lora-rank --model --peer --run --telemetry --telemetry-ca",
    "keygen": "--out --passphrase-env",
    "status": "--data-dir --json",
    "logs": "--data-dir --follow -f -n",
    "samples": "--best --data-dir --foreign --worst -n",
    "top": "--broker --broker-ca --data-dir",
    "monitor": "--broker --broker-ca --broker-listen --grafana --listen --run-id --web-name",
    "eval": "--against --data-dir --lora-rank --model --run --samples --threads --no-yes --yes",
    "export": "--adapter --data-dir --lora-rank --model --precision --push --run --threads "
    "--no-yes --yes out",
    "chat": "--chat --max-new-tokens --system --temperature directory",
    "replay": "--round data_dir",
    "report": "--out data_dirs",
    "prepare": "--data-dir --model --run --no-yes --yes",
    "runs": "--cache-dir --invite --invite-file --mine --peer",
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
    "simulate": "--json --nodes --plot --profile --scenario --seed",
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


def in_order(flags: dict[str, str]) -> dict[str, str]:
    return {name: " ".join(sorted(told.split())) for name, told in flags.items()}


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
    assert surface(whole_parser()) == in_order(SURFACE)
    assert surface(coordinator_parser()) == in_order(COORDINATOR)


def test_every_setting_is_a_flag() -> None:
    options = {setting.option for setting in settings_of(NodeConfig).values()}
    assert options - set(SETTINGS.split()) == set()


# Of other programs that texts name.
OTHERS = {
    *("--build-arg", "--format", "--full", "--kill-after", "--logdir", "--max-restarts", "--net"),
    *("--no-python", "--nproc-per-node", "--overrides", "--port", "--project", "--property"),
    *("--install", "--python", "--query-gpu", "--reinstall", "--seconds", "--shutdown"),
    *("--torch-backend", "--worker-extension-cls"),
}
# An argument of a subprocess has a quote on both sides, a custom property of CSS is in a style.
NAMED = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\"\w-])")


def unknown_flags(text: str) -> set[str]:
    known = {*SETTINGS.split(), *OTHERS, "--help", "--version"}
    known |= {flag for told in (*SURFACE.values(), *COORDINATOR.values()) for flag in told.split()}
    return set(NAMED.findall(text)) - known


def test_every_flag_that_a_text_names_exists() -> None:
    pages = [*ROOT.glob("docs/*.md"), *(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE"))]
    modules = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    found = {
        str(path.relative_to(ROOT)): unknown
        for path in (*pages, ROOT / "swarm" / "PROTOCOL.md", *modules)
        if (unknown := unknown_flags(path.read_text()) - STYLES)
    }
    assert found == {}
    assert unknown_flags('f"--verify-reads {path}: run with `--peer`"') == {"--verify-reads"}


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
    assert imported_by("import node.cli\nimport node.observe.status") & LATE != set()
