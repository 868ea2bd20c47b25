"""How a text from elsewhere is shown: the one place that makes it harmless.

What is not printable may move a cursor, colour a terminal, turn the direction of what follows, or
hide: control and format characters, other blanks than the space, lone surrogates, what no standard
assigns. Markup of a page or a library is text here; whoever writes a page escapes it besides.
"""


def printable(text: str, chars_max: int, *, escapes: bool = False) -> str:
    """The text in one line, cut to `chars_max`. What is not printable becomes `?`, or with
    `escapes` what Python writes for it, such as `\\n` or `\\u202e`: then blanks at the end, and the
    end of a line, can be told apart."""
    shown = "".join(
        char if char.isprintable() else _escaped(char) if escapes else "?"
        for char in text[: chars_max + 1]
    )
    return shown if len(shown) <= chars_max else shown[: chars_max - 1] + "…"


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
