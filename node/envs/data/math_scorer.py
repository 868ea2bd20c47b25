"""Texts that equal the answer as mathematics, such as `1/2`, `0.5` and `\\frac{1}{2}`. Only this
file imports `math_verify`, which parses LaTeX and compares by sympy.

sympy expands powers and products without a bound, and its parsers backtrack. So strangers' texts
reach it only in a small grammar: known commands, single letters, short numbers, and bounds on
length, nesting, powers and the number of expanded terms. Other texts are worth 0 unread. A timer of
the process's CPU time ends slow ones.
"""

import functools
import logging
import math
import re
from typing import Any, Final

from node.envs.answers import BOX
from node.envs.base import Undecided
from node.envs.data.items import Item
from node.envs.data.scorers import ItemScorer, Settings, installed
from node.sandbox.bounds import OutOfTime, cpu_bound

TEXT_CHARS_MAX: Final = 160
NUMBER_DIGITS_MAX: Final = 32
NESTING_MAX: Final = 5
LETTERS_MAX: Final = 4  # different ones
LETTERS_IN_ALL_MAX: Final = 32
ROOTS_MAX: Final = 4
FUNCTIONS_MAX: Final = 2  # sines, logarithms
POWERS_MAX: Final = 6
FRACTIONS_MAX: Final = 8
EXPONENT_MAX: Final = 12  # of what has letters or parentheses
NUMBERS_EXPONENT_MAX: Final = 128  # of a number
TERMS_MAX: Final = 64
TEXT_CPU_S: Final = 0.5
ANSWERS_READ_MAX: Final = 256

_FUNCTIONS: Final = (
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "ln", "log",
)  # fmt: skip
_FRACTIONS: Final = ("frac", "dfrac", "tfrac", "div")
_COMMANDS: Final = (
    *_FUNCTIONS, *_FRACTIONS, "sqrt", "pi", "cdot", "times", "pm", "left", "right",
    "infty", "cup", "cap", "in", "leq", "le", "geq", "ge", "neq", "ne", "alpha", "beta", "theta",
    "circ", "quad",
)  # fmt: skip
_TOKEN: Final = re.compile(
    r"\\(?P<command>[a-z]+)|(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<letter>[A-Za-z])"
    r"|(?P<other>\\[ ,;!{}%]|[-+*/^=<>(),|.:%\[\]{} ])"
)
_COUNTED: Final = (
    ("functions", frozenset(f"\\{name}" for name in _FUNCTIONS), FUNCTIONS_MAX),
    ("roots", frozenset({"\\sqrt"}), ROOTS_MAX),
    ("fractions", frozenset({"/", *(f"\\{name}" for name in _FRACTIONS)}), FRACTIONS_MAX),
    ("powers", frozenset({"^"}), POWERS_MAX),
)
_OPEN, _CLOSE = frozenset("([{"), frozenset(")]}")


class MathScorer(ItemScorer):
    """LaTeX or plain arithmetic that equals the answer's last `\\boxed{...}`, or the part after
    `####`, or all of it."""

    def __init__(self, settings: Settings) -> None:
        self.engine = f"math-verify-{installed('math', 'math-verify', 'math')}"

    def prepare(self) -> None:
        _warm_up()

    def own_answer(self, item: Item) -> str:
        answer = _bare(_final(item["answer"]))
        fault = grammar_fault(answer)
        if fault is not None:
            raise ValueError(f"an answer that the scorer math does not read ({fault})")
        return answer

    def score(self, item: Item, text: str) -> float:
        if len(text) > TEXT_CHARS_MAX:
            return 0.0
        text, answer = _bare(text), _bare(_final(item["answer"]))
        if grammar_fault(text) is not None or grammar_fault(answer) is not None:
            return 0.0
        if text == answer:
            return 1.0
        self.prepare()  # before the timer runs: an import that is cut off half-way stays so
        try:
            with cpu_bound(TEXT_CPU_S):
                return float(_equal(answer, text))
        except OutOfTime:  # a faster machine may finish
            raise Undecided from None


def _final(answer: str) -> str:
    begin = answer.rfind(BOX)
    if begin >= 0:
        depth, end = 1, begin + len(BOX)
        while end < len(answer) and depth:
            depth += (answer[end] == "{") - (answer[end] == "}")
            end += 1
        return answer[begin + len(BOX) : end - 1]
    return answer.rpartition("####")[2]


