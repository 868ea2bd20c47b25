"""The state that the page shows, as one JSON object, the same for all who watch. Pure.

Every list has a bound, and a count of the entries left out. Its texts come from strangers; the
page shows them as text.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from swarm.telemetry import metrics as m
from swarm.telemetry.dashboard.feeding import Feeding
from swarm.telemetry.dashboard.series import (
    REJECTED,
    Outages,
    Rates,
    Series,
    mean,
    metrics,
    short,
    total,
)
from swarm.telemetry.dashboard.version_broadcasts import broadcast_rows
from swarm.telemetry.fleet_view import NodeView, plausible
from swarm.telemetry.reports import AlarmReport, PeerTraffic

SAMPLE_S: Final = 0.9  # the least time between two points of a curve
NODES_SHOWN_MAX: Final = 1_024
LATELY_S: Final = 600.0  # a node that has been gone for longer is not counted as gone lately
SHOWN_S: Final = 3_600.0  # and after so long it is not shown
WORKERS_SHOWN_MAX: Final = 512
ALARMS_SHOWN_MAX: Final = 32
ALARM_NODES_SHOWN_MAX: Final = 8
NOTES_SHOWN_MAX: Final = 16
LABELS_SHOWN_MAX: Final = 12
SENDS_TO_SHOWN_MAX: Final = 4
RUNS_SHOWN_MAX: Final = 8
CENTRAL: Final = ("learner", "coordinator")  # of a run, one of each
BAND: Final = 0.1  # the share of nodes below the band of a curve, and above it

HISTORY: Final = (
    "in_bytes_per_s", "out_bytes_per_s", m.TOKENS_PER_S, "nodes",
    "reward", "reward_low", "reward_high", "held_out", "held_out_low", "held_out_high",
)  # fmt: skip
FIGURE_COLUMNS: Final = ("name", "unit", "low", "middle", "high", "nodes", "help")

CAPACITY: Final = (
    m.IDLE_RATIO,
    m.PREDICTED_IDLE_RATIO,
    m.STALENESS_MEAN_STEPS,
    m.STALENESS_MAX_STEPS,
    m.PREDICTED_STALENESS_STEPS,
    m.STALENESS_BOUND_STEPS,
    m.IN_FLIGHT_GROUPS,
    m.QUEUED_GROUPS,
    m.QUEUED_STALENESS_MAX_STEPS,
    m.COST_PER_H,
    m.ROUND_S,
    m.VERSION_LAG_RATIO,
)


@dataclass(frozen=True, slots=True)
class ReportSource:
    """The source of reports: its name, `connected`, the seconds since it last answered, and the
    flag with which nodes report there."""

    name: str
    connected: bool = True
    away_s: float | None = None
    flag: str = ""


class PageState:
    """The page: a `DashboardState` of its own for each run, so that no figure mixes two."""

    def __init__(self, *, can_act: bool = False) -> None:
        self._can_act = can_act
        self._states: dict[str, DashboardState] = {}  # of the runs on the page, by id

    def curves(self) -> dict[str, Any]:
        """The curves of each run, for `go_on`."""
        return {run_id: state.curves() for run_id, state in self._states.items()}

    def go_on(self, curves: Mapping[str, Any], until_s: float, now_s: float) -> None:
        """As `DashboardState.go_on`, for each run."""
        states = {run: DashboardState(can_act=self._can_act) for run in [*curves][:RUNS_SHOWN_MAX]}
        for run_id, state in states.items():
            state.go_on(curves[run_id], until_s, now_s)
        self._states = states

    def look(
        self,
        nodes: Sequence[NodeView],
        telemetry: Mapping[str, int],
        source: ReportSource,
        now_s: float,
    ) -> dict[str, Any]:
        """As `DashboardState.look`, of the run with most nodes, and under `others` the same of the
        other runs, by their ids. At most `RUNS_SHOWN_MAX`, in all."""
        # A node that was heard of in two runs is shown in the one that it was heard in last.
        nodes = list({node.report.peer_id: node for node in reversed(nodes)}.values())[::-1]
        by_run: dict[str, list[NodeView]] = defaultdict(list)
        for node in nodes:
            by_run[node.report.run_id].append(node)
        count = Counter(n.report.run_id for n in nodes if n.gone is None or n.heard_s <= SHOWN_S)
        runs = sorted(by_run, key=lambda run_id: (-count[run_id], run_id))[:RUNS_SHOWN_MAX] or [""]
        states, pages = dict[str, DashboardState](), dict[str, dict[str, Any]]()
        for run_id in runs:
            state = self._states.get(run_id) or DashboardState(can_act=self._can_act)
            page = state.look(by_run[run_id], telemetry, source, now_s)
            if not pages or page["headline"]["nodes"]:
                states[run_id], pages[run_id] = state, page
        self._states = states
        return {**pages.pop(runs[0]), "others": pages}


class DashboardState:
    """Makes the state of one run from its nodes. Holds a bounded history."""

    def __init__(self, *, can_act: bool = False) -> None:
        self._series = Series(HISTORY)
        self._rates = Rates()
        self._feeding = Feeding()
        self._outages = Outages()
        self._can_act = can_act
        self._number = 0
        self._sampled_s = -math.inf
        self._passed: dict[tuple[str, str], float] = {}  # held-out pass rates at the last point

    def _held_out(self, present: Sequence[NodeView]) -> float | None:
        """The next point of the curve. It begins at the mean, and moves by the mean change of those
        nodes that were there before, so that nobody moves it by coming or going."""
        name = m.HELD_OUT_RATIO
        passed = {
            _key(n): plausible(n.report.metrics[name]) for n in present if name in n.report.metrics
        }
        steps = [value - self._passed[key] for key, value in passed.items() if key in self._passed]
        level = self._series.last("held_out")
        self._passed = passed
        if not passed:
            return None
        return mean([*passed.values()]) if level is None else level + (mean(steps) or 0.0)

    def curves(self) -> dict[str, Any]:
        """The curves, for `go_on`."""
        return self._series.as_kept()

    def go_on(self, curves: Mapping[str, Any], until_s: float, now_s: float) -> None:
        """With the curves of a start that ended at `until_s`.

        Raises:
            ValueError, TypeError, KeyError: these are no curves.
        """
        self._series.go_on(curves)
        for nobody_listened_s in (until_s, now_s):
            self._outages.note(nobody_listened_s, connected=False, away_s=0.0)

    # Long: one page, part by part.
    def look(
        self,
        nodes: Sequence[NodeView],
        telemetry: Mapping[str, int],
        source: ReportSource,
        now_s: float,
    ) -> dict[str, Any]:
        """The page at `now_s`, unix time. `nodes`: those heard last first; `telemetry`: counts of
        reports taken, dropped and lost."""
        self._outages.note(now_s, connected=source.connected, away_s=source.away_s)
        nodes = [self._outages.excused(node, now_s) for node in nodes]
        # A node that was heard of in two runs is shown in the one that it was heard in last.
        nodes = list({node.report.peer_id: node for node in reversed(nodes)}.values())
        heard_of, missed = len(nodes), _missed(nodes)
        nodes = [n for n in nodes if n.gone is None or n.heard_s <= SHOWN_S or _key(n) in missed]
        rates = self._rates.look(node.report for node in nodes)
        if not source.connected:  # nobody measures: the last rates are not those of now
            rates = {peer: {} for peer in rates}
        present = [node for node in nodes if node.gone is None]
        headline = _headline(nodes, present, rates) | {
            "heard_of": heard_of,
            "gone_lately": sum(
                n.gone is not None and ((n.heard_s <= LATELY_S and not n.left) or _key(n) in missed)
                for n in nodes
            ),
            "left": sum(n.gone is not None and n.left for n in nodes),
        }
        if not 0 <= now_s - self._sampled_s < SAMPLE_S:
            self._sampled_s = now_s
            heard = dict.fromkeys(HISTORY)
            if source.connected:
                heard = _points(present, headline) | {"held_out": self._held_out(present)}
            self._series.add(now_s, heard)
        self._number += 1
        return {
            "number": self._number,
            "unix_s": now_s,
            "can_act": self._can_act,
            "source": asdict(source),
            "runs": sorted({node.report.run_id for node in nodes})[:RUNS_SHOWN_MAX],
            "headline": headline,
            "alarms": _alarms(nodes),
            "notes": _notes(present),
            "history": self._series.as_json(),
            "feeding": self._feeding.look(nodes, now_s),
            "capacity": _capacity(present),
            "workers": _workers(present),
            "broadcast": broadcast_rows(present),
            "nodes": _nodes(nodes, rates),
            "figures": _figures(present),
            "rejected": _by_label(present, REJECTED),
            "protocols_in": _by_label(present, m.PROTOCOL_BYTES_IN_TOTAL),
            "protocols_out": _by_label(present, m.PROTOCOL_BYTES_OUT_TOTAL),
            "discarded": _by_label(present, m.DISCARDED_TOTAL),
            "telemetry": dict(telemetry),
        }


# --- headline and history ----------------------------------------------------------------------


def _headline(
    nodes: Sequence[NodeView], present: Sequence[NodeView], rates: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    def rate(name: str) -> float | None:
        found = [rates[n.report.peer_id][name] for n in present if name in rates[n.report.peer_id]]
        return short(sum(found)) if found else None

    # Where there is a learner, its steps are what counts; workers' batches are their own affair.
    learners = [node for node in present if node.report.role == "learner"]
    rounds = metrics(learners or present, m.ROUND)
    return {
        "nodes": len(nodes),
        "present": len(present),
        "gone": len(nodes) - len(present),
        "roles": dict(Counter(node.report.role for node in present)),
        "in_bytes_per_s": rate(m.BYTES_IN_TOTAL),
        "out_bytes_per_s": rate(m.BYTES_OUT_TOTAL),
        "in_bytes": sum(metrics(present, m.BYTES_IN_TOTAL)),
        "out_bytes": sum(metrics(present, m.BYTES_OUT_TOTAL)),
        "accepted_per_s": rate(m.ACCEPTED_TOTAL),
        "rejected_per_s": rate(REJECTED),
        "accepted": sum(metrics(present, m.ACCEPTED_TOTAL)),
        "rejected": sum(total(n.report.labelled.get(REJECTED, {})) for n in present),
        m.TOKENS_PER_S: rate(m.GENERATED_TOKENS_TOTAL),
        m.ROUND: median(rounds) if rounds else None,
        "round_low": min(rounds, default=None),
        "round_high": max(rounds, default=None),
        m.ROUND_S: _median(metrics(learners or present, m.ROUND_S)),
        "reward": _mean(metrics(present, m.OWN_REWARD)),
        "held_out": _mean(metrics(present, m.HELD_OUT_RATIO)),
        "foreign_groups": _mean(metrics(present, m.EXTERNAL_GROUPS)),
        "foreign_wanted": _mean(metrics(present, m.EXTERNAL_GROUPS_WANTED)),
        m.FOREIGN_GRADIENT_RATIO: _mean(metrics(present, m.FOREIGN_GRADIENT_RATIO)),
        m.SHARING_PER_TOKEN_RATIO: _median(metrics(present, m.SHARING_PER_TOKEN_RATIO)),
        m.POOL_GROUPS: sum(metrics(present, m.POOL_GROUPS)),
        m.POOL_BYTES: sum(metrics(present, m.POOL_BYTES)),
        m.PUBLISHED_VERSION: max(metrics(present, m.PUBLISHED_VERSION), default=None),
        m.COST_PER_H: max(metrics(present, m.COST_PER_H), default=None),
    }


def _key(node: NodeView) -> tuple[str, str]:
    return node.report.run_id, node.report.peer_id


def _missed(nodes: Sequence[NodeView]) -> set[tuple[str, str]]:
    """Learners and coordinators that are gone while workers of their run report and no other has
    their role: the run waits for them."""
    there = {(n.report.run_id, n.report.role) for n in nodes if n.gone is None}
    return {
        _key(n)
        for n in nodes
        if n.gone is not None
        and n.report.role in CENTRAL
        and (n.report.run_id, "worker") in there
        and (n.report.run_id, n.report.role) not in there
    }


def _points(present: Sequence[NodeView], headline: Mapping[str, Any]) -> dict[str, float | None]:
    points: dict[str, float | None] = {
        name: headline[name] for name in ("in_bytes_per_s", "out_bytes_per_s", m.TOKENS_PER_S)
    }
    points["nodes"] = headline["present"]
    for name, metric in (("reward", m.OWN_REWARD), ("held_out", m.HELD_OUT_RATIO)):
        values = sorted(metrics(present, metric))
        points[name] = _mean(values)
        points[f"{name}_low"], points[f"{name}_high"] = band(values)
    return points


def band(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The ends of sorted values without the `BAND` at either end; None for no values."""
    if not values:
        return None, None
    cut = int(len(values) * BAND)
    return values[cut], values[len(values) - 1 - cut]


