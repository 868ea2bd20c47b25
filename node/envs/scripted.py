"""A tiny environment without any dependency, for tests and simulations: add two small numbers."""

import json
import random

from node.envs.base import Problem
from swarm.errors import ConfigError
from swarm.rollouts import Task
from swarm.texts import printable

_MAX_DEFAULT = 9
_MAX_MOST = 10**9
_TEXT_CHARS_MAX = 16


class ScriptedSum:
    """Prompt `3+4=`, answer `7`. The one parameter is `max`, the largest summand."""

    name = "scripted_sum"
    version = "1"

    def problem(self, task: Task) -> Problem:
        parameters = json.loads(task.parameters)
        largest = parameters.pop("max", _MAX_DEFAULT)
        if parameters or type(largest) is not int or not 1 <= largest <= _MAX_MOST:
            given = printable(task.parameters, 100)
            raise ConfigError(f"{self.name} parameters {given}: give max, 1 to {_MAX_MOST:,}")
        rng = random.Random(task.seed + task.index)
        left, right = rng.randint(0, largest), rng.randint(0, largest)
        return Problem(task, f"{left}+{right}=", str(left + right), {})

    def score(self, problem: Problem, text: str) -> float:
        if len(text) > _TEXT_CHARS_MAX:
            return 0.0
        return 1.0 if text.strip() == problem.answer else 0.0
