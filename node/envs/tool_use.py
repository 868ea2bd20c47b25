"""Tools that a policy calls in text: pure, bounded, the same on every machine.

The first `<tool>name: argument</tool>` of a turn is the call. Its result is
`<result>text</result>`, also for an error.
"""

import ast
import random
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Final

from node.envs.base import Problem
from node.envs.games import named, numbers
from swarm.rollouts import Task

CALL: Final = re.compile(r"<tool>\s*([a-z_]{1,32})\s*:(.*?)</tool>", re.DOTALL)
_END: Final = "</tool>"
EXPRESSION_CHARS_MAX: Final = 128
RESULT_CHARS_MAX: Final = 1_024
FOUND_MAX: Final = 3  # documents that a search names

Tool = Callable[[str], str]  # an argument to a result


def call_in(text: str) -> tuple[str, str] | None:
    """The tool and argument of a turn's first call; None: it has none, and is an answer."""
    # Only up to the last end: without one, each of many beginnings would search the whole text.
    found = CALL.search(text, 0, max(0, text.rfind(_END) + len(_END)))
    return None if found is None else (found[1], found[2].strip())


def written(name: str, argument: str) -> str:
    """A call as text."""
    return f"<tool>{name}: {argument}</tool>"


def answered(tools: Mapping[str, Tool], name: str, argument: str) -> str:
    if name in tools:
        result = tools[name](argument)
    else:
        result = f"no tool {name}; there are: {', '.join(sorted(tools))}"
    return f"<result>{result[:RESULT_CHARS_MAX]}</result>"


_OPERATIONS: Final[Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: lambda a, b: a % b,
}


def calculator(argument: str) -> str:
    """Whole numbers with + - * / // % and parentheses, exactly."""
    if len(argument) > EXPRESSION_CHARS_MAX:
        return f"over {EXPRESSION_CHARS_MAX} characters"
    if not re.fullmatch(r"[0-9+\-*/%() ]*", argument) or "**" in argument:
        return "only whole numbers and + - * / // % ( )"
    try:
        return str(_value(ast.parse(argument.strip(), mode="eval").body))
    except ZeroDivisionError:
        return "division by zero"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "not an expression"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return -_value(node.operand) if isinstance(node.op, ast.USub) else _value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError


def file_tree(files: Mapping[str, str]) -> Tool:
    """Files in memory, by path: `list FOLDER` and `read PATH`."""

    def look(argument: str) -> str:
        verb, _, path = argument.partition(" ")
        path = path.strip().strip("/")
        if verb == "read":
            return files.get(path, f"no file {path[:64]}")
        if verb == "list":
            inside = f"{path}/" if path else ""
            names = {each[len(inside) :].split("/")[0] for each in files if each.startswith(inside)}
            return " ".join(sorted(names)) or f"no folder {path[:64]}"
        return "list FOLDER or read PATH"

    return look


def search(corpus: Sequence[str]) -> Tool:
    """A search of a corpus: the documents with most of the wanted words, earlier ones first."""
    words = [frozenset(re.findall(r"\w+", document.lower())) for document in corpus]

    def find(argument: str) -> str:
        asked = set(re.findall(r"\w+", argument.lower()))
        hits = [len(asked & each) for each in words]
        best = sorted((at for at, n in enumerate(hits) if n), key=lambda at: (-hits[at], at))
        return "\n".join(corpus[at] for at in best[:FOUND_MAX]) or "nothing found"

    return find


CALLS_MAX: Final = 4
_WORDS: Final = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath")


class ToolTask:
    """A task of up to `CALLS_MAX` calls, then an answer."""

    turns_max = CALLS_MAX + 1

    def begin(self, problem: Problem) -> int:
        """The number of calls."""
        return 0

    def reply(self, problem: Problem, state: int, text: str) -> tuple[int, str | None]:
        call = call_in(text)
        if call is None:
            return state, None
        return state + 1, answered(self._tools(problem), *call)

    def _tools(self, problem: Problem) -> Mapping[str, Tool]:
        raise NotImplementedError

    def worth(self, problem: Problem, texts: Sequence[str]) -> float:
        """1 if the last turn is exactly the answer."""
        return float(bool(texts) and texts[-1] == problem.answer)

    def of_turn(self, problem: Problem, texts: Sequence[str]) -> float:
        """1 for the turn that `right` has at its place."""
        return float(tuple(texts[-1:]) == self.right(problem)[len(texts) - 1 : len(texts)])

    def score(self, problem: Problem, text: str) -> float:
        return self.worth(problem, (text,))

    def right(self, problem: Problem) -> tuple[str, ...]:
        raise NotImplementedError


class CalculatorSum(ToolTask):
    """Prompt `57*13+8=`, with a calculator. Parameter: `max`, the largest number."""

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
        return written("calculator", problem.entry["sum"]), problem.answer


class FileLookup(ToolTask):
    """A number in a file, whose path a search tells. Parameter: `files`."""

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
        return (
            written("search", problem.entry["name"]),
            written("files", f"read {problem.entry['path']}"),
            problem.answer,
        )
