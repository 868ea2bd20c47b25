"""Logs of nodes played back into the dashboard's state, as if each node had reported. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
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
