"""What is wrong with a node, by its own reports of the last minutes and the last rounds. Pure.

An alarm stands as long as what it tells of is so. Each threshold leaves room for what happens in a
healthy swarm: a slow first round, one bad group, a burst of traffic. A round takes a second here
and ten minutes there: what depends on rounds is counted in them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from swarm.telemetry.reports import (
    ADVICE,
    ALARMS_MAX,
    ALONE_ADVICE,
    Alarm,
    AlarmReport,
    Level,
    NodeReport,
    PeerTraffic,
)

HISTORY_REPORTS: Final = 64
HISTORY_S: Final = 120.0  # how far back an alarm looks that depends on no rounds
ROUNDS_KEPT: Final = 8  # of each the first report, however long ago
PATIENCE_S: Final = 60.0  # for which something must be so, where it may be a passing state
ROUNDS_MIN: Final = 3  # for which something must be so, where it is of rounds or steps
IDLE_RATIO_MAX: Final = 0.5
STALENESS_SHARE: Final = 0.8  # of S, in the mean
DOMINATES_SHARE: Final = 0.8
DOMINATED_GROUPS_MIN: Final = 20
PRODUCERS_MIN: Final = 3  # connected: of two, one always makes most
REJECTS_MIN: Final = 20
REJECTS_SHARE: Final = 0.5  # of what came
FUTURE_PEERS_MIN: Final = 3  # fewer may be wrong themselves; a worker has a note for its learner's
TURNED_AWAY_MIN: Final = 3  # newcomers; one may have come in a busy moment
NO_PLACE: Final = ("full", "handshakes", "too_many_of_one_block", "too_many_of_one_address")
DISK_FREE_BYTES_MIN: Final = 2 << 30
DISK_CRITICAL_BYTES: Final = 256 << 20
MEMORY_BYTES_MIN: Final = 512 << 20
MEMORY_CRITICAL_BYTES: Final = 128 << 20

History = Sequence[NodeReport]  # of one process, the oldest first


@dataclass(frozen=True, slots=True)
class Finding:
    """What is so. `subject`: the peer that it is about; `advice` None: that of the alarm."""

    level: Level
    text: str
    subject: str = ""
    advice: str | None = None


@dataclass(frozen=True, slots=True)
class Past:
    """What an alarm looks at, each up to now and never empty: the reports of `HISTORY_S`, and the
    first of each of the last rounds, which may be older."""

    recent: History
    rounds: History

    @property
    def now(self) -> NodeReport:
        """The last report."""
        return self.recent[-1]

    @property
    def all(self) -> History:
        """Both, each report once."""
        return _in_order((*self.rounds, *self.recent))

    def since(self, rounds: int, span_s: float) -> History:
        """From that many rounds ago, and that many seconds; empty: it does not go back so far."""
        now, history = self.now, self.all
        for index in range(len(history) - 1, -1, -1):
            was = history[index]
            if _round(now) - _round(was) >= rounds and now.sent_at_s - was.sent_at_s >= span_s:
                return history[index:]
        return ()


def past_of(history: History) -> Past:
    """Of the process of the last report."""
    now = history[-1]
    ours = _in_order([each for each in history if each.instance == now.instance])
    recent = [each for each in ours if now.sent_at_s - HISTORY_S <= each.sent_at_s]
    return Past(recent, _first_of_each_round(ours)[-ROUNDS_KEPT:])


def _in_order(reports: History) -> History:
    return sorted(
        {each.sequence: each for each in reports}.values(), key=lambda each: each.sequence
    )


def _first_of_each_round(reports: History) -> History:
    first: dict[float, NodeReport] = {}
    for each in reports:
        first.setdefault(_round(each), each)
    return list(first.values())


def alarms_of(history: History) -> tuple[AlarmReport, ...]:
    """The alarms that stand, by the last reports of one process; critical ones first."""
    if not history:
        return ()
    past = past_of(history)
    found = [(alarm, check(past)) for alarm, check in CHECKS.items()]
    standing = [
        AlarmReport(
            kind=alarm,
            level=finding.level,
            text=finding.text,
            advice=finding.advice or ADVICE[alarm],
            subject=finding.subject,
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


def _round(report: NodeReport) -> float:
    return _value(report, "round")


def _rise(history: History, name: str) -> float:
    return _value(history[-1], name) - _value(history[0], name)


def _labelled_rise(history: History, name: str) -> dict[str, float]:
    first, last = (each.labelled.get(name, {}) for each in (history[0], history[-1]))
    return {label: value - first.get(label, 0.0) for label, value in last.items()}


def _span_s(history: History) -> float:
    return history[-1].sent_at_s - history[0].sent_at_s


def _not_sharing(past: Past) -> Finding | None:
    """Peers have been there all along, rounds go by, and nothing of theirs is accepted."""
    history = past.since(ROUNDS_MIN, PATIENCE_S)
    if past.now.role != "node" or not history:
        return None
    peers = min(_value(each, "peers") for each in history)
    if not peers or not _value(past.now, "external_groups_wanted"):
        return None
    if _rise(history, "accepted_total"):
        return None
    return Finding(
        "critical",
        f"{peers:.0f} peers are connected, and no group of theirs was accepted for "
        f"{_span_s(history):.0f} s",
    )


def _no_foreign(past: Past) -> Finding | None:
    """Effective J is zero round after round."""
    history = past.since(ROUNDS_MIN, 0.0)
    wanted = _value(past.now, "external_groups_wanted")
    if not history or not wanted:
        return None
    # The first is of the round before them; where rounds are short, all that is recent counts.
    looked_at = (*history[1:], *past.recent)
    if any(_value(each, "external_groups") for each in looked_at):
        return None
    rounds = _round(past.now) - _round(min(history[0], past.recent[0], key=_round))
    alone = not any(_value(each, "peers") for each in looked_at)
    return Finding(
        "warning",
        f"the last {rounds:.0f} rounds trained on no foreign group, of {wanted:.0f}"
        + (": no peer is connected" if alone else ""),
        advice=ALONE_ADVICE if alone else None,
    )


def _learner_starving(past: Past) -> Finding | None:
    """The mean of the last steps, each once: of `HISTORY_S`, or a few where they take longer."""
    if past.now.role != "learner":
        return None
    steps = [each for each in _first_of_each_round(past.all) if "idle_ratio" in each.metrics]
    if len(steps) < ROUNDS_MIN:
        return None
    recent = [each for each in steps if past.now.sent_at_s - each.sent_at_s <= HISTORY_S]
    idle = fmean(_value(each, "idle_ratio") for each in max(recent, steps[-ROUNDS_MIN:], key=len))
    if idle <= IDLE_RATIO_MAX:
        return None
    return Finding("warning", f"the learner waits for groups {idle:.0%} of the time")


def _staleness_near_bound(past: Past) -> Finding | None:
    now = past.now
    bound, mean = _value(now, "staleness_bound_steps"), _value(now, "staleness_mean_steps")
    queued = _value(now, "queued_staleness_max_steps")
    if bound < 1 or max(mean, queued - 1) < STALENESS_SHARE * bound:
        return None
    return Finding(
        "warning",
        f"groups are {mean:.1f} steps old in the mean, at most {queued:.0f} in the queue; the "
        f"bound is {bound:.0f}",
    )


def _one_producer(past: Past) -> Finding | None:
    """One of several feeds all: workers of a learner, or peers of a node. What it did before the
    others came does not count."""
    now, first = past.now, None
    for each in reversed(past.all):
        if _producers(each) < PRODUCERS_MIN:
            break
        first = each
    if first is None:
        return None
    if now.workers:
        before = {row.peer_id or row.name: row.admitted for row in first.workers}
        counts = {row.peer_id or row.name: row.admitted for row in now.workers}
    else:
        before = {row.peer_id: row.groups_trained for row in first.peers}
        counts = {row.peer_id: row.groups_trained for row in now.peers}
    rises = {who: count - before.get(who, 0) for who, count in counts.items()}
    total = sum(rises.values())
    if total < DOMINATED_GROUPS_MIN:
        return None
    most, who = max((count, peer) for peer, count in rises.items())
    if most <= DOMINATES_SHARE * total:
        return None
    return Finding(
        "warning",
        f"{who} made {most} of the last {total} groups; {_producers(now)} are connected",
        who,
    )


def _producers(report: NodeReport) -> int:
    if report.workers:
        return sum(row.phase in ("working", "idle") for row in report.workers)
    return sum(row.connected for row in report.peers)


def _reject_storm(past: Past) -> Finding | None:
    history = past.recent
    rises = _labelled_rise(history, "rejected_total")
    total = sum(rises.values())
    came = total + _rise(history, "accepted_total")
    if total < REJECTS_MIN or total <= REJECTS_SHARE * came:
        return None
    most = max(rises, key=lambda reason: (rises[reason], reason))
    return Finding(
        "critical",
        f"{total:.0f} of {came:.0f} records were refused within {_span_s(history):.0f} s, most as "
        f"{most}",
    )


def _refusing_newcomers(past: Past) -> Finding | None:
    rises = _labelled_rise(past.recent, "turned_away_total")
    full = sum(rises.get(why, 0.0) for why in NO_PLACE)
    if full < TURNED_AWAY_MIN:
        return None
    now = past.now
    return Finding(
        "critical",
        f"refusing newcomers: {_value(now, 'connections'):.0f} of "
        f"{_value(now, 'connections_max'):.0f} places are taken, "
        f"{_value(now, 'largest_origin_connections'):.0f} of them by one address; {full:.0f} were "
        f"turned away within {_span_s(past.recent):.0f} s",
    )


def _low(name: str, what: str, warn: int, critical: int) -> Callable[[Past], Finding | None]:
    def check(past: Past) -> Finding | None:
        left = past.now.metrics.get(name)
        if left is None or left >= warn:
            return None
        level: Level = "critical" if left < critical else "warning"
        return Finding(level, f"{left / 2**20:,.0f} MiB {what}")

    return check


def _clock_skew(past: Past) -> Finding | None:
    """What most peers date is in our future: ours is slow. Of one or two it says nothing, however
    many records they are: their clocks are fast, and this node's alarm would blame its own."""
    history = past.since(ROUNDS_MIN, HISTORY_S) or past.recent
    before = {row.peer_id: row for row in history[0].peers}
    rises = []  # of each peer that was heard from: records dated in the future
    for row in history[-1].peers:
        was = before.get(row.peer_id, PeerTraffic(peer_id=row.peer_id))
        if row.groups_accepted > was.groups_accepted or row.rejected > was.rejected:
            rises.append(row.future - was.future)
    fast = sum(rise > 0 for rise in rises)
    if fast < FUTURE_PEERS_MIN or 2 * fast <= len(rises):
        return None
    return Finding(
        "warning",
        f"records of {fast} of {len(rises)} peers were dated in the future of this clock",
    )


def _version_split(past: Past) -> Finding | None:
    """Workers that get leases all the same are further behind than S."""
    now, history = past.now, past.recent
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
    return Finding(
        "warning",
        f"{len(late)} of {len(now.workers)} workers are more than {max(1.0, bound):.0f} versions "
        f"behind {published:.0f}, {min(late)} for one",
    )


CHECKS: Final[dict[Alarm, Callable[[Past], Finding | None]]] = {
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
    Alarm.REFUSING_NEWCOMERS: _refusing_newcomers,
    Alarm.VERSION_SPLIT: _version_split,
}
