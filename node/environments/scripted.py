"""A tiny environment without any dependency, for tests and simulations: add two small numbers."""

import json
import random

from node.environments.base import Problem
from swarm.errors import ConfigError
from swarm.rollouts import Task

_MAX_DEFAULT = 9
_TEXT_CHARS_MAX = 16


class ScriptedSum:
    """Prompt `3+4=`, answer `7`. The one parameter is `max`, the largest summand."""

    name = "scripted_sum"
    version = "1"

    def problem(self, task: Task) -> Problem:
        parameters = json.loads(task.parameters)
        largest = parameters.pop("max", _MAX_DEFAULT)
        if parameters or not isinstance(largest, int) or largest < 1:
            raise ConfigError(f"{self.name} parameters {task.parameters}: give max, at least 1")
        rng = random.Random(task.seed + task.index)
        left, right = rng.randint(0, largest), rng.randint(0, largest)
        return Problem(task, f"{left}+{right}=", str(left + right), {})

    def score(self, problem: Problem, text: str) -> float:
        if len(text) > _TEXT_CHARS_MAX:
            return 0.0
        return 1.0 if text.strip() == problem.answer else 0.0
