"""A coordinator's telemetry: what its last look saw, as a report, and the model beside it."""

from collections.abc import Callable
from math import isfinite
from random import Random
from typing import Final

import trio

from coordinator.view import MachineRow, View
from swarm.identity import Identity
from swarm.telemetry import metrics as m
from swarm.telemetry.broker_address import Broker
from swarm.telemetry.metrics import finite
from swarm.telemetry.mqtt import MqttPublisher, Outgoing, publisher_of
from swarm.telemetry.reports import (
    NAME_CHARS_MAX,
    NOTES_MAX,
    PHASE_CHARS_MAX,
    TEXT_CHARS_MAX,
    WORKERS_MAX,
    NodeReport,
    Topic,
    WorkerRow,
    encode_report,
)
from swarm.transport.base import TransportCounters

PHASES: Final = {True: "watching", False: "learner away"}


def view_metrics(view: View) -> dict[str, float]:
    """Metrics from the learner's report and from the capacity model."""
    measured = m.measured(view.report) | m.measured(view.predicted)
    return finite({m.COST_PER_H: view.cost_per_h}) | measured


def worker_row(row: MachineRow) -> WorkerRow:
    """One machine."""
    return WorkerRow(
        name=(row.name or row.peer)[:NAME_CHARS_MAX],
        peer_id=row.peer,
        phase=row.phase[:PHASE_CHARS_MAX],
        version=row.version,
        groups_per_s=row.groups_per_s if isfinite(row.groups_per_s) else None,
        price_per_h=row.price_per_h if isfinite(row.price_per_h) else None,
        admitted=row.admitted,
        heard_s=row.heard_s,
    )


def view_notes(view: View) -> tuple[str, ...]:
    """The problem, if there is one, and the reasons for the plan."""
    texts = (view.problem, view.why, view.depth_why)
    return tuple(text[:TEXT_CHARS_MAX] for text in texts if text)[:NOTES_MAX]


class CoordinatorReports:
    """The reports of one coordinator. It learns of the run from its learner, and says nothing
    before."""

    def __init__(
        self,
        broker: Broker,
        identity: Identity,
        agent: str,
        counters: TransportCounters,
        nursery: trio.Nursery,
        *,
        instance: str,
        interval_s: float,
        now_s: Callable[[], float],
        rng: Random,
    ) -> None:
        """`nursery`: where the connection to the broker lives."""
        self._broker = broker
        self._identity = identity
        self._agent = agent
        self._counters = counters
        self._nursery = nursery
        self._instance = instance
        self._interval_s = interval_s
        self._now_s = now_s
        self._rng = rng
        self._started_s = trio.current_time()
        self._run_id = ""
        self._sequence = 0
        self.publisher: MqttPublisher | None = None

    def note(self, view: View) -> None:
        """Publish what was seen. Returns at once."""
        if view.report is not None and view.report.run_id != self._run_id:
            self._begin(view.report.run_id)
        if self.publisher is None:
            return
        topic = Topic(self._run_id, self._identity.peer_id, "report")
        payload = encode_report(self._report(view, self.publisher.dropped), self._identity)
        self.publisher.put(Outgoing(str(topic), payload))

    def _begin(self, run_id: str) -> None:
        if self.publisher is not None:  # a learner has one run for as long as it lives
            return
        self._run_id = run_id
        self.publisher = publisher_of(
            self._broker, self._identity, run_id, self._instance, self._rng
        )
        self._nursery.start_soon(self.publisher.run)

    def _report(self, view: View, dropped: int) -> NodeReport:
        self._sequence += 1
        own = {
            m.UPTIME_S: trio.current_time() - self._started_s,
            m.BYTES_IN_TOTAL: float(self._counters.bytes_in.total()),
            m.BYTES_OUT_TOTAL: float(self._counters.bytes_out.total()),
            m.TELEMETRY_DROPPED_TOTAL: float(dropped),
        }
        return NodeReport(
            peer_id=self._identity.peer_id,
            run_id=self._run_id,
            role="coordinator",
            agent=self._agent[:NAME_CHARS_MAX],
            instance=self._instance,
            sequence=self._sequence,
            sent_at_s=self._now_s(),
            interval_s=self._interval_s,
            phase=PHASES[view.reachable],
            metrics=view_metrics(view) | own,
            workers=tuple(worker_row(row) for row in view.rows[:WORKERS_MAX]),
            workers_left_out=max(0, len(view.rows) - WORKERS_MAX),
            notes=view_notes(view),
        )
