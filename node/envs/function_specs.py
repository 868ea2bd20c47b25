"""The functions that `python_function` asks for: a dozen templates of four kinds. Pure.

A template has a sentence, the body of a correct function, and values for the names in braces of
both. No correct function comes near a limit of `node.sandbox.runner`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

KINDS: Final = ("lists", "strings", "numbers", "dicts")
_WORDS: Final = ("amber", "bread", "cloud", "level", "moon", "noon", "otter", "radar", "salt")
_GAPS: Final = (" ", " ", ", ", ". ", "-", " 7", " 42 ")


@dataclass(frozen=True, slots=True)
class Spec:
    """One function to write."""

    signature: str
    about: str  # its arguments
    task: str
    source: str  # a correct one
    draw: Callable[[Random], list[Any]]  # arguments of one test


@dataclass(frozen=True, slots=True)
class _Template:
    kind: str
    argument: str  # a key of `_ARGUMENTS`
    task: str
    body: str
    values: Mapping[str, Sequence[Any]]


def draw_spec(rng: Random, kinds: Sequence[str] = KINDS) -> Spec:
    """One function of these kinds."""
    template = rng.choice([each for each in _TEMPLATES if each.kind in kinds])
    values = {name: rng.choice(choices) for name, choices in template.values.items()}
    about, draw = _ARGUMENTS[template.argument]
    body = template.body.format(**values).replace("\n", "\n    ")
    source = f"def solve({template.argument}):\n    {body}"
    return Spec(template.argument, about, template.task.format(**values), source, draw)


def _number(rng: Random) -> int:
    return rng.randrange(-30, 60)


def _numbers(rng: Random) -> list[int]:
    return [rng.choice((_number(rng), rng.randrange(-5, 10))) for _ in range(rng.randrange(13))]


def _text(rng: Random) -> str:
    return "".join(
        rng.choice((str, str.capitalize, str.upper))(rng.choice(_WORDS)) + rng.choice(_GAPS)
        for _ in range(rng.randrange(8))
    )


def _counts(rng: Random) -> dict[str, int]:
    return {rng.choice(_WORDS): _number(rng) for _ in range(rng.randrange(9))}


_ARGUMENTS: Final[Mapping[str, tuple[str, Callable[[Random], list[Any]]]]] = {
    "xs": ("`xs` is a list of integers", lambda rng: [_numbers(rng)]),
    "s": ("`s` is a string", lambda rng: [_text(rng)]),
    "n": ("`n` is a positive integer", lambda rng: [rng.randrange(1, 120)]),
    "d": ("`d` is a dict from strings to integers", lambda rng: [_counts(rng)]),
}
_TEMPLATES: Final = (
    _Template(
        "lists",
        "xs",
        "Return the list `xs` rotated to the left by {k} places.",
        "if not xs:\n    return []\nk = {k} % len(xs)\nreturn xs[k:] + xs[:k]",
        {"k": range(1, 41)},
    ),
    _Template(
        "lists",
        "xs",
        "Return the sum of the elements of `xs` that are divisible by {k}, each times {m}.",
        "return sum(x * {m} for x in xs if x % {k} == 0)",
        {"k": range(2, 10), "m": range(2, 10)},
    ),
    _Template(
        "lists",
        "xs",
        "Return the {k} smallest different values of `xs` that are greater than {m}, in ascending "
        "order, or all of them if there are fewer.",
        "return sorted(set(x for x in xs if x > {m}))[:{k}]",
        {"k": range(3, 9), "m": range(-15, 3)},
    ),
    _Template(
        "strings",
        "s",
        "Return how many characters of `s` are {a!r} or {b!r}, in either case.",
        "return sum(c in {a!r} + {b!r} for c in s.lower())",
        {"a": "aelmnr", "b": "bdiostu"},
    ),
    _Template(
        "strings",
        "s",
        "Return the words of `s`, split at white space, joined by {mark!r} in the order from last "
        "to first, without every {a!r}.",
        "return {mark!r}.join(s.split()[::-1]).replace({a!r}, '')",
        {"mark": ("-", "/", "+", "..", "_", ":"), "a": "aelmnor"},
    ),
    _Template(
        "strings",
        "s",
        "Return every {k}th character of `s`, beginning with the one at position {a}, counted from "
        "0, in upper case.",
        "return s[{a}::{k}].upper()",
        {"k": range(4, 10), "a": range(6)},
    ),
    _Template(
        "numbers",
        "n",
        "Return the digits of `n` in base {k} as a list, the highest first, each plus {m}.",
        "digits = []\nwhile n:\n    digits.append(n % {k} + {m})\n    n //= {k}\n"
        "return digits[::-1]",
        {"k": range(2, 17), "m": range(10)},
    ),
    _Template(
        "numbers",
        "n",
        "Return the list of the divisors of `n` that are at least {k}, in ascending order.",
        "return [i for i in range({k}, n + 1) if n % i == 0]",
        {"k": range(1, 10)},
    ),
    _Template(
        "numbers",
        "n",
        "Return the sum of all positive integers up to and including `n` that are divisible by {a} "
        "or by {b}.",
        "return sum(i for i in range(1, n + 1) if i % {a} == 0 or i % {b} == 0)",
        {"a": range(2, 8), "b": range(8, 14)},
    ),
    _Template(
        "dicts",
        "d",
        "Return the keys of `d` whose value is at least {k}, in alphabetical order.",
        "return sorted(key for key, value in d.items() if value >= {k})",
        {"k": range(-15, 41)},
    ),
    _Template(
        "dicts",
        "d",
        "Return a dict with the same keys as `d`, where each value is multiplied by {a} and those "
        "that are then below {k} are left out.",
        "return {{key: value * {a} for key, value in d.items() if value * {a} >= {k}}}",
        {"a": range(2, 8), "k": range(-20, 61, 10)},
    ),
    _Template(
        "dicts",
        "d",
        "Return the sum of the values of `d` whose key contains {a!r}, plus {k}.",
        "return sum(value for key, value in d.items() if {a!r} in key) + {k}",
        {"a": "aelmnor", "k": range(10)},
    ),
)
