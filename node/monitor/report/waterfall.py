"""Broadcasts of versions as rows of bars: the phases of each receiver over time. Pure.

A worker's own log is the best source. Without it, the learner's log tells what the learner heard.
Each log has its machine's clock, so bars of several logs are as exact as these clocks agree.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from node.records.event_log import History, VersionEvent
from node.records.format import short_id
from node.records.records import (
    VersionCame,
    VersionComing,
    VersionPublished,
    VersionSpread,
    VersionSpreading,
)

ROWS_MAX: Final = 60  # that are drawn: the newest versions'
PUBLISHER: Final = ""  # the peer of a version's own row
DROPPED: Final = "dropped"
PHASES: Final = {  # in the order in which they are explained
    "made": "made by the learner",
    "spread": "until all that took part had it",
    "manifest": "worker learns what to fetch",
    "fetch": "worker fetches",
    "patch": "worker patches",
    "load": "engine paused or starting, and loads",
    "heard": "worker fetches, as the learner heard",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """A phase, in seconds since the version was published."""

    phase: str  # one of `PHASES`
    start_s: float
    end_s: float


@dataclass(slots=True)
class WaterfallRow:
    """One receiver and version, or the version at its publisher. Times as in `Bar`; None: no log
    tells."""

    version: int
    peer: str  # `PUBLISHER`: the publisher's row
    name: str
    bars: list[Bar] = field(default_factory=list)
    bound_s: float | None = None  # when it could have been there by the links
    had_s: float | None = None  # when the learner knew that all chunks are there
    used_s: float | None = None  # when it was asked for a lease with it
    note: str = ""  # what is not to be seen in the bars

    @property
    def end_s(self) -> float:
        """The time of the row's last bar or mark."""
        marks = (self.bound_s, self.had_s, self.used_s)
        return max(
            [bar.end_s for bar in self.bars] + [mark for mark in marks if mark is not None],
            default=0.0,
        )


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Rows by version, the publisher's first in each; older versions are counted."""

    rows: tuple[WaterfallRow, ...]
    versions_left_out: int


def waterfall(lives: Iterable[tuple[str, History]]) -> Waterfall | None:
    """The newest broadcasts of these nodes, by name and life; None: no log tells of any."""
    logs = _logs(lives)
    if not logs:
        return None
    zero_s = _zero_s(logs)
    rows: _Rows = {}
    for log in logs:
        _Reading(log, rows, zero_s).read()
    _hear(logs, rows, zero_s)
    by_version: dict[tuple[int, str], list[WaterfallRow]] = {}
    for (run, version, _), row in rows.items():
        if row.bars or row.end_s > 0.0 or row.note:
            by_version.setdefault((version, run), []).append(row)
    drawn: list[WaterfallRow] = []
    versions = sorted(by_version, reverse=True)
    for place, key in enumerate(versions):
        its = sorted(by_version[key], key=lambda row: (row.peer != PUBLISHER, row.name))
        if drawn and len(drawn) + len(its) > ROWS_MAX:
            return Waterfall(tuple(drawn), len(versions) - place)
        drawn[:0] = its[:ROWS_MAX]
    return Waterfall(tuple(drawn), 0)


@dataclass(slots=True)
class _Log:
    """The broadcasts in one log. Versions of one run are counted together."""

    name: str
    run: str  # empty: the log does not say, and there are several runs
    events: Sequence[tuple[float, VersionEvent]]


_Rows = dict[tuple[str, int, str], WaterfallRow]  # by run, version and peer
_Zeros = Mapping[tuple[str, int], float]  # unix time of the publication, by run and version


def _logs(lives: Iterable[tuple[str, History]]) -> list[_Log]:
    logs = [
        _Log(name, life.started.run_id if life.started else "", life.versions)
        for name, life in lives
        if life.versions
    ]
    runs = {log.run for log in logs} - {""}
    if len(runs) == 1:
        for log in logs:
            log.run = min(runs)
    return logs


def _zero_s(logs: Sequence[_Log]) -> _Zeros:
    """The first publication of each version, or, where no log tells of it, its first event."""
    first: dict[tuple[str, int], float] = {}
    offered: dict[tuple[str, int], float] = {}
    for log in logs:
        for time_s, event in log.events:
            key = log.run, event.version
            first[key] = min(time_s, first.get(key, time_s))
            if isinstance(event, VersionPublished):
                at_s = time_s - event.announced_ago_s
                offered[key] = min(at_s, offered.get(key, at_s))
    return first | offered


