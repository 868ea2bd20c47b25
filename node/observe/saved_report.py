"""Summaries of a learner's steps and a worker's batches, for reports. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from typing import Any, Final

from node.observe.abilities import band_of
from node.observe.event_log import FILE_NAME, History, VersionEvent, history, read_events
from node.observe.records import (
    RoundDone,
    StepDone,
    VersionCame,
    VersionComing,
    VersionPublished,
    VersionSpread,
    VersionSpreading,
    WorkDone,
)
from node.observe.text_format import amount, duration, percent, printable, short_id
from node.observe.usefulness import advice, usefulness
from swarm.errors import ConfigError
from swarm.telemetry import metrics as m
from swarm.telemetry.dashboard.page_state import SAMPLE_S, DashboardState, ReportSource
from swarm.telemetry.dashboard.saved import saved_page
from swarm.telemetry.dashboard.series import RECENT_POINTS, short
from swarm.telemetry.fleet_view import Gone, NodeView
from swarm.telemetry.reports import NodeReport, PeerTraffic, Role, WorkerRow

STEPS_COLUMNS: Final = (
    "learner", "steps", "groups trained on", "of the pool", "workers", "tokens trained on",
    "waited", "staleness mean", "staleness most", "k3", "effective sample",
    "groups discarded",
)  # fmt: skip
WORK_COLUMNS: Final = (
    "worker", "batches", "generated tokens", "tokens a second", "waited",
    "groups handed in", "of these accepted",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepsSummary:
    """A learner's numbers, over all of its steps."""

    steps: int
    groups: int  # trained on
    shared_groups: int  # of these, from the pool
    workers: int  # whose groups these were
    trained_tokens: int
    idle_share: float  # of its time it waited for groups, in [0, 1]
    staleness_mean: float | None  # over steps; None: nothing was measured
    staleness_max: int
    mismatch_k3: float | None  # mean over steps, as the next
    effective_share: float | None
    discarded: int

    def cells(self) -> tuple[str, ...]:
        """For `STEPS_COLUMNS` after the first."""
        return (
            f"{self.steps:,}",
            f"{self.groups:,}",
            f"{self.shared_groups:,}",
            f"{self.workers:,}",
            amount(self.trained_tokens),
            percent(self.idle_share),
            "–" if self.staleness_mean is None else f"{self.staleness_mean:.1f}",
            f"{self.staleness_max}",
            "–" if self.mismatch_k3 is None else f"{self.mismatch_k3:.2g}",
            percent(self.effective_share),
            f"{self.discarded:,}",
        )


@dataclass(frozen=True, slots=True)
class WorkSummary:
    """A worker's numbers, over all of its batches and starts."""

    batches: int
    generated_tokens: int
    tokens_per_s: float  # while it generated
    idle_share: float  # of its time it waited for leases, in [0, 1]
    verdicts: dict[str, int]  # on groups that it handed in: `accepted`, or why not

    @property
    def handed_in(self) -> int:
        """Groups whose fate is known."""
        return sum(self.verdicts.values())

    @property
    def accepted(self) -> int:
        """Groups of these that the learner accepted."""
        return self.verdicts.get("accepted", 0)

    def cells(self) -> tuple[str, ...]:
        """For `WORK_COLUMNS` after the first."""
        return (
            f"{self.batches:,}",
            amount(self.generated_tokens),
            f"{self.tokens_per_s:,.0f}",
            percent(self.idle_share),
            f"{self.handed_in:,}",
            f"{self.accepted:,}",
        )


def steps_summary(steps: Sequence[StepDone]) -> StepsSummary | None:
    """None: there was no step."""
    if not steps:
        return None
    return StepsSummary(
        steps=len(steps),
        groups=sum(each.groups for each in steps),
        shared_groups=sum(each.shared_groups for each in steps),
        workers=len({worker for each in steps for worker in each.groups_by_worker}),
        trained_tokens=steps[-1].trained_tokens_total,
        idle_share=_share(sum(s.idle_s for s in steps), sum(s.train_s for s in steps)),
        staleness_mean=_finite_mean(each.staleness_mean for each in steps),
        staleness_max=max(each.staleness_max for each in steps),
        mismatch_k3=_finite_mean(each.mismatch_k3 for each in steps),
        effective_share=_finite_mean(each.effective_share for each in steps),
        discarded=sum(steps[-1].discarded_total.values()),
    )


