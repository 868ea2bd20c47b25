"""`swarm-node report`: event logs replayed into the dashboard page, and saved as one HTML file.

Beside the page's own state a report has curves of each node, the phases of broadcasts, and what
only logs know: first and last evaluations, rewards by environment, troubles.
"""

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from node.observe import records as r
from node.observe.abilities import interval
from node.observe.event_log import FILE_NAME, History, VersionEvent, history, read_events
from node.observe.text_format import amount, counted, duration, percent, printable, said, short_id
from node.observe.usefulness import advice, usefulness
from swarm.errors import ConfigError
from swarm.telemetry import metrics as m
from swarm.telemetry.dashboard.page_state import SAMPLE_S, DashboardState, ReportSource
from swarm.telemetry.dashboard.saved import saved_page
from swarm.telemetry.dashboard.series import RECENT_POINTS, mean, short
from swarm.telemetry.fleet_view import Gone, NodeView
from swarm.telemetry.reports import NodeReport, PeerTraffic, Role, WorkerRow

NODES_MAX: Final = 64  # of one report
TROUBLES_SHOWN_MAX: Final = 20
KINDS_TOLD: Final = 3  # of tasks, in the first sentence

# --- logs replayed into the dashboard's state ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoggedNode:
    """One node of a report; `name` is the end of its peer id, or its directory's name."""

    name: str
    life: History

    @property
    def peer_id(self) -> str:
        """Empty if the log does not say."""
        if self.life.started:
            return self.life.started.peer_id
        events = (event for _, event in self.life.versions)
        return next(
            (each.peer_id for each in events if isinstance(each, r.VersionComing | r.VersionCame)),
            "",
        )

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
        return "learner" if self.life.steps else "worker" if self.life.work else "node"


def replayed(nodes: Sequence[LoggedNode], begin_s: float, end_s: float) -> dict[str, Any]:
    """The page's state at the end, with curves of the whole time: `RECENT_POINTS` points at most.

    A node is gone from a curve one point after its last event. At the end all nodes are shown.
    """
    state, source = DashboardState(), ReportSource("event logs")
    step_s = max(1.1 * SAMPLE_S, (end_s - begin_s) / (RECENT_POINTS - 1))
    ticks = [begin_s + tick * step_s for tick in range(int((end_s - begin_s) / step_s) + 1)]
    seen = [_views(node, ticks, end_s, gone_after_s=step_s) for node in nodes if node.records]
    for now_s in ticks:
        views = [next(each) for each in seen]
        state.look([view for view in views if view], {}, source, now_s)
    last = [next(each) for each in seen]
    return state.look([view for view in last if view], {}, source, end_s)


def _views(
    node: LoggedNode, ticks: Sequence[float], end_s: float, gone_after_s: float
) -> Iterator[NodeView | None]:
    """The node as a watcher would see it at each tick and at the end; None before its first
    record."""
    coming = deque(node.records)
    known: dict[str, float] = {}
    labelled: dict[str, dict[str, float]] = {}
    given: Counter[str] = Counter()  # groups trained on, by who made them
    sequence, heard_at_s, last_s = 0, 0.0, coming[-1][0]
    for now_s in (*ticks, None):
        while coming and coming[0][0] <= (end_s if now_s is None else now_s):
            heard_at_s, record = coming.popleft()
            sequence += 1
            known |= m.measured(record, "logged") | m.measured(record)
            if isinstance(record, r.RoundDone):
                given.update(record.foreign_by_producer)
                labelled[m.REJECTED_TOTAL] = dict(record.rejected_total)
            elif isinstance(record, r.StepDone):
                given.update(record.groups_by_worker)
                labelled[m.DISCARDED_TOTAL] = dict(record.discarded_total)
        if not sequence:
            yield None
            continue
        gone = Gone.OFFLINE if now_s is not None and now_s > last_s + gone_after_s else None
        heard_s = max(0.0, (end_s if now_s is None else now_s) - heard_at_s)
        report = _report(node, sequence, heard_at_s, known, labelled, given)
        yield NodeView(report, heard_s=heard_s, gone=gone, lost=0)


