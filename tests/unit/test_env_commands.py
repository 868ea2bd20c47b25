"""`swarm-node env`: what it shows, what it finds out, and the page that says how to write one."""

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from node.cli import main
from node.envs.base import Interaction
from node.envs.gym.datasets import GROUPS, OFFERED, REFUSED
from node.envs.registry import environment
from node.envs.trial import tasks_of
from swarm.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "environments.md").read_text()
UNFIT = {
    "Hashed": "16 of 16 problems are others in another process",
    "Remembering": "problems are others in another process",
    "Wrong": "16 of 16 own answers are worth less than 1",
    "Slow": "ms of CPU, 100 may be",
    "Endless": "the text '[[]]' took over 2 s of CPU: bound",
    "Hungry": "MiB more, 64 may be",
    "Coded": "it runs an answer as code",
    "Lax": "worth 1: a word behind the answer",
    "Generous": "out of [0, 1]",
    "Moody": "another reward the second time",
    "Threaded": "1 threads run on",
    "Leaving": "ended its process with status 3",
}
FOREIGN = ("environment_factory", "verifiers", "verifiers_tools")
QUICK = ("Hashed", "Hungry", "Coded", "Lax")


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["env", *arguments])
    return status, capsys.readouterr().out


def test_the_list_has_every_name_once_and_every_reason(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = ask(capsys, "list")
    assert status == 0
    listed = [name for line in out.splitlines() for name in line.partition(": ")[2].split(", ")]
    assert all(listed.count(name) == 1 for name in (*OFFERED, "scripted_sum", *FOREIGN))
    assert all(f"  {name}: {reason}\n" in out for name, reason in REFUSED.items())
    assert all(f"{group} ({group}-" in out for group in GROUPS)


def test_one_is_shown_with_its_bounds_and_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = ask(capsys, "show", "coin_flip")
    assert status == 0
    source = environment("coin_flip")
    problem = source.problem(tasks_of(source, "{}", 1)[0])
    for line in (
        f"coin_flip, version {source.version}",
        "scorer: ours",
        "max_trials: 15, at most 40",
        problem.prompt,
        problem.answer,
    ):
        assert line in out


@pytest.mark.parametrize(("typed", "worth"), [("8\n", "1.0"), ("7", "0.0")])
def test_a_typed_answer_is_scored(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, typed: str, worth: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    status, out = ask(capsys, "try", "scripted_sum")
    assert status == 0
    assert f"0+8=\nworth {worth}\n" in out


def test_one_that_answers_is_played_line_by_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = environment("text_maze")
    assert isinstance(source, Interaction)
    problem = source.problem(tasks_of(source, "{}", 1)[0])
    right = source.right(problem)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{each}\n" for each in right)))
    status, out = ask(capsys, "try", "text_maze")
    assert status == 0
    assert out.count("--- it answers:") == len(right) - 1
    assert "worth 1.0\n" in out


def test_one_that_answers_is_checked_by_its_turns(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = ask(capsys, "check", "text_maze")
    assert (status, "its own answers are worth 1" in out) == (0, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "codeio"],
        ["show", "nonesuch"],
        ["check", "no.such.module:Thing"],
        ["check", "scripted_sum", "--parameters", "[]"],
        ["check", "scripted_sum", "--parameters", '{"min": 2}'],
        ["new", "Not-A-Name"],
        ["new", "tests"],
    ],
)
def test_what_is_wrong_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["env", *arguments]) == 2
    assert re.fullmatch(r"swarm-node: [^\n]+\n", capsys.readouterr().err)


def test_a_fit_one_is_found_fit(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = ask(capsys, "check", "scripted_sum", "--parameters", '{"max": 99}')
    assert (status, "FAIL" in out) == (0, False)
    assert out.endswith("\nfit for strangers\n")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in UNFIT]
)
def test_each_fault_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    status, out = ask(capsys, "check", f"tests.unit.unfit_environments:{name}")
    assert status == 1
    assert any(line.startswith("FAIL") and UNFIT[name] in line for line in out.splitlines()), out
    assert "\nnot fit for strangers: " in out


def test_the_page_can_be_followed(tmp_path: Path) -> None:
    """Line by line, with what is installed in a folder of its own."""
    (commands,) = re.findall(r"```sh\n(swarm-node env new .*?)```", PAGE, re.DOTALL)
    installed = tmp_path / "installed"
    environ = {**os.environ, "PYTHONPATH": f"{installed}{os.pathsep}{ROOT}"}
    python = {
        "swarm-node": [sys.executable, "-m", "node.cli"],
        "pip": [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check"],
        "pytest": [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
    }
    apart = ["--no-deps", "--no-build-isolation", "--quiet", "--target", str(installed)]
    said = {}
    for line in commands.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        command = [*python[program], *arguments, *(apart if program == "pip" else [])]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environ,
            input="4321",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        said[line.partition("#")[0].strip()] = done.stdout
    assert "plugged in: my_puzzles\n" in said["swarm-node env list"]
    assert said["swarm-node env check my_puzzles"].endswith("fit for strangers\n")
    assert "\nworth 0.0\n" in said["swarm-node env try my_puzzles"]


def test_the_module_on_the_page_has_about_thirty_lines() -> None:
    from node.commands.environments import template

    assert len(template("my_puzzles")["my_puzzles.py"].splitlines()) <= 36


def test_one_that_is_written_and_not_installed_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="mine: no such environment; swarm-node env list"):
        environment("mine")
    (tmp_path / "mine" / "pyproject.toml").touch()
    with pytest.raises(ConfigError, match=r"no such environment; pip install \./mine first; "):
        environment("mine")
