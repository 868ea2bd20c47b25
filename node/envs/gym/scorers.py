"""Guards that select the texts for a dataset's own scorer, and scorers in its place. Pure, and
quick for any text: each looks at its text a bounded number of times.

The parser of arithmetic reads each character once, nests to `DEPTH_MAX`, and has no power, so that
a value is no longer than its text.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

from node.envs.answers import answer_in
from node.envs.gym.upstream import formula_names

DEPTH_MAX: Final = 16
_TOKEN: Final = re.compile(r" ?(0|[1-9][0-9]{0,8}|[-+*/()])")
_ARITHMETIC: Final = ({"+", "-"}, {"*", "/"})


def computed(text: str) -> tuple[Fraction, list[int]]:
    """The value of an expression with at most one space before each token, and its numbers.

    Raises:
        ValueError: it is none, or too deep.
        ZeroDivisionError: it divides by zero.
    """
    tokens, at = [], 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise ValueError("no expression")
        tokens.append(token[1])
        at = token.end()
    parser = _Parser(tokens)
    value = parser.sum(0)
    if parser.at < len(tokens):
        raise ValueError("something follows the expression")
    return value, [int(each) for each in tokens if each[0].isdigit()]


class _Parser:
    """By recursive descent: sums of products of signed atoms."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = tokens
        self.at = 0

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while (operator := self._next(_ARITHMETIC[0])) is not None:
            right = self._product(depth)
            value = value + right if operator == "+" else value - right
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._signed(depth)
        while (operator := self._next(_ARITHMETIC[1])) is not None:
            right = self._signed(depth)
            value = value * right if operator == "*" else value / right
        return value

    def _signed(self, depth: int) -> Fraction:
        if self._next({"-"}) is not None:
            return -self._atom(depth)
        return self._atom(depth)

    def _atom(self, depth: int) -> Fraction:
        if self._next({"("}) is not None:
            if depth >= DEPTH_MAX:
                raise ValueError("too deep")
            value = self.sum(depth + 1)
            if self._next({")"}) is None:
                raise ValueError("a parenthesis is open")
            return value
        if self.at < len(self._tokens) and self._tokens[self.at].isdigit():
            self.at += 1
            return Fraction(self._tokens[self.at - 1])
        raise ValueError("a number is missing")

    def _next(self, wanted: set[str]) -> str | None:
        """The next token, taken if it is one of these."""
        if self.at == len(self._tokens) or self._tokens[self.at] not in wanted:
            return None
        self.at += 1
        return self._tokens[self.at - 1]


Entry = Mapping[str, Any]
Guard = Callable[[Any, Entry, str], str | None]  # dataset, entry, text
Scorer = Callable[[Entry, str], float]

# --- guards -------------------------------------------------------------------------------------

_FORMULA = re.compile(r"[A-Z∧∨¬→↔() ]+")
_LONG_NAME = re.compile(r"[A-Z]{2}")  # no premise has one
_OPERATORS = frozenset("∧∨¬→↔")
# Own answers have two operators at most; a copied premise may have more. The parser walks a formula
# once for each operator and pair of parentheses, so both are bounded.
FORMULA_OPERATORS_MAX = 12


def plain_formula(dataset: Any, entry: Entry, text: str) -> str | None:
    """A formula without its spaces; None: it is none, is too deep, or has a variable that the
    premises lack, each of which would double the scorer's time."""
    if not _FORMULA.fullmatch(text):
        return None
    text = text.replace(" ", "")
    if _LONG_NAME.search(text):
        return None
    premises: list[str] = entry["metadata"]["premises"]
    for signs in (_OPERATORS, {"("}, {")"}):
        counts = [sum(char in signs for char in formula) for formula in (text, *premises)]
        if counts[0] > max(FORMULA_OPERATORS_MAX, *counts[1:]):
            return None
    try:
        names = formula_names(dataset, text)
    except ValueError:
        return None
    return text if names <= set(entry["metadata"]["variables"]) else None


