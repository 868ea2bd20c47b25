"""A second judge of what of a text is its answer: slow, by patterns and by trying every place.

It shares nothing with `node.envs.answers` but the limits. Its patterns may go back over a
text, so it looks at short ones.
"""

import re
import unicodedata
from collections import Counter

from node.envs.answers import ANSWER_CHARS_MAX
from node.envs.numerals import BLANKS_MAX, CLOSING_MARKS

TEXT_CHARS_MAX = 200  # of what is compared
ANY = "any"  # numbers of other shapes than a plain one

_BLANKS = "[ \n\t\r]"
_ENDING = re.compile("|".join((*map(re.escape, CLOSING_MARKS), f"{_BLANKS}+", ".")), re.DOTALL)
_PLAIN = re.compile(
    r"(?:|.*(?:=|\bis|\bso) )(?:\$|\*\*)?(?P<number>[-\N{MINUS SIGN}]?(?:0|[1-9][0-9]*)"
    r"(?:\.[0-9]*[1-9]|/[1-9][0-9]*)?)"
)


def reference(kind: str, text: str) -> str | None:
    """The answer, or None; `ANY` where it has no opinion."""
    if kind == "whole":
        return text
    if kind == "last_number":
        return _number(text)
    text = re.sub(rf"{_BLANKS}{{1,{BLANKS_MAX}}}\Z", "", text)
    if kind == "code":
        return _code(text)
    end = len(text) - len(_ending(text))
    if kind == "last_line":
        line = text[text.rfind("\n", 0, end) + 1 :]
        return _checked(line.lstrip()) if end and len(line) <= ANSWER_CHARS_MAX else None
    if kind == "tags":
        found = [each for each in range(len(text)) if text.startswith("</answer>", each)]
        inside = text[: found[-1]] if found else ""
        rest = text[found[-1] + len("</answer>") :] if found else ""
        if "<answer>" not in inside or _ending(rest) != rest:
            return None
        inside = inside.split("<answer>")[-1]
        return None if "</answer>" in inside else _checked(_margins(inside))
    if "\\boxed{" not in text:
        return None
    return _boxed(text.split("\\boxed{")[-1])


def _boxed(text: str) -> str | None:
    """The shortest beginning before a brace in which all braces are pairs."""
    hidden = re.sub(r"\\.", "xx", text, flags=re.DOTALL)
    for at in (each for each, char in enumerate(hidden) if char == "}"):
        if _nested(hidden[:at]):
            rest = text[at + 1 :]
            return _checked(_margins(text[:at])) if _ending(rest) == rest else None
    return None


def _ending(text: str) -> str:
    """The longest ending of marks, each once, and short rows of blanks."""
    for at in range(len(text) + 1):
        parts = _ENDING.findall(text[at:])
        rows = [part for part in parts if part.isspace()]
        marks = Counter(part for part in parts if not part.isspace())
        is_short = all(len(row) <= BLANKS_MAX for row in rows)
        if is_short and set(marks) <= set(CLOSING_MARKS) and max(marks.values(), default=0) <= 1:
            return text[at:]
    return ""


def _margins(text: str) -> str:
    text = re.sub(rf"\A{_BLANKS}{{1,{BLANKS_MAX}}}", "", text)
    return re.sub(rf"{_BLANKS}{{1,{BLANKS_MAX}}}\Z", "", text)


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
    """The number if it is plain, and after `=` or alone; None if no digit stands near the end."""
    bare = text[: len(text) - len(_ending(text))]
    if not re.search(r"[0-9]", bare[-16:]):
        return None
    found = _PLAIN.fullmatch(bare) if "\n" not in bare else None
    if found is None or len(bare) > 80 or "}" in text:
        return ANY
    number = found["number"].replace("\N{MINUS SIGN}", "-")
    return ANY if number.startswith("-0") else number
