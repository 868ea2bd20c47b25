"""A coordinator's look as a report: measured beside predicted, workers with their prices."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import trio

from coordinator.model.capacity import Capacity, Form, assess
from coordinator.reporting import CoordinatorReports, view_metrics, worker_row
from coordinator.view import CoordinatorView, MachineRow
from swarm.identity import Identity
from swarm.telemetry.broker_address import Broker
from swarm.telemetry.metrics import METRICS
from swarm.telemetry.reports import WORKERS_MAX, NodeReport, Topic, decode_report
from swarm.transport.base import TransportCounters
from swarm.wire.messages import LearnerReport
from tests.coordinator_samples import fleet, run_of
from tests.support import run
from tests.wire_samples import steering_messages

OWN = Identity(b"c" * 32)
ROW = MachineRow(
    name="spot-1",
    provider="local",
    peer="",
    phase="working",
    condition="",
    version=3,
    groups_per_s=0.5,
    measured=True,
    price_per_h=0.25,
    admitted=7,
    heard_s=1.0,
    note="",
)


def predicted() -> Capacity:
    run_ = run_of()
    capacity = assess(run_, fleet(1, 8, run=run_), Form.OVERLAPPED)
    assert isinstance(capacity, Capacity)
    return capacity


def learner_report() -> LearnerReport:
    report = steering_messages()["report"]
    assert isinstance(report, LearnerReport)
    return report


def view_of(**changes: Any) -> CoordinatorView:
    view = CoordinatorView(
        "l", report=learner_report(), predicted=predicted(), cost_per_h=1.25, rows=(ROW,)
    )
    return replace(view, **changes)


def reports(nursery: trio.Nursery) -> CoordinatorReports:
    return CoordinatorReports(
        Broker.parse("mqtt://127.0.0.1:1"),
        OWN,
        "test",
        TransportCounters(),
        nursery,
        instance="i",
        interval_s=5.0,
        now_s=lambda: 100.0,
        rng=Random(1),
    )


def published(made: CoordinatorReports) -> list[NodeReport]:
    found = []
    assert made.publisher is not None
    while (message := made.publisher._queue.take()) is not None:
        assert Topic.parse(message.topic).peer_id == OWN.peer_id
        found.append(decode_report(message.payload, OWN.peer_id))
    return found


def test_the_model_stands_beside_what_was_measured() -> None:
    metrics = view_metrics(view_of())
    report, capacity = learner_report(), predicted()
    assert metrics["idle_ratio"] == report.pace.idle_share
    assert metrics["predicted_idle_ratio"] == pytest.approx(1.0 - capacity.utilisation)
    assert metrics["staleness_max_steps"] == report.pace.staleness_worst
    assert metrics["predicted_staleness_steps"] == capacity.staleness_worst
    assert set(metrics) <= set(METRICS)


def test_what_is_not_known_is_left_out() -> None:
    assert view_metrics(view_of(report=None, predicted=None)) == {"cost_per_h": 1.25}
    endless = replace(predicted(), broadcast_s=float("inf"))
    assert "predicted_broadcast_s" not in view_metrics(view_of(predicted=endless))


def test_a_worker_has_its_price() -> None:
    row = worker_row(replace(ROW, name="n" * 200, phase="p" * 200))
    assert (row.price_per_h, row.groups_per_s, row.admitted) == (0.25, 0.5, 7)
    unknown = worker_row(replace(ROW, name="", peer="p", price_per_h=float("inf")))
    assert (unknown.name, unknown.price_per_h) == ("p", None)


def test_nothing_is_said_before_the_run_is_known_and_each_look_then() -> None:
    async def body() -> None:
        async with trio.open_nursery() as nursery:
            made = reports(nursery)
            made.note(view_of(report=None))
            assert made.publisher is None
            made.note(view_of(rows=(ROW,) * (WORKERS_MAX + 3), problem="no money"))
            made.note(view_of(report=None, reachable=False, why="gone"))
            first, second = published(made)
            assert (first.sequence, second.sequence) == (1, 2)
            assert first.run_id == second.run_id == learner_report().run_id
            assert (first.role, first.phase, second.phase) == (
                "coordinator", "watching", "learner away"
            )  # fmt: skip
            assert len(first.workers) == WORKERS_MAX
            assert first.notes[0] == "no money"
            assert first.metrics["cost_per_h"] == 1.25
            nursery.cancel_scope.cancel()

    run(body)