class _Reading:
    """One log, from its first event to its last."""

    def __init__(self, log: _Log, rows: _Rows, zero_s: _Zeros) -> None:
        self._log = log
        self._name = log.name
        self._zero_s = zero_s
        self._rows = rows
        self._open: tuple[VersionComing, float] | None = None  # and when it began
        self._fetching_s: float | None = None  # when the try began to

    def read(self) -> None:
        for time_s, event in self._log.events:
            at_s = time_s - self._zero_s[self._log.run, event.version]
            match event:
                case VersionPublished():
                    row = self._row(event.version, PUBLISHER, self._name)
                    start_s = -max(0.0, event.made_s - event.announced_ago_s)
                    row.bars.append(Bar("made", start_s, 0.0))
                case VersionSpread():
                    row = self._row(event.version, PUBLISHER, self._name)
                    row.bars.append(Bar("spread", max(0.0, at_s - event.spread_s), at_s))
                    if event.bound_s is not None:
                        row.bound_s = at_s - event.spread_s + event.bound_s
                case VersionComing():
                    self._enter(event, at_s)
                case VersionCame():
                    self._end(event, at_s)
                case VersionSpreading():
                    pass  # see `_hear`
        self._close(None, 0.0)

    def _enter(self, event: VersionComing, at_s: float) -> None:
        self._close(event.version, at_s)
        if event.phase == "manifest":
            self._fetching_s = None
        if event.phase == "fetch" and self._fetching_s is None:
            self._fetching_s = at_s
        row = self._row(event.version, event.peer_id, self._name)
        if event.phase == DROPPED:
            row.note = "dropped for a newer one"
        elif event.phase in PHASES:
            self._open = event, at_s

    def _end(self, event: VersionCame, at_s: float) -> None:
        self._close(event.version, at_s)
        row = self._row(event.version, event.peer_id, self._name)
        if not row.bars and event.failure is None:  # the log's beginning is gone
            self._draw_from_end(row, event, at_s)
        row.note = "" if event.failure is None else "failed"
        if event.bound_s is not None and self._fetching_s is not None:
            row.bound_s = self._fetching_s + event.bound_s
        self._fetching_s = None

    def _draw_from_end(self, row: WaterfallRow, event: VersionCame, at_s: float) -> None:
        ends_s = at_s
        spans = (("load", event.paused_s), ("patch", event.patch_s), ("fetch", event.fetch_s))
        for phase, seconds in spans:
            row.bars.insert(0, Bar(phase, ends_s - seconds, ends_s))
            ends_s -= seconds
        self._fetching_s = ends_s

    def _close(self, version: int | None, at_s: float) -> None:
        """The phase that runs ends here; one of another version, nobody knows when."""
        if self._open is None:
            return
        (event, start_s), self._open = self._open, None
        row = self._row(event.version, event.peer_id, self._name)
        if event.version == version:
            row.bars.append(Bar(event.phase, start_s, max(start_s, at_s)))
        else:
            row.bars.append(Bar(event.phase, start_s, start_s))
            row.note = f"no more is known after {event.phase} began"

    def _row(self, version: int, peer: str, name: str) -> WaterfallRow:
        return _row_of(self._rows, self._log, version, peer, name)


def _row_of(rows: _Rows, log: _Log, version: int, peer: str, name: str) -> WaterfallRow:
    return rows.setdefault((log.run, version, peer), WaterfallRow(version, peer, name))


def _hear(logs: Sequence[_Log], rows: _Rows, zero_s: _Zeros) -> None:
    """Add the news that learners had of their workers."""
    told = {key for key, row in rows.items() if row.bars}
    for log in logs:
        for time_s, event in log.events:
            if not isinstance(event, VersionSpreading):
                continue
            at_s = time_s - zero_s[log.run, event.version]
            for peer, share in event.shares.items():
                row = _row_of(rows, log, event.version, peer, short_id(peer))
                if (log.run, event.version, peer) not in told:
                    row.bars = [Bar("heard", 0.0, max(0.0, at_s))]
                    row.note = "" if share >= 1.0 else f"{share:.0%}, as far as was heard"
                if share >= 1.0 and row.had_s is None:
                    row.had_s = at_s
            for peer in event.using:
                row = _row_of(rows, log, event.version, peer, short_id(peer))
                row.used_s = at_s if row.used_s is None else row.used_s
