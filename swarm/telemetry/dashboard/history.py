"""Curves of the page: the last minutes in full, and the whole run in a bounded number of points.

The server keeps both, so a page opened late shows the past as well. Pure.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

RECENT_POINTS: Final = 180
FOLDED_POINTS_MAX: Final = 256
DIGITS: Final = 4  # of a value on the page; more than that nobody can see in a curve

Row = tuple[float | None, ...]


class Fold:
    """A series of any length in at most `points_max` rows, evenly spread: whenever it is full,
    each two neighbours become their mean."""

    def __init__(self, columns: int, points_max: int = FOLDED_POINTS_MAX) -> None:
        if points_max < 2 or points_max % 2:
            raise ValueError(f"points_max = {points_max}: must be even and at least 2")
        self._points_max = points_max
        self._rows: list[Row] = []
        self._open: list[Row] = []  # of the next point
        self._per_point = 1
        self._columns = columns

    def add(self, row: Row) -> None:
        """The next row of values; None where there is none."""
        assert len(row) == self._columns
        self._open.append(row)
        if len(self._open) < self._per_point:
            return
        if len(self._rows) == self._points_max:
            pairs = zip(self._rows[::2], self._rows[1::2], strict=True)
            self._rows = [merged(pair) for pair in pairs]
            self._per_point *= 2
            return
        self._rows.append(merged(self._open))
        self._open = []

    def as_kept(self) -> dict[str, Any]:
        """All that `go_on` needs."""
        return {"rows": self._rows, "open": self._open, "per_point": self._per_point}

    def go_on(self, told: Mapping[str, Any]) -> None:
        """
        Raises:
            ValueError, TypeError, KeyError: it is not what `as_kept` gave.
        """
        rows, opened = (_rows(told[name], self._columns) for name in ("rows", "open"))
        per_point = int(told["per_point"])
        if len(rows) > self._points_max or not len(opened) < max(1, per_point):
            raise ValueError("more points than there may be")
        self._rows, self._open, self._per_point = rows, opened, per_point

    @property
    def rows(self) -> tuple[Row, ...]:
        """Oldest first; the last one may stand for fewer rows than the others."""
        return (*self._rows, merged(self._open)) if self._open else tuple(self._rows)


def _rows(told: Sequence[Sequence[float | None]], columns: int) -> list[Row]:
    rows = [tuple(None if v is None else float(v) for v in row) for row in told]
    if any(len(row) != columns for row in rows):
        raise ValueError("a row of other columns")
    return rows


def merged(rows: Sequence[Row]) -> Row:
    """The mean of each column, over the rows that have a value there."""
    return tuple(
        _mean([value for value in column if value is not None])
        for column in zip(*rows, strict=True)
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


class Series:
    """Named figures over time. Times are unix seconds."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = ("t", *names)
        self._recent: deque[Row] = deque(maxlen=RECENT_POINTS)
        self._all = Fold(len(self._names))

    def add(self, unix_s: float, values: Mapping[str, float | None]) -> None:
        """Add a point: the value of each name at a time."""
        row = (unix_s, *(values[name] for name in self._names[1:]))
        self._recent.append(row)
        self._all.add(row)

    def as_kept(self) -> dict[str, Any]:
        """All that `go_on` needs, in values of JSON."""
        return {"names": self._names, "recent": list(self._recent), "all": self._all.as_kept()}

    def go_on(self, told: Mapping[str, Any]) -> None:
        """With what a series of the same names had.

        Raises:
            ValueError, TypeError, KeyError: it is not what `as_kept` gave.
        """
        if tuple(told["names"]) != self._names:
            raise ValueError("other curves")
        recent = _rows(told["recent"], len(self._names))
        self._all.go_on(told["all"])
        self._recent.extend(recent)

    def as_json(self) -> dict[str, dict[str, list[float | None]]]:
        """`recent` and `all`: each a list of values for each name, `t` their times."""
        return {
            "recent": self._columns(tuple(self._recent)),
            "all": self._columns(self._all.rows),
        }

    def _columns(self, rows: Sequence[Row]) -> dict[str, list[float | None]]:
        columns = zip(*rows, strict=True) if rows else [()] * len(self._names)
        named = dict(zip(self._names, columns, strict=True))
        times = [None if t is None else round(t, 1) for t in named.pop("t")]
        return {"t": times, **{name: [short(v) for v in column] for name, column in named.items()}}


def short(value: float | None) -> float | None:
    """The value in `DIGITS` significant digits."""
    return None if value is None else float(f"{value:.{DIGITS}g}")
