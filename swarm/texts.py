"""Display of foreign text: unprintable characters may move a cursor, reverse text or hide."""

from collections.abc import Sequence


def printable(text: str, chars_max: int, *, escapes: bool = False) -> str:
    """The text on one line, cut to `chars_max`. Unprintable characters become `?`, or with
    `escapes` Python escapes such as `\n`."""
    shown = "".join(
        char if char.isprintable() else _escaped(char) if escapes else "?"
        for char in text[: chars_max + 1]
    )
    return shown if len(shown) <= chars_max else shown[: chars_max - 1] + "…"


def first_line(error: BaseException, chars_max: int = 160) -> str:
    """The first line of an error's message, or the name of its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:chars_max]


def listed(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
