"""A machine without torch: what works there, and what is said where it does not."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from coordinator.providers import skypilot
from node.engines.vllm import engine as vllm_engine
from node.policies import frozen
from node.system.extras import packages_of

ROOT = Path(__file__).parents[2]
# As where the extra `torch` is not installed, from the first import on.
WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {packages} else found(name, *rest)
from node.cli import main
sys.exit(main({arguments}))
"""
EXTRA = ("torch", "transformers", "peft", "gguf")


def run(tmp_path: Path, *arguments: str, packages: tuple[str, ...] = EXTRA) -> tuple[int, str]:
    """Its exit status and all that it printed."""
    program = WITHOUT.format(packages=packages, arguments=list(arguments))
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("command", ["join --model tiny", "prepare --model tiny", "methods"])
def test_what_takes_torch_says_in_one_line_how_it_is_had(command: str, tmp_path: Path) -> None:
    status, said = run(tmp_path, *command.split())
    assert status == 2
    assert "install 'gguf" in said
    assert "torch==" in said
    assert said.count("\n") == 1, said


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("simulate --scenario calm --nodes 3", "replay: swarm-node simulate"),
        ("config", "run.id = demo"),
        ("weights list", "weights"),
        ("env list", "chain_sum"),
        ("monitor --grafana", "swarm_"),
    ],
)
def test_what_works_without_torch(command: str, says: str, tmp_path: Path) -> None:
    _, said = run(tmp_path, *command.split())
    assert "Traceback" not in said
    assert "torch==" not in said
    assert says in said


def test_a_package_that_no_extra_brings_is_a_fault(tmp_path: Path) -> None:
    status, said = run(tmp_path, "simulate", "--scenario", "join", packages=("msgpack",))
    assert status == 1
    assert "ModuleNotFoundError" in said


@pytest.mark.slow
def test_the_doctor_goes_on_without_torch(tmp_path: Path) -> None:
    status, said = run(tmp_path, "doctor", "--model", "tiny")
    assert status == 1
    assert "fail  software: torch is not installed; to train or sample here: pip install" in said
    assert "model: not looked at" in said
    assert "hole punching" in said


def test_what_is_to_be_installed_goes_where_this_installation_is(tmp_path: Path) -> None:
    new = tmp_path / "mine"
    status, said = run(tmp_path, "env", "new", str(new), packages=("pip",))
    assert status == 0
    assert f"then uv pip install --python {sys.executable} ./mine" in said
    shutil.rmtree(new)
    assert "then pip install ./mine" in run(tmp_path, "env", "new", str(new), packages=())[1]


def test_a_name_that_is_none_gets_one_that_is(tmp_path: Path) -> None:
    status, said = run(tmp_path, "env", "new", str(tmp_path / "My-words"))
    assert status == 2
    assert "underscores; my_words would do" in said


def test_an_extra_is_installed_by_the_names_of_its_packages() -> None:
    """The project's own name is on no index."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert canonical(packages_of("data")) == canonical(extras["data"])
    assert canonical(packages_of("vllm")) == canonical([*extras["torch"], *extras["vllm"][1:]])
    (pinned,) = (each for each in extras["vllm"] if each.startswith("vllm=="))
    assert f"pip install {pinned} on" in vllm_engine.NOT_INSTALLED
    assert f"'{extras['quantised'][1]}'" == frozen.BITSANDBYTES
    assert f"pip install {extras['sky'][0]}" in skypilot.NOT_THERE


def canonical(requirements: Iterable[str]) -> set[Requirement]:
    return {Requirement(each) for each in requirements}


def test_no_page_and_no_message_installs_the_project_from_an_index() -> None:
    """Pages that say how a wheel or a checkout is installed name a file or a directory."""
    told = re.compile(r"pip install [^`\n]*(?<![/\w.])'?swarm[-_]node(?![\w-]*-0)")
    found = {
        str(path.relative_to(ROOT)): told.findall(path.read_text())
        for folder in ("node", "swarm", "coordinator", "docs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".toml", ".txt")
    }
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert told.search("pip install 'swarm-node[data]'")
    assert not told.search("uv tool install './swarm_node-0.1.0-py3-none-any.whl[torch]'")
