"""Display of foreign text: unprintable characters may move a cursor, reverse text or hide."""


def printable(text: str, chars_max: int, *, escapes: bool = False) -> str:
    """The text on one line, cut to `chars_max`. Unprintable characters become `?`, or with
    `escapes` Python escapes such as `\n`."""
    shown = "".join(
        char if char.isprintable() else _escaped(char) if escapes else "?"
        for char in text[: chars_max + 1]
    )
    return shown if len(shown) <= chars_max else shown[: chars_max - 1] + "…"


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
