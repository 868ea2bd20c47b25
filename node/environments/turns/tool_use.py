"""Tasks that are done with tools: a turn calls one, or is the answer."""

import random
from collections.abc import Mapping, Sequence
from typing import Final

from node.environments.base import Problem
from node.environments.turns.parameters import named, numbers
from node.environments.turns.tools import (
    Tool,
    answered,
    calculator,
    call_in,
    file_tree,
    search,
    written,
)
from swarm.rollouts import Task

CALLS_MAX: Final = 4
_WORDS: Final = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath")


class ToolTask:
    """The common part of such tasks: up to `CALLS_MAX` calls, then an answer."""

    turns_max = CALLS_MAX + 1

    def begin(self, problem: Problem) -> int:
        """The calls that were made."""
        return 0

    def reply(self, problem: Problem, state: int, text: str) -> tuple[int, str | None]:
        call = call_in(text)
        if call is None:
            return state, None
        return state + 1, answered(self._tools(problem), call)

    def _tools(self, problem: Problem) -> Mapping[str, Tool]:
        raise NotImplementedError

    def worth(self, problem: Problem, texts: Sequence[str]) -> float:
        """1 where the last turn is the answer and nothing else."""
        return float(bool(texts) and texts[-1] == problem.answer)

    def score(self, problem: Problem, text: str) -> float:
        return self.worth(problem, (text,))


class CalculatorSum(ToolTask):
    """Prompt `57*13+8=`, with a calculator. The one parameter is `max`, the largest number."""

    name = "calculator_sum"
    version = "1"
    tools = frozenset({"calculator"})

    def problem(self, task: Task) -> Problem:
        largest = numbers(task, {"max": (99, 2, 10_000)})["max"]
        rng = random.Random(task.seed + task.index)
        a, b, c = (rng.randint(2, largest) for _ in range(3))
        return Problem(task, f"{a}*{b}+{c}=", str(a * b + c), {"sum": f"{a}*{b}+{c}"})

    def _tools(self, problem: Problem) -> Mapping[str, Tool]:
        return {"calculator": calculator}

    def right(self, problem: Problem) -> tuple[str, ...]:
        """One call."""
        return written("calculator", problem.entry["sum"]), problem.answer


class FileLookup(ToolTask):
    """A number that stands in a file, whose path a search tells. Parameters: `files`."""

    name = "file_lookup"
    version = "1"
    tools = frozenset({"files", "search"})

    def problem(self, task: Task) -> Problem:
        count = numbers(task, {"files": (4, 2, len(_WORDS))})["files"]
        rng = random.Random(task.seed + task.index)
        names = rng.sample(_WORDS, count)
        folders = [rng.choice(_WORDS) for _ in names]
        files = {
            f"{folder}/{name}": str(rng.randint(10, 99))
            for folder, name in zip(folders, names, strict=True)
        }
        corpus = [
            f"{name} is in {folder}/{name}" for folder, name in zip(folders, names, strict=True)
        ]
        path = f"{folders[0]}/{names[0]}"
        entry = {"files": files, "corpus": corpus, "path": path, "name": names[0]}
        return Problem(task, named(rng, f"number in {names[0]}:"), files[path], entry)

    def _tools(self, problem: Problem) -> Mapping[str, Tool]:
        return {
            "files": file_tree(problem.entry["files"]),
            "search": search(problem.entry["corpus"]),
        }

    def right(self, problem: Problem) -> tuple[str, ...]:
        """Search, read, answer."""
        return (
            written("search", problem.entry["name"]),
            written("files", f"read {problem.entry['path']}"),
            problem.answer,
        )