def _mean(values: Sequence[float]) -> float | None:
    return short(mean(values))


def _median(values: Sequence[float]) -> float | None:
    return short(median(values)) if values else None


# --- alarms ------------------------------------------------------------------------------------


def _alarms(nodes: Sequence[NodeView]) -> dict[str, Any]:
    """One entry for each kind, the critical ones first, then those that most nodes raise."""
    raised: dict[str, list[tuple[str, AlarmReport]]] = {}
    for node in nodes:
        if node.gone is None:
            for alarm in node.report.alarms:
                raised.setdefault(alarm.kind.value, []).append((node.report.peer_id, alarm))
    entries = [_alarm(kind, alarms) for kind, alarms in raised.items()]
    entries.sort(key=lambda entry: (entry["level"] != "critical", -entry["count"], entry["kind"]))
    return {"shown": entries[:ALARMS_SHOWN_MAX], "kinds": len(entries)}


def _alarm(kind: str, alarms: Sequence[tuple[str, AlarmReport]]) -> dict[str, Any]:
    worst = next((a for _, a in alarms if a.level == "critical"), alarms[0][1])
    return {
        "kind": kind,
        "level": worst.level,
        "text": worst.text,
        "advice": worst.advice,
        "count": len(alarms),
        "nodes": [peer for peer, _ in alarms[:ALARM_NODES_SHOWN_MAX]],
    }


