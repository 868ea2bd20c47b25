"""The nodes that a watcher knows of: last reports, nodes that are gone, reports that were lost.

Reports are signed, so no node can speak for another. A broker may still carry anything, so each
collection is bounded and each refusal is counted. Pure: time is an argument, in unix seconds.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from swarm.errors import Reject, RemoteProtocolError
from swarm.identity import PeerId
from swarm.telemetry.reports import (
    NodeReport,
    Status,
    Topic,
    decode_report,
    decode_status,
)

NODES_MAX: Final = 4096
REPORTS_BYTES_MAX: Final = 16 << 20  # last reports of all nodes: 1,200 with 64 peers each
EARLY_MAX: Final = 1024  # statuses of processes without a report
GONE_S_MIN: Final = 10.0
GONE_S_MAX: Final = 300.0  # bounds the effect of the interval that a node states
GONE_INTERVALS: Final = 3
SKEW_S_MAX: Final = 120.0  # between a node's clock and ours
WINDOW_S: Final = 10.0
WINDOW_REPORTS_MAX: Final = 64  # good reports of one node in the window
# Failed checks in the window over all topics, under a second of one core. Beyond it only a sample
# of the messages on failing topics is checked, so that a node's own reports still pass.
WINDOW_FAILURES_MAX: Final = 4_096
TOPIC_FAILURES_MIN: Final = 16  # a topic with fewer in the window is not sampled
FAILURES_SAMPLE: Final = 4  # of so many messages one is checked
FIGURE_MAX: Final = 1e18  # bounds each figure that is summed over nodes
GAP_MAX: Final = 100_000  # lost reports that one gap may count


class Drop(StrEnum):
    TOPIC = "topic"  # no topic of a node
    OTHER_RUN = "other_run"
    OVERSIZE = "oversize"
    MALFORMED = "malformed"
    FORGED = "forged"  # not signed by whom it speaks of, or about another run
    REPLAYED = "replayed"  # it has been here, or is older than what was
    TOO_OFTEN = "too_often"
    FULL = "full"  # no room for another node


class Gone(StrEnum):
    OFFLINE = "offline"  # it said so, or its broker did with what the node had left for it
    SILENT = "silent"  # no report for `gone_after_s`


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node, as far as is known."""

    report: NodeReport  # the last
    heard_s: float  # ago
    gone: Gone | None
    lost: int  # reports of this instance that never came
    left: bool = False  # it said goodbye


@dataclass(slots=True)
class _Entry:
    report: NodeReport
    size_bytes: int
    heard_at_s: float
    lost: int = 0
    connection: int = 0  # the highest that was online
    offline: bool = False
    left: bool = False  # it said so
    remembered: bool = False  # from before nobody listened
    window_from_s: float = 0.0
    window_reports: int = 0
    window_failures: int = 0

    def gone(self, now_s: float) -> Gone | None:
        if self.offline:
            return Gone.OFFLINE
        return Gone.SILENT if now_s - self.heard_at_s > gone_after_s(self.report) else None


def gone_after_s(report: NodeReport) -> float:
    """Seconds after a node's last report from which the node counts as gone."""
    return min(GONE_S_MAX, max(GONE_S_MIN, GONE_INTERVALS * report.interval_s))


class _Refused(Exception):
    def __init__(self, reason: Drop) -> None:
        super().__init__(reason)
        self.reason = reason


_Key = tuple[str, PeerId]  # run id, node


