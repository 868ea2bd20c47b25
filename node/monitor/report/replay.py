"""Logs of nodes played back into the dashboard's state, as if each node had reported. Pure."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from node.records.event_log import History
from node.records.format import short_id
from node.records.records import RoundDone, StepDone, VersionCame, VersionComing
from swarm.telemetry import metrics as m
from swarm.telemetry.dashboard.history import RECENT_POINTS, short
from swarm.telemetry.dashboard.state import SAMPLE_S, DashboardState, ReportSource
from swarm.telemetry.fleet_view import Gone, NodeView
from swarm.telemetry.reports import NodeReport, PeerTraffic, Role, WorkerRow


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
    def role(self) -> Role:
        """What the node was, by what it logged."""
        return "learner" if self.life.steps else "worker" if self.life.work else "node"


def replayed(nodes: Sequence[LoggedNode], begin_s: float, end_s: float) -> dict[str, Any]:
    """The page's state at the end, with curves of the whole time: `RECENT_POINTS` points at most.

    A node is gone from a curve one point after its last event. At the end all nodes are shown.
    """
    state, source = DashboardState(), ReportSource("event logs")
    step_s = max(1.1 * SAMPLE_S, (end_s - begin_s) / (RECENT_POINTS - 1))
    reports = [list(_reports(node)) for node in nodes]
    times = [[report.sent_at_s for report in each] for each in reports]
    for tick in range(int((end_s - begin_s) / step_s) + 1):
        now_s = begin_s + tick * step_s
        views = []
        for made, sent in zip(reports, times, strict=True):
            if place := bisect_right(sent, now_s):
                gone = Gone.OFFLINE if now_s > sent[-1] + step_s else None
                views.append(_view(made[place - 1], now_s, gone))
        state.look(views, {}, source, now_s)
    return state.look([_view(made[-1], end_s, None) for made in reports if made], {}, source, now_s)


def _view(report: NodeReport, now_s: float, gone: Gone | None) -> NodeView:
    return NodeView(report, heard_s=max(0.0, now_s - report.sent_at_s), gone=gone, lost=0)


def metrics_over_time(node: LoggedNode) -> Iterator[tuple[float, Any, dict[str, float]]]:
    """(unix time, record, metrics known by then) for each record that sets some, in order."""
    life = node.life
    records: list[tuple[float, Any]] = [*life.rounds, *life.steps, *life.work, *life.held_out]
    known: dict[str, float] = {}
    for time_s, record in sorted(records, key=lambda event: event[0]):
        known |= m.measured(record, "logged") | m.measured(record)
        known |= m.figure_metrics(record)
        yield time_s, record, known


def _reports(node: LoggedNode) -> Iterator[NodeReport]:
    """A report for each record. They are not validated: the page shows all text as text."""
    started, role = node.life.started, node.role
    given: Counter[str] = Counter()  # groups trained on, by who made them
    labelled: dict[str, dict[str, float]] = {}
    for number, (time_s, record, known) in enumerate(metrics_over_time(node)):
        if isinstance(record, RoundDone):
            given.update(record.foreign_by_producer)
            labelled[m.REJECTED_TOTAL] = dict(record.rejected_total)
        elif isinstance(record, StepDone):
            given.update(record.groups_by_worker)
            labelled[m.DISCARDED_TOTAL] = dict(record.discarded_total)
        yield NodeReport.model_construct(
            peer_id=node.peer_id or node.name,
            run_id=started.run_id if started else "unknown",
            role=role,
            agent=started.agent if started else "",
            instance="log",
            sequence=number,
            sent_at_s=time_s,
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
                if role == "learner"
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
