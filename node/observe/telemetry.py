"""Telemetry of a running node: a report per interval with its alarms.

`swarm-node status` shows the alarms as notes, and the metrics endpoint shows the last report. A
broker gets the reports if one is named.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Final

import psutil
import trio

from node.config import NodeConfig
from node.observe.alarms import HISTORY_REPORTS, HISTORY_S, ROUNDS_KEPT, alarms_of, identity_of
from node.observe.node_reports import Extras, MachineResources, Reporter, Traffic
from node.observe.records import StatusSnapshot
from node.system.machine import disk_free_bytes
from swarm.errors import ConfigError
from swarm.identity import Identity
from swarm.storage import RunSync
from swarm.telemetry import metrics as m
from swarm.telemetry import reports
from swarm.telemetry.broker_address import Broker
from swarm.telemetry.mqtt import MqttPublisher, Outgoing

ALARM_NOTE: Final = "alarm:"  # with the alarm's kind: its topic among a node's notes
BROKER_NOTE: Final = "telemetry"
FIRST_TRIES: Final = 2  # failed connections that are not noted: a starting node is busy
ALARMS_AGAIN_S: Final = 300.0  # a standing alarm is published again after so long


def broker_of(config: NodeConfig, password: str | None) -> Broker | None:
    """The broker that reports go to; None: there is none.

    Raises:
        ConfigError: what is said of it does not fit together.
    """
    if config.telemetry is None:
        if config.telemetry_ca is not None:
            raise ConfigError("--telemetry-ca: of use with --telemetry mqtts://… alone")
        return None
    try:
        return Broker.parse(config.telemetry, password=password, ca_file=config.telemetry_ca)
    except ConfigError as error:
        raise ConfigError(f"--telemetry {error}") from None


def machine_of(data_dir: Path) -> MachineResources:
    """Free memory and disk of this machine. Blocking."""
    return MachineResources(psutil.virtual_memory().available, disk_free_bytes(data_dir))


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of a report's figures. Each is called once per report, and is quick."""

    snapshot: Callable[[], StatusSnapshot]
    traffic: Callable[[], Traffic]
    extras: Callable[[], Extras]
    machine: Callable[[], MachineResources]  # blocking


@dataclass(eq=False)
class Telemetry:
    """The reports of one process. `notes`: of the node, by topic; alarms are put there. `run_sync`:
    where what blocks goes."""

    reporter: Reporter
    identity: Identity
    run_id: str
    sources: Sources
    notes: dict[str, str]
    _: KW_ONLY
    interval_s: float
    publisher: MqttPublisher | None
    now_s: Callable[[], float]
    run_sync: RunSync
    latest: reports.NodeReport | None = None

    def __post_init__(self) -> None:
        self._told: object = None  # at which connection, and what stood
        self._told_s = 0.0
        keep = max(2, min(HISTORY_REPORTS, int(HISTORY_S / self.interval_s) + 1))
        self._history: deque[reports.NodeReport] = deque(maxlen=keep)
        self._history_step_s = HISTORY_S / keep
        # The first report of each round
        self._rounds: deque[reports.NodeReport] = deque(maxlen=ROUNDS_KEPT)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            if self.publisher is not None:
                nursery.start_soon(self.publisher.run)
            while True:
                await self.report()
                await trio.sleep(self.interval_s)

    async def report(self) -> reports.NodeReport:
        machine = await self.run_sync(self.sources.machine)
        dropped = 0 if self.publisher is None else self.publisher.dropped
        snapshot = self.sources.snapshot()
        own = {text for topic, text in self.notes.items() if topic.startswith(ALARM_NOTE)}
        snapshot = replace(snapshot, notes=tuple(n for n in snapshot.notes if n not in own))
        report = self.reporter.make(
            snapshot,
            self.sources.traffic(),
            machine,
            self.sources.extras(),
            now_s=self.now_s(),
            dropped=dropped,
        )
        alarms = alarms_of((*self._rounds, *self._history, report))
        report = report.model_copy(update={"alarms": alarms})
        self._remember(report)
        self._note(alarms)
        if self.publisher is not None:
            self._publish(self.publisher, report)
        self.latest = report
        return report

    def _remember(self, report: reports.NodeReport) -> None:
        """Keep it for the alarms, unless the last kept one is recent: few must reach far."""
        last = self._history[-1] if self._history else None
        if last is None or not 0 <= report.sent_at_s - last.sent_at_s < self._history_step_s:
            self._history.append(report)
        before = self._rounds[-1].metrics.get(m.ROUND) if self._rounds else None
        if not self._rounds or report.metrics.get(m.ROUND) != before:
            self._rounds.append(report)

    def _note(self, alarms: tuple[reports.AlarmReport, ...]) -> None:
        for topic in [each for each in self.notes if each.startswith(ALARM_NOTE)]:
            del self.notes[topic]
        for alarm in alarms:
            self.notes[ALARM_NOTE + alarm.kind] = f"{alarm.text}. {alarm.advice}"
        publisher = self.publisher
        if publisher is None:
            return
        if publisher.failure and not publisher.connected and publisher.connections > FIRST_TRIES:
            self.notes[BROKER_NOTE] = (
                f"the telemetry broker cannot be reached ({publisher.failure}); "
                f"{publisher.dropped} messages dropped"
            )
        else:
            self.notes.pop(BROKER_NOTE, None)

    def _publish(self, publisher: MqttPublisher, report: reports.NodeReport) -> None:
        peer, run_id = self.identity.peer_id, self.run_id
        topic = str(reports.Topic(run_id, peer, "report"))
        # Again at each new connection, because messages may have been dropped.
        told = publisher.established, identity_of(report.alarms)
        now_s = trio.current_time()
        if told != self._told or (report.alarms and now_s - self._told_s >= ALARMS_AGAIN_S):
            self._told, self._told_s = told, now_s
            alarms = reports.AlarmsReport(
                run_id=run_id,
                instance=report.instance,
                sent_at_s=report.sent_at_s,
                alarms=report.alarms,
            )
            payload = reports.sealed(alarms, self.identity)
            publisher.put(Outgoing(str(reports.Topic(run_id, peer, "alarms")), payload, qos=1))
        publisher.put(Outgoing(topic, reports.encode_report(report, self.identity)))
