"""Judges that find the first wrong step of an answer. Pure, and bounded in time."""

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Final, Literal

StepJudge = Callable[[Sequence[str]], int | None]
"""Of the steps of an answer, the place of the first wrong one; None: none is."""

JudgeName = Literal["arithmetic"]

_NUMBER: Final = r"\$?(?:\d{1,3}(?:,\d{3}){1,5}|\d{1,15})(?:\.\d{1,15})?"
_EQUATION: Final = re.compile(
    rf"(?<![\w.,$])({_NUMBER}(?:\s?[-+*/×÷]\s?{_NUMBER}){{1,8}})\s?=\s?({_NUMBER})"
    r"(?![\w,])(?!\.\d)(?!\s?[-+*/×÷^%(])"
)
_BEFORE: Final = frozenset("-+*/×÷^)=")  # then the left side has begun earlier
_BEFORE_CHARS: Final = 4
_TOKEN: Final = re.compile(r"[\d.]+|[-+*/]")


def arithmetic(steps: Sequence[str]) -> int | None:
    """The first step that has a false equation of numbers, such as `2 + 3 * 4 = 20`. A right side
    that is rounded to its last decimal is true. Equations with words, parentheses or powers are not
    judged."""
    return next((at for at, step in enumerate(steps) if _has_false_equation(step)), None)


def _has_false_equation(text: str) -> bool:
    for found in _EQUATION.finditer(text):
        before = text[max(0, found.start() - _BEFORE_CHARS) : found.start()].rstrip()
        if before[-1:] not in _BEFORE and not _is_true(*found.groups()):
            return True
    return False


def _is_true(left: str, right: str) -> bool:
    plain = str.maketrans({"×": "*", "÷": "/", "$": "", ",": ""})
    told = right.translate(plain)
    try:
        value = _value(_TOKEN.findall(left.translate(plain)))
    except ZeroDivisionError:
        return False
    decimals = len(told.partition(".")[2])
    return abs(value - Fraction(told)) <= (
        0 if (value * 10**decimals).denominator == 1 else Fraction(1, 2 * 10**decimals)
    )


def _value(tokens: Sequence[str]) -> Fraction:
    """Numbers and operators by turns; * and / bind more tightly."""
    terms = [Fraction(tokens[0])]
    for sign, number in zip(tokens[1::2], map(Fraction, tokens[2::2]), strict=True):
        if sign == "*":
            terms[-1] *= number
        elif sign == "/":
            terms[-1] /= number
        else:
            terms.append(number if sign == "+" else -number)
    return sum(terms, Fraction(0))


JUDGES: Final[Mapping[JudgeName, StepJudge]] = MappingProxyType({"arithmetic": arithmetic})
"""By the name that a setting gives."""
