"""What the functions of `python_function` are to do: families of descriptions with parameters, each
with a function that does it and inputs to try it on. Pure.

A family is a sentence, the body of a right function, and values for the names in braces, which
stand in both. Inputs are drawn by the name of the function's argument, small enough that no right
function comes near a limit of `node.sandbox.runner`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

KINDS: Final = ("lists", "strings", "numbers", "dicts")

_Values = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Spec:
    """One function to write."""

    signature: str
    about: str  # its arguments
    task: str
    source: str  # a right one
    draw: Callable[[Random], list[Any]]  # arguments to try it on


@dataclass(frozen=True, slots=True)
class _Family:
    kind: str
    argument: str  # a key of `_ARGUMENTS`
    task: str
    body: str
    values: _Values = field(default_factory=dict)
    weight: int = 1


def draw_spec(rng: Random, kinds: Sequence[str] = KINDS) -> Spec:
    """One function of these kinds."""
    families = [each for each in _FAMILIES if each.kind in kinds]
    (family,) = rng.choices(families, [each.weight for each in families])
    values = {name: rng.choice(choices) for name, choices in family.values.items()}
    if family.body == _NUMBER_STEPS:
        values = _steps(rng, (_WHICH, _MADE, _TOGETHER))
    elif family.body == _WORD_STEPS:
        values = _steps(rng, (_WHICH_WORDS, _MADE_WORDS, _WORDS_TOGETHER))
    signature, about, draw = _ARGUMENTS[family.argument]
    body = family.body.format(**values).replace("\n", "\n    ")
    task = family.task.format(**values)
    return Spec(signature, about, task, f"def solve({signature}):\n    {body}", draw)


# --- arguments ------------------------------------------------------------------------------------

_WORDS: Final = (
    "amber", "bread", "cloud", "delta", "eagle", "flute", "grape", "hotel", "igloo", "jolly",
    "level", "moon", "noon", "otter", "peep", "radar", "salt", "teeth", "under", "wool",
)  # fmt: skip
_MARKS: Final = (" ", " ", " ", ", ", ". ", "-", "! ", " 7", " 42 ", "3")


def _number(rng: Random) -> int:
    return rng.randrange(-30, 60)


def _numbers(rng: Random) -> list[int]:
    return [rng.choice((_number(rng), rng.randrange(-5, 10))) for _ in range(rng.randrange(13))]


def _text(rng: Random) -> str:
    parts = []
    for _ in range(rng.randrange(8)):
        word = rng.choice(_WORDS)
        parts += [rng.choice((word, word, word.capitalize(), word.upper())), rng.choice(_MARKS)]
    return "".join(parts)


def _words(rng: Random) -> list[str]:
    return [rng.choice(_WORDS) for _ in range(rng.randrange(10))]


def _counts(rng: Random) -> dict[str, int]:
    return {rng.choice(_WORDS): _number(rng) for _ in range(rng.randrange(9))}


def _rows(rng: Random) -> list[list[int]]:
    width = rng.randrange(1, 5)
    return [[_number(rng) for _ in range(width)] for _ in range(rng.randrange(1, 5))]


_ARGUMENTS: Final[Mapping[str, tuple[str, str, Callable[[Random], list[Any]]]]] = {
    "xs": ("xs", "`xs` is a list of integers", lambda rng: [_numbers(rng)]),
    "two lists": (
        "xs, ys", "`xs` and `ys` are lists of integers", lambda rng: [_numbers(rng), _numbers(rng)]
    ),
    "rows": (
        "rows", "`rows` is a list of rows of equal length, each a list of integers",
        lambda rng: [_rows(rng)],
    ),
    "s": ("s", "`s` is a string", lambda rng: [_text(rng)]),
    "words": ("words", "`words` is a list of lowercase words", lambda rng: [_words(rng)]),
    "n": ("n", "`n` is a positive integer", lambda rng: [rng.randrange(1, 120)]),
    "a, b": (
        "a, b", "`a` and `b` are positive integers",
        lambda rng: [rng.randrange(1, 80), rng.randrange(1, 80)],
    ),
    "d": ("d", "`d` is a dict from strings to integers", lambda rng: [_counts(rng)]),
    "two dicts": (
        "d, e", "`d` and `e` are dicts from strings to integers",
        lambda rng: [_counts(rng), _counts(rng)],
    ),
}  # fmt: skip


# --- three steps: which elements, made what, put together how -------------------------------------

_Step = Sequence[tuple[str, str, _Values]]  # in words, as code
_NUMBER_STEPS: Final = "values = [{code1} for x in xs if {code0}]\nreturn {code2}"
_WORD_STEPS: Final = "values = [{code1} for w in words if {code0}]\nreturn {code2}"
_LETTERS: Final = "aeioulmnrst"
_WHICH: Final[_Step] = (
    ("divisible by {k}", "x % {k} == 0", {"k": range(2, 10)}),
    ("not divisible by {k}", "x % {k} != 0", {"k": range(2, 10)}),
    ("greater than {k}", "x > {k}", {"k": range(-15, 36, 5)}),
    ("less than {k}", "x < {k}", {"k": range(-15, 36, 5)}),
    ("even", "x % 2 == 0", {}),
    ("negative", "x < 0", {}),
)
_MADE: Final[_Step] = (
    ("as they are", "x", {}),
    ("each multiplied by {m}", "x * {m}", {"m": range(2, 10)}),
    ("each increased by {m}", "x + {m}", {"m": range(1, 13)}),
    ("each squared", "x * x", {}),
    ("each replaced by its absolute value", "abs(x)", {}),
)
_TOGETHER: Final[_Step] = (
    ("their sum", "sum(values)", {}),
    ("the largest of them, or 0 if there are none", "max(values, default=0)", {}),
    ("a list of them in reverse order", "values[::-1]", {}),
    ("a list of them in ascending order, each value once", "sorted(set(values))", {}),
    ("how many different values they are", "len(set(values))", {}),
    ("a list of their running totals", "[sum(values[: i + 1]) for i in range(len(values))]", {}),
)
_WHICH_WORDS: Final[_Step] = (
    ("have {a!r} in them", "{a!r} in w", {"a": _LETTERS}),
    ("do not have {a!r} in them", "{a!r} not in w", {"a": _LETTERS}),
    ("end with {a!r}", "w.endswith({a!r})", {"a": "rtnel"}),
    ("have more than {k} letters", "len(w) > {k}", {"k": (3, 4)}),
    ("read the same backwards", "w == w[::-1]", {}),
)
_MADE_WORDS: Final[_Step] = (
    ("as they are", "w", {}),
    ("each in upper case", "w.upper()", {}),
    ("each read backwards", "w[::-1]", {}),
    ("each without its {k} first letters", "w[{k}:]", {"k": (1, 2, 3)}),
    ("each with every {b!r} as {c!r}", "w.replace({b!r}, {c!r})", {"b": "aeo", "c": "*#7x"}),
)
_WORDS_TOGETHER: Final[_Step] = (
    ("a list of them in alphabetical order", "sorted(values)", {}),
    ("all of them joined by {d!r}", "{d!r}.join(values)", {"d": ("-", "+", ", ", "/")}),
    ("the number of letters in all of them together", "sum(map(len, values))", {}),
    ("a list of the length of each", "[len(v) for v in values]", {}),
    ("a dict that has for each of them how often it is there",
     "{{v: values.count(v) for v in values}}", {}),
)  # fmt: skip


def _steps(rng: Random, steps: Sequence[_Step]) -> dict[str, str]:
    """One of each step: its code under its number, and its words."""
    told: dict[str, str] = {}
    for number, step in enumerate(steps):
        words, code, values = rng.choice(step)
        drawn = {name: rng.choice(choices) for name, choices in values.items()}
        told |= {f"code{number}": code.format(**drawn), f"words{number}": words.format(**drawn)}
    return told


# --- the families ---------------------------------------------------------------------------------

_FAMILIES: Final[Sequence[_Family]] = (
    _Family(
        "lists", "xs",
        "Take the elements of `xs` that are {words0}, {words1}, and return {words2}.",
        _NUMBER_STEPS, weight=20,
    ),
    _Family(
        "strings", "words",
        "Take the words of `words` that {words0}, {words1}, and return {words2}.",
        _WORD_STEPS, weight=12,
    ),
    _Family(
        "lists", "xs", "Return the list `xs` rotated to the left by {k} places.",
        "if not xs:\n    return []\nk = {k} % len(xs)\nreturn xs[k:] + xs[:k]", {"k": range(1, 15)},
    ),
    _Family(
        "lists", "xs",
        "Split `xs` into consecutive pieces of {k} elements, the last of which may be shorter, and "
        "return the list of the {what} of each piece.",
        "return [{what}(xs[i : i + {k}]) for i in range(0, len(xs), {k})]",
        {"k": range(2, 8), "what": ("sum", "max", "min")},
    ),
    _Family(
        "lists", "xs",
        "Return the list of all sums of {k} neighbouring elements of `xs`, from left to right.",
        "return [sum(xs[i : i + {k}]) for i in range(len(xs) - {k} + 1)]", {"k": range(2, 8)},
    ),
    _Family(
        "lists", "xs",
        "Return the elements at positions {a}, {a} + {k}, {a} + 2 * {k} and so on of `xs`, counted "
        "from 0.",
        "return xs[{a} :: {k}]", {"a": range(5), "k": range(2, 7)},
    ),
    _Family(
        "lists", "xs",
        "Return `xs` with every value below {a} replaced by {a} and every value above "
        "{b} replaced by {b}.",
        "return [min(max(x, {a}), {b}) for x in xs]",
        {"a": range(-20, 1, 4), "b": range(4, 41, 4)},
    ),
    _Family(
        "lists", "xs",
        "Return how many pairs of positions i < j there are with xs[i] + xs[j] == {k}.",
        "return sum(xs[i] + xs[j] == {k} for i in range(len(xs)) for j in range(i + 1, len(xs)))",
        {"k": range(21)},
    ),
    _Family(
        "lists", "xs",
        "Return the length of the longest run of neighbouring elements of `xs` that are "
        "all greater than {k}.",
        "best = run = 0\nfor x in xs:\n    run = run + 1 if x > {k} else 0\n    best = "
        "max(best, run)\n"
        "return best",
        {"k": range(-12, 19, 3)},
    ),
    _Family(
        "lists", "xs",
        "Return the {k} smallest different values of `xs` in ascending order, or all of "
        "them if there are fewer.",
        "return sorted(set(xs))[:{k}]", {"k": range(1, 8)},
    ),
    _Family(
        "lists", "xs", "Return `xs` sorted by the remainder of each element when divided by {k}; "
        "elements with the same remainder keep their order.",
        "return sorted(xs, key=lambda x: x % {k})", {"k": range(3, 14)},
    ),
    _Family(
        "lists", "two lists",
        "Return the list of xs[i] * {a} + ys[i] * {b} for all positions i that "
        "both lists have.",
        "return [x * {a} + y * {b} for x, y in zip(xs, ys)]",
        {"a": range(1, 7), "b": range(-4, 5)},
    ),
    _Family(
        "lists", "two lists", "Return the values that are in {how} of `xs` and `ys`, in ascending "
        "order, each once.",
        "both = set(xs) & set(ys)\nevery = set(xs) | set(ys)\n"
        "return sorted(both if {how!r} == 'both' else every - both)",
        {"how": ("both", "exactly one")},
    ),
    _Family(
        "lists", "rows", "Return the list of the {what} of each column of `rows`, each plus {k}.",
        "return [{what}(column) + {k} for column in zip(*rows)]",
        {"what": ("sum", "max", "min"), "k": range(15)},
    ),
    _Family(
        "lists", "rows",
        "Return `rows` with rows and columns exchanged, and each element multiplied "
        "by {k}.",
        "return [[x * {k} for x in column] for column in zip(*rows)]", {"k": range(1, 12)},
    ),
    _Family(
        "strings", "s", "Return how many characters of `s` are one of the letters of {chars!r}, in "
        "either case.",
        "return sum(c in {chars!r} for c in s.lower())",
        {"chars": tuple(a + b for a in _LETTERS for b in _LETTERS if a < b)},
    ),
    _Family(
        "strings", "s", "Return `s` without its digits, and with every {a!r} replaced by {b!r}.",
        "return ''.join(c for c in s if not c.isdigit()).replace({a!r}, {b!r})",
        {"a": _LETTERS, "b": "*#_+xyz"},
    ),
    _Family(
        "strings", "s",
        "Move each letter of `s` {k} places on in the alphabet, from z on to a, keeping "
        "its case, and return the result; other characters stay.",
        "out = []\nfor c in s:\n    if c.isalpha():\n        first = ord('a') if c.islower() else "
        "ord('A')\n        c = chr(first + (ord(c) - first + {k}) % 26)\n    out.append(c)\n"
        "return ''.join(out)",
        {"k": range(1, 26)},
    ),
    _Family(
        "strings", "s",
        "Return the list of the words of `s`, split at white space, that have at least "
        "{k} characters, each read backwards.",
        "return [w[::-1] for w in s.split() if len(w) >= {k}]", {"k": range(2, 9)},
    ),
    _Family(
        "strings", "s",
        "Return every {k}th character of `s`, beginning with the one at position {a}, "
        "counted from 0, in upper case.",
        "return s[{a}::{k}].upper()", {"k": range(4, 10), "a": range(6)},
    ),
    _Family(
        "strings", "s", "Return the sum of the numbers in `s`, where neighbouring digits are one "
        "number, multiplied by {k}.",
        "import re\nreturn {k} * sum(map(int, re.findall('[0-9]+', s)))", {"k": range(1, 20)},
    ),
    _Family(
        "strings", "s", "Return the words of `s`, split at white space, joined by {mark!r} in the "
        "order from last to first.",
        "return {mark!r}.join(s.split()[::-1])",
        {"mark": ("-", "/", "+", "..", " | ", "_", ":", "&", "<>", "~")},
    ),
    _Family(
        "strings", "words",
        "Return the words with more than {k} letters, each as the word, a colon "
        "and its length.",
        "return [f'{{w}}:{{len(w)}}' for w in words if len(w) > {k}]", {"k": range(2, 5)},
    ),
    _Family(
        "strings", "words",
        "Return the words sorted by how often {a!r} is in them, fewest first, and "
        "those with the same number alphabetically.",
        "return sorted(words, key=lambda w: (w.count({a!r}), w))", {"a": _LETTERS},
    ),
    _Family(
        "strings", "words",
        "Return the words joined without anything between them, where every word "
        "that reads the same backwards is in upper case and each {a!r} is {b!r}.",
        "return ''.join(w.upper() if w == w[::-1] else w for w in words).replace({a!r}, {b!r})",
        {"a": _LETTERS, "b": "0123456789"},
    ),
    _Family(
        "numbers", "n", "Return the sum of all positive integers up to and including `n` that are "
        "divisible by {a} or by {b}.",
        "return sum(i for i in range(1, n + 1) if i % {a} == 0 or i % {b} == 0)",
        {"a": range(2, 8), "b": range(8, 14)},
    ),
    _Family(
        "numbers", "n", "Return the digits of `n` in base {k} as a list, the highest first.",
        "digits = []\nwhile n:\n    digits.append(n % {k})\n    n //= {k}\nreturn digits[::-1]",
        {"k": range(2, 17)},
    ),
    _Family(
        "numbers", "n",
        "Begin with `n`. As long as it is greater than {m}, halve it if it is even and "
        "subtract {k} if it is odd. Return how many steps that takes.",
        "steps = 0\nwhile n > {m}:\n    n = n // 2 if n % 2 == 0 else n - {k}\n    steps += 1\n"
        "return steps",
        {"k": range(1, 20, 2), "m": range(1, 8)},
    ),
    _Family(
        "numbers", "n",
        "Return the list of the divisors of `n` that are at least {k}, in ascending "
        "order.",
        "return [i for i in range({k}, n + 1) if n % i == 0]", {"k": range(1, 10)},
    ),
    _Family(
        "numbers", "n",
        "The sequence begins with {a}, {b}, and each further term is the sum of the two "
        "before it. Return its term number `n` modulo {m}, where {a} is number 1.",
        "x, y = {a}, {b}\nfor _ in range(n - 1):\n    x, y = y, x + y\nreturn x % {m}",
        {"a": range(1, 7), "b": range(1, 7), "m": (7, 10, 11, 13, 97, 100)},
    ),
    _Family(
        "numbers", "n",
        "Return {a} for `n` divisible by {k}, {b} for `n` divisible by {m}, both joined "
        "in this order for `n` divisible by both, and `n` as a string otherwise.",
        "text = ({a!r} if n % {k} == 0 else '') + ({b!r} if n % {m} == 0 else '')\n"
        "return text or str(n)",
        {"a": ("tick", "ping", "left"), "b": ("tock", "pong", "right"), "k": (2, 3), "m": (5, 7)},
    ),
    _Family(
        "numbers", "a, b", "Return the greatest common divisor of `a` and `b` plus {k}.",
        "import math\nreturn math.gcd(a, b) + {k}", {"k": range(30)},
    ),
    _Family(
        "numbers", "a, b",
        "Return how many integers from the smaller to the larger of `a` and `b`, "
        "both included, have a sum of decimal digits that is divisible by {k}.",
        "low, high = min(a, b), max(a, b)\n"
        "return sum(sum(map(int, str(i))) % {k} == 0 for i in range(low, high + 1))",
        {"k": range(2, 8)},
    ),
    _Family(
        "numbers", "a, b", "Return `a` to the power of `b`, modulo {m}.",
        "return pow(a, b, {m})", {"m": range(5, 60)},
    ),
    _Family(
        "dicts", "d", "Return the keys of `d` whose value is at least {k}, in alphabetical order.",
        "return sorted(key for key, value in d.items() if value >= {k})",
        {"k": range(-15, 41)},
    ),
    _Family(
        "dicts", "d",
        "Return a dict with the same keys as `d`, where each value is multiplied by {a} "
        "and those that are then below {k} are left out.",
        "return {{key: value * {a} for key, value in d.items() if value * {a} >= {k}}}",
        {"a": range(2, 8), "k": range(-20, 61, 10)},
    ),
    _Family(
        "dicts", "d", "Return the sum of the values of `d` whose key has more than {k} letters.",
        "return sum(value for key, value in d.items() if len(key) > {k})",
        {"k": (3, 4)},
    ),
    _Family(
        "dicts", "two dicts",
        "Return a dict with all keys of `d` and `e`. Each value is {a} times that "
        "of `d` plus {b} times that of `e`, where a missing one counts as {m}.",
        "return {{key: {a} * d.get(key, {m}) + {b} * e.get(key, {m}) for key in {{**d, **e}}}}",
        {"a": range(1, 6), "b": range(1, 6), "m": (0, 1, 10)},
    ),
    _Family(
        "dicts", "words", "Return a dict that has, for each word that is in `words` at least {k} "
        "times, how often it is there.",
        "return {{w: words.count(w) for w in words if words.count(w) >= {k}}}", {"k": (1, 2)},
    ),
    _Family(
        "dicts", "words",
        "Return a dict from the first letter of words to the list of the words of "
        "`words` that have it there, in their order.",
        "groups = {{}}\nfor w in words:\n    groups.setdefault(w[0], []).append(w)\n"
        "return groups",
    ),
)  # fmt: skip
