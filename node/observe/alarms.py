"""Alarms of a node, from its own reports of the last minutes and rounds. Pure.

An alarm stands as long as its condition holds. Each threshold leaves room for a healthy swarm: a
slow first round, one bad group, a burst of traffic. A round takes from a second to ten minutes, so
conditions on rounds are counted in rounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from node.observe.text_format import often
from swarm.telemetry import metrics as m
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
LESSONLESS_ROUNDS: Final = 5  # in each of which no group may have taught anything
LESSONLESS_GROUPS_MIN: Final = 16  # fewer may be alike by chance
MOST: Final = 0.5  # of the completions, where something is the reason
NEARLY_ALL: Final = 0.95
DISK_FREE_BYTES_MIN: Final = 2 << 30
DISK_CRITICAL_BYTES: Final = 256 << 20
MEMORY_BYTES_MIN: Final = 512 << 20
MEMORY_CRITICAL_BYTES: Final = 128 << 20

History = Sequence[NodeReport]  # of one process, the oldest first


@dataclass(frozen=True, slots=True)
class AlarmCondition:
    """A condition that holds now. `subject`: its peer; `advice` None: that of the alarm."""

    level: Level
    text: str
    subject: str = ""
    advice: str | None = None


@dataclass(frozen=True, slots=True)
class Past:
    """Reports that alarms look at: those of the last `HISTORY_S`, and the first of each of the last
    rounds, which may be older. Neither is empty."""

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
        """The reports of that many rounds and seconds; empty: the history is not as long."""
        now, history = self.now, self.all
        for index in range(len(history) - 1, -1, -1):
            was = history[index]
            if _round(now) - _round(was) >= rounds and now.sent_at_s - was.sent_at_s >= span_s:
                return history[index:]
        return ()


def past_of(history: History) -> Past:
    """The past of the process that sent the last report."""
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
    """The alarms that stand, without their texts, whose figures change with each report."""
    return frozenset((each.kind, each.subject, each.level) for each in alarms)


def _value(report: NodeReport, name: str) -> float:
    return report.metrics.get(name, 0.0)


def _round(report: NodeReport) -> float:
    return _value(report, m.ROUND)


def _rise(history: History, name: str) -> float:
    return _value(history[-1], name) - _value(history[0], name)


def _labelled_rise(history: History, name: str) -> dict[str, float]:
    first, last = (each.labelled.get(name, {}) for each in (history[0], history[-1]))
    return {label: value - first.get(label, 0.0) for label, value in last.items()}


def _span_s(history: History) -> float:
    return history[-1].sent_at_s - history[0].sent_at_s


def _not_sharing(past: Past) -> AlarmCondition | None:
    """Peers have been there all along, rounds go by, and nothing of theirs is accepted."""
    history = past.since(ROUNDS_MIN, PATIENCE_S)
    if past.now.role != "node" or not history:
        return None
    peers = min(_value(each, m.PEERS) for each in history)
    if not peers or not _value(past.now, m.EXTERNAL_GROUPS_WANTED):
        return None
    if _rise(history, m.ACCEPTED_TOTAL):
        return None
    return AlarmCondition(
        "critical",
        f"{peers:.0f} peers are connected, and no group of theirs was accepted for "
        f"{_span_s(history):.0f} s",
    )


def _no_foreign(past: Past) -> AlarmCondition | None:
    """Effective J is zero round after round."""
    history = past.since(ROUNDS_MIN, 0.0)
    wanted = _value(past.now, m.EXTERNAL_GROUPS_WANTED)
    if not history or not wanted:
        return None
    # The first is of the round before them; where rounds are short, all that is recent counts.
    looked_at = (*history[1:], *past.recent)
    if any(_value(each, m.EXTERNAL_GROUPS) for each in looked_at):
        return None
    rounds = _round(past.now) - _round(min(history[0], past.recent[0], key=_round))
    alone = not any(_value(each, m.PEERS) for each in looked_at)
    return AlarmCondition(
        "warning",
        f"the last {rounds:.0f} rounds trained on no foreign group, of {wanted:.0f}"
        + (": no peer is connected" if alone else ""),
        advice=ALONE_ADVICE if alone else None,
    )


def _learner_starving(past: Past) -> AlarmCondition | None:
    """The mean of the last steps, each once: of `HISTORY_S`, or a few where they take longer."""
    if past.now.role != "learner":
        return None
    steps = [each for each in _first_of_each_round(past.all) if m.IDLE_RATIO in each.metrics]
    if len(steps) < ROUNDS_MIN:
        return None
    recent = [each for each in steps if past.now.sent_at_s - each.sent_at_s <= HISTORY_S]
    idle = fmean(_value(each, m.IDLE_RATIO) for each in max(recent, steps[-ROUNDS_MIN:], key=len))
    if idle <= IDLE_RATIO_MAX:
        return None
    return AlarmCondition("warning", f"the learner waits for groups {idle:.0%} of the time")


def _staleness_near_bound(past: Past) -> AlarmCondition | None:
    now = past.now
    bound, mean = _value(now, m.STALENESS_BOUND_STEPS), _value(now, m.STALENESS_MEAN_STEPS)
    queued = _value(now, m.QUEUED_STALENESS_MAX_STEPS)
    if bound < 1 or max(mean, queued - 1) < STALENESS_SHARE * bound:
        return None
    return AlarmCondition(
        "warning",
        f"groups are {mean:.1f} steps old in the mean, at most {queued:.0f} in the queue; the "
        f"bound is {bound:.0f}",
    )


def _one_producer(past: Past) -> AlarmCondition | None:
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
    return AlarmCondition(
        "warning",
        f"{who} made {most} of the last {total} groups; {_producers(now)} are connected",
        who,
    )


def _producers(report: NodeReport) -> int:
    if report.workers:
        return sum(row.phase in ("working", "idle") for row in report.workers)
    return sum(row.connected for row in report.peers)


def _reject_storm(past: Past) -> AlarmCondition | None:
    history = past.recent
    rises = _labelled_rise(history, m.REJECTED_TOTAL)
    total = sum(rises.values())
    came = total + _rise(history, m.ACCEPTED_TOTAL)
    if total < REJECTS_MIN or total <= REJECTS_SHARE * came:
        return None
    most = max(rises, key=lambda reason: (rises[reason], reason))
    return AlarmCondition(
        "critical",
        f"{total:.0f} of {came:.0f} records were refused within {_span_s(history):.0f} s, most as "
        f"{most}",
    )


def _refusing_newcomers(past: Past) -> AlarmCondition | None:
    rises = _labelled_rise(past.recent, m.TURNED_AWAY_TOTAL)
    full = sum(rises.get(why, 0.0) for why in NO_PLACE)
    if full < TURNED_AWAY_MIN:
        return None
    now = past.now
    return AlarmCondition(
        "critical",
        f"refusing newcomers: {_value(now, m.CONNECTIONS):.0f} of "
        f"{_value(now, m.CONNECTIONS_MAX):.0f} places are taken, "
        f"{_value(now, m.LARGEST_ORIGIN_CONNECTIONS):.0f} of them by one address; {full:.0f} were "
        f"turned away within {_span_s(past.recent):.0f} s",
    )


def _low(name: str, what: str, warn: int, critical: int) -> Callable[[Past], AlarmCondition | None]:
    def check(past: Past) -> AlarmCondition | None:
        left = past.now.metrics.get(name)
        if left is None or left >= warn:
            return None
        level: Level = "critical" if left < critical else "warning"
        return AlarmCondition(level, f"{left / 2**20:,.0f} MiB {what}")

    return check


def _clock_skew(past: Past) -> AlarmCondition | None:
    """Records of most peers are dated in the future: this clock is slow. With one or two such peers
    it is their clocks that are fast, however many records they send."""
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
    return AlarmCondition(
        "warning",
        f"records of {fast} of {len(rises)} peers were dated in the future of this clock",
    )


def _version_split(past: Past) -> AlarmCondition | None:
    """Workers that get leases all the same are further behind than S."""
    now, history = past.now, past.recent
    published, bound = _value(now, m.PUBLISHED_VERSION), _value(now, m.STALENESS_BOUND_STEPS)

    def behind(report: NodeReport) -> set[str]:
        least = _value(report, m.PUBLISHED_VERSION) - max(1.0, bound)
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
    return AlarmCondition(
        "warning",
        f"{len(late)} of {len(now.workers)} workers are more than {max(1.0, bound):.0f} versions "
        f"behind {published:.0f}, {min(late)} for one",
    )


def _nothing_to_learn(past: Past) -> AlarmCondition | None:
    """All rewards of each group are alike, round after round: no update has moved the policy."""
    history = past.since(LESSONLESS_ROUNDS, 0.0)
    if not history or _rise(history, m.INFORMATIVE_GROUPS_TOTAL):
        return None
    groups = _rise(history, m.GROUPS_TOTAL)
    if groups < LESSONLESS_GROUPS_MIN:
        return None
    names = (m.COMPLETIONS_TOTAL, m.UNREAD_COMPLETIONS_TOTAL, m.RIGHT_COMPLETIONS_TOTAL)
    made, unread, right = (_rise(history, name) for name in names)
    reason, advice = _why_alike(made, unread, right, _rise(history, m.CUT_COMPLETIONS_TOTAL))
    return AlarmCondition(
        "critical",
        f"nothing can be learned here: in each of the last {groups:.0f} groups all rewards are "
        f"alike{reason}",
        advice=advice,
    )


def _why_alike(made: float, unread: float, right: float, cut: float) -> tuple[str, str | None]:
    """The reason, and what to do about it where that is more than the alarm's own advice."""
    if not made:
        return "", None
    if unread > MOST * made and cut > MOST * made:
        return (
            f"; {cut / made:.0%} of the completions were cut by the token limit, and "
            f"{unread / made:.0%} have no answer",
            "Raise sampling.max_new_tokens of the run, or have answer.system ask for less.",
        )
    if unread > MOST * made:
        return (
            f"; {unread / made:.0%} of the completions have no answer in the run's format",
            "Look with `swarm-node samples` at what the policy says, and choose the run's "
            "answer.format, its system prompt or its examples by that.",
        )
    if right >= NEARLY_ALL * made:
        return f"; {right / made:.0%} of the answers are right", "Make the run's tasks harder."
    if right <= (1 - NEARLY_ALL) * made:
        return (
            f"; {right / made:.0%} of the answers are right",
            "Make the run's tasks easier, or begin with a policy that solves some of them.",
        )
    return "", None