def _notes(present: Sequence[NodeView]) -> list[list[str]]:
    """Notes of nodes beside their alarms: peer id and text."""
    found = [
        [node.report.peer_id, note]
        for node in present
        for note in node.report.notes
        if note not in {alarm.text for alarm in node.report.alarms}
    ]
    return found[:NOTES_SHOWN_MAX]


# --- tables ------------------------------------------------------------------------------------


def _nodes(nodes: Sequence[NodeView], rates: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Those with alarms first, then those that are gone, then by id."""
    ordered = sorted(
        nodes,
        key=lambda n: (not n.report.alarms or n.gone is not None, n.gone is None, n.report.peer_id),
    )
    rows = [_node_row(node, rates[node.report.peer_id]) for node in ordered[:NODES_SHOWN_MAX]]
    return _table(rows, max(0, len(nodes) - NODES_SHOWN_MAX))


def _table(rows: Sequence[Mapping[str, Any]], left_out: int) -> dict[str, Any]:
    """Rows of the same keys, which are sent once."""
    return {
        "columns": list(rows[0]) if rows else [],
        "rows": [list(row.values()) for row in rows],
        "left_out": left_out,
    }


def _figures(present: Sequence[NodeView]) -> dict[str, Any]:
    """Every metric without a label that a node reports: its lowest, middle and highest value."""
    found: dict[str, list[float]] = {}
    for node in present:
        for name, value in node.report.metrics.items():
            found.setdefault(name, []).append(value)
    rows: list[list[Any]] = []
    for name, metric in m.METRICS.items():
        if name in found:
            values = sorted(map(plausible, found[name]))
            ends = (values[0], median(values), values[-1])
            text = name.replace("_", " ")
            rows.append([text, metric.unit, *map(short, ends), len(values), metric.help])
    return {"columns": FIGURE_COLUMNS, "rows": rows}


def _node_row(node: NodeView, rates: Mapping[str, float]) -> dict[str, Any]:
    report = node.report
    figure = report.metrics.get
    live = {} if node.gone else rates
    return {
        "id": report.peer_id,
        "role": report.role,
        "phase": report.phase,
        m.ROUND: figure(m.ROUND),
        "version": figure(m.POLICY_VERSION),
        "reward": short(figure(m.OWN_REWARD)),
        "held_out": short(figure(m.HELD_OUT_RATIO)),
        "in_bytes_per_s": short(live.get(m.BYTES_IN_TOTAL)),
        "out_bytes_per_s": short(live.get(m.BYTES_OUT_TOTAL)),
        "in_bytes": figure(m.BYTES_IN_TOTAL),
        "out_bytes": figure(m.BYTES_OUT_TOTAL),
        "sends_to": [] if node.gone else _sends_to(report.peers),
        m.PEERS: figure(m.PEERS),
        "accepted": figure(m.ACCEPTED_TOTAL),
        "rejected": total(report.labelled.get(REJECTED, {})),
        "trained_groups": sum(peer.groups_trained for peer in report.peers),
        "foreign_groups": figure(m.EXTERNAL_GROUPS),
        "foreign_wanted": figure(m.EXTERNAL_GROUPS_WANTED),
        m.TOKENS_PER_S: short(figure(m.TOKENS_PER_S)),
        m.MEMORY_BYTES: figure(m.MEMORY_BYTES),
        "heard_s": round(node.heard_s, 1),
        "gone": node.gone is not None,
        "left": node.left,
        "alarms": [alarm.kind.value for alarm in report.alarms],
        "lost": node.lost,
        "agent": report.agent,
        m.UPTIME_S: figure(m.UPTIME_S),
    }


def _sends_to(peers: Sequence[PeerTraffic]) -> list[list[Any]]:
    """The peers that get most, with bytes a second."""
    busy = sorted((p for p in peers if p.out_bytes_per_s), key=lambda p: -p.out_bytes_per_s)
    return [[p.peer_id, p.out_bytes_per_s] for p in busy[:SENDS_TO_SHOWN_MAX]]


def _workers(present: Sequence[NodeView]) -> dict[str, Any]:
    """Workers as the coordinator, which knows prices, and then the learner report them."""
    newest = max(metrics(present, m.PUBLISHED_VERSION), default=None)
    rows: dict[str, dict[str, Any]] = {}
    left_out = 0
    for role in ("coordinator", "learner"):
        for node in present:
            if node.report.role != role:
                continue
            left_out += node.report.workers_left_out
            for worker in node.report.workers:
                key = worker.peer_id or worker.name
                if key in rows:
                    told = worker.model_dump().items()
                    rows[key].update({name: v for name, v in told if not rows[key][name]})
                elif len(rows) < WORKERS_SHOWN_MAX:
                    rows[key] = worker.model_dump()
                else:
                    left_out += 1
    return _table([_worker_row(row, newest) for row in rows.values()], left_out)


def _worker_row(row: Mapping[str, Any], newest: float | None) -> dict[str, Any]:
    version, heard_s = row["version"], row["heard_s"]
    told = {name: value for name, value in row.items() if name != "peer_id"}
    return told | {
        "id": row["peer_id"],
        "behind": None if version is None or newest is None else max(0, int(newest) - version),
        "groups_per_s": short(row["groups_per_s"]),
        "heard_s": None if heard_s is None else round(heard_s, 1),
    }


def _capacity(present: Sequence[NodeView]) -> dict[str, float | None] | None:
    """The capacity model beside the measurements; None without learner and coordinator. Of several
    learners the first one by id counts."""
    central = [n.report for n in present if n.report.role in CENTRAL]
    central.sort(key=lambda report: (report.role != "learner", report.peer_id))

    if not central:
        return None
    return {
        name: next((r.metrics[name] for r in central if name in r.metrics), None)
        for name in CAPACITY
    }


def _by_label(present: Sequence[NodeView], name: str) -> list[list[Any]]:
    """The sums over all nodes by value of the label, the largest first; the rest together."""
    totals: dict[str, float] = defaultdict(float)
    for node in present:
        for label, value in node.report.labelled.get(name, {}).items():
            totals[label] += plausible(value)
    counted: list[list[Any]] = [[label, value] for label, value in totals.items() if value]
    ordered = sorted(counted, key=lambda item: (-item[1], item[0]))
    rest = sum(value for _, value in ordered[LABELS_SHOWN_MAX:])
    return ordered[:LABELS_SHOWN_MAX] + ([["others", rest]] if rest else [])
