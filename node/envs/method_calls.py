"""Calls of an object's methods in a policy's text: how they are described, read and answered.

The form is that of the chat templates of Hermes and Qwen, as plain text, so that it is the same for
all models of a run. `tool_use.py` has a shorter form for the built-in tools.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

CALLS_MAX: Final = 16  # in a turn
BRACKETS_MAX: Final = 256  # in a call outside of its strings, so that reading it is shallow
CUT: Final = "…"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_THOUGHT, _THOUGHT_END = "<think>", "</think>"
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+>")  # of an object, another one in each process
_TOLD: Final = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{}\n"
    "</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


class MethodCall(NamedTuple):
    name: str
    arguments: Any  # of a sound call a table


def described(schemas: Sequence[Mapping[str, Any]]) -> str:
    """The part of a prompt that tells of the tools; empty without any."""
    if not schemas:
        return ""
    return _TOLD.format("\n".join(json.dumps(each, ensure_ascii=False) for each in schemas))


def written(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as text."""
    called = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{_CALL}\n{called}\n{_CALL_END}"


def calls_in(text: str) -> list[MethodCall]:
    """The calls of a turn; none if one of them is malformed, which makes the whole turn text."""
    before, closed, after = text.partition(_THOUGHT_END)
    said = after if closed else before
    if not closed and said.lstrip().startswith(_THOUGHT):
        return []
    found: list[MethodCall] = []
    for part in said.split(_CALL)[1:]:
        written_call, ended, _ = part.partition(_CALL_END)
        call = _read(written_call) if ended else None
        if call is None:
            return []
        found.append(call)
    return found


def _read(text: str) -> MethodCall | None:
    bare = _STRING.sub("", text)
    if bare.count("{") + bare.count("[") > BRACKETS_MAX:
        return None
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments")
    return MethodCall(value["name"], {} if arguments is None else arguments)


def _no_constant(name: str) -> Any:
    raise ValueError(name)  # NaN and the like are no JSON


def plain(result: Any) -> str:
    """A method's result as text: text blocks joined, else its `str`."""
    if isinstance(result, list) and all(
        isinstance(each, Mapping) and each.get("type") == "text" for each in result
    ):
        result = "".join(str(each.get("text", "")) for each in result)
    return _ADDRESS.sub(" at 0x>", str(result))


def answered(results: Sequence[str], chars_max: int) -> str:
    """Results as the reply to a turn, each cut so that all of them fit."""
    around = len(_answer("")) + 1
    room = max(0, chars_max // len(results) - around)
    cut = (each if len(each) <= room else each[: max(0, room - 1)] + CUT for each in results)
    return "\n".join(map(_answer, cut))


def _answer(result: str) -> str:
    return f"<tool_response>\n{result}\n</tool_response>"
