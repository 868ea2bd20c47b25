"""A figure of a round is declared once, and so is in the log, the status, its lines and reports."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from node.monitor.reporting import status_metrics
from node.monitor.status import snapshot_json
from node.records.event_log import FILE_NAME, EventLog, read_events
from node.records.figures import mismatch_lines
from swarm.telemetry.metrics import FIGURES, METRIC, METRICS, SHOWN, figures_of
from tests.unit.monitor_records import round_done, snapshot

LOGGED_LAST = ["mismatch_mean", "mismatch_max", "mismatch_k3", "effective_share", "paused_s"]


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
    assert not metric or (metric in METRICS and status_metrics(told)[metric] == 0.25)
    assert len(status_metrics(told)) == len(status_metrics(unmeasured)) + bool(metric)
    assert [text for _, text in mismatch_lines(told)] == ([shown(0.25)] if shown else [])


def test_lines_of_the_log_keep_their_order(tmp_path: Path) -> None:
    with EventLog(tmp_path / FILE_NAME, lambda: 1.0) as log:
        log.write(round_done(3))
    line = json.loads((tmp_path / FILE_NAME).read_text())
    assert list(line)[:3] == ["event", "time_s", "round"]
    assert list(line)[-len(LOGGED_LAST) :] == LOGGED_LAST


def test_nothing_measured_leaves_a_status_as_it_was() -> None:
    assert snapshot().with_figures(None) == snapshot()
