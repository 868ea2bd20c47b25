"""Write a Python function: tasks from `function_specs`, scored by the share of tests passed.

The code of an answer runs in a child of `node.sandbox.runner`, which gets the inputs and not the
expected results. A run that ends near a limit is undecided, because another machine may decide
otherwise. The answer format `code` fits best.
"""

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from node.envs.answers import ANSWER_CHARS_MAX
from node.envs.base import Problem, Undecided
from node.envs.function_specs import KINDS, Spec, draw_spec
from node.sandbox import runner
from swarm.errors import ConfigError
from swarm.rollouts import Task

TESTS_DEFAULT, TESTS_MIN, TESTS_MAX = 12, 4, 40
_RESULTS_MIN = 3  # different results in a task's tests, so that no constant passes most of them
_DRAWS_MAX = 20
FUNCTION = "solve"


class PythonFunction:
    """Parameters: `tests` of each task, and `kinds` of functions (`function_specs.KINDS`)."""

    name = "python_function"
    version = "1"
    runs_code = True

    def problem(self, task: Task) -> Problem:
        tests, kinds = _settings(task.parameters)
        rng = Random(f"{task.seed}/{task.index}")
        spec = draw_spec(rng, kinds)
        calls, expected = _tests(spec, rng, tests + 1)
        shown = ", ".join(map(repr, calls[0]))
        prompt = (
            f"Write a Python function `{FUNCTION}({spec.signature})`. {spec.about}. {spec.task}\n"
            f"For example, `{FUNCTION}({shown})` returns `{expected[0]!r}`.\n"
            "Give the whole function, with what it imports, in one block of code, and nothing "
            "after it."
        )
        return Problem(task, prompt, spec.source, {"calls": calls[1:], "expected": expected[1:]})

    def score(self, problem: Problem, text: str) -> float:
        return share_passed(results(text, problem.entry["calls"]), problem.entry["expected"])


def results(text: str, calls: Sequence[Sequence[Any]]) -> Sequence[tuple[Any] | None]:
    """The result of a text's function for each list of arguments; None: it failed. Raises as
    `decided` and `runner.run`."""
    if len(text) > ANSWER_CHARS_MAX:
        return [None] * len(calls)
    ran = decided(runner.run(text, FUNCTION, calls))
    return ran.results if ran.ended == "done" else [None] * len(calls)


def decided(ran: runner.RunResult) -> runner.RunResult:
    """The run; Undecided if another machine may end it otherwise."""
    if ran.ended == "undecided":
        raise Undecided(f"after {ran.lines} lines and {ran.cpu_s:.2f} s")
    return ran


def share_passed(found: Sequence[tuple[Any] | None], expected: Sequence[Any]) -> float:
    pairs = zip(found, expected, strict=True)
    return sum(each is not None and _same(each[0], right) for each, right in pairs) / len(expected)


def _settings(parameters: str) -> tuple[int, tuple[str, ...]]:
    settings: Mapping[str, Any] = json.loads(parameters)
    tests, kinds = settings.get("tests", TESTS_DEFAULT), settings.get("kinds", list(KINDS))
    if not (
        settings.keys() <= {"tests", "kinds"}
        and type(tests) is int
        and TESTS_MIN <= tests <= TESTS_MAX
        and isinstance(kinds, list)
        and kinds
        and all(each in KINDS for each in kinds)
    ):
        raise ConfigError(
            f"{PythonFunction.name} parameters {parameters}: give tests, {TESTS_MIN} to "
            f"{TESTS_MAX}, and kinds, a list of some of {', '.join(KINDS)}"
        )
    return tests, tuple(kinds)


def _tests(spec: Spec, rng: Random, count: int) -> tuple[list[list[Any]], list[Any]]:
    """Arguments, and the right function's results, as plain JSON values."""
    names: dict[str, Any] = {}
    exec(spec.source, names)
    right = names[FUNCTION]
    for _ in range(_DRAWS_MAX):
        calls = [spec.draw(rng) for _ in range(count)]
        copies = json.loads(json.dumps(calls))
        expected = json.loads(json.dumps([right(*arguments) for arguments in copies]))
        if len({json.dumps(each) for each in expected}) >= _RESULTS_MIN:
            break
    telling = max(range(count), key=lambda each: len(json.dumps(calls[each])))
    for values in (calls, expected):
        values.insert(0, values.pop(telling))  # the one that is shown
    return calls, expected


def _same(found: Any, right: Any) -> bool:
    """True if two plain values have one type and value: 1 is neither True nor 1.0."""
    if type(found) is not type(right):
        return False
    if isinstance(right, list):
        return len(found) == len(right) and all(map(_same, found, right))
    if isinstance(right, dict):
        return found.keys() == right.keys() and all(_same(found[key], right[key]) for key in right)
    return bool(found == right)
