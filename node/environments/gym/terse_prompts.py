"""The same problems in few words, for policies that read bytes and know no English.

A terse prompt holds all that the full question does but the instructions; the answer's format and
the scorer are unchanged.
"""

import datetime
from collections.abc import Callable, Mapping
from typing import Any

Metadata = Mapping[str, Any]


def terse_prompt(name: str, entry: Mapping[str, Any]) -> str:
    """The short form of an entry's question; the question itself where there is none."""
    shorten = _SHORT.get(name)
    return (shorten and shorten(entry["metadata"])) or _last_line_problem(name, entry["question"])


def _last_line_problem(name: str, question: str) -> str:
    if name != "decimal_arithmetic":
        return question
    return question.rsplit("\n", 1)[-1].removesuffix(" = ?") + "="


def _base_conversion(meta: Metadata) -> str:
    return f"{meta['source_repr']} {meta['source_base']}>{meta['target_base']}="


def _basic_arithmetic(meta: Metadata) -> str:
    return f"{meta['expression'].replace(' ', '')}="


def _fraction(meta: Metadata) -> str:
    return f"{meta['numerator']}/{meta['denominator']}="


def _logic(meta: Metadata) -> str:
    return "; ".join(meta["premises"]) + " |- "


def _grid(row: list[int]) -> str:
    return " ".join(map(str, row))


def _matrix(meta: Metadata) -> str:
    return "\n".join(map(_grid, meta["matrix"])) + "\n=\n"


def _arc(meta: Metadata) -> str:
    shown = [f"{_grid(pair['input'])} > {_grid(pair['output'])}" for pair in meta["train_examples"]]
    return "\n".join([*shown, f"{_grid(meta['test_example']['input'])} > "])


def _bf(meta: Metadata) -> str:
    return f"{meta['bf_program'].strip()}\n="


_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def _calendar(meta: Metadata) -> str | None:
    """Weekday offsets and leap years have a short form, the others none."""
    if meta["task"] == "is_leap_year":
        return f"{meta['year']} leap? "
    if meta["task"] == "weekday_offset":
        start = datetime.date.fromisoformat(meta["start_date"])
        return f"{_WEEKDAYS[start.weekday()]} {meta['offset_days']:+d}="
    return None


def _gcd(meta: Metadata) -> str:
    return f"gcd {','.join(map(str, meta['numbers']))}="


_SHORT: Mapping[str, Callable[[Metadata], str | None]] = {
    "base_conversion": _base_conversion,
    "basic_arithmetic": _basic_arithmetic,
    "arc_1d": _arc,
    "bf": _bf,
    "propositional_logic": _logic,
    "fraction_simplification": _fraction,
    "calendar_arithmetic": _calendar,
    "binary_matrix": _matrix,
    "chain_sum": _basic_arithmetic,
    "products": _basic_arithmetic,
    "gcd": _gcd,
}