def _report(
    node: LoggedNode,
    sequence: int,
    sent_at_s: float,
    known: Mapping[str, float],
    labelled: Mapping[str, Mapping[str, float]],
    given: Mapping[str, int],
) -> NodeReport:
    """Not validated: the page shows all text as text."""
    started = node.life.started
    return NodeReport.model_construct(
        peer_id=node.peer_id or node.name,
        run_id=started.run_id if started else "unknown",
        role=node.role,
        agent=started.agent if started else "",
        instance="log",
        sequence=sequence,
        sent_at_s=sent_at_s,
        interval_s=1.0,
        metrics=dict(known),
        labelled=dict(labelled),
        peers=tuple(
            PeerTraffic.model_construct(peer_id=peer, groups_trained=groups)
            for peer, groups in given.items()
        ),
        workers=tuple(
            WorkerRow.model_construct(name=short_id(peer), peer_id=peer, admitted=groups)
            for peer, groups in given.items()
            if node.role == "learner"
        ),
    )


# --- curves of each node -------------------------------------------------------------------------

POINTS_MAX: Final = 400  # of a curve; longer ones are means over bins
SMOOTHING_ROUNDS: Final = 15  # a reward's curve is the mean over so many last rounds
ROUND_METRICS: Final = (
    m.IDLE_RATIO, m.STALENESS_MEAN_STEPS, m.STALENESS_MAX_STEPS,
    *filter(None, (each[m.METRIC] for each in m.FIGURES.values())),
)  # fmt: skip

Line = list[tuple[float, float]]  # points (x, y)
_LineOf = Callable[[LoggedNode], Line]


def drawn_charts(nodes: Sequence[LoggedNode]) -> list[Any]:
    """The charts of a report; one without a point is left out."""
    held_out = partial(_line, metric=m.HELD_OUT_RATIO, kinds=r.HeldOut)
    charts = [
        *_chart(
            nodes, "Held-out pass rate over rounds", "rounds", "share",
            "The run's fixed held-out tasks, which no node trains on.",
            partial(held_out, x_of=_round_of),
        ),
        *_chart(
            nodes, "Held-out pass rate over generated tokens", "tokens generated by the node",
            "share", "Tokens of groups that came from others are not counted.",
            partial(held_out, x_of=lambda record: record.generated_tokens_total),
        ),
        *_chart(
            nodes, f"Own training reward, mean over the last {SMOOTHING_ROUNDS} rounds", "rounds",
            "", "Rewards of the node's own completions on its training tasks.",
            lambda node: _smooth(_over_rounds(node, m.OWN_REWARD)),
        ),
    ]  # fmt: skip
    for name in ROUND_METRICS:
        metric, line = m.METRICS[name], partial(_over_rounds, metric=name)
        title = name.replace("_", " ")
        charts += _chart(nodes, title, "rounds", metric.unit, f"{metric.help}.", line)
    return charts


def _chart(
    nodes: Sequence[LoggedNode], title: str, x: str, unit: str, caption: str, line: _LineOf
) -> list[Any]:
    """A chart for the page; none without a point. `unit`: `share` is drawn in percent."""
    drawn = [(node.name, points) for node in nodes if (points := line(node))]
    named = {"title": title, "x_name": x, "unit": unit, "caption": caption}
    return [{**named, **curves(drawn, POINTS_MAX)}] if drawn else []