def work_summary(work: Sequence[WorkDone]) -> WorkSummary | None:
    """None: there was no batch."""
    if not work:
        return None
    tokens, seconds = sum(w.generated_tokens for w in work), sum(w.generate_s for w in work)
    verdicts: Counter[str] = Counter()
    for last in _last_of_each_start(work):
        verdicts.update(last.verdicts_total)
    return WorkSummary(
        batches=len(work),
        generated_tokens=tokens,
        tokens_per_s=tokens / seconds if seconds > 0 else 0.0,
        idle_share=_share(sum(w.wait_s for w in work), seconds),
        verdicts=dict(verdicts),
    )


def _last_of_each_start(work: Sequence[WorkDone]) -> list[WorkDone]:
    """Batches are counted from one at each start, and so are totals."""
    return [a for a, b in pairwise(work) if b.batch <= a.batch] + [work[-1]]


def work_sentence(works: Sequence[WorkSummary]) -> list[str]:
    """One sentence on the verdicts on all workers' groups; none without workers."""
    if not works:
        return []
    refused: Counter[str] = Counter()
    for work in works:
        refused.update(work.verdicts)
    handed_in, taken = refused.total(), refused.pop("accepted", 0)
    groups = "1 group" if handed_in == 1 else f"{handed_in:,} groups"
    reasons = "".join(f", {printable(why, 40)} {n:,}" for why, n in refused.most_common() if n)
    return [f"Workers handed in {groups}: accepted {taken:,}{reasons}."]


def grown(totals: Iterable[int]) -> int:
    """The sum of a total over all starts of a process, at each of which it begins at zero."""
    before, done = 0, 0
    for total in totals:
        if total < before:
            done += before
        before = total
    return done + before


def _share(waited_s: float, worked_s: float) -> float:
    whole_s = waited_s + worked_s
    return waited_s / whole_s if whole_s > 0 else 0.0


def _finite_mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and isfinite(value)]
    return sum(known) / len(known) if known else None


# Broadcasts of versions as rows of bars: the phases of each receiver over time. Pure.

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


# Logs of nodes played back into the dashboard's state, as if each node had reported. Pure.


@dataclass(frozen=True, slots=True)
class LoggedNode:
    """One node of a report; `name` is the end of its peer id, or its directory's name."""

    name: str
    life: History

    @property
    def peer_id(self) -> str:
        """Whose log it is; empty if the log does not say."""
        if self.life.started:
            return self.life.started.peer_id
        told = (
            event.peer_id
            for _, event in self.life.versions
            if isinstance(event, VersionComing | VersionCame)
        )
        return next(told, "")

    @property
    def times(self) -> list[float]:
        """Unix times of all its events, in seconds."""
        life = self.life
        series = (life.rounds, life.held_out, life.troubles, life.steps, life.work, life.versions)
        return [time_s for events in series for time_s, _ in events]

    @property
    def records(self) -> list[tuple[float, Any]]:
        """(unix time, record) of all records that set metrics, in order."""
        life = self.life
        found: list[tuple[float, Any]] = [*life.rounds, *life.steps, *life.work, *life.held_out]
        return sorted(found, key=lambda event: event[0])

    @property
    def role(self) -> Role:
        """The node's role, by the records that it logged."""
        return "learner" if self.life.steps else "worker" if self.life.work else "node"


def replayed(nodes: Sequence[LoggedNode], begin_s: float, end_s: float) -> dict[str, Any]:
    """The page's state at the end, with curves of the whole time: `RECENT_POINTS` points at most.

    A node is gone from a curve one point after its last event. At the end all nodes are shown.
    """
    state, source = DashboardState(), ReportSource("event logs")
    step_s = max(1.1 * SAMPLE_S, (end_s - begin_s) / (RECENT_POINTS - 1))
    players = [_Player(node) for node in nodes]
    now_s = begin_s
    for tick in range(int((end_s - begin_s) / step_s) + 1):
        now_s = begin_s + tick * step_s
        state.look(_views(players, now_s, gone_after_s=step_s), {}, source, now_s)
    return state.look(_views(players, end_s, gone_after_s=inf), {}, source, now_s)


def _views(players: Sequence["_Player"], now_s: float, gone_after_s: float) -> list[NodeView]:
    views = []
    for player in players:
        report = player.report(now_s)
        if report is not None:
            gone = Gone.OFFLINE if now_s > player.last_s + gone_after_s else None
            heard_s = max(0.0, now_s - report.sent_at_s)
            views.append(NodeView(report, heard_s=heard_s, gone=gone, lost=0))
    return views


