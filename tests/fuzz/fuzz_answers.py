"""Fuzz target: the answer in a text, held against `tests/answers_reference.py`.

The first byte of an input says which format, the rest is the text, in UTF-8. Whatever the text, an
answer is found or not; one that is found can be written and found again, whatever reasoning stands
before it, and not where many blanks, a letter or a special token follow.
"""

from random import Random

from node.envs.answers import FORMATS, answer_in, written
from node.envs.numerals import BLANKS_MAX
from tests.answers_reference import ANY, TEXT_CHARS_MAX, reference

INPUT_BYTES_MAX = 16_384
PADDING = (
    " " * 2 * (BLANKS_MAX + 1),
    "\n" * 2 * (BLANKS_MAX + 1),
    "\u200b",
    "<|im_start|>",
    "<pad>",
    "\N{REPLACEMENT CHARACTER}",
    "x",
)
REASONING = "First I add 3 and 4, which is 7.\n"
PIECES = (
    *("```", "\n```", "python", "\t"),
    *("<answer>", "</answer>", "\\boxed{", "{", "}", "\n", " ", "$", "**", "*", ".", ",", "/", "-"),
    *(
        "+",
        "0",
        "000",
        "12",
        "345",
        ",678",
        "= ",
        "x",
        "e",
        "\N{MINUS SIGN}",
        "\N{VULGAR FRACTION ONE HALF}",
    ),
)


def check(data: bytes) -> None:
    """Judge one input.

    Raises:
        AssertionError: the reference finds another answer, or a promise is broken.
    """
    kind = FORMATS[data[0] % len(FORMATS)] if data else FORMATS[0]
    text = data[1:].decode(errors="replace")
    found = answer_in(kind, text)
    if len(text) <= TEXT_CHARS_MAX:
        expected = reference(kind, text)
        assert found == expected or expected == ANY, (
            f"{kind}: the reference says {expected!r}, not {found!r}"
        )
    if found is None or kind == "whole":
        return
    assert found, "an empty answer"
    again = written(kind, found)
    assert answer_in(kind, again) == found, "not found again"
    assert answer_in(kind, REASONING + text) == found, "reasoning changes it"
    for padding in PADDING if kind != "last_line" else PADDING[:3]:
        assert answer_in(kind, text + padding) is None, f"followed by {padding!r}"


def seeds() -> dict[str, bytes]:
    """Inputs to begin with, by name."""
    texts = {
        "sentence": "7 + 5 = 12.",
        "bold": "**1,234**",
        "math": "so $-3/4$",
        "tags": "I add.\n<answer>12</answer>",
        "box": "thus \\boxed{\\frac{1}{2}}",
        "lines": "one\n\n  two",
        "padded": "12            ",
        "zeros": "it is 0012",
        "code": "thus\n```python\ndef f(x):\n    return x\n```",
        "decimal": "it is 0.50 or \N{MINUS SIGN}1,000.25",
    }
    return {
        f"{kind}-{name}": bytes([number]) + text.encode()
        for number, kind in enumerate(FORMATS)
        for name, text in texts.items()
    }


def mutate(data: bytes, random: Random) -> bytes | None:
    """Put a piece that means something into the text, most often at its end."""
    if not data:
        return None
    text = data[1:].decode(errors="replace")
    at = len(text) if random.random() < 0.5 else random.randrange(len(text) + 1)
    piece = random.choice(PIECES) * random.choice((1, 1, 1, 2, 64))
    return data[:1] + (text[:at] + piece + text[at:]).encode()
