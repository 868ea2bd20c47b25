"""Curves of the page: the last minutes in full, and the whole run in a bounded number of points.

The server keeps both, so a page opened late shows the past as well. Pure.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, Final

from swarm.telemetry import metrics as m
from swarm.telemetry.fleet_view import Gone, NodeView, gone_after_s, plausible
from swarm.telemetry.reports import NodeReport

RECENT_POINTS: Final = 180
RECENT_S: Final = 600.0  # an older point is none of the last minutes, after a pause for one
FOLDED_POINTS_MAX: Final = 256
DIGITS: Final = 4  # of a value on the page; more than that nobody can see in a curve

Row = tuple[float | None, ...]


class Fold:
    """A series of any length in at most `points_max` rows: if it is full, pairs of neighbours are
    replaced by their mean."""

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
        mean([value for value in column if value is not None]) for column in zip(*rows, strict=True)
    )


def mean(values: Sequence[float]) -> float | None:
    """None: of no values."""
    return sum(values) / len(values) if values else None


def metrics(nodes: Iterable[NodeView], name: str) -> list[float]:
    """The metric of all nodes that report it."""
    there = (node.report.metrics for node in nodes)
    return [plausible(each[name]) for each in there if name in each]


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

    def last(self, name: str) -> float | None:
        """The newest value of a name; None: no recent point has one."""
        place = self._names.index(name)
        return next((row[place] for row in reversed(self._recent) if row[place] is not None), None)

    def as_kept(self) -> dict[str, Any]:
        """All that `go_on` needs, in values of JSON."""
        return {"names": self._names, "recent": list(self._recent), "all": self._all.as_kept()}

    def go_on(self, told: Mapping[str, Any]) -> None:
        """Restore the points of `as_kept`; raises as `Fold.go_on`."""
        if tuple(told["names"]) != self._names:
            raise ValueError("other curves")
        recent = _rows(told["recent"], len(self._names))
        self._all.go_on(told["all"])
        self._recent.extend(recent)

    def as_json(self) -> dict[str, dict[str, list[float | None]]]:
        """`recent` and `all`: each a list of values for each name, `t` their times."""
        newest = (self._recent[-1][0] or 0.0) if self._recent else 0.0
        recent = [row for row in self._recent if newest - (row[0] or 0.0) <= RECENT_S]
        return {
            "recent": self._columns(recent),
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


# --- rates of counters, by each node's own clock -------------------------------------------------

WINDOW_S: Final = 5.0  # a rate is over at least this much, or one interval
SAMPLES_MAX: Final = 16  # of one node
RATE_INTERVAL_S_MIN: Final = 0.1  # between two reports; a shorter one gives no rate
RATE_MAX: Final = 1e15  # a second, of any figure; bounds invented ones
COUNTERS: Final = (m.BYTES_IN_TOTAL, m.BYTES_OUT_TOTAL, m.ACCEPTED_TOTAL, m.GENERATED_TOKENS_TOTAL)
REJECTED: Final = m.REJECTED_TOTAL

Sample = tuple[float, dict[str, float]]


class Rates:
    """Keeps a few samples of each node that is watched, and forgets the others."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, int, deque[Sample]]] = {}

    def look(self, reports: Iterable[NodeReport]) -> dict[str, dict[str, float]]:
        """Rates a second of each node by counter; a node of one report has none."""
        kept: dict[str, tuple[str, int, deque[Sample]]] = {}
        for report in reports:
            instance, sequence, samples = self._kept.get(report.peer_id, ("", -1, deque()))
            if instance != report.instance:
                samples, sequence = deque(maxlen=SAMPLES_MAX), -1
            if report.sequence > sequence:
                samples.append((report.sent_at_s, counters(report)))
                # Keep what covers the window alone, so that a rate is that of now
                while len(samples) > 2 and samples[-1][0] - samples[1][0] >= WINDOW_S:
                    samples.popleft()
            kept[report.peer_id] = (report.instance, report.sequence, samples)
        self._kept = kept
        return {peer: _rates(samples) for peer, (_, _, samples) in kept.items()}


def counters(report: NodeReport) -> dict[str, float]:
    """Those of a report that rates are made of."""
    found = {name: plausible(report.metrics[name]) for name in COUNTERS if name in report.metrics}
    return found | {REJECTED: total(report.labelled.get(REJECTED, {}))}


def total(values: Mapping[str, float]) -> float:
    """Over all values of a label."""
    return sum(map(plausible, values.values()))


def _rates(samples: deque[Sample]) -> dict[str, float]:
    if len(samples) < 2:
        return {}
    (began_s, before), (ended_s, after) = samples[0], samples[-1]
    elapsed_s = ended_s - began_s
    if elapsed_s < RATE_INTERVAL_S_MIN:  # its clock went back, or it made the two up
        return {}
    # A counter never falls while a node runs; one that does is not believed.
    return {
        name: min(RATE_MAX, (value - before[name]) / elapsed_s)
        for name, value in after.items()
        if name in before and value >= before[name]
    }


# --- outages of the broker, which say nothing of the nodes ---------------------------------------


class Outages:
    """Remembers the last time that the broker was away, and who was there before it."""

    def __init__(self) -> None:
        self._began_s = inf
        self._ended_s = -inf
        self._is_away = False

    def note(self, now_s: float, *, connected: bool, away_s: float | None) -> None:
        if not connected:
            if not self._is_away:
                self._began_s = now_s - (away_s or 0.0)
            self._ended_s = now_s
        self._is_away = not connected

    def excused(self, node: NodeView, now_s: float) -> NodeView:
        """The node, not gone if only the broker was away: from its return on the node has as much
        time as after a report."""
        if node.gone is not Gone.SILENT:
            return node
        patience_s, heard_at_s = gone_after_s(node.report), now_s - node.heard_s
        was_there = heard_at_s >= self._began_s - patience_s
        silent_s = now_s - max(heard_at_s, self._ended_s)
        return replace(node, gone=None) if was_there and silent_s <= patience_s else node
