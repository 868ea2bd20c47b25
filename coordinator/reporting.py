"""A coordinator's telemetry: its last view with measured and predicted metrics."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from random import Random
from typing import Final

import trio

from coordinator.view import CoordinatorView, MachineRow
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


def view_metrics(view: CoordinatorView) -> dict[str, float]:
    measured = m.measured(view.report) | m.measured(view.predicted)
    return finite({m.COST_PER_H: view.cost_per_h}) | measured


def worker_row(row: MachineRow) -> WorkerRow:
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


def view_notes(view: CoordinatorView) -> tuple[str, ...]:
    texts = (view.problem, view.why, view.depth_why)
    return tuple(text[:TEXT_CHARS_MAX] for text in texts if text)[:NOTES_MAX]


@dataclass(slots=True)
class CoordinatorReports:
    """The reports of one coordinator, from the first view with the learner's run id on. The
    connection to the broker runs in `nursery`."""

    broker: Broker
    identity: Identity
    agent: str
    counters: TransportCounters
    nursery: trio.Nursery
    instance: str
    interval_s: float
    now_s: Callable[[], float]
    rng: Random
    publisher: MqttPublisher | None = None
    _started_s: float = field(default_factory=trio.current_time)
    _run_id: str = ""
    _sequence: int = 0

    def note(self, view: CoordinatorView) -> None:
        """Publish a view. Returns at once."""
        if self.publisher is None:
            if view.report is None:
                return
            self._run_id = view.report.run_id  # a learner has one run for as long as it lives
            self.publisher = publisher_of(
                self.broker, self.identity, self._run_id, self.instance, self.rng
            )
            self.nursery.start_soon(self.publisher.run)
        topic = Topic(self._run_id, self.identity.peer_id, "report")
        payload = encode_report(self._report(view, self.publisher.dropped), self.identity)
        self.publisher.put(Outgoing(str(topic), payload))

    def _report(self, view: CoordinatorView, dropped: int) -> NodeReport:
        self._sequence += 1
        own = {
            m.UPTIME_S: trio.current_time() - self._started_s,
            m.BYTES_IN_TOTAL: float(self.counters.bytes_in.total()),
            m.BYTES_OUT_TOTAL: float(self.counters.bytes_out.total()),
            m.TELEMETRY_DROPPED_TOTAL: float(dropped),
        }
        return NodeReport(
            peer_id=self.identity.peer_id,
            run_id=self._run_id,
            role="coordinator",
            agent=self.agent[:NAME_CHARS_MAX],
            instance=self.instance,
            sequence=self._sequence,
            sent_at_s=self.now_s(),
            interval_s=self.interval_s,
            phase=PHASES[view.reachable],
            metrics=view_metrics(view) | own,
            workers=tuple(worker_row(row) for row in view.rows[:WORKERS_MAX]),
            workers_left_out=max(0, len(view.rows) - WORKERS_MAX),
            notes=view_notes(view),
        )
