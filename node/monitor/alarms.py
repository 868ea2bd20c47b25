"""What is wrong with a node, by its own reports of the last minutes. Pure.

An alarm stands as long as what it tells of is so. Each threshold leaves room for what happens in a
healthy swarm: a slow first round, one bad group, a burst of traffic.
"""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Final

from swarm.telemetry import ADVICE, ALARMS_MAX, Alarm, AlarmReport, Level, NodeReport, PeerTraffic

HISTORY_REPORTS: Final = 64
HISTORY_S: Final = 120.0  # how far back an alarm looks
PATIENCE_S: Final = 60.0  # for which something must be so, where it may be a passing state
ROUNDS_WITHOUT_FOREIGN: Final = 3
IDLE_RATIO_MAX: Final = 0.5
STALENESS_SHARE: Final = 0.8  # of S, in the mean
DOMINATES_SHARE: Final = 0.8
DOMINATED_GROUPS_MIN: Final = 20
REJECTS_MIN: Final = 20
REJECTS_SHARE: Final = 0.5  # of what came
FUTURE_PEERS_MIN: Final = 3  # fewer may be wrong themselves; a worker has a note for its learner's
DISK_FREE_BYTES_MIN: Final = 2 << 30
DISK_CRITICAL_BYTES: Final = 256 << 20
MEMORY_BYTES_MIN: Final = 512 << 20
MEMORY_CRITICAL_BYTES: Final = 128 << 20

Finding = tuple[Level, str] | tuple[Level, str, str] | None  # what is so, and of which peer
History = Sequence[NodeReport]  # of one process, the oldest first


def alarms_of(history: History) -> tuple[AlarmReport, ...]:
    """The alarms that stand, by the last reports of one process; critical ones first."""
    if not history:
        return ()
    now = history[-1]
    recent = [
        each
        for each in history
        if each.instance == now.instance and now.sent_at_s - HISTORY_S <= each.sent_at_s
    ]
    found = [(alarm, check(recent)) for alarm, check in CHECKS.items()]
    standing = [
        AlarmReport(
            kind=alarm,
            level=finding[0],
            text=finding[1],
            advice=ADVICE[alarm],
            subject=finding[2] if len(finding) > 2 else "",
        )
        for alarm, finding in found
        if finding is not None
    ]
    return tuple(sorted(standing, key=lambda each: each.level != "critical")[:ALARMS_MAX])


def identity_of(alarms: Sequence[AlarmReport]) -> frozenset[tuple[Alarm, str, Level]]:
    """What stands, whatever figures are in its words: two looks at the same are equal."""
    return frozenset((each.kind, each.subject, each.level) for each in alarms)


def _value(report: NodeReport, name: str) -> float:
    return report.metrics.get(name, 0.0)


def _rise(history: History, name: str) -> float:
    return _value(history[-1], name) - _value(history[0], name)


def _labelled_rise(history: History, name: str) -> dict[str, float]:
    first, last = (each.labelled.get(name, {}) for each in (history[0], history[-1]))
    return {label: value - first.get(label, 0.0) for label, value in last.items()}


def _span_s(history: History) -> float:
    return history[-1].sent_at_s - history[0].sent_at_s


def _not_sharing(history: History) -> Finding:
    """Peers have been there all along, rounds go by, and nothing of theirs is accepted."""
    if history[-1].role != "node" or _span_s(history) < PATIENCE_S:
        return None
    peers = min(_value(each, "peers") for each in history)
    wanted = _value(history[-1], "external_groups_wanted")
    if not peers or not wanted or _rise(history, "round") < 1 or _rise(history, "accepted_total"):
        return None
    return (
        "critical",
        f"{peers:.0f} peers are connected, and no group of theirs was accepted for "
        f"{_span_s(history):.0f} s",
    )


def _no_foreign(history: History) -> Finding:
    """Effective J is zero round after round."""
    if _rise(history, "round") < ROUNDS_WITHOUT_FOREIGN:
        return None
    wanted = _value(history[-1], "external_groups_wanted")
    used = max(_value(each, "external_groups") for each in history)
    if not wanted or used:
        return None
    rounds = _rise(history, "round")
    return "warning", f"the last {rounds:.0f} rounds trained on no foreign group, of {wanted:.0f}"


def _learner_starving(history: History) -> Finding:
    if history[-1].role != "learner" or _rise(history, "round") < 2:
        return None
    idle = fmean(_value(each, "idle_ratio") for each in history)
    if idle <= IDLE_RATIO_MAX:
        return None
    return "warning", f"the learner waits for groups {idle:.0%} of the time"