def metrics_over_time(node: LoggedNode) -> Iterator[tuple[float, Any, dict[str, float]]]:
    """(unix time, record, metrics known by then) for each record that sets some, in order."""
    known: dict[str, float] = {}
    for time_s, record in node.records:
        known |= m.measured(record, "logged") | m.measured(record)
        known |= m.figure_metrics(record)
        yield time_s, record, known


class _Player:
    """Reports of one node at rising times. They are not validated: the page shows all text as
    text."""

    def __init__(self, node: LoggedNode) -> None:
        self._node = node
        self._ahead = [time_s for time_s, _ in reversed(node.records)]
        self._coming = metrics_over_time(node)
        self._given: Counter[str] = Counter()  # groups trained on, by who made them
        self._labelled: dict[str, dict[str, float]] = {}
        self._sequence = 0
        self._report: NodeReport | None = None
        self.last_s = self._ahead[0] if self._ahead else 0.0  # of its last record

    def report(self, now_s: float) -> NodeReport | None:
        """The report as of a time; None: the node had logged nothing by then."""
        passed = None
        while self._ahead and self._ahead[-1] <= now_s:
            self._ahead.pop()
            passed = next(self._coming)
            self._note(passed[1])
        if passed is not None:
            time_s, _, known = passed
            self._report = self._made(time_s, known)
        return self._report

    def _note(self, record: Any) -> None:
        if isinstance(record, RoundDone):
            self._given.update(record.foreign_by_producer)
            self._labelled[m.REJECTED_TOTAL] = dict(record.rejected_total)
        elif isinstance(record, StepDone):
            self._given.update(record.groups_by_worker)
            self._labelled[m.DISCARDED_TOTAL] = dict(record.discarded_total)

    def _made(self, time_s: float, known: Mapping[str, float]) -> NodeReport:
        node, started = self._node, self._node.life.started
        self._sequence += 1
        given = self._given.most_common()
        return NodeReport.model_construct(
            peer_id=node.peer_id or node.name,
            run_id=started.run_id if started else "unknown",
            role=node.role,
            agent=started.agent if started else "",
            instance="log",
            sequence=self._sequence,
            sent_at_s=time_s,
            interval_s=1.0,
            metrics=dict(known),
            labelled=dict(self._labelled),
            peers=tuple(
                PeerTraffic.model_construct(peer_id=peer, groups_trained=groups)
                for peer, groups in given
            ),
            workers=tuple(
                WorkerRow.model_construct(name=short_id(peer), peer_id=peer, admitted=groups)
                for peer, groups in given
                if node.role == "learner"
            ),
        )


def curves(
    lines: Sequence[tuple[str, Sequence[tuple[float, float]]]], points_max: int
) -> dict[str, Any]:
    """Lines of (x, y) on one axis, for the page: `x`, and a list of values for each line.

    With more than `points_max` different x they are put into bins of equal width, of whose values
    the mean is shown. A line without a value at an x has None there.
    """
    places = sorted({x for _, line in lines for x, _ in line})
    if len(places) > points_max:
        width = (places[-1] - places[0]) / (points_max - 1)
        first = places[0]
        lines = [
            (name, [(first + width * round((x - first) / width), y) for x, y in line])
            for name, line in lines
        ]
        places = sorted({x for _, line in lines for x, _ in line})
    drawn = []
    for name, line in lines:
        at: dict[float, list[float]] = {}
        for x, y in line:
            at.setdefault(x, []).append(y)
        means = {x: sum(values) / len(values) for x, values in at.items()}
        drawn.append({"name": name, "y": [short(means.get(x)) for x in places]})
    return {"x": places, "lines": drawn}


# Charts of a saved report: a curve for each node, and broadcasts. Pure.

MINUTES: Final = "minutes since the first event"
POINTS_MAX: Final = 400  # of a curve; longer ones are means over bins
SMOOTHING_ROUNDS: Final = 15  # a reward's curve is the mean over so many last rounds


def _chart(title: str, x: str, unit: str, caption: str, lines: Iterable[Any]) -> list[Any]:
    """A chart for the page; none without a point. `unit`: `share` is drawn in percent."""
    drawn = [(name, line) for name, line in lines if line]
    if not drawn:
        return []
    named = {"title": title, "x_name": x, "unit": unit, "caption": caption}
    return [{**named, **curves(drawn, POINTS_MAX)}]


