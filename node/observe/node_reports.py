"""Makes a node's report from its status, its last records and its traffic.

A metric without a value is left out of a report; zero means that it was measured.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from node.observe import records as r
from node.observe.event_log import Record
from swarm.identity import PeerId
from swarm.leases.coordination import ReportedWorker
from swarm.telemetry import metrics as m
from swarm.telemetry import reports
from swarm.telemetry.metrics import finite
from swarm.transport.base import TransportCounters
from swarm.weights.broadcast import Holding
from swarm.weights.weights_service import VersionOutcome
from swarm.wire.messages import ROLLOUTS_PROTOCOL, adverts_topic

OTHERS: Final = "others"  # the label of the values beyond `LABELS_MAX`, summed


@dataclass(frozen=True, slots=True)
class MachineResources:
    memory_available_bytes: int
    disk_free_bytes: int | None  # None: where the data directory is cannot be asked


@dataclass(frozen=True, slots=True)
class Traffic:
    counters: TransportCounters
    connected: Sequence[PeerId]


@dataclass(frozen=True, slots=True)
class Extras:
    """Parts of a report that only some roles have."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    labelled: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    workers: tuple[reports.WorkerRow, ...] = ()
    broadcast: reports.BroadcastReport | None = None


def bounded(values: Mapping[str, float]) -> dict[str, float]:
    """At most `LABELS_MAX` of them, the largest; the rest in one sum."""
    if len(values) <= reports.LABELS_MAX:
        return {name[: reports.NAME_CHARS_MAX]: value for name, value in values.items()}
    ordered = sorted(values.items(), key=lambda item: (-item[1], item[0]))
    kept = {
        name[: reports.NAME_CHARS_MAX]: value for name, value in ordered[: reports.LABELS_MAX - 1]
    }
    return kept | {OTHERS: sum(value for _, value in ordered[reports.LABELS_MAX - 1 :])}


def peer_rows(snapshot: r.StatusSnapshot, traffic: Traffic) -> tuple[reports.PeerTraffic, ...]:
    """Connected and known peers, those with the most traffic first."""
    accounts = {each.peer_id: each for each in snapshot.peers}
    connected = {str(each) for each in traffic.connected}
    by_peer = traffic.counters.by_peer
    busiest = {str(peer) for peer, _ in by_peer.busiest(reports.PEERS_MAX)}
    rows = []
    for name in accounts.keys() | connected | busiest:
        counted, account = by_peer.of(PeerId(name)), accounts.get(name)
        rows.append(
            reports.PeerTraffic(
                peer_id=name,
                bytes_in=counted.bytes_in,
                bytes_out=counted.bytes_out,
                out_bytes_per_s=round(account.out_bytes_per_s) if account else 0,
                groups_accepted=account.groups_accepted if account else 0,
                groups_trained=account.groups_trained if account else 0,
                rejected=sum(account.rejected.values()) if account else 0,
                future=account.rejected.get("future", 0) if account else 0,
                connected=name in connected,
            )
        )
    rows.sort(key=lambda row: (not row.connected, -row.bytes_in - row.bytes_out, row.peer_id))
    return tuple(rows[: reports.PEERS_MAX])


def worker_rows(workers: Iterable[ReportedWorker]) -> tuple[reports.WorkerRow, ...]:
    """A learner's workers as it measured them, connected ones first, then those heard of last."""
    return tuple(
        reports.WorkerRow(
            name=each.peer[-12:],
            peer_id=each.peer,
            phase=_phase(each),
            version=each.version,
            groups_per_s=each.groups_per_s,
            admitted=each.admitted,
            refused=each.refused,
            leased=each.leased,
            heard_s=each.heard_s,
        )
        for each in sorted(workers, key=lambda each: (not each.connected, each.heard_s, each.peer))
    )


def _phase(worker: ReportedWorker) -> str:
    if not worker.connected:
        return "gone"
    if worker.standing_by:
        return "standing by"
    return "working" if worker.leased else "idle"


def broadcast_row(holding: Holding | None) -> reports.BroadcastReport | None:
    if holding is None or holding.chunks == 0:
        return None
    return reports.BroadcastReport(
        version=holding.version,
        chunks=holding.chunks,
        have="" if holding.complete else bitfield(holding.have, holding.chunks),
        size_bytes=holding.size_bytes,
        complete=holding.complete,
    )