def curves(lines: Sequence[tuple[str, Line]], points_max: int) -> dict[str, Any]:
    """Lines on one axis, for the page: `x`, and a list of values for each line.

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
        drawn.append({"name": name, "y": [short(mean(at.get(x, ()))) for x in places]})
    return {"x": places, "lines": drawn}


def _line(node: LoggedNode, metric: str, kinds: Any, x_of: Callable[[Any], float]) -> Line:
    """A point for each record of these kinds that sets the metric."""
    records = [record for _, record in node.records if isinstance(record, kinds)]
    found = [(x_of(record), m.measured(record).get(metric)) for record in records]
    return [(x, value) for x, value in found if value is not None]


def _round_of(record: r.RoundDone | r.StepDone | r.HeldOut) -> int:
    return record.step if isinstance(record, r.StepDone) else record.round


def _over_rounds(node: LoggedNode, metric: str) -> Line:
    return _line(node, metric, r.RoundDone | r.StepDone, _round_of)


def _smooth(line: Line) -> Line:
    """Means over the last `SMOOTHING_ROUNDS` values. A long line lacks its first third of a window:
    means over too few values to show."""
    first = SMOOTHING_ROUNDS // 3 if len(line) > SMOOTHING_ROUNDS else 0
    means = []
    for at in range(first, len(line)):
        last = [y for _, y in line[max(0, at - SMOOTHING_ROUNDS + 1) : at + 1]]
        means.append((line[at][0], fmean(last)))
    return means


# --- broadcasts of versions as rows of bars ------------------------------------------------------

WATERFALL_CAPTION: Final = (
    "A row is one worker and version; the first row of a version is its learner's. A worker "
    "without a log here is drawn as its learner heard of it. Each log has its machine's clock."
)
ROWS_MAX: Final = 60  # of the newest versions
PUBLISHER: Final = ""  # the peer of a version's own row
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
    """A version at one receiver, or at its publisher. Times as in `Bar`; None: unknown."""

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
        marks = [mark for mark in (self.bound_s, self.had_s, self.used_s) if mark is not None]
        return max([bar.end_s for bar in self.bars] + marks, default=0.0)


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
    by_version: dict[tuple[int, str], list[WaterfallRow]] = {}
    for (run, version, _), row in _Reading(logs).rows.items():
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


_Timed = Sequence[tuple[float, VersionEvent]]  # in seconds since the version was published
_COMING: Final = (r.VersionComing, r.VersionCame)


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


def _zero_s(logs: Sequence[_Log]) -> dict[tuple[str, int], float]:
    """Unix time of the first publication by run and version, or else of its first event."""
    first: dict[tuple[str, int], float] = {}
    offered: dict[tuple[str, int], float] = {}
    for log in logs:
        for time_s, event in log.events:
            key = log.run, event.version
            first[key] = min(time_s, first.get(key, time_s))
            if isinstance(event, r.VersionPublished):
                at_s = time_s - event.announced_ago_s
                offered[key] = min(at_s, offered.get(key, at_s))
    return first | offered


class _Reading:
    """Makes rows from logs, by run, version and peer."""

    def __init__(self, logs: Sequence[_Log]) -> None:
        self.rows: dict[tuple[str, int, str], WaterfallRow] = {}
        zero_s = _zero_s(logs)
        timed = [
            (
                log,
                [(time_s - zero_s[log.run, event.version], event) for time_s, event in log.events],
            )
            for log in logs
        ]
        for log, events in timed:
            self._add_published(log, events)
            self._add_coming(log, [e for e in events if isinstance(e[1], _COMING)])
        told = {key for key, row in self.rows.items() if row.bars}
        for log, events in timed:
            self._add_heard(log, events, told)

    def _add_published(self, log: _Log, events: _Timed) -> None:
        for at_s, event in events:
            if isinstance(event, r.VersionPublished):
                start_s = -max(0.0, event.made_s - event.announced_ago_s)
                self._row(log, event.version).bars.append(Bar("made", start_s, 0.0))
            elif isinstance(event, r.VersionSpread):
                row = self._row(log, event.version)
                row.bars.append(Bar("spread", max(0.0, at_s - event.spread_s), at_s))
                if event.bound_s is not None:
                    row.bound_s = at_s - event.spread_s + event.bound_s

    def _add_coming(self, log: _Log, events: _Timed) -> None:
        """A phase ends with the next event, unless that is of another version."""
        fetching_s: float | None = None  # when the try began
        for (at_s, event), after in zip(events, [*events[1:], None], strict=False):
            assert isinstance(event, _COMING)
            row = self._row(log, event.version, event.peer_id)
            if isinstance(event, r.VersionCame):
                _end(row, event, at_s, fetching_s)
                fetching_s = None
            elif event.phase == "dropped":
                row.note = "dropped for a newer one"
            elif event.phase in PHASES:
                if event.phase == "manifest":
                    fetching_s = None
                elif event.phase == "fetch" and fetching_s is None:
                    fetching_s = at_s
                if after is not None and after[1].version == event.version:
                    row.bars.append(Bar(event.phase, at_s, max(at_s, after[0])))
                else:
                    row.bars.append(Bar(event.phase, at_s, at_s))
                    row.note = f"no more is known after {event.phase} began"

    def _add_heard(self, log: _Log, events: _Timed, told: Container[tuple[str, int, str]]) -> None:
        """Add what learners heard of their workers. `told`: rows with a log of their own."""
        for at_s, event in events:
            if not isinstance(event, r.VersionSpreading):
                continue
            for peer, share in event.shares.items():
                row = self._row(log, event.version, peer, short_id(peer))
                if (log.run, event.version, peer) not in told:
                    row.bars = [Bar("heard", 0.0, max(0.0, at_s))]
                    row.note = "" if share >= 1.0 else f"{share:.0%}, as far as was heard"
                if share >= 1.0 and row.had_s is None:
                    row.had_s = at_s
            for peer in event.using:
                row = self._row(log, event.version, peer, short_id(peer))
                row.used_s = at_s if row.used_s is None else row.used_s

    def _row(self, log: _Log, version: int, peer: str = PUBLISHER, name: str = "") -> WaterfallRow:
        row = WaterfallRow(version, peer, name or log.name)
        return self.rows.setdefault((log.run, version, peer), row)


def _end(row: WaterfallRow, event: r.VersionCame, at_s: float, fetching_s: float | None) -> None:
    if not row.bars and event.failure is None:  # the log's beginning is gone
        fetching_s = at_s - event.paused_s - event.patch_s - event.fetch_s
        fetched_s, patched_s = fetching_s + event.fetch_s, at_s - event.paused_s
        row.bars = [
            Bar("fetch", fetching_s, fetched_s),
            Bar("patch", fetched_s, patched_s),
            Bar("load", patched_s, at_s),
        ]
    row.note = "" if event.failure is None else "failed"
    if event.bound_s is not None and fetching_s is not None:
        row.bound_s = fetching_s + event.bound_s


def drawn_broadcasts(nodes: Sequence[LoggedNode]) -> dict[str, Any] | None:
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


# --- the report ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """One node's numbers. Pass rates and rewards are in [0, 1], and None if never measured."""

    name: str
    model: str
    starts: int
    rounds: int
    steps: int
    batches: int
    generated_tokens: int
    seconds: float  # from the first to the last event
    held_out_first: float | None
    held_out_last: float | None
    rise_points: float | None  # of the held-out pass rate; None without a second evaluation
    reward_first: float | None  # mean over the first tenth of the rounds or steps
    reward_last: float | None  # mean over the last tenth
    local_groups_mean: float  # I; of a learner, groups of its workers
    external_groups_mean: float  # J
    foreign_groups: int  # groups of others trained on, in all
    groups_quantised: int  # trained on, and sampled by engines with quantised weights
    verdicts: Counter[str]  # on groups that a worker handed in: `accepted`, or why not
    sharing: str  # the gain from sharing, in a sentence

    def __str__(self) -> str:
        if self.batches and not self.rounds and not self.steps:
            handed_in = counted(self.verdicts.total(), "groups")
            taken = self.verdicts["accepted"]
            return f"{self.name}: {taken:,} of {handed_in} accepted in {_extent([self])}"
        return (
            f"{self.name}: held-out {percent(self.held_out_first)} to "
            f"{percent(self.held_out_last)} ({said(self.rise_points, '+.1f')} points) in "
            f"{_extent([self])}" + (f"\n  {self.sharing}" if self.sharing else "")
        )


