"""Tasks whose replies come from running the policy's code.

Such code may act otherwise on another machine, so a transcript whose replies differ is undecided,
and nobody is to blame (`scoring.py`).
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Final

from node.envs.answers import answer_in, written
from node.envs.base import Problem
from node.envs.games import named, numbers
from node.envs.python_function import (
    FUNCTION,
    PythonFunction,
    decided,
    results,
    share_passed,
)
from node.envs.tool_use import Tool, ToolTask
from node.envs.tool_use import written as call
from node.sandbox import runner
from swarm.rollouts import Task

TRIES: Final = 3  # at a function
TESTS_TOLD: Final = 3  # of a task's, to the policy
PYTHON_CHARS_MAX: Final = 2_048
_VALUE_CHARS_MAX: Final = 200
# Runs in the child of the runner, where an error is a missing result. Prints of plain values are
# kept; others, such as addresses, differ between machines.
_TOOL: Final = """
def said(text):
    lines = []
    plain = {str, int, float, bool, type(None)}
    def is_plain(value):  # of a list its elements, in no lines of Python
        kind = type(value)
        return kind in plain or kind in (list, tuple) and plain.issuperset(map(type, value))
    def keep(*values, sep=" ", end="\\n", file=None, flush=False):
        lines.append(sep.join(str(v) if is_plain(v) else "..." for v in values) + end)
    names = {"__name__": "__main__", "print": keep}
    try:
        code = compile(text, "<tool>", "eval")
    except SyntaxError:
        exec(compile(text, "<tool>", "exec"), names)
        return "".join(lines)[:2000]
    value = eval(code, names)
    if value is None:
        return "".join(lines)[:2000]
    return value[:2000] if type(value) is str else value
"""


def python(argument: str) -> str:
    """The value of an expression, or the output of a program. Raises as `decided` and
    `runner.run`."""
    if len(argument) > PYTHON_CHARS_MAX:
        return f"over {PYTHON_CHARS_MAX} characters"
    ran = decided(runner.run(_TOOL, "said", [[argument]]))
    if ran.ended == "over":
        return "stopped: it ran for too long"
    (found,) = ran.results
    if found is None:
        return "failed"
    return found[0].rstrip() if isinstance(found[0], str) else repr(found[0])


class PythonRepair:
    """A function to write in three tries; the reply to each names the first of three tests that it
    fails. Parameters: those of `python_function`."""

    name = "python_repair"
    version = "1"
    turns_max = TRIES
    tools = frozenset({"tests"})
    runs_code = True

    def __init__(self) -> None:
        self._source = PythonFunction()

    def problem(self, task: Task) -> Problem:
        return self._source.problem(task)

    def begin(self, problem: Problem) -> None:
        """No state: the reply follows from the try."""

    def reply(self, problem: Problem, state: None, text: str) -> tuple[None, str | None]:
        code = answer_in("code", text)
        if code is None:
            return None, "no code: give the whole function in one block of code"
        calls = problem.entry["calls"][:TESTS_TOLD]
        found = results(code, calls)
        for arguments, result, right in zip(calls, found, problem.entry["expected"], strict=False):
            if share_passed([result], [right]) < 1:
                came = "failed" if result is None else f"returned {_cut(repr(result[0]))}"
                shown = ", ".join(map(repr, arguments))
                wanted = _cut(repr(right))
                return None, f"{FUNCTION}({_cut(shown)}) {came}, and should return {wanted}"
        return None, None

    def worth(self, problem: Problem, texts: Sequence[str]) -> float:
        """The share of all tests that the last try passes."""
        code = answer_in("code", texts[-1]) if texts else None
        return 0.0 if code is None else self._source.score(problem, code)

    of_turn = worth

    def score(self, problem: Problem, text: str) -> float:
        return self.worth(problem, (text,))

    def right(self, problem: Problem) -> tuple[str, ...]:
        return (written("code", problem.answer),)


def _cut(text: str) -> str:
    return text if len(text) <= _VALUE_CHARS_MAX else f"{text[:_VALUE_CHARS_MAX]}..."


def _digits(rng: Random, largest: int) -> tuple[str, str]:
    base, power = rng.randint(2, largest), rng.randint(5, 40)
    return f"sum of the digits of {base}**{power}:", f"sum(map(int, str({base}**{power})))"


def _multiples(rng: Random, largest: int) -> tuple[str, str]:
    a, b = (rng.randint(2, largest) for _ in range(2))
    until = rng.randint(100, 999)
    shown = f"numbers from 1 to {until} that {a} or {b} divides, how many:"
    return shown, f"sum(n % {a} == 0 or n % {b} == 0 for n in range(1, {until + 1}))"


def _remainder(rng: Random, largest: int) -> tuple[str, str]:
    base, power, by = rng.randint(2, largest), rng.randint(100, 999), rng.randint(100, 999)
    return f"remainder of {base}**{power} by {by}:", f"pow({base}, {power}, {by})"


_QUESTIONS: Final = (_digits, _multiples, _remainder)


class PythonQuestion(ToolTask):
    """A number that a line of Python finds. Parameter: `max`, the largest number in it."""

    name = "python_question"
    version = "1"
    tools = frozenset({"python"})
    runs_code = True

    def problem(self, task: Task) -> Problem:
        largest = numbers(task, {"max": (20, 2, 99)})["max"]
        rng = Random(task.seed + task.index)
        prompt, expression = rng.choice(_QUESTIONS)(rng, largest)
        answer = str(int(eval(expression)))  # of the lines above, never of a text
        return Problem(task, named(rng, prompt), answer, {"expression": expression})

    def _tools(self, problem: Problem) -> Mapping[str, Tool]:
        return {"python": python}

    def right(self, problem: Problem) -> tuple[str, ...]:
        return call("python", problem.entry["expression"]), problem.answer