def plain_number(_dataset: Any, _entry: Entry, text: str) -> str | None:
    return text if answer_in("last_number", text) == text else None


def plain_numbers(_dataset: Any, _entry: Entry, text: str) -> str | None:
    parts = [part.removeprefix(" ") for part in text.split(",")]
    return text if all(answer_in("last_number", part) == part for part in parts) else None


def only(pattern: str) -> Guard:
    """Texts that match as a whole. No part of the pattern may match in two ways."""
    compiled = re.compile(pattern, re.ASCII)
    return lambda _dataset, _entry, text: text if compiled.fullmatch(text) else None


def each_letter_once(_dataset: Any, _entry: Entry, text: str) -> str | None:
    """`A=1,B=2`, without a repeated letter."""
    letters = re.findall("[A-Z]", text)
    return text if _MAPPING.fullmatch(text) and len(letters) == len(set(letters)) else None


_MAPPING = re.compile(r"[A-Z]=[0-9](?:, ?[A-Z]=[0-9])*")
_DECIMAL = r"(?:0|[1-9][0-9]{0,11})(?:\.[0-9]{1,4})?"
_JUG_STEP = r'"(?:fill [A-C]|empty [A-C]|pour [A-C]->[A-C])"'
_FACTOR = r"[1-9][0-9]{0,11}"

complex_number = only(rf"-?{_DECIMAL}(?: ?[+-] ?{_DECIMAL}i)?|-?{_DECIMAL}i")
scientific_number = only(r"-?[0-9]{1,25}(?:\.[0-9]{1,30})?(?:e[+-]?[0-9]{1,3})?")
whole_number_or_hex = only(r"-?0x(?:0|[1-9a-f][0-9a-f]*)|-?(?:0|[1-9][0-9]*)")
factors = only(rf"{_FACTOR}(?: ?× ?{_FACTOR})*")
jug_steps = only(rf"\[{_JUG_STEP}(?:, ?{_JUG_STEP})*\]")
buttons = only(r"[A-C](?: ?→ ?[A-C])*")
bits = only(r"[01](?:[ \n][01])*")
turns = only(r"[LRUDBF](?:'|2)?(?: [LRUDBF](?:'|2)?)*")
_DISK_MOVE = r"Move disk [0-9]+ from Peg [0-9] to Peg [0-9]"
disk_moves = only(rf"{_DISK_MOVE}(?:\n{_DISK_MOVE})*")

# --- scorers ------------------------------------------------------------------------------------


def _same(normal: Callable[[str], object]) -> Scorer:
    """True if text and answer are the same in a normal form."""
    return lambda entry, text: float(normal(text) == normal(str(entry["answer"])))


def _rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().split("\n")]


_UNQUOTED = re.compile("['\" ]")

same_text = _same(str.strip)
same_in_any_case = _same(lambda text: text.strip().lower())
same_words = _same(str.split)
same_rows = _same(_rows)
same_but_for_spaces = _same(lambda text: "".join(text.split()))
same_but_for_quotes = _same(lambda text: _UNQUOTED.sub("", text))
same_measure = _same(lambda text: "".join(text.split()).removesuffix("°"))


def _near(most: Fraction) -> Scorer:
    """True if it is a plain number that differs from the answer by at most so much."""

    def score(entry: Entry, text: str) -> float:
        number = answer_in("last_number", text)
        if number != text:
            return 0.0
        return float(abs(Fraction(number) - Fraction(str(entry["answer"]))) <= most)

    return score


same_number = _near(Fraction(0))
near_number = _near(Fraction(1, 10_000))  # as the library


def makes_target(entry: Entry, text: str) -> float:
    """True if it computes the target (24 where there is none) from the given numbers, each once."""
    about = entry["metadata"]
    try:
        value, found = computed(text)
    except (ValueError, ZeroDivisionError):
        return 0.0
    return float(sorted(found) == sorted(about["numbers"]) and value == about.get("target", 24))


