"""An environment whose problems cost what its parameters say."""

import json
from contextlib import suppress
from pathlib import Path

from node.envs.base import Problem
from swarm.rollouts import Task


class Greedy:
    """Parameters: `bytes` that a problem holds, `spins`: whether it never ends, `file`: what its
    answer is if that can be read."""

    name = "greedy"
    version = "1"

    def problem(self, task: Task) -> Problem:
        """See `Environment.problem`."""
        asked = json.loads(task.parameters)
        bytearray(asked.get("bytes", 0))
        while asked.get("spins"):
            with suppress(Exception):  # as a library might, between two draws
                json.loads("[]")
        answer = "nothing"
        with suppress(OSError):
            answer = Path(asked.get("file", "")).read_text()
        return Problem(task, f"{task.seed} {task.index}?", answer, {})

    def score(self, problem: Problem, text: str) -> float:
        """See `Environment.score`."""
        return float(text == problem.answer)
