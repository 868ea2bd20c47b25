"""A figure of a round is declared once, and so the log, the status, its lines, reports, Prometheus,
trackers, Grafana, the page and the saved report have it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from coordinator.model.capacity import Capacity
from node.observe import metrics_page
from node.observe.event_log import FILE_NAME, EventLog, read_events
from node.observe.figures import mismatch_lines
from node.observe.node_reports import (
    Extras,
    MachineResources,
    Reporter,
    Traffic,
)
from node.observe.records import HeldOut, RoundDone, StatusSnapshot, StepDone, WorkDone
from node.observe.saved_report import write_report
from node.observe.status import snapshot_json
from swarm.identity import PeerId
from swarm.telemetry.dashboard.grafana import grafana_dashboard
from swarm.telemetry.dashboard.page_state import DashboardState, ReportSource
from swarm.telemetry.fleet_view import NodeView
from swarm.telemetry.metrics import (
    COMPUTED,
    FIGURES,
    METRIC,
    METRICS,
    SHOWN,
    figures_of,
    measured,
    read_metrics,
)
from swarm.transport.base import TransportCounters
from swarm.weights.weights_service import VersionOutcome
from swarm.wire.messages import LearnerReport
from tests.unit.monitor_records import round_done, snapshot

LOGGED_LAST = [
    *("mismatch_mean", "mismatch_max", "mismatch_k3", "effective_share", "version_lag"),
    *("step_rate", "completion_tokens_mean", "completion_tokens_max", "paused_s"),
]


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_goes_from_the_round_to_all_who_are_told(name: str, tmp_path: Path) -> None:
    unmeasured = replace(snapshot(), **dict.fromkeys(FIGURES))
    record = round_done(3, **(dict.fromkeys(FIGURES) | {name: 0.25}))
    told = unmeasured.with_figures(record)
    assert figures_of(told) == dict.fromkeys(FIGURES) | {name: 0.25}
    assert json.loads(snapshot_json(told))[name] == 0.25
    with EventLog(tmp_path / FILE_NAME, lambda: 1.0) as log:
        log.write(record)
    assert [event for _, event in read_events(tmp_path / FILE_NAME)] == [record]
    metric, shown = FIGURES[name][METRIC], FIGURES[name][SHOWN]
    assert not metric or (metric in METRICS and measured(told)[metric] == 0.25)
    assert len(measured(told)) == len(measured(unmeasured)) + bool(metric)
    assert not metric or metric in shown_everywhere(told, record, tmp_path)
    assert [text for _, text in mismatch_lines(told)] == ([shown(0.25)] if shown else [])


def shown_everywhere(status: StatusSnapshot, record: RoundDone, directory: Path) -> set[str]:
    """The metrics that all who show figures have of a status and a round, none of them by name."""
    made = Reporter(PeerId("p"), "run", "node", "agent", instance="i", interval_s=1.0)
    made.note(record)
    traffic, machine = Traffic(TransportCounters(), ()), MachineResources(1, 1)
    report = made.make(status, traffic, machine, Extras(), now_s=1.0, dropped=0)
    page = DashboardState().look([NodeView(report, 0.0, None, 0)], {}, ReportSource("s"), 1.0)
    tracked = made.tracked(record, status)
    assert tracked is not None
    saved = write_report([directory], directory).html.read_text()
    charts = {name for name in METRICS if f'"caption":"{METRICS[name].help}."' in saved}
    prometheus = metrics_page.page(lambda: report, {}).decode()
    return (
        {row[0].replace(" ", "_") for row in page["figures"]["rows"]}
        & set(tracked[1])
        & set(re.findall(r"^swarm_(\w+) ", prometheus, re.MULTILINE))
        & set(re.findall(r"swarm_(\w+)\{", str(grafana_dashboard())))
        & charts
    )


def test_lines_of_the_log_keep_their_order(tmp_path: Path) -> None:
    with EventLog(tmp_path / FILE_NAME, lambda: 1.0) as log:
        log.write(round_done(3))
    line = json.loads((tmp_path / FILE_NAME).read_text())
    assert list(line)[:3] == ["event", "time_s", "round"]
    assert list(line)[-len(LOGGED_LAST) :] == LOGGED_LAST


def test_nothing_measured_leaves_a_status_as_it_was() -> None:
    assert snapshot().with_figures(None) == snapshot()


RECORDS: dict[str, tuple[type, ...]] = {
    "StatusSnapshot": (StatusSnapshot,),
    "RoundDone": (RoundDone,),
    "RoundDone_sums": (RoundDone,),
    "StepDone": (StepDone,),
    "StepDone_sums": (StepDone,),
    "WorkDone": (WorkDone,),
    "HeldOut": (HeldOut,),
    "logged": (RoundDone, StepDone, WorkDone),
    "VersionOutcome": (VersionOutcome,),
    "MachineResources": (MachineResources,),
    "LearnerReport": (LearnerReport,),
    "Capacity": (Capacity,),
}
PATHS = [
    (name, source, path)
    for name, metric in METRICS.items()
    for source, reading in metric.set_by.items()
    for path in ([reading] if isinstance(reading, str) else reading)
    if path
]


@pytest.mark.parametrize(("name", "source", "path"), PATHS)
def test_what_sets_a_metric_has_the_attribute(name: str, source: str, path: str) -> None:
    assert any(has(record, path) for record in RECORDS[source]), (name, source, path)


def has(record: Any, path: str) -> bool:
    """Whether a class has an attribute, and the class of that the next one."""
    first, _, rest = path.partition(".")
    if not rest:
        return first in get_type_hints(record) or hasattr(record, first)
    inner = get_type_hints(record)[first]
    classes = [each for each in (get_args(inner) or (inner,)) if each is not type(None)]
    return has(classes[0], rest)


def test_every_metric_says_who_sets_it_its_unit_and_its_group() -> None:
    code = {"traffic", "coordinator", "learner", "node", "figures"}
    for name, metric in METRICS.items():
        assert metric.set_by.keys() <= code | RECORDS.keys(), name
    assert all(METRICS[name].set_by[source] == "" for name, source in COMPUTED)


def test_attributes_of_a_row_are_added_up() -> None:
    """In a round, `round_s` is the time of generating, scoring and training."""
    record = replace(round_done(3), generate_s=1.0, score_s=2.0, train_s=4.0)
    assert measured(record)["round_s"] == 7.0


ROW = """[a_s]
unit = "s"
group = "A"
help = "seconds of a"
set_by = { RoundDone = "a_s" }
"""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('unit = "s"', ""),
        ('unit = "s"', "unit = 1"),
        ('group = "A"', 'group = ""'),
        ('help = "seconds of a"', 'halp = "seconds of a"'),
        ('{ RoundDone = "a_s" }', "{}"),
        ('"a_s"', "1"),
        ("[a_s]", "[a_s"),
    ],
)
def test_a_wrong_row_is_refused(right: str, wrong: str) -> None:
    assert read_metrics(ROW)["a_s"].kind == "gauge"
    with pytest.raises(ValueError, match=r"validation error|Expected"):
        read_metrics(ROW.replace(right, wrong))
