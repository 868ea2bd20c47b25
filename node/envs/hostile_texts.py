"""Texts that try to make a scorer run code, run long, fill memory or err. Pure."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

LENGTHS: Final = (64, 128, 256, 1024, 4096, 16_384, 100_000)  # around the bounds that scorers have
_REPEATED: Final = (
    "9", "[", "(", "{", "{1:", '{"a":', "[[", "]", "-", "¬", "1+", "2**", "9**9**", "1,", "1 ", " ",
    "\n", "\t", "a", "aa ", "ß", "\N{COMBINING ACUTE ACCENT}", "%s", "{0}", "\\frac{", "\\", "'",
    '"', "0 1 ", "1\n", "A=1,", "A → ", "R9999 ", "RU", "P∨", "<answer>", '["a"], ', "2 × ", "x*",
    "Emma is a knight, ", "Move disk 1 from Peg 1 to Peg 2\n", '"fill A", ',
)  # fmt: skip
_SINGLE: Final = (
    "nan", "NaN", "-nan", "sNaN", "inf", "-Infinity", "[NaN]", "[NaN, NaN, NaN]", "nanj",
    "nan + nani",
    "1e999999999", "9e999999999999999", "1e-999999999999", "1e999999999/1e-99999999",
    "0x" + "f" * 60,
    "1/0", "0/0", "R999999999", "9**9**9**9", "10**100000000", "factorial(10**9)", "1_2", "0012",
    "\uff11\uff12", "\u0661\u0662", "\ud800" * 16, "\0" * 64, "\u202e12", "%(x)s", "{0.__class__}",
    "None", "[]", "{}", "[[]]", "()", ",", "=", ":", "/", ".", "-", "×", "→", "°",
    '{"0": [1]}', '{"0": {"0": 1}}', "[[1], 2]", '[["a"], "b"]', "[1e400]", "\N{KELVIN SIGN}",
)  # fmt: skip
BEHIND: Final = " and so on"
_CODE: Final = (
    "__import__('pathlib').Path({path!r}).touch()",
    "__import__('pathlib').Path({path!r}).touch() or [[0]]",
    "[__import__('pathlib').Path({path!r}).touch()]",
)


def hostile_texts(marker: Path) -> Iterator[tuple[str, str]]:
    """Names and texts that are worth less than 1 for any question. `marker`: the file that code in
    them would make."""
    for each in _CODE:
        yield "code", each.format(path=str(marker))
    for each in _SINGLE:
        yield ascii(each)[:24], each
    for each in _REPEATED:
        for length in LENGTHS:
            text = (each * (length // len(each)))[:length]
            yield f"{each!a} up to {length}", text
            if each in ("[", "(", "{"):
                closing = {"[": "]", "(": ")", "{": "}"}[each]
                yield (
                    f"{each + closing!a} {length} deep",
                    each * (length // 2) + closing * (length // 2),
                )


def around(answer: str) -> Iterator[tuple[str, str]]:
    """Names and texts with a right answer and more, worth less than 1."""
    yield "a word behind the answer", answer + BEHIND
    yield "a line behind the answer", answer + "\nand so on"
    yield "a word before the answer", "I say " + answer
    yield "many words behind the answer", answer + BEHIND * 10_000
    yield "many words before the answer", BEHIND * 10_000 + answer
    yield "many lines behind the answer", answer + "\nso" * 10_000


def repeated(answer: str) -> Iterator[tuple[str, str]]:
    """Names and texts of a repeated right answer, the slowest that pass a guard. One may be right,
    if steps may follow a reached goal."""
    for joint in ("", " ", "\n", ",", ", ", " → "):
        for length in LENGTHS:
            text = joint.join([answer] * max(2, length // (len(answer) + len(joint))))
            yield f"the answer again, with {joint!a}, up to {length}", text