_REVERSED: Final = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def bitfield(have: int, chunks: int) -> str:
    """Hex, the first chunk's bit first. `have`: bit i is chunk i. Over `CHUNKS_MAX` chunks each
    bit stands for as many as needed, and is set where all of them are here."""
    have &= (1 << chunks) - 1
    each = -(-chunks // reports.CHUNKS_MAX)
    bits = -(-chunks // each)
    if each > 1:  # by text, whose slices cost what they hold; a shift of `have` costs all of it
        text = f"{have:0{chunks}b}"[::-1]
        marks = "".join("0" if "0" in text[i : i + each] else "1" for i in range(0, chunks, each))
        have = int(marks[::-1], 2)
    field = have.to_bytes(-(-bits // 8), "little").translate(_REVERSED)
    return field.hex()[: -(-bits // 4)]


@dataclass(eq=False)
class Reporter:
    """Makes the reports of one process. It keeps what records said last."""

    peer_id: PeerId
    run_id: str
    role: reports.Role
    agent: str
    instance: str  # another at each start, at most 32 characters
    interval_s: float
    _sequence: int = 0
    _errors: int = 0
    _returns: int = 0
    _last: dict[type[Record], Record] = field(default_factory=dict)  # a round, a step, a batch
    _outcome: VersionOutcome | None = None
    _saved_bytes: int = 0
    _sums: Counter[str] = field(default_factory=Counter)

    def note(self, record: Record) -> None:
        match record:
            case r.Started():  # from a checkpoint, perhaps of before what was noted
                self._last.pop(r.RoundDone, None)
                self._last.pop(r.StepDone, None)
            case r.RoundDone() | r.StepDone() | r.WorkDone():
                self._last[type(record)] = record
                self._sums.update(m.measured(record, f"{type(record).__name__}_sums"))
            case r.WentBack():
                self._returns += 1
            case r.Trouble():
                self._errors += 1

    def tracked(
        self, record: Record, snapshot: r.StatusSnapshot
    ) -> tuple[int, dict[str, float]] | None:
        """A round and its figures for a tracker, after `record` was noted; None: it is no round and
        no evaluation. Only the round of an evaluation has its figures: elsewhere they would look
        measured."""
        evaluated = (m.HELD_OUT_RATIO, m.VALIDATION_RATIO, m.VALIDATION_BEST_RATIO)
        known = m.measured(snapshot)
        match record:
            case r.HeldOut(round=number):
                found = {name: known[name] for name in evaluated if name in known}
                # What the record says, whenever the status comes to say it
                return number, finite(found | m.measured(record))
            case r.RoundDone(round=number) | r.StepDone(step=number) | r.WorkDone(batch=number):
                of_record = m.measured(record)
            case _:
                return None
        rest = {name: value for name, value in known.items() if name not in evaluated}
        return number, finite(rest | dict(self._sums) | of_record)

    def note_outcome(self, outcome: VersionOutcome) -> None:
        self._saved_bytes += outcome.applied.bytes_saved
        if outcome.applied.failure is None:
            self._outcome = outcome

    def make(
        self,
        snapshot: r.StatusSnapshot,
        traffic: Traffic,
        machine: MachineResources,
        extras: Extras,
        *,
        now_s: float,
        dropped: int,
    ) -> reports.NodeReport:
        """The next report. `dropped`: reports that could not be sent; `now_s`: unix time."""
        self._sequence += 1
        metrics = self._metrics(snapshot, traffic, machine)
        metrics[m.TELEMETRY_DROPPED_TOTAL] = dropped
        protocols = snapshot.bytes_by_protocol
        labelled: dict[str, Mapping[str, float]] = {
            m.PROTOCOL_BYTES_IN_TOTAL: {name: each[0] for name, each in protocols.items()},
            m.PROTOCOL_BYTES_OUT_TOTAL: {name: each[1] for name, each in protocols.items()},
            m.REJECTED_TOTAL: snapshot.rejected,
            m.TURNED_AWAY_TOTAL: snapshot.door.turned_away if snapshot.door else {},
            **extras.labelled,
        }
        return reports.NodeReport(
            peer_id=self.peer_id,
            run_id=self.run_id,
            role=self.role,
            agent=self.agent[: reports.NAME_CHARS_MAX],
            instance=self.instance,
            sequence=self._sequence,
            sent_at_s=now_s,
            interval_s=self.interval_s,
            phase=snapshot.phase[: reports.PHASE_CHARS_MAX],
            metrics=finite(metrics | dict(extras.metrics)),
            labelled={name: bounded(finite(each)) for name, each in labelled.items() if each},
            peers=peer_rows(snapshot, traffic),
            workers=extras.workers[: reports.WORKERS_MAX],
            workers_left_out=max(0, len(extras.workers) - reports.WORKERS_MAX),
            broadcast=extras.broadcast,
            notes=tuple(
                each[: reports.TEXT_CHARS_MAX] for each in snapshot.notes[: reports.NOTES_MAX]
            ),
        )

    def _metrics(
        self, snapshot: r.StatusSnapshot, traffic: Traffic, machine: MachineResources
    ) -> dict[str, float]:
        counters = traffic.counters
        metrics = m.measured(snapshot) | m.measured(machine)
        metrics |= {
            m.PEERS: len(traffic.connected),
            m.ADVERTS_IN_TOTAL: counters.messages_in[adverts_topic(self.run_id)],
            m.FETCHES_TOTAL: counters.messages_out[ROLLOUTS_PROTOCOL],
            m.ERRORS_TOTAL: self._errors,
            m.RETURNS_TOTAL: self._returns,
            **self._sums,
        }
        for record in self._last.values():
            metrics |= m.measured(record)
        if self._outcome is not None:
            metrics |= m.measured(self._outcome)
            metrics[m.SAVED_BYTES_TOTAL] = self._saved_bytes
        return metrics