def _went_back(past: Past) -> AlarmCondition | None:
    """The policy fell in the last rounds, and is again the one that did best."""
    history = past.all
    falls = _rise(history, m.RETURNS_TOTAL)
    if not falls:
        return None
    now = past.now
    rounds = _round(now) - _round(history[0])
    return AlarmCondition(
        "warning",
        f"the policy fell and went back to its best {often(falls)} within {rounds:.0f} rounds; it "
        f"learns at {_value(now, m.RATE_SHARE_RATIO):.0%} of its rate",
    )


CHECKS: Final[dict[Alarm, Callable[[Past], AlarmCondition | None]]] = {
    Alarm.NOT_SHARING: _not_sharing,
    Alarm.NO_FOREIGN: _no_foreign,
    Alarm.LEARNER_STARVING: _learner_starving,
    Alarm.STALENESS_NEAR_BOUND: _staleness_near_bound,
    Alarm.ONE_PRODUCER: _one_producer,
    Alarm.REJECT_STORM: _reject_storm,
    Alarm.DISK_LOW: _low(
        m.DISK_FREE_BYTES, "of disk are left", DISK_FREE_BYTES_MIN, DISK_CRITICAL_BYTES
    ),
    Alarm.MEMORY_LOW: _low(
        m.MEMORY_AVAILABLE_BYTES, "of memory are left", MEMORY_BYTES_MIN, MEMORY_CRITICAL_BYTES
    ),
    Alarm.CLOCK_SKEW: _clock_skew,
    Alarm.REFUSING_NEWCOMERS: _refusing_newcomers,
    Alarm.VERSION_SPLIT: _version_split,
    Alarm.NOTHING_TO_LEARN: _nothing_to_learn,
    Alarm.WENT_BACK: _went_back,
}