@dataclass(frozen=True, slots=True)
class ReportSummary:
    nodes: tuple[NodeSummary, ...]
    html: Path

    @property
    def rise_points_mean(self) -> float | None:
        """Mean rise over the nodes that were evaluated at least twice."""
        return mean([node.rise_points for node in self.nodes if node.rise_points is not None])

    def __str__(self) -> str:
        return "\n".join([*map(str, self.nodes), f"report: {self.html}"])


def write_report(run_dirs: Sequence[Path], out: Path) -> ReportSummary:
    """Write `report.html` into the directory `out`, from each node's data directory. Takes seconds:
    not for the event loop.

    Raises:
        ConfigError: there is no event log in one of the directories, or too many directories.
    """
    if not 1 <= len(run_dirs) <= NODES_MAX:
        raise ConfigError(f"report: give from 1 to {NODES_MAX} data directories")
    nodes = [_read(directory) for directory in run_dirs]
    summaries = tuple(summarise(node.name, node.life) for node in nodes)
    out.mkdir(parents=True, exist_ok=True)
    page = out / "report.html"
    page.write_text(saved_page(_pages(nodes, summaries)), encoding="utf-8")
    return ReportSummary(summaries, page)


def _read(directory: Path) -> LoggedNode:
    try:
        life = history(read_events(directory / FILE_NAME))
    except OSError as error:
        raise ConfigError(
            f"report: no event log in {directory} ({error.strerror}): name a node's --data-dir"
        ) from None
    peer = LoggedNode("", life).peer_id
    return LoggedNode(short_id(peer) if peer else printable(directory.name, 24), life)


