"""An environment whose answers may be of any length: a sum, behind as many dots as one likes. One
task in ten begins with a `!`, which a policy can be taught to answer with many.

`experiment_partial.py` plugs it in, to have completions with a long tail of lengths.
"""

import json
import random

from node.environments.base import Problem
from swarm.errors import ConfigError
from swarm.rollouts import Task

NAME = "long_sum"
LONG_SHARE = 0.1  # of the tasks


class LongSum:
    """Prompt `3+4=` or `!3+4=`, answer `7`, and `.....7` is as good. Parameter `max`: the largest
    summand."""

    name = NAME
    version = "1"

    def problem(self, task: Task) -> Problem:
        largest = json.loads(task.parameters).get("max")
        if not isinstance(largest, int) or largest < 1:
            raise ConfigError(f"{self.name} parameters {task.parameters}: give max, at least 1")
        rng = random.Random(f"{task.seed}/{task.index}")
        left, right = rng.randint(0, largest), rng.randint(0, largest)
        mark = "!" if rng.random() < LONG_SHARE else ""
        return Problem(task, f"{mark}{left}+{right}=", str(left + right), {})

    def score(self, problem: Problem, text: str) -> float:
        return 1.0 if text.lstrip(".") == problem.answer else 0.0