def drawn_charts(nodes: Sequence[LoggedNode], begin_s: float) -> list[Any]:
    """The charts of a report; one without a point is left out."""
    by_round = [(n.name, [(e.round, e.passed) for _, e in n.life.held_out]) for n in nodes]
    by_tokens = [
        (n.name, [(e.generated_tokens_total, e.passed) for _, e in n.life.held_out]) for n in nodes
    ]
    rewards = [(n.name, _smooth(_over_rounds(n, m.OWN_REWARD))) for n in nodes]
    charts = [
        *_chart("Held-out pass rate over rounds", "rounds", "share", HELD_OUT_CAPTION, by_round),
        *_chart(
            "Held-out pass rate over generated tokens", "tokens generated by the node", "share",
            TOKENS_CAPTION, by_tokens,
        ),
        *_band_chart(by_round),
        *_chart(
            f"Own training reward, mean over the last {SMOOTHING_ROUNDS} rounds", "rounds", "",
            REWARD_CAPTION, rewards,
        ),
        *_network_charts(nodes, begin_s),
        *_staleness_charts(nodes, begin_s),
    ]  # fmt: skip
    for name in filter(None, (each[m.METRIC] for each in m.FIGURES.values())):
        metric = m.METRICS[name]
        lines = [(n.name, _over_rounds(n, name)) for n in nodes]
        charts += _chart(metric.group, "rounds", metric.unit, f"{metric.help}.", lines)
    return charts


def _network_charts(nodes: Sequence[LoggedNode], begin_s: float) -> list[Any]:
    charts = []
    for title, metric in (("Bytes received", m.BYTES_IN_TOTAL), ("Bytes sent", m.BYTES_OUT_TOTAL)):
        lines = [
            (
                node.name,
                [
                    (round((time_s - begin_s) / 60, 3), known[metric])
                    for time_s, _, known in metrics_over_time(node)
                    if metric in known
                ],
            )
            for node in nodes
        ]
        charts += _chart(title, MINUTES, "B", TRAFFIC_CAPTION, lines)
    return charts


def _staleness_charts(nodes: Sequence[LoggedNode], begin_s: float) -> list[Any]:
    stale = [
        (f"{n.name} {what}", _over_rounds(n, metric))
        for n in nodes
        for what, metric in (("mean", m.STALENESS_MEAN_STEPS), ("oldest", m.STALENESS_MAX_STEPS))
    ]
    behind = [
        (
            node.name,
            [
                ((time_s - begin_s) / 60, max(0, work.learner_version - work.policy_version))
                for time_s, work in node.life.work
            ],
        )
        for node in nodes
    ]
    title = "Staleness of what the learner trained on"
    return [
        *_chart(title, "steps", "steps", STALENESS_CAPTION, stale),
        *_chart(
            "How far workers are behind the learner", MINUTES, "versions", BEHIND_CAPTION, behind
        ),
    ]


def _over_rounds(node: LoggedNode, metric: str) -> list[tuple[float, float]]:
    """(round or step, value) wherever a round or a step set the metric."""
    return [
        (known[m.ROUND], known[metric])
        for _, record, known in metrics_over_time(node)
        if isinstance(record, RoundDone | StepDone) and metric in known
    ]