def summarise(name: str, life: History) -> NodeSummary:
    rounds = [record for _, record in life.rounds]
    steps = [record for _, record in life.steps]
    work = [record for _, record in life.work]
    foreign = [e.external_groups for e in rounds] or [s.shared_groups for s in steps]
    own = [e.local_groups for e in rounds] or [s.groups - s.shared_groups for s in steps]
    rewards = [e.own_reward for e in rounds] or [s.reward for s in steps if isfinite(s.reward)]
    tenth = max(1, len(rewards) // 10)
    first, last = life.held_out_first, life.held_out_last
    times = LoggedNode(name, life).times
    found = life.started and usefulness(rounds, life.started.external_groups)
    return NodeSummary(
        name=name,
        model=f"{life.started.model}, {life.started.engine}" if life.started else "",
        starts=life.starts,
        rounds=len(rounds),
        steps=len(steps),
        batches=len(work),
        generated_tokens=sum(w.generated_tokens for w in work)
        + (rounds[-1].generated_tokens_total if rounds else 0),
        seconds=max(times) - min(times) if times else 0.0,
        held_out_first=first,
        held_out_last=last,
        rise_points=None
        if first is None or last is None or len(life.held_out) < 2
        else 100 * (last - first),
        reward_first=mean(rewards[:tenth]),
        reward_last=mean(rewards[-tenth:]),
        local_groups_mean=mean(own) or 0.0,
        external_groups_mean=mean(foreign) or 0.0,
        foreign_groups=sum(e.external_groups for e in rounds) + sum(s.groups for s in steps),
        groups_quantised=sum(e.groups_quantised for e in rounds)
        + sum(s.groups_quantised for s in steps),
        verdicts=_verdicts(work),
        sharing=advice(found) if found else "",
    )


def _verdicts(work: Sequence[r.WorkDone]) -> Counter[str]:
    """Over all starts: each counts batches and verdicts anew."""
    total: Counter[str] = Counter()
    for last in [a for a, b in pairwise(work) if b.batch <= a.batch] + [*work[-1:]]:
        total.update(last.verdicts_total)
    return total


def _pages(nodes: Sequence[LoggedNode], summaries: Sequence[NodeSummary]) -> dict[str, Any]:
    """A page for each run, so that no chart mixes two: the first one's, and under `others` the rest
    by their ids. Nodes whose logs name no run have a page together."""
    by_run: dict[str, list[int]] = {}
    for place, node in enumerate(nodes):
        run_id = node.life.started.run_id if node.life.started else "unknown"
        by_run.setdefault(run_id, []).append(place)
    found = {
        run_id: page_state([nodes[at] for at in places], [summaries[at] for at in places])
        for run_id, places in by_run.items()
    }
    return {**found.pop(next(iter(by_run))), "others": found}


def page_state(nodes: Sequence[LoggedNode], summaries: Sequence[NodeSummary]) -> dict[str, Any]:
    """The dashboard's state at the end of the logs, and under `saved` what a report has beside."""
    times = [time_s for node in nodes for time_s in node.times]
    begin_s, end_s = min(times, default=0.0), max(times, default=0.0)
    run_ids = sorted({node.life.started.run_id for node in nodes if node.life.started})
    saved = {
        "title": f"Swarm run {', '.join(run_ids) or 'of unknown id'}",
        "sentences": [*_plainly([node.life for node in nodes]), *_sentences(summaries)],
        "tables": [*_nodes(summaries), *_environments(nodes), *_troubles(nodes, begin_s)],
        "charts": drawn_charts(nodes),
        "waterfall": drawn_broadcasts(nodes),
    }
    return {**replayed(nodes, begin_s, end_s), "saved": saved}


def _sentences(summaries: Sequence[NodeSummary]) -> list[str]:
    tokens = sum(node.generated_tokens for node in summaries)
    quantised = sum(node.groups_quantised for node in summaries)
    extent = f"{counted(len(summaries), 'nodes')} in {_extent(summaries)}"
    longest = duration(max(node.seconds for node in summaries))
    foreign = counted(sum(node.foreign_groups for node in summaries), "times")
    return [
        f"{extent} over {longest}, {tokens:,} tokens generated.",
        f"Groups of others were trained on {foreign}.",
        *_handed_in(summaries),
        *(
            [f"{counted(quantised, 'groups')} trained on came from engines with quantised weights."]
            if quantised
            else []
        ),
        *(f"{node.name}: {node.sharing}" for node in summaries if node.sharing),
    ]


def _extent(nodes: Sequence[NodeSummary]) -> str:
    """All their rounds, steps and batches, in words."""
    done = {kind: sum(getattr(n, kind) for n in nodes) for kind in ("rounds", "steps", "batches")}
    return " and ".join(counted(n, kind) for kind, n in done.items() if n) or "0 rounds"


def _handed_in(summaries: Sequence[NodeSummary]) -> list[str]:
    """One sentence on the verdicts on all workers' groups; none without workers."""
    if not any(node.batches for node in summaries):
        return []
    refused: Counter[str] = Counter()
    for node in summaries:
        refused.update(node.verdicts)
    handed_in, taken = refused.total(), refused.pop("accepted", 0)
    reasons = "".join(f", {printable(why, 40)} {n:,}" for why, n in refused.most_common() if n)
    return [f"Workers handed in {counted(handed_in, 'groups')}: accepted {taken:,}{reasons}."]


def _plainly(lives: Sequence[History]) -> list[str]:
    """The trial, the change, and whether that may be luck, without this page's words."""
    tests = [(e.held_out[0][1], e.held_out[-1][1]) for e in lives if len(e.held_out) > 1]
    if not tests:
        return ["No model was tested twice, so nothing is said of a change."]
    models, were = counted(len(tests), "language models"), "was" if len(tests) == 1 else "were"
    before, after = (fmean(test[at].passed for test in tests) for at in (0, 1))
    rises = [100 * (last.passed - first.passed) for first, last in tests]
    spread = f" (by model {min(rises):+.1f} to {max(rises):+.1f})" if len(tests) > 1 else ""
    tasks = counted(max(last.tasks for _, last in tests), "tasks")
    kinds = sorted({name for _, last in tests for name in last.passed_by_environment})
    what = ", ".join(printable(name, 40) for name in kinds[:KINDS_TOLD])
    more = " and more" if len(kinds) > KINDS_TOLD else ""
    return [
        f"{models} practised {what}{more}, and {were} tested before and after on {tasks} kept out "
        "of practice.",
        f"Before, {percent(before)} of these were solved, and after, {percent(after)}: "
        f"{fmean(rises):+.1f} points{spread}.",
        _luck(tests),
    ]


def _luck(tests: Sequence[tuple[r.HeldOut, r.HeldOut]]) -> str:
    rises = []
    for of_task in zip(*(zip(a.rewards, b.rewards, strict=False) for a, b in tests), strict=False):
        known = [now - was for was, now in of_task if was is not None and now is not None]
        rises += [fmean(known)] if known else []
    if not rises:
        return "Whether that is luck is unknown: the logs do not say which tasks were solved."
    _, low, high = interval(rises, -1.0, 1.0)
    verdict = "may be luck" if low <= 0.0 <= high else "is more than luck"
    return (
        f"That {verdict}: over all tasks of this kind the change is between {100 * low:+.1f} and "
        f"{100 * high:+.1f} points, with 95 % confidence."
    )


def _table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = ""
) -> list[Any]:
    """A table for the page; none without rows."""
    return [{"title": title, "columns": columns, "rows": rows, "note": note}] if rows else []


