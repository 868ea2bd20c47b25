"""What is installed where there is no checkout and no compiler: the wheel and the sdist, each into
an environment that was empty, with the versions of constraints.txt."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.nodes import ENVIRON, MakeNode

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
COMPILERS = ("cc", "gcc", "c++", "g++", "clang", "clang++", "x86_64-linux-gnu-gcc")
INSTALL_S = 600.0
# What uv needs of the settings of pip: see scripts/packages.sh.
UV = '. scripts/packages.sh; declare -a uv; set_uv; "${uv[@]}" "$@"'

Install = Callable[..., "Installed"]


@dataclass(frozen=True)
class Installed:
    """A tool of uv's."""

    directory: Path

    @property
    def python(self) -> str:
        return str(self.directory / "swarm-node" / "bin" / "python")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = self.directory / "bin" / "swarm-node"
        return subprocess.run(
            [str(command), *arguments],
            capture_output=True, text=True, check=False, cwd=self.directory, env=ENVIRON,
        )  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with what `make wheel` makes."""
    if not (ROOT / ".venv/bin/uv").exists():
        pytest.skip("NOT TESTED: uv is not in .venv, and pip has no overrides")
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([ROOT / "scripts/wheel.sh", out], check=True, capture_output=True)
    return out


@pytest.fixture(scope="module")
def install(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Install:
    """Installs what a pattern names into an environment of its own; nothing can be compiled."""
    without = tmp_path_factory.mktemp("without")
    for name in COMPILERS:
        (without / name).write_text("#!/bin/sh\necho this machine has no compiler >&2\nexit 1\n")
        (without / name).chmod(0o755)

    def make(pattern: str, extra: str = "") -> Installed:
        (file,) = built.glob(pattern)
        directory = tmp_path_factory.mktemp("tool")
        environ = os.environ | {
            "PATH": f"{without}:{os.environ['PATH']}",
            "CC": str(without / "cc"),
            "UV_TOOL_DIR": str(directory),
            "UV_TOOL_BIN_DIR": str(directory / "bin"),
            "UV_PYTHON": str(Path(ROOT / ".venv/bin/python").resolve()),
        }
        arguments = ["tool", "install", "--overrides", str(built / "overrides.txt")]
        arguments += ["--constraints", "constraints.txt", f"{file}{extra}"]
        done = subprocess.run(
            ["bash", "-c", UV, "bash", *arguments],
            capture_output=True, text=True, check=False, cwd=ROOT, env=environ, timeout=INSTALL_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return Installed(directory)

    return make


def test_the_sdist_alone_monitors_and_simulates_and_names_what_training_takes(
    install: Install,
) -> None:
    tool = install("*.tar.gz")
    manual = tool.directory / "swarm-node/share/man/man1/swarm-node.1"
    assert "\\-\\-peer" in manual.read_text()
    simulated = tool.run("simulate", "--scenario", "calm", "--nodes", "3")
    assert simulated.returncode == 0, simulated.stderr
    assert "schemaVersion" in tool.run("monitor", "--grafana").stdout
    joined = tool.run("join", "--model", "tiny", "--rounds", "1")
    assert (joined.returncode, joined.stderr.count("\n")) == (2, 1)
    assert "torch==" in joined.stderr


def test_two_nodes_of_the_wheel_train_on_each_other_s_groups(
    install: Install, make_node: MakeNode
) -> None:
    python = install("*.whl", "[torch]").python
    nodes = []
    for name in "ab":
        node = make_node(name, *(("--peer", nodes[0].address()) if nodes else ()))
        node.python = python
        node.environ = {"PYTHONSAFEPATH": "1"}  # the code of the wheel, not of this directory
        nodes.append(node.start())
    for node in nodes:
        node.until(lambda node=node: node.foreign_trained() > 0)
    assert [node.interrupt() for node in nodes] == [0, 0], [node.said() for node in nodes]
