"""A second judge of what of a text is its answer: slow, by patterns and by trying every place.

It shares nothing with `node.envs.answers` but the limits. Its patterns may go back over a
text, so it looks at short ones.
"""

import re
import unicodedata
from itertools import permutations

from node.envs.answers import ANSWER_CHARS_MAX, CLOSING_MARKS, NUMBER_CHARS_MAX

TEXT_CHARS_MAX = 200  # of what is compared

_INTEGER = r"(?:0|[1-9][0-9]*)"
_GROUPED = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+"
_NUMBER = re.compile(
    rf"(?P<fraction>{_INTEGER}/[1-9][0-9]*)|(?P<decimal>(?:{_GROUPED}|{_INTEGER})(?:\.[0-9]+)?)"
)
_ENDINGS = {
    "".join(marks)
    for count in range(len(CLOSING_MARKS) + 1)
    for marks in permutations(CLOSING_MARKS, count)
}


def reference(kind: str, text: str) -> str | None:
    """The answer, or None."""
    if kind == "whole":
        return text
    if kind == "last_number":
        return _number(text)
    if kind == "code":
        return _code(text)
    if kind == "last_line":
        line = text.split("\n")[-1]
        return _checked(line.lstrip()) if len(line) <= ANSWER_CHARS_MAX else None
    before, after = ("<answer>", "</answer>") if kind == "tags" else ("\\boxed{", "}")
    if not text.endswith(after) or before not in text[: -len(after)]:
        return None
    inside = text[: -len(after)].split(before)[-1]
    if kind == "tags" and after in inside:
        return None
    if kind == "boxed" and not _nested(inside):
        return None
    return _checked(re.sub(r"\A\s|\s\Z", "", inside))


def _code(text: str) -> str | None:
    """Line by line, from the last fence back to the one before."""
    lines = text.split("\n")
    if lines[-1] != "```" or "```" not in text[:-3]:
        return None
    begin = max(place for place, line in enumerate(lines[:-1]) if "```" in line)
    name, code = lines[begin].rpartition("```")[2], lines[begin + 1 : -1]
    if not re.fullmatch(r"```[A-Za-z0-9]*", lines[begin]) or lines[begin] != f"```{name}":
        return None
    text = "\n".join(code)
    seen = text.replace(" ", "x").replace("\t", "x").replace("\n", "x")
    if not text or any(_checked(f"{char}x") is None for char in seen):
        return None
    if any(line != line.rstrip(" \t") for line in code) or code[0] == "" or code[-1] == "":
        return None
    gaps = "".join("e" if line == "" else "-" for line in code)
    return None if "eee" in gaps else text


def _nested(text: str) -> bool:
    """Whether pairs of braces can be taken away until none is left."""
    braces = re.sub(r"[^{}]", "", text)
    while "{}" in braces:
        braces = braces.replace("{}", "")
    return not braces


def _checked(text: str) -> str | None:
    seen = "".join(
        " " if unicodedata.category(char) == "Cf" or char in "\u2800\u3164" else char
        for char in text
    )
    return text if seen and seen == seen.strip() and not re.search(r"\s\s", seen) else None


def _number(text: str) -> str | None:
    """Of all ways to end, the longest row of marks; then the row of number characters before it."""
    ending = max((each for each in _ENDINGS if text.endswith(each)), key=len)
    text = text[: len(text) - len(ending)]
    row = re.search(r"[0-9.,/]*\Z", text)
    assert row is not None
    before, found = text[: row.start()], _NUMBER.fullmatch(row.group())
    if (
        found is None
        or len(row.group()) > NUMBER_CHARS_MAX
        or (row.group().endswith("000") and "." in row.group())
    ):
        return None
    if re.search(r"[A-Za-z][-+\N{MINUS SIGN}]\Z|[A-Za-z_]\Z", before) or before[-1:].isnumeric():
        return None
    if found["fraction"] and re.search(r"[0-9]\s\Z", before):
        return None
    sign = before[-1:] in ("-", "\N{MINUS SIGN}") and before != "" and not _operand(before[-2:-1])
    return ("-" if sign else "") + row.group().replace(",", "")


def _operand(char: str) -> bool:
    return char != "" and (char.isalnum() or char in ")]}._")