def _staleness_near_bound(history: History) -> Finding:
    now = history[-1]
    bound, mean = _value(now, "staleness_bound_steps"), _value(now, "staleness_mean_steps")
    queued = _value(now, "queued_staleness_max_steps")
    if bound < 1 or max(mean, queued - 1) < STALENESS_SHARE * bound:
        return None
    return (
        "warning",
        f"groups are {mean:.1f} steps old in the mean, at most {queued:.0f} in the queue; the "
        f"bound is {bound:.0f}",
    )


def _one_producer(history: History) -> Finding:
    """One of several feeds all: workers of a learner, or peers of a node."""
    now, first = history[-1], history[0]
    if now.workers:
        before = {row.peer_id or row.name: row.admitted for row in first.workers}
        counts = {row.peer_id or row.name: row.admitted for row in now.workers}
        others = sum(row.phase in ("working", "idle") for row in now.workers)
    else:
        before = {row.peer_id: row.groups_trained for row in first.peers}
        counts = {row.peer_id: row.groups_trained for row in now.peers}
        others = sum(row.connected for row in now.peers)
    rises = {who: count - before.get(who, 0) for who, count in counts.items()}
    total = sum(rises.values())
    if others < 3 or total < DOMINATED_GROUPS_MIN:
        return None
    most, who = max((count, peer) for peer, count in rises.items())
    if most <= DOMINATES_SHARE * total:
        return None
    return "warning", f"{who} made {most} of the last {total} groups; {others} are connected", who


def _reject_storm(history: History) -> Finding:
    rises = _labelled_rise(history, "rejected_total")
    total = sum(rises.values())
    came = total + _rise(history, "accepted_total")
    if total < REJECTS_MIN or total <= REJECTS_SHARE * came:
        return None
    most = max(rises, key=lambda reason: (rises[reason], reason))
    return (
        "critical",
        f"{total:.0f} of {came:.0f} records were refused within {_span_s(history):.0f} s, most as "
        f"{most}",
    )


def _low(name: str, what: str, warn: int, critical: int) -> Callable[[History], Finding]:
    def check(history: History) -> Finding:
        left = history[-1].metrics.get(name)
        if left is None or left >= warn:
            return None
        return "critical" if left < critical else "warning", f"{left / 2**20:,.0f} MiB {what}"

    return check


def _clock_skew(history: History) -> Finding:
    """What most peers date is in our future: ours is slow. Of one or two it says nothing, however
    many records they are: their clocks are fast, and this node's alarm would blame its own."""
    before = {row.peer_id: row for row in history[0].peers}
    rises = []  # of each peer that was heard from: records dated in the future
    for row in history[-1].peers:
        was = before.get(row.peer_id, PeerTraffic(peer_id=row.peer_id))
        if row.groups_accepted > was.groups_accepted or row.rejected > was.rejected:
            rises.append(row.future - was.future)
    fast = sum(rise > 0 for rise in rises)
    if fast < FUTURE_PEERS_MIN or 2 * fast <= len(rises):
        return None
    return (
        "warning",
        f"records of {fast} of {len(rises)} peers were dated in the future of this clock",
    )


def _version_split(history: History) -> Finding:
    """Workers that get leases all the same are further behind than S."""
    now = history[-1]
    published, bound = _value(now, "published_version"), _value(now, "staleness_bound_steps")

    def behind(report: NodeReport) -> set[str]:
        least = _value(report, "published_version") - max(1.0, bound)
        return {
            row.peer_id or row.name
            for row in report.workers
            if row.phase in ("working", "idle") and (row.version or 0) < least
        }

    if _span_s(history) < PATIENCE_S:
        return None
    late = set.intersection(*(behind(each) for each in history))
    if not late:
        return None
    return (
        "warning",
        f"{len(late)} of {len(now.workers)} workers are more than {max(1.0, bound):.0f} versions "
        f"behind {published:.0f}, {min(late)} for one",
    )


CHECKS: Final[dict[Alarm, Callable[[History], Finding]]] = {
    Alarm.NOT_SHARING: _not_sharing,
    Alarm.NO_FOREIGN: _no_foreign,
    Alarm.LEARNER_STARVING: _learner_starving,
    Alarm.STALENESS_NEAR_BOUND: _staleness_near_bound,
    Alarm.ONE_PRODUCER: _one_producer,
    Alarm.REJECT_STORM: _reject_storm,
    Alarm.DISK_LOW: _low(
        "disk_free_bytes", "of disk are left", DISK_FREE_BYTES_MIN, DISK_CRITICAL_BYTES
    ),
    Alarm.MEMORY_LOW: _low(
        "memory_available_bytes", "of memory are left", MEMORY_BYTES_MIN, MEMORY_CRITICAL_BYTES
    ),
    Alarm.CLOCK_SKEW: _clock_skew,
    Alarm.VERSION_SPLIT: _version_split,
}