def _bare(text: str) -> str:
    """Without blanks and one pair of dollar signs around it."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text.strip("$").strip()
    return text


def grammar_fault(text: str) -> str | None:
    """The reason why a text is beyond the grammar; None: it may be parsed."""
    if not 0 < len(text) <= TEXT_CHARS_MAX:
        return f"empty, or over {TEXT_CHARS_MAX} characters"
    tokens = _tokens(text)
    if tokens is None:
        return "a sign or command that it does not know"
    letters = [token for token in tokens if token.isalpha()]
    if len(letters) > LETTERS_IN_ALL_MAX or len(set(letters)) > LETTERS_MAX:
        return f"over {LETTERS_MAX} different letters, or {LETTERS_IN_ALL_MAX} in all"
    for what, names, most in _COUNTED:
        if sum(token in names for token in tokens) > most:
            return f"over {most} {what}"
    return _nesting_fault(tokens) or _size_fault(tokens)


def _tokens(text: str) -> list[str] | None:
    found, at = [], 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            return None
        if token["command"] is not None and token["command"] not in _COMMANDS:
            return None
        if token["number"] is not None and len(token["number"]) > NUMBER_DIGITS_MAX:
            return None
        if token[0] != " ":
            found.append(token[0])
        at = token.end()
    return [token for token in found if token not in {"\\left", "\\right"}]


def _nesting_fault(tokens: list[str]) -> str | None:
    """Brackets of any kind that do not match in number, or nest too deeply."""
    depth = 0
    for token in tokens:
        depth += (token in _OPEN) - (token in _CLOSE)
        if not 0 <= depth <= NESTING_MAX:
            return f"a bracket that was not opened, or nested deeper than {NESTING_MAX}"
    return "a bracket that was not closed" if depth else None


def _size_fault(tokens: list[str]) -> str | None:
    """Too high powers, or too many terms, counted as if all sums in brackets were multiplied."""
    sums, product, closed = [1], 1, 1
    for at, token in enumerate(tokens):
        if token in _OPEN:
            sums.append(1)
        elif token in _CLOSE:
            closed = sums.pop()
            product *= closed
        elif token in {"+", "-", ","}:
            sums[-1] += 1
        elif token == "^":
            power = _power(tokens, at)
            if power is None:
                return "an exponent that is no small number"
            if at and tokens[at - 1] in _CLOSE and power:  # a sum, which has been counted once
                product *= math.comb(closed + power - 1, power)
        if product * sums[0] > TERMS_MAX:
            return f"over {TERMS_MAX} terms when it is multiplied out"
    return None


def _power(tokens: list[str], at: int) -> int | None:
    """The exponent after the `^` at a place; None: it is missing, too large, or has one itself."""
    power, last = _exponent(tokens, at + 1)
    is_number = at > 0 and tokens[at - 1].replace(".", "").isdigit()
    most = NUMBERS_EXPONENT_MAX if is_number else EXPONENT_MAX
    is_tower = tokens[last + 1 : last + 2] == ["^"]
    return None if power is None or power > most or is_tower else power


def _exponent(tokens: list[str], at: int) -> tuple[int | None, int]:
    """The exponent that begins here, without its sign, and its last place. A letter counts as 1;
    None: it has another form."""
    place = at
    braces = place < len(tokens) and tokens[place] == "{"
    place += braces
    place += place < len(tokens) and tokens[place] == "-"
    if place >= len(tokens):
        return None, place
    token = tokens[place]
    value = int(token) if token.isdigit() else 1 if token.isalpha() or token == "\\circ" else None
    if braces:
        place += 1
        if place >= len(tokens) or tokens[place] != "}":
            return None, place
    return value, place


# --- what costs -------------------------------------------------------------------------------


# Unequal texts use more of sympy than equal ones.
_ALIKE_AND_NOT: Final = (
    ("\\frac{1}{2}", "0.5"), ("\\frac{1}{2}", "1/2x"), ("x^2+1", "1+x^2"), ("x^2+1", "(x-1)^2"),
    ("\\sqrt{8}", "2"), ("(1,2)", "(2,1)"), ("x>3", "x<3"), ("x^2+2x+1", "(x+1)^2"),
)  # fmt: skip


@functools.cache
def _warm_up() -> None:
    """Import, and compare some texts: each fork would else load modules in the time of its first
    text."""
    import math_verify

    # It warns that its timer is off, which `cpu_bound` replaces.
    logging.getLogger(math_verify.__name__).setLevel(logging.ERROR)
    for answer, text in _ALIKE_AND_NOT:
        _equal(answer, text)


def _equal(answer: str, text: str) -> bool:
    import math_verify

    found = _parsed(text)
    return bool(found) and bool(
        math_verify.verify(_answer(answer).copy(), found, timeout_seconds=None)
    )


def _parsed(text: str) -> list[Any]:
    """Parse without math-verify's timer, which would replace that of a verifier's fork."""
    import math_verify

    found: list[Any] = math_verify.parse(
        f"${text}$",
        [math_verify.LatexExtractionConfig(boxed_match_priority=-1)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    return found


_answer = functools.lru_cache(maxsize=ANSWERS_READ_MAX)(_parsed)
