"""Arithmetic as strangers write it: whole numbers, the four operations and parentheses. Pure.

The parser takes each character once, goes no deeper than `DEPTH_MAX`, and has no power, so that a
value is no longer than the text that it came from.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

DEPTH_MAX: Final = 16
_TOKEN: Final = re.compile(r" ?(0|[1-9][0-9]{0,8}|[-+*/()])")
_OPERATORS: Final = ({"+", "-"}, {"*", "/"})


@dataclass(frozen=True, slots=True)
class Computed:
    """The value of an expression, and the numbers in it."""

    value: Fraction
    numbers: tuple[int, ...]


def computed(text: str) -> Computed:
    """Compute an expression, with at most one space before each part of it.

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
    return Computed(value, tuple(int(each) for each in tokens if each[0].isdigit()))


class _Parser:
    """By recursive descent: sums of products of signed atoms."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = tokens
        self.at = 0

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while (operator := self._next(_OPERATORS[0])) is not None:
            right = self._product(depth)
            value = value + right if operator == "+" else value - right
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._signed(depth)
        while (operator := self._next(_OPERATORS[1])) is not None:
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