def _smooth(line: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means over the last `SMOOTHING_ROUNDS` values. A long line lacks its first third of a window:
    means over too few values to show."""
    first = SMOOTHING_ROUNDS // 3 if len(line) > SMOOTHING_ROUNDS else 0
    means = []
    for at in range(first, len(line)):
        last = [y for _, y in line[max(0, at - SMOOTHING_ROUNDS + 1) : at + 1]]
        means.append((line[at][0], sum(last) / len(last)))
    return means


def _band_chart(by_round: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> list[Any]:
    evaluated = [line for _, line in by_round if line]
    band = band_of([([x for x, _ in line], [y for _, y in line]) for line in evaluated])
    if band is None:
        return []
    title = f"Held-out pass rate, mean of {band.nodes} nodes and its 95 % interval"
    ends = {"mean": band.mean, "low": band.low, "high": band.high}
    lines = [(name, list(zip(band.x, ys, strict=True))) for name, ys in ends.items()]
    return _chart(title, "rounds", "share", BAND_CAPTION, lines)


HELD_OUT_CAPTION: Final = "The run's fixed held-out tasks, which no node trains on."
TOKENS_CAPTION: Final = (
    "The same pass rates against what each node generated itself: tokens of groups that came from "
    "others are not counted."
)
BAND_CAPTION: Final = (
    "Student's t over the nodes of this report, at rounds after which all were evaluated. Nodes of "
    "one swarm train on each other's groups: another swarm may do otherwise."
)
REWARD_CAPTION: Final = (
    "Rewards of the node's own completions on its training tasks; groups of others never enter."
)
TRAFFIC_CAPTION: Final = "Payload bytes of all protocols, counted by each node itself."
STALENESS_CAPTION: Final = (
    "Steps of the learner from the oldest version in a group to the step that trained on it: the "
    "mean over a step's groups, and the oldest of them."
)
BEHIND_CAPTION: Final = (
    "Versions between the policy that a worker generates with and the newest that it had heard of."
)
WATERFALL_CAPTION: Final = (
    "A row is one worker and version, the first row of a version its learner. Phases are those of "
    "the worker's own log, or, where that is not among these, what its learner heard. Each log has "
    "its machine's clock."
)


def drawn_broadcasts(nodes: Sequence[LoggedNode]) -> dict[str, Any] | None:
    """The newest broadcasts as rows of bars; None where no log tells of any."""
    found = waterfall((node.name, node.life) for node in nodes)
    if found is None:
        return None
    made = [row.version for row in found.rows if not row.peer]
    several = len(set(made)) < len(made)  # learners
    left_out = found.versions_left_out
    return {
        "title": "Broadcasts" + (f" ({left_out} before them are not drawn)" if left_out else ""),
        "caption": WATERFALL_CAPTION,
        "phases": PHASES,
        "rows": [
            {
                **asdict(row),
                "name": f"{row.version} · {row.name}"
                if row.peer
                else f"version {row.version}" + (f" of {row.name}" if several else ""),
            }
            for row in found.rows
        ],
    }


# `swarm-node report`: from the event logs of some nodes to one HTML page, the dashboard saved.

NODES_MAX: Final = 64
PRODUCERS_SHOWN_MAX: Final = 24
TROUBLES_SHOWN_MAX: Final = 20
_OTHERS: Final = "others"


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """One node's numbers. Pass rates and rewards are in [0, 1], and None where never measured."""

    name: str
    peer_id: str  # empty when the log does not tell
    model: str
    engine: str
    starts: int
    rounds: int
    generated_tokens: int
    seconds: float  # from the first to the last event
    evaluations: int
    held_out_first: float | None
    held_out_last: float | None
    reward_first: float | None  # mean over the first tenth of the rounds or steps
    reward_last: float | None  # mean over the last tenth
    local_groups_mean: float  # effective I; of a learner, groups of its workers
    external_groups_mean: float  # effective J
    foreign_groups: int  # groups of others trained on, in all
    groups_shared: int
    accepted: int
    rejected: dict[str, int]
    bytes_in: int
    bytes_out: int
    troubles: int
    groups_quantised: int = 0  # trained on, and sampled by engines with quantised weights
    steps: StepsSummary | None = None  # of a learner
    work: WorkSummary | None = None  # of a worker
    sharing: str = ""  # what it brought, in a sentence

    @property
    def extent(self) -> str:
        """The number of its rounds, steps or batches, in words."""
        if self.steps is not None and not self.rounds:
            return _count(self.steps.steps, "step")
        if self.work is not None and not self.rounds:
            return _count(self.work.batches, "batch", "es")
        return _count(self.rounds, "round")

    @property
    def learns(self) -> bool:
        """True for nodes and learners; workers have no pass rate and no reward."""
        return self.work is None or bool(self.rounds) or self.steps is not None

    @property
    def rise_points(self) -> float | None:
        """Percentage points by which the held-out pass rate rose; None without a second look."""
        if self.evaluations < 2 or self.held_out_first is None or self.held_out_last is None:
            return None
        return 100 * (self.held_out_last - self.held_out_first)


@dataclass(frozen=True, slots=True)
class ReportSummary:
    """Summaries of a report's nodes, and the path of its page."""

    nodes: tuple[NodeSummary, ...]
    html: Path

    @property
    def rise_points_mean(self) -> float | None:
        """Mean rise over the nodes that were evaluated at least twice."""
        return _mean([node.rise_points for node in self.nodes if node.rise_points is not None])

    def __str__(self) -> str:
        return "\n".join([*map(_line, self.nodes), f"report: {self.html}"])


def _line(node: NodeSummary) -> str:
    if node.work is not None and not node.learns:
        taken = f"{node.work.accepted:,} of {_count(node.work.handed_in, 'group')} accepted"
        return f"{node.name}: {taken} in {node.extent}"
    return (
        f"{node.name}: held-out {percent(node.held_out_first)} to {percent(node.held_out_last)}"
        f" ({_points(node.rise_points)} points) in {node.extent}"
        + (f"\n  {node.sharing}" if node.sharing else "")
    )


def write_report(run_dirs: Sequence[Path], out: Path) -> ReportSummary:
    """Write `report.html` into the directory `out`, from each node's data directory. Takes seconds:
    not for the event loop.

    Raises:
        ConfigError: there is no event log in one of the directories, or too many directories.
    """
    nodes = _read(run_dirs)
    summaries = tuple(summarise(node.name, node.life) for node in nodes)
    out.mkdir(parents=True, exist_ok=True)
    page = out / "report.html"
    page.write_text(saved_page(page_state(nodes, summaries)), encoding="utf-8")
    return ReportSummary(summaries, page)


def _read(run_dirs: Sequence[Path]) -> list[LoggedNode]:
    if not 1 <= len(run_dirs) <= NODES_MAX:
        raise ConfigError(f"report: give from 1 to {NODES_MAX} data directories")
    nodes: list[LoggedNode] = []
    for directory in run_dirs:
        try:
            life = history(read_events(directory / FILE_NAME))
        except OSError as error:
            raise ConfigError(
                f"report: no event log in {directory} ({error.strerror}): name a node's --data-dir"
            ) from None
        peer = LoggedNode("", life).peer_id
        nodes.append(LoggedNode(short_id(peer) if peer else printable(directory.name, 24), life))
    return nodes


def summarise(name: str, life: History) -> NodeSummary:
    """A node's numbers from its history."""
    rounds = [record for _, record in life.rounds]
    steps = [record for _, record in life.steps]
    work = [record for _, record in life.work]
    counted: Sequence[RoundDone | StepDone | WorkDone] = rounds or steps or work
    last = rounds[-1] if rounds else None
    node = LoggedNode(name, life)
    times = node.times
    done, made = steps_summary(steps), work_summary(work)
    own_groups = [r.local_groups for r in rounds] or [s.groups - s.shared_groups for s in steps]
    others_groups = [r.external_groups for r in rounds] or [s.shared_groups for s in steps]
    rewards = [r.own_reward for r in rounds] or [s.reward for s in steps if isfinite(s.reward)]
    tenth = max(1, len(rewards) // 10)
    return NodeSummary(
        name=name,
        peer_id=node.peer_id,
        model=life.started.model if life.started else "",
        engine=life.started.engine if life.started else "",
        starts=life.starts,
        rounds=len(rounds),
        generated_tokens=(last.generated_tokens_total if last else 0)
        + (made.generated_tokens if made else 0),
        seconds=max(times) - min(times) if times else 0.0,
        evaluations=len(life.held_out),
        held_out_first=life.held_out_first,
        held_out_last=life.held_out_last,
        reward_first=_mean(rewards[:tenth]),
        reward_last=_mean(rewards[-tenth:]),
        local_groups_mean=_mean(own_groups) or 0.0,
        external_groups_mean=_mean(others_groups) or 0.0,
        foreign_groups=sum(r.external_groups for r in rounds) + (done.groups if done else 0),
        groups_shared=sum(r.groups_shared for r in rounds) + (made.handed_in if made else 0),
        accepted=last.accepted_total if last else done.groups if done else 0,
        rejected=dict(last.rejected_total) if last else {},
        bytes_in=grown(each.bytes_in_total for each in counted),
        bytes_out=grown(each.bytes_out_total for each in counted),
        troubles=len(life.troubles),
        groups_quantised=sum(r.groups_quantised for r in rounds)
        + sum(step.groups_quantised for step in steps),
        steps=done,
        work=made,
        sharing=_sharing(life, rounds),
    )


def _sharing(life: History, rounds: Sequence[RoundDone]) -> str:
    if life.started is None:
        return ""
    found = usefulness(rounds, life.started.external_groups)
    return "" if found is None else advice(found)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# --- the page ----------------------------------------------------------------------------------


def page_state(nodes: Sequence[LoggedNode], summaries: Sequence[NodeSummary]) -> dict[str, Any]:
    """The dashboard's state at the end of the logs, and under `saved` what a report has beside."""
    times = [time_s for node in nodes for time_s in node.times]
    begin_s, end_s = min(times, default=0.0), max(times, default=0.0)
    run_ids = sorted({node.life.started.run_id for node in nodes if node.life.started})
    saved = {
        "title": f"Swarm run {', '.join(run_ids) or 'of unknown id'}",
        "sentences": _sentences(summaries),
        "tables": [
            *_nodes_tables(summaries),
            *_sharing_table(nodes),
            *_rejected_table(summaries),
            *_environments(nodes),
            *_troubles(nodes, begin_s),
        ],
        "charts": drawn_charts(nodes, begin_s),
        "waterfall": drawn_broadcasts(nodes),
    }
    return {**replayed(nodes, begin_s, end_s), "saved": saved}


# --- sentences and tables ----------------------------------------------------------------------


def _sentences(summaries: Sequence[NodeSummary]) -> list[str]:
    tokens = sum(node.generated_tokens for node in summaries)
    foreign = sum(node.foreign_groups for node in summaries)
    longest = max(node.seconds for node in summaries)
    quantised = sum(node.groups_quantised for node in summaries)
    extent = f"{_count(len(summaries), 'node')} in {_extent(summaries)}"
    return [
        f"{extent} over {duration(longest)}, {tokens:,} tokens generated.",
        f"Groups of others were trained on {_count(foreign, 'time')}.",
        _rise_sentence(summaries),
        _rejected_sentence(summaries),
        *work_sentence([node.work for node in summaries if node.work]),
        *(
            [f"{_count(quantised, 'group')} trained on came from engines with quantised weights."]
            if quantised
            else []
        ),
        *(f"{node.name}: {node.sharing}" for node in summaries if node.sharing),
    ]


def _extent(summaries: Sequence[NodeSummary]) -> str:
    rounds = sum(node.rounds for node in summaries)
    steps = sum(node.steps.steps for node in summaries if node.steps)
    batches = sum(node.work.batches for node in summaries if node.work)
    parts = [_count(rounds, "round")] if rounds or not (steps or batches) else []
    parts += [_count(steps, "step")] if steps else []
    parts += [_count(batches, "batch", "es")] if batches else []
    return " and ".join(parts)


def _rise_sentence(summaries: Sequence[NodeSummary]) -> str:
    rises = [node.rise_points for node in summaries if node.rise_points is not None]
    if not rises:
        return "No node was evaluated twice on the held-out tasks, so nothing is said of a rise."
    mean = sum(rises) / len(rises)
    return (
        f"From the first to the last evaluation the held-out pass rate changed by {mean:+.1f}"
        f" points in the mean over {_count(len(rises), 'node')}"
        f" (from {min(rises):+.1f} to {max(rises):+.1f})."
    )


def _rejected_sentence(summaries: Sequence[NodeSummary]) -> str:
    totals = _rejected_in_all(summaries)
    accepted = _count(sum(node.accepted for node in summaries), "group")
    if not totals.total():
        return f"{accepted} from peers accepted, nothing rejected."
    reasons = ", ".join(f"{printable(r, 40)} {n:,}" for r, n in totals.most_common() if n)
    return f"{accepted} from peers accepted, {totals.total():,} records rejected: {reasons}."


def _rejected_in_all(summaries: Sequence[NodeSummary]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for node in summaries:
        totals.update(node.rejected)
    return totals


def _count(number: int, noun: str, many: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else many}"


_LEARNING: Final = (
    "node", "held-out start", "held-out end", "rise (points)", "own reward start → end",
    "rounds or steps", "generated tokens", "own groups a round (I)", "foreign groups a round (J)",
    "model",
)  # fmt: skip
_NETWORK: Final = (
    "node", "groups shared", "groups accepted", "records rejected", "bytes in", "bytes out",
    "starts", "troubles",
)  # fmt: skip
_LEARNING_NOTE: Final = (
    "Own reward is the mean over the first and over the last tenth of the rounds or steps; I and J "
    "are means over all of them of what was really trained on, and a learner's I are groups of its "
    "workers."
)


def _table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = ""
) -> list[Any]:
    """A table for the page; none without rows."""
    return [{"title": title, "columns": columns, "rows": rows, "note": note}] if rows else []


def _nodes_tables(summaries: Sequence[NodeSummary]) -> list[Any]:
    learning = [_learning_row(node) for node in summaries if node.learns]
    network = [
        (
            node.name,
            f"{node.groups_shared:,}",
            f"{node.accepted:,}",
            f"{sum(node.rejected.values()):,}",
            amount(node.bytes_in, "B"),
            amount(node.bytes_out, "B"),
            str(node.starts),
            str(node.troubles),
        )
        for node in summaries
    ]
    steps = [(node.name, *node.steps.cells()) for node in summaries if node.steps]
    work = [(node.name, *node.work.cells()) for node in summaries if node.work]
    mean = [_mean_row(summaries)] if learning else []
    return [
        *_table("Learning", _LEARNING, [*learning, *mean], _LEARNING_NOTE),
        *_table("Steps", STEPS_COLUMNS, steps),
        *_table("Work", WORK_COLUMNS, work),
        *_table("Network", _NETWORK, network),
    ]


def _learning_row(node: NodeSummary) -> tuple[str, ...]:
    return (
        node.name,
        percent(node.held_out_first),
        percent(node.held_out_last),
        _points(node.rise_points),
        f"{_reward(node.reward_first)} → {_reward(node.reward_last)}",
        f"{node.steps.steps if node.steps and not node.rounds else node.rounds:,}",
        amount(node.generated_tokens),
        f"{node.local_groups_mean:.1f}",
        f"{node.external_groups_mean:.1f}",
        f"{node.model}, {node.engine}",
    )


def _mean_row(summaries: Sequence[NodeSummary]) -> tuple[str, ...]:
    measured = [n for n in summaries if n.rise_points is not None]
    return (
        "mean",
        percent(_mean([n.held_out_first for n in measured if n.held_out_first is not None])),
        percent(_mean([n.held_out_last for n in measured if n.held_out_last is not None])),
        _points(_mean([n.rise_points for n in measured if n.rise_points is not None])),
        *[""] * (len(_LEARNING) - 4),
    )


def _points(rise: float | None) -> str:
    return "–" if rise is None else f"{rise:+.1f}"


def _reward(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _sharing_table(nodes: Sequence[LoggedNode]) -> list[Any]:
    trained = [node for node in nodes if node.life.rounds]
    producers, groups = sharing_matrix(trained)
    rows = [
        (node.name, *(f"{count:,}" for count in row))
        for node, row in zip(trained, groups, strict=True)
    ]
    note = (
        "A row is the node that trained, a column the peer that made the groups. The diagonal "
        "counts a node's own groups."
    )
    return _table("Groups trained on", ("trained on by", *producers), rows, note)


def sharing_matrix(nodes: Sequence[LoggedNode]) -> tuple[list[str], list[list[int]]]:
    """(producers, groups trained on: a row for each node, a column for each producer).

    The nodes of the report come first among the producers, then peers without a log here by how
    much they gave; those beyond `PRODUCERS_SHOWN_MAX` share one column.
    """
    counts: list[Counter[str]] = []
    for node in nodes:
        counts.append(Counter())
        for _, record in node.life.rounds:
            counts[-1].update(record.foreign_by_producer)
    known = [node.peer_id or node.name for node in nodes]
    totals = sum(counts, Counter())
    strangers = sorted(set(totals) - set(known), key=lambda peer: (-totals[peer], peer))
    shown = [*known, *strangers][: max(PRODUCERS_SHOWN_MAX, len(known))]
    rest = set(totals) - set(shown)
    groups = [[of[peer] for peer in shown] for of in counts]
    names = [short_id(peer) for peer in shown]
    if rest:
        names.append(_OTHERS)
        groups = [
            [*row, sum(of[peer] for peer in rest)] for row, of in zip(groups, counts, strict=True)
        ]
    for position, node in enumerate(nodes):
        groups[position][position] += sum(record.local_groups for _, record in node.life.rounds)
    return names, groups


def _rejected_table(summaries: Sequence[NodeSummary]) -> list[Any]:
    """Counts for each node by reason, the most frequent reason first."""
    reasons = [reason for reason, total in _rejected_in_all(summaries).most_common() if total]
    rows = [
        (node.name, *(f"{node.rejected.get(reason, 0):,}" for reason in reasons))
        for node in summaries
        if reasons
    ]
    note = "What peers sent and a node did not accept."
    return _table("Rejected records by reason", ("node", *reasons), rows, note)


def _environments(nodes: Sequence[LoggedNode]) -> list[Any]:
    """Pass rates by environment, as means over the nodes that were evaluated."""
    first = [node.life.held_out[0][1].passed_by_environment for node in nodes if node.life.held_out]
    last = [node.life.held_out[-1][1].passed_by_environment for node in nodes if node.life.held_out]
    rows = [
        (
            name,
            percent(_mean([rates[name] for rates in first if name in rates])),
            percent(_mean([rates[name] for rates in last if name in rates])),
        )
        for name in sorted({name for rates in (*first, *last) for name in rates})
    ]
    title = "Held-out pass rate by environment, mean over nodes"
    return _table(title, ("environment", "start", "end"), rows)


def _troubles(nodes: Sequence[LoggedNode], begin_s: float) -> list[Any]:
    found = sorted((time_s, n.name, t.what) for n in nodes for time_s, t in n.life.troubles)
    rows = [
        (name, duration(time_s - begin_s), printable(what, 400))
        for time_s, name, what in found[:TROUBLES_SHOWN_MAX]
    ]
    more = len(found) - TROUBLES_SHOWN_MAX
    return _table("Troubles", ("node", "after", ""), rows, f"And {more} more." if more > 0 else "")