NODE_COLUMNS: Final = (
    "node", "held-out start", "held-out end", "rise (points)", "own reward start → end", "work",
    "starts", "generated tokens", "own groups a round (I)", "foreign groups a round (J)",
    "groups handed in", "of these accepted", "model",
)  # fmt: skip
NODES_NOTE: Final = (
    "Own reward is the mean over the first and over the last tenth of the rounds or steps. I and J "
    "are means over all of them; a learner's I are groups of its workers."
)


def _nodes(summaries: Sequence[NodeSummary]) -> list[Any]:
    rows = [
        (
            node.name,
            percent(node.held_out_first),
            percent(node.held_out_last),
            said(node.rise_points, "+.1f"),
            f"{said(node.reward_first, '.2f')} → {said(node.reward_last, '.2f')}",
            _extent([node]),
            f"{node.starts}",
            amount(node.generated_tokens),
            f"{node.local_groups_mean:.1f}",
            f"{node.external_groups_mean:.1f}",
            f"{node.verdicts.total():,}",
            f"{node.verdicts['accepted']:,}",
            node.model,
        )
        for node in summaries
    ]
    return _table("Nodes from start to end", NODE_COLUMNS, rows, NODES_NOTE)


def _environments(nodes: Sequence[LoggedNode]) -> list[Any]:
    """Pass rates by environment, as means over the nodes that were evaluated."""
    evaluated = [node.life.held_out for node in nodes if node.life.held_out]
    ends = [[events[at][1].passed_by_environment for events in evaluated] for at in (0, -1)]
    names = sorted({name for end in ends for rates in end for name in rates})
    rows = [
        (name, *(percent(mean([rates[name] for rates in end if name in rates])) for end in ends))
        for name in names
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
