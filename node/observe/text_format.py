"""Formats of numbers, times and strangers' texts, the same in every view."""

import shutil
from collections.abc import Sequence

from swarm.texts import printable as printable  # here for all views

SHORT_ID_CHARS = 8
WIDTH_COLUMNS = 80
_BARS = "▁▂▃▄▅▆▇█"


def terminal_width() -> int:
    """The width of what is printed once: the terminal's, at most `WIDTH_COLUMNS`."""
    return min(WIDTH_COLUMNS, shutil.get_terminal_size((WIDTH_COLUMNS, 24)).columns)


def short_id(peer_id: str) -> str:
    """The end of a peer id, where ids differ; their beginnings are alike."""
    return printable(peer_id[-SHORT_ID_CHARS:], SHORT_ID_CHARS)


def percent(share: float | None) -> str:
    """A share in [0, 1] as a percentage; None is a dash."""
    return "–" if share is None else f"{100 * share:.1f} %"


def said(value: float | None, form: str) -> str:
    """A number by a format; None is a dash."""
    return "–" if value is None else f"{value:{form}}"


def amount(count: float | None, unit: str = "") -> str:
    """A count in three digits: 999, 12.3 k, 4.56 MB, by powers of 1000. None is a dash."""
    if count is None:
        return "–"
    size = float(count)
    for prefix in ("", "k", "M", "G", "T"):
        if abs(size) < 999.5 or prefix == "T":
            digits = 0 if not prefix or abs(size) >= 99.95 else 1 if abs(size) >= 9.995 else 2
            return f"{size:.{digits}f} {prefix}{unit}".rstrip()
        size /= 1000
    raise AssertionError("unreachable")


def often(count: float) -> str:
    """A number of times, in words."""
    return "once" if count == 1 else f"{count:.0f} times"


def counted(number: int, nouns: str) -> str:
    """A number of things, whose noun is given in the plural: 1 peer, 2,000 batches."""
    one = "batch" if nouns == "batches" else nouns.removesuffix("s")
    return f"{number:,} {one if number == 1 else nouns}"


def duration(seconds: float) -> str:
    """Seconds as 42 s, 3 min 05 s or 2 h 07 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def bar_chart(values: Sequence[float]) -> str:
    """One character for each value in [0, 1]; values outside are cut to it."""
    top = len(_BARS) - 1
    return "".join(_BARS[round(top * min(1.0, max(0.0, value)))] for value in values)
