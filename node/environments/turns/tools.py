"""Tools that a policy calls in text: pure, bounded, the same on every machine.

A call is `<tool>name: argument</tool>`, the first one of a turn, and its result
`<result>text</result>`. What a tool cannot do it says in its result.
"""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

CALL: Final = re.compile(r"<tool>\s*([a-z_]{1,32})\s*:(.*?)</tool>", re.DOTALL)
_END: Final = "</tool>"
EXPRESSION_CHARS_MAX: Final = 128
RESULT_CHARS_MAX: Final = 1_024
FOUND_MAX: Final = 3  # documents that a search names

Tool = Callable[[str], str]  # an argument to a result


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A turn's call of a tool."""

    name: str
    argument: str


def call_in(text: str) -> ToolCall | None:
    """The first call of a turn; None: it has none, and so is an answer."""
    # Up to the last end of a call: without one, each beginning of many would look for it in vain.
    found = CALL.search(text, 0, max(0, text.rfind(_END) + len(_END)))
    return None if found is None else ToolCall(found[1], found[2].strip())


def written(name: str, argument: str) -> str:
    """A call as text."""
    return f"<tool>{name}: {argument}</tool>"


def answered(tools: Mapping[str, Tool], call: ToolCall) -> str:
    """A call's result, as it is said to the policy."""
    tool = tools.get(call.name)
    if tool is None:
        result = f"no tool {call.name}; there are: {', '.join(sorted(tools))}"
    else:
        result = tool(call.argument)
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
    """A frozen corpus: the documents with most of the words that are asked for, earlier ones
    first."""
    words = [frozenset(re.findall(r"\w+", document.lower())) for document in corpus]

    def find(argument: str) -> str:
        asked = set(re.findall(r"\w+", argument.lower()))
        hits = [len(asked & each) for each in words]
        best = sorted((at for at, n in enumerate(hits) if n), key=lambda at: (-hits[at], at))
        return "\n".join(corpus[at] for at in best[:FOUND_MAX]) or "nothing found"

    return find