def one_of_all(entry: Entry, text: str) -> float:
    return float(_rows(text) in [_rows(each) for each in entry["metadata"]["valid_answers"]])


def same_groups(entry: Entry, text: str) -> float:
    """True if it has the same lists of words, in any order."""
    found = _lists_of_words(text)
    if found is None:
        return 0.0
    return float(sorted(map(sorted, found)) == sorted(map(sorted, entry["metadata"]["solution"])))


def same_partitions(entry: Entry, text: str) -> float:
    """As `same_groups`, but the order within a list counts."""
    found = _lists_of_words(text)
    return float(found is not None and sorted(found) == sorted(entry["metadata"]["solution"]))


_WORD_LIST = r'\[(?:"[a-z]+"(?:, ?"[a-z]+")*)?\]'
_WORD_LISTS = re.compile(rf"\[(?:{_WORD_LIST}(?:, ?\n?{_WORD_LIST})*)?\]")
_WORDS = re.compile(r'"([a-z]+)"')
_LISTS = re.compile(r"\[[^\[\]]*\]")


def _lists_of_words(text: str) -> list[list[str]] | None:
    if not _WORD_LISTS.fullmatch(text):
        return None
    return [_WORDS.findall(each) for each in _LISTS.findall(text)]


def colours_graph(entry: Entry, text: str) -> float:
    """True if it gives each vertex one of the colours, and no two neighbours the same."""
    if not _COLOURING.fullmatch(text):
        return 0.0
    pairs = [(int(vertex), int(colour)) for vertex, colour in _COLOURED.findall(text)]
    puzzle, coloured = entry["metadata"]["puzzle"], dict(pairs)
    if sorted(vertex for vertex, _ in pairs) != sorted(puzzle["vertices"]):
        return 0.0
    if not set(coloured.values()) <= set(puzzle["color_options"]):
        return 0.0
    return float(all(coloured[one] != coloured[other] for one, other in puzzle["edges"]))


_COLOURED = re.compile(r'"([0-9]{1,3})": ?([0-9]{1,3})')
_COLOURING = re.compile(rf"\{{{_COLOURED.pattern}(?:, ?\n?{_COLOURED.pattern})*\}}")


def fills_survo(entry: Entry, text: str) -> float:
    """True if it fills the empty cells with the candidates so that rows and columns add up."""
    about, rows = entry["metadata"], _rows(text)
    puzzle: list[list[int]] = about["puzzle"]
    if [len(row) for row in rows] != [len(row) for row in puzzle]:
        return 0.0
    if not all(re.fullmatch("[1-9][0-9]{0,5}", cell, re.ASCII) for row in rows for cell in row):
        return 0.0
    grid = [[int(cell) for cell in row] for row in rows]
    cells = [pair for lines in zip(grid, puzzle, strict=True) for pair in zip(*lines, strict=True)]
    filled = [found for found, given in cells if given == 0]
    kept = all(found == given for found, given in cells if given)
    adds_up = all(sum(line[:-1]) == line[-1] for line in (*grid, *zip(*grid, strict=True)))
    return float(kept and adds_up and sorted(filled) == sorted(about["candidate_numbers"]))


def names_roles(entry: Entry, text: str) -> float:
    """True if it names everybody's role once, in any order: `A is a knight, and B is a knave.`"""
    found = _roles(text)
    return float(found is not None and found == _roles(str(entry["answer"]).strip()))


_ROLE = re.compile(r"([A-Za-z]+) is an? ([a-z]+)")
_ROLES = re.compile(rf"{_ROLE.pattern}(?:,? and {_ROLE.pattern}|, {_ROLE.pattern})*\.?")


def _roles(text: str) -> list[tuple[str, str]] | None:
    return sorted(_ROLE.findall(text)) if _ROLES.fullmatch(text) else None