class Watch:
    """The nodes of one run, or of all that a broker tells of."""

    def __init__(self, run_id: str | None = None) -> None:
        self._run_id = run_id
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()  # heard of last comes last
        self._early: OrderedDict[_Key, Status] = OrderedDict()
        self._held_bytes = 0
        self.taken = 0
        self.repeated = 0
        self._failures_from_s = 0.0
        self._failures = 0  # in the window
        self._unlooked = 0  # while they were too many
        self._lost_before = 0  # by nodes and instances that are not here any more
        self.dropped: Counter[Drop] = Counter()
        self.forgotten = 0  # gone nodes that made room for others

    def take(
        self, topic: str, payload: bytes, now_s: float, *, retained: bool = False
    ) -> NodeReport | Status | None:
        """Take a delivered message; None if it does not count. `retained`: the broker had kept it,
        so its node may be long gone. Never raises."""
        try:
            return self._take(topic, payload, now_s, retained)
        except _Refused as refused:
            self.dropped[refused.reason] += 1
        except RemoteProtocolError as error:
            self.dropped[_DROPS.get(error.reason, Drop.MALFORMED)] += 1
        return None

    def remember(self, report: NodeReport, heard_at_s: float, now_s: float, *, gone: bool) -> None:
        """Restore a node's last report from before a restart. `gone`: it had left."""
        size_bytes = len(report.model_dump_json())
        key = report.run_id, PeerId(report.peer_id)
        if self._run_id not in (None, report.run_id) or key in self._entries:
            return
        if self._make_room(key, None, size_bytes, now_s):
            entry = _Entry(report, size_bytes, heard_at_s, offline=gone, remembered=True)
            entry.window_from_s = now_s
            self._entries[key] = entry
            self._held_bytes += size_bytes

    def nodes(self, now_s: float) -> list[NodeView]:
        """All nodes, those heard last first."""
        return [
            NodeView(
                *(each.report, max(0.0, now_s - each.heard_at_s), each.gone(now_s), each.lost),
                left=each.offline and each.left,
            )
            for each in reversed(self._entries.values())
        ]

    @property
    def lost(self) -> int:
        """Reports that never came, by the gaps in what came."""
        return self._lost_before + sum(each.lost for each in self._entries.values())

    def counters(self) -> dict[str, int]:
        return {
            "reports_taken": self.taken,
            "reports_lost": self.lost,
            "reports_repeated": self.repeated,
            "nodes_forgotten": self.forgotten,
            **{f"dropped_{reason}": count for reason, count in sorted(self.dropped.items())},
        }

    def _take(
        self, topic: str, payload: bytes, now_s: float, retained: bool
    ) -> NodeReport | Status | None:
        try:
            where = Topic.parse(topic)
        except RemoteProtocolError:
            raise _Refused(Drop.TOPIC) from None
        if self._run_id is not None and where.run_id != self._run_id:
            raise _Refused(Drop.OTHER_RUN)
        if where.kind == "alarms":  # they are in the report as well
            return None
        key = where.run_id, where.peer_id
        if self._is_too_often(self._entries.get(key), now_s):
            raise _Refused(Drop.TOO_OFTEN)
        taken: NodeReport | Status | None = None
        try:
            if where.kind == "status":
                taken = self._take_status(key, decode_status(payload, where.peer_id))
            else:
                report = decode_report(payload, where.peer_id)
                if report.run_id != where.run_id:
                    raise _Refused(Drop.FORGED)
                taken = self._take_report(key, report, len(payload), now_s, retained)
            return taken
        finally:
            self._count(self._entries.get(key), is_good=taken is not None)

    def _is_too_often(self, entry: _Entry | None, now_s: float) -> bool:
        """Checked before the signature, which costs a hundred times as much."""
        if not 0 <= now_s - self._failures_from_s < WINDOW_S:
            self._failures_from_s, self._failures = now_s, 0
        if entry is not None:
            if not 0 <= now_s - entry.window_from_s < WINDOW_S:
                entry.window_from_s, entry.window_reports, entry.window_failures = now_s, 0, 0
            if entry.window_reports >= WINDOW_REPORTS_MAX:
                return True
            if entry.window_failures < TOPIC_FAILURES_MIN:
                return False
        if self._failures < WINDOW_FAILURES_MAX:
            return False
        self._unlooked += 1
        return self._unlooked % FAILURES_SAMPLE != 0

    def _count(self, entry: _Entry | None, *, is_good: bool) -> None:
        """Failures do not use up a node's good reports: anybody can publish on its topic."""
        self._failures += not is_good
        if entry is not None:
            entry.window_reports += is_good
            entry.window_failures += not is_good

    def _take_status(self, key: _Key, status: Status) -> Status:
        if status.run_id != key[0]:
            raise _Refused(Drop.FORGED)
        entry = self._entries.get(key)
        if entry is None or status.instance != entry.report.instance:
            self._early[key] = status  # of a process that no report has come of, or one before
            self._early.move_to_end(key)
            if len(self._early) > EARLY_MAX:
                self._early.popitem(last=False)
            return status
        if status.connection < entry.connection:
            raise _Refused(Drop.REPLAYED)
        entry.connection, entry.offline = status.connection, not status.online
        entry.left = status.left
        return status

    def _take_report(
        self, key: _Key, report: NodeReport, size_bytes: int, now_s: float, retained: bool
    ) -> NodeReport | None:
        skew_s = report.sent_at_s - now_s
        heard_at_s = min(now_s, report.sent_at_s) if retained else now_s
        before = self._entries.get(key)
        if before is not None and not _is_newer(before.report, report, skew_s):
            was = before.report
            if retained and (was.instance, was.sequence) == (report.instance, report.sequence):
                self.repeated += 1
                return None
            raise _Refused(Drop.REPLAYED)
        if not self._make_room(key, before, size_bytes, now_s):
            raise _Refused(Drop.FULL)
        entry = _Entry(report, size_bytes, heard_at_s, window_from_s=now_s)
        if before is None or before.report.instance != report.instance:
            self._apply_early(key, entry, retained)
        if before is not None:
            self._follow(before, entry, retained)
        self._held_bytes += size_bytes - (before.size_bytes if before else 0)
        self._entries[key] = entry
        self._entries.move_to_end(key)
        self.taken += 1
        return report

    def _apply_early(self, key: _Key, entry: _Entry, retained: bool) -> None:
        status = self._early.pop(key, None)
        if status is not None and status.instance == entry.report.instance:
            entry.connection, entry.offline = status.connection, retained and not status.online
            entry.left = status.left

    def _follow(self, before: _Entry, entry: _Entry, retained: bool) -> None:
        """Carry over counts and windows to the next report."""
        entry.window_from_s, entry.window_reports = before.window_from_s, before.window_reports
        entry.window_failures = before.window_failures
        last, report = before.report, entry.report
        if last.instance != report.instance:
            self._lost_before += before.lost
            return
        missed = 0 if before.remembered else report.sequence - last.sequence - 1
        entry.lost = before.lost + min(GAP_MAX, missed)
        entry.connection = before.connection
        entry.offline, entry.left = before.offline and retained, before.left

    def _make_room(self, key: _Key, before: _Entry | None, size_bytes: int, now_s: float) -> bool:
        """Forget gone nodes, oldest first, until a report fits; False: it does not fit."""
        nodes = len(self._entries) + (before is None)
        held = self._held_bytes + size_bytes - (before.size_bytes if before else 0)
        if nodes <= NODES_MAX and held <= REPORTS_BYTES_MAX:
            return True
        for other, entry in list(self._entries.items()):
            if other != key and entry.gone(now_s) is not None:
                del self._entries[other]
                self._held_bytes -= entry.size_bytes
                self._lost_before += entry.lost
                self.forgotten += 1
                nodes, held = nodes - 1, held - entry.size_bytes
                if nodes <= NODES_MAX and held <= REPORTS_BYTES_MAX:
                    return True
        return False


def plausible(value: float) -> float:
    """A stranger's figure, bounded so that sums and differences of many stay finite."""
    return max(-FIGURE_MAX, min(FIGURE_MAX, value))


_DROPS: Final = {
    Reject.OVERSIZE: Drop.OVERSIZE,
    Reject.BAD_SIGNATURE: Drop.FORGED,
    Reject.WRONG_PRODUCER: Drop.FORGED,
}


def _is_newer(last: NodeReport, report: NodeReport, skew_s: float) -> bool:
    if report.instance == last.instance:
        return report.sequence > last.sequence
    # a process that started again; its clock may have been set back meanwhile
    return report.sent_at_s > last.sent_at_s or abs(skew_s) <= SKEW_S_MAX
