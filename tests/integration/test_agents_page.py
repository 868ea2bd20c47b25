"""AGENTS.md, followed command by command by a process that knows nothing else."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.nodes import COMMAND_TIMEOUT_S, ENVIRON

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
LINES_MAX = 80
FILES = {"mine.toml": "toml", "mine.py": "python"}  # that the page says to write


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


def test_its_commands_work_in_their_order(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    text = (ROOT / "AGENTS.md").read_text()
    assert text.count("\n") <= LINES_MAX
    for name, kind in FILES.items():
        (written,) = blocks(text, kind)
        (tmp_path / name).write_text(written)
    program = tmp_path / "bin" / "swarm-node"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m node.cli "$@"\n')
    program.chmod(0o755)
    environ = {
        **ENVIRON,
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "SWARM_NODE_CACHE_DIR": str(prepared[1]),
    }
    commands = [line for block in blocks(text, "sh") for line in block.splitlines()]
    said = {command: _run(command, tmp_path, environ) for command in commands}
    assert len(said) == 11
    assert '"event": ' in said["tail -n 1 first/events.jsonl"]
    assert "first" in said["swarm-node runs --mine"]
    (checked,) = (told for command, told in said.items() if "env check" in command)
    assert checked.endswith("fit for strangers\n")
    assert (tmp_path / "report" / "report.html").exists()


def _run(command: str, directory: Path, environ: dict[str, str]) -> str:
    """What a command says. `PYTHONPATH` of the page comes before that of the tests."""
    done = subprocess.run(
        ["bash", "-c", command.replace("PYTHONPATH=my_puzzles", f"PYTHONPATH=my_puzzles:{ROOT}")],
        cwd=directory, env=environ, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S,
        check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout
