"""The package that `swarm-node env new` writes."""

from string import Template
from typing import Final

MODULE: Final = '''\
"""Numbers to be written backwards."""

import json
import random

from node.environments.base import Problem
from swarm.errors import ConfigError
from swarm.rollouts import Task

TEXT_CHARS_MAX = 64  # longer texts are worth 0 unread


class Puzzles:
    """Parameter `digits`: how many digits a number has, from 1 to 32; 4 by default."""

    name = "$name"
    version = "1"  # raise it when a problem, an answer or a score changes

    def problem(self, task: Task) -> Problem:
        parameters = json.loads(task.parameters)
        digits = parameters.pop("digits", 4)
        if parameters or not isinstance(digits, int) or not 1 <= digits <= 32:
            raise ConfigError(f"environment {self.name}: give digits, from 1 to 32")
        rng = random.Random(task.seed + task.index)  # the one source of chance
        number = "".join(rng.choices("123456789", k=digits))
        return Problem(task, f"Write {number} backwards.", number[::-1], {})

    def score(self, problem: Problem, text: str) -> float:
        if len(text) > TEXT_CHARS_MAX:
            return 0.0
        return float(text.strip() == problem.answer)
'''
PROJECT: Final = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "$name"
version = "1"
dependencies = ["swarm-node"]

[project.entry-points."swarm_node.environments"]
$name = "$name:Puzzles"

[tool.setuptools]
py-modules = ["$name"]
"""
TEST: Final = '''\
"""Whether strangers' text may be given to it, and what its answers are worth."""

import subprocess
import sys

from $name import Puzzles
from swarm.rollouts import Task


def test_it_is_fit_for_strangers() -> None:
    subprocess.run([sys.executable, "-m", "node.cli", "env", "check", "$name:Puzzles"], check=True)


def test_a_wrong_answer_is_worth_nothing() -> None:
    source = Puzzles()
    problem = source.problem(Task(source.name, source.version, "{}", 1, 0))
    assert [source.score(problem, text) for text in (problem.answer, "0")] == [1.0, 0.0]
'''


def template(name: str) -> dict[str, str]:
    """The texts of the package, by their paths in it."""
    files = {f"{name}.py": MODULE, "pyproject.toml": PROJECT, f"test_{name}.py": TEST}
    return {path: Template(text).substitute(name=name) for path, text in files.items()}
