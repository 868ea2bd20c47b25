"""Alarms of a node, from its own reports of the last minutes and rounds. Pure.

An alarm stands as long as its condition holds. Thresholds leave room for a slow first round, one
bad group or a burst of traffic. A round takes from a second to ten minutes, so conditions on rounds
are counted in rounds.
"""

from collections.abc import Callable, Sequence
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

HISTORY_REPORTS: Final = 64  # kept for the alarms
HISTORY_S: Final = 120.0  # an alarm that depends on no rounds looks back so far
ROUNDS_KEPT: Final = 8  # the first report of each is kept, however long ago
PATIENCE_S: Final = 60.0  # a condition that may be passing must hold for so long
ROUNDS_MIN: Final = 3  # a condition on rounds or steps must hold for so many
IDLE_RATIO_MAX: Final = 0.5  # of a learner's time
STALENESS_SHARE: Final = 0.8  # of the bound S, for the mean
DOMINATES_SHARE: Final = 0.8  # of the groups, by one producer
DOMINATED_GROUPS_MIN: Final = 20  # before one producer can dominate
PRODUCERS_MIN: Final = 3  # connected: of two, one always makes most
REJECTS_MIN: Final = 20  # records within `HISTORY_S`
REJECTS_SHARE: Final = 0.5  # of the records that came
FUTURE_PEERS_MIN: Final = 3  # fewer peers may have wrong clocks themselves
TURNED_AWAY_MIN: Final = 3  # newcomers; one may have come in a busy moment
NO_PLACE: Final = ("full", "handshakes", "too_many_of_one_block", "too_many_of_one_address")
LESSONLESS_ROUNDS: Final = 5  # in a row without an informative group
LESSONLESS_GROUPS_MIN: Final = 16  # fewer groups may be alike by chance
MOST: Final = 0.5  # of the completions: the share that counts as a reason
CUT_THOUGHTS_SHARE: Final = 0.1  # of the completions: fewer are what a limit is for
LAG_MAX: Final = 0.5  # of what was learned, lost by rounding
NEARLY_ALL: Final = 0.95  # of the completions
DISK_FREE_BYTES_MIN: Final = 2 << 30
DISK_CRITICAL_BYTES: Final = 256 << 20
MEMORY_BYTES_MIN: Final = 512 << 20
MEMORY_CRITICAL_BYTES: Final = 128 << 20

History = Sequence[NodeReport]  # of one process, the oldest first


def _standing(
    kind: Alarm, text: str, level: Level = "warning", subject: str = "", advice: str = ""
) -> AlarmReport:
    """`advice`: instead of the alarm's own."""
    return AlarmReport(
        kind=kind, level=level, text=text, advice=advice or ADVICE[kind], subject=subject
    )


class Past:
    """The reports of the process that sent the last one: `recent` ones of the last `HISTORY_S`, and
    the first of each of the last `rounds`, which may be older; `all` has both, in order."""

    def __init__(self, history: History) -> None:
        self.now = history[-1]
        ours = {each.sequence: each for each in history if each.instance == self.now.instance}
        kept = [ours[number] for number in sorted(ours)]
        self.recent = [each for each in kept if self.now.sent_at_s - HISTORY_S <= each.sent_at_s]
        rounds = first_of_each_round(kept)[-ROUNDS_KEPT:]
        both = {each.sequence: each for each in (*rounds, *self.recent)}
        self.all = [both[number] for number in sorted(both)]

    def value(self, name: str) -> float:
        """The metric in the last report; 0: it is not there."""
        return _value(self.now, name)

    def since(self, rounds: int, span_s: float) -> History:
        """The reports of that many rounds and seconds; empty: the history is not as long."""
        for index, was in reversed([*enumerate(self.all)]):
            passed = _round(self.now) - _round(was)
            if passed >= rounds and self.now.sent_at_s - was.sent_at_s >= span_s:
                return self.all[index:]
        return ()


def first_of_each_round(reports: History) -> History:
    first: dict[float, NodeReport] = {}
    for each in reports:
        first.setdefault(_round(each), each)
    return list(first.values())


def alarms_of(history: History) -> tuple[AlarmReport, ...]:
    """The alarms that stand, by the last reports of one process; critical ones first."""
    if not history:
        return ()
    past = Past(history)
    standing = [alarm for check in CHECKS.values() if (alarm := check(past)) is not None]
    return tuple(sorted(standing, key=lambda each: each.level != "critical")[:ALARMS_MAX])


def identity_of(alarms: Sequence[AlarmReport]) -> frozenset[tuple[Alarm, str, Level]]:
    """The alarms without their texts, whose figures change with each report."""
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


def _not_sharing(past: Past) -> AlarmReport | None:
    """Peers are connected, rounds go by, and no foreign group is accepted."""
    history = past.since(ROUNDS_MIN, PATIENCE_S)
    if past.now.role != "node" or not history:
        return None
    peers = min(_value(each, m.PEERS) for each in history)
    wanted = past.value(m.EXTERNAL_GROUPS_WANTED)
    if not peers or not wanted or _rise(history, m.ACCEPTED_TOTAL):
        return None
    return _standing(
        Alarm.NOT_SHARING,
        f"{peers:.0f} peers are connected, and no group of theirs was accepted for "
        f"{_span_s(history):.0f} s",
        "critical",
    )


def _no_foreign(past: Past) -> AlarmReport | None:
    """Effective J is zero round after round."""
    history = past.since(ROUNDS_MIN, 0.0)
    wanted = past.value(m.EXTERNAL_GROUPS_WANTED)
    if not history or not wanted:
        return None
    # The first report is of the round before them. If rounds are short, all recent reports count.
    looked_at = (*history[1:], *past.recent)
    if any(_value(each, m.EXTERNAL_GROUPS) for each in looked_at):
        return None
    rounds = _round(past.now) - _round(min(history[0], past.recent[0], key=_round))
    alone = not any(_value(each, m.PEERS) for each in looked_at)
    return _standing(
        Alarm.NO_FOREIGN,
        f"the last {rounds:.0f} rounds trained on no foreign group, of {wanted:.0f}"
        + (": no peer is connected" if alone else ""),
        advice=ALONE_ADVICE if alone else "",
    )


def _learner_starving(past: Past) -> AlarmReport | None:
    """The mean of the last steps, each once: of `HISTORY_S`, or a few where they take longer."""
    if past.now.role != "learner":
        return None
    steps = [each for each in first_of_each_round(past.all) if m.IDLE_RATIO in each.metrics]
    if len(steps) < ROUNDS_MIN:
        return None
    recent = [each for each in steps if past.now.sent_at_s - each.sent_at_s <= HISTORY_S]
    idle = fmean(_value(each, m.IDLE_RATIO) for each in max(recent, steps[-ROUNDS_MIN:], key=len))
    if idle <= IDLE_RATIO_MAX:
        return None
    return _standing(Alarm.LEARNER_STARVING, f"the learner waits for groups {idle:.0%} of the time")


def _staleness_near_bound(past: Past) -> AlarmReport | None:
    bound, mean = past.value(m.STALENESS_BOUND_STEPS), past.value(m.STALENESS_MEAN_STEPS)
    queued = past.value(m.QUEUED_STALENESS_MAX_STEPS)
    if bound < 1 or max(mean, queued - 1) < STALENESS_SHARE * bound:
        return None
    return _standing(
        Alarm.STALENESS_NEAR_BOUND,
        f"groups are {mean:.1f} steps old in the mean, at most {queued:.0f} in the queue; the "
        f"bound is {bound:.0f}",
    )


def _one_producer(past: Past) -> AlarmReport | None:
    """One of several workers or peers makes nearly all groups, since the others are connected."""
    now, first = past.now, None
    for each in reversed(past.all):
        if _producers(each) < PRODUCERS_MIN:
            break
        first = each
    if first is None:
        return None
    before, counts = _groups_by_producer(first), _groups_by_producer(now)
    rises = {who: count - before.get(who, 0) for who, count in counts.items()}
    total = sum(rises.values())
    if total < DOMINATED_GROUPS_MIN:
        return None
    most, who = max((count, peer) for peer, count in rises.items())
    if most <= DOMINATES_SHARE * total:
        return None
    return _standing(
        Alarm.ONE_PRODUCER,
        f"{who} made {most} of the last {total} groups; {_producers(now)} are connected",
        subject=who,
    )


def _groups_by_producer(report: NodeReport) -> dict[str, int]:
    if report.workers:
        return {row.peer_id or row.name: row.admitted for row in report.workers}
    return {row.peer_id: row.groups_trained for row in report.peers}


def _producers(report: NodeReport) -> int:
    if report.workers:
        return sum(row.phase in ("working", "idle") for row in report.workers)
    return sum(row.connected for row in report.peers)


def _reject_storm(past: Past) -> AlarmReport | None:
    history = past.recent
    rises = _labelled_rise(history, m.REJECTED_TOTAL)
    total = sum(rises.values())
    came = total + _rise(history, m.ACCEPTED_TOTAL)
    if total < REJECTS_MIN or total <= REJECTS_SHARE * came:
        return None
    most = max(rises, key=lambda reason: (rises[reason], reason))
    return _standing(
        Alarm.REJECT_STORM,
        f"{total:.0f} of {came:.0f} records were refused within {_span_s(history):.0f} s, most as "
        f"{most}",
        "critical",
    )


def _refusing_newcomers(past: Past) -> AlarmReport | None:
    rises = _labelled_rise(past.recent, m.TURNED_AWAY_TOTAL)
    full = sum(rises.get(why, 0.0) for why in NO_PLACE)
    if full < TURNED_AWAY_MIN:
        return None
    return _standing(
        Alarm.REFUSING_NEWCOMERS,
        f"refusing newcomers: {past.value(m.CONNECTIONS):.0f} of "
        f"{past.value(m.CONNECTIONS_MAX):.0f} places are taken, "
        f"{past.value(m.LARGEST_ORIGIN_CONNECTIONS):.0f} of them by one address; {full:.0f} were "
        f"turned away within {_span_s(past.recent):.0f} s",
        "critical",
    )


def _low(past: Past, kind: Alarm, name: str, warn: int, critical: int) -> AlarmReport | None:
    left = past.now.metrics.get(name)
    if left is None or left >= warn:
        return None
    what = kind.removesuffix("_low")
    text = f"{left / 2**20:,.0f} MiB of {what} are left"
    return _standing(kind, text, "critical" if left < critical else "warning")


def _clock_skew(past: Past) -> AlarmReport | None:
    """Most peers date records in the future: this clock is slow. If only one or two peers do, their
    clocks are fast."""
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
    return _standing(
        Alarm.CLOCK_SKEW,
        f"records of {fast} of {len(rises)} peers were dated in the future of this clock",
    )


def _version_split(past: Past) -> AlarmReport | None:
    """Workers that get leases are further behind than S."""
    now, history = past.now, past.recent
    bound = max(1.0, past.value(m.STALENESS_BOUND_STEPS))

    def behind(report: NodeReport) -> set[str]:
        least = _value(report, m.PUBLISHED_VERSION) - bound
        return {
            row.peer_id or row.name
            for row in report.workers
            if row.phase in ("working", "idle") and (row.version or 0) < least
        }

    late = set.intersection(*(behind(each) for each in history))
    if not late or _span_s(history) < PATIENCE_S:
        return None
    return _standing(
        Alarm.VERSION_SPLIT,
        f"{len(late)} of {len(now.workers)} workers are more than {bound:.0f} versions behind "
        f"{past.value(m.PUBLISHED_VERSION):.0f}, {min(late)} for one",
    )


def _nothing_to_learn(past: Past) -> AlarmReport | None:
    """All rewards of each group are alike, round after round: no update moved the policy."""
    history = past.since(LESSONLESS_ROUNDS, 0.0)
    if not history or _rise(history, m.INFORMATIVE_GROUPS_TOTAL):
        return None
    groups = _rise(history, m.GROUPS_TOTAL)
    if groups < LESSONLESS_GROUPS_MIN:
        return None
    reason, advice = _why_alike(history)
    return _standing(
        Alarm.NOTHING_TO_LEARN,
        f"nothing can be learned here: in each of the last {groups:.0f} groups all rewards are "
        f"alike{reason}",
        "critical",
        advice=advice,
    )


def _why_alike(history: History) -> tuple[str, str]:
    """The reason, and what to do about it if that is more than the alarm's own advice."""
    made = _rise(history, m.COMPLETIONS_TOTAL)
    if not made:
        return "", ""
    unread = _rise(history, m.UNREAD_COMPLETIONS_TOTAL) / made
    right = _rise(history, m.RIGHT_COMPLETIONS_TOTAL) / made
    cut = _rise(history, m.CUT_COMPLETIONS_TOTAL) / made
    if unread > MOST and cut > MOST:
        return (
            f"; {cut:.0%} of the completions were cut by the token limit, and {unread:.0%} have no "
            "answer",
            "Raise sampling.max_new_tokens of the run, or have answer.system ask for less.",
        )
    if unread > MOST:
        return (
            f"; {unread:.0%} of the completions have no answer in the run's format",
            "Look with `swarm-node samples` at what the policy says, and choose the run's "
            "answer.format, its system prompt or its examples by that.",
        )
    advice = ""
    if right >= NEARLY_ALL:
        advice = "Make the run's tasks harder."
    if right <= 1 - NEARLY_ALL:
        advice = "Make the run's tasks easier, or begin with a policy that solves some of them."
    return f"; {right:.0%} of the answers are right" if advice else "", advice


def _cut_thoughts(past: Past) -> AlarmReport | None:
    """Many completions of the last rounds have a thought without end, and so no answer."""
    history = past.since(ROUNDS_MIN, 0.0)
    made = _rise(history, m.COMPLETIONS_TOTAL) if history else 0.0
    cut = _rise(history, m.CUT_THOUGHTS_TOTAL) if made else 0.0
    if cut <= CUT_THOUGHTS_SHARE * made:
        return None
    return _standing(
        Alarm.CUT_THOUGHTS,
        f"{cut / made:.0%} of the last {made:.0f} completions were cut before </think>, or what "
        "else ends the run's thoughts",
    )


def _lagging_version(past: Past) -> AlarmReport | None:
    """Rounding has kept most of what was learned from what generates, round after round."""
    history = past.since(ROUNDS_MIN, 0.0)
    least = min((_value(each, m.VERSION_LAG_RATIO) for each in history), default=0.0)
    if least <= LAG_MAX:
        return None
    return _standing(
        Alarm.LAGGING_VERSION,
        f"rounding to bf16 keeps {past.value(m.VERSION_LAG_RATIO):.0%} of what was learned from "
        "the policy that generates",
    )


def _went_back(past: Past) -> AlarmReport | None:
    """The policy got worse in the last rounds and was rolled back to the best one."""
    falls, rounds = _rise(past.all, m.RETURNS_TOTAL), _rise(past.all, m.ROUND)
    if not falls:
        return None
    return _standing(
        Alarm.WENT_BACK,
        f"the policy fell and went back to its best {often(falls)} within {rounds:.0f} rounds; it "
        f"learns at {past.value(m.RATE_SHARE_RATIO):.0%} of its rate",
    )


CHECKS: Final[dict[Alarm, Callable[[Past], AlarmReport | None]]] = {
    Alarm.NOT_SHARING: _not_sharing,
    Alarm.NO_FOREIGN: _no_foreign,
    Alarm.LEARNER_STARVING: _learner_starving,
    Alarm.STALENESS_NEAR_BOUND: _staleness_near_bound,
    Alarm.ONE_PRODUCER: _one_producer,
    Alarm.REJECT_STORM: _reject_storm,
    Alarm.DISK_LOW: lambda past: _low(
        past, Alarm.DISK_LOW, m.DISK_FREE_BYTES, DISK_FREE_BYTES_MIN, DISK_CRITICAL_BYTES
    ),
    Alarm.MEMORY_LOW: lambda past: _low(
        past, Alarm.MEMORY_LOW, m.MEMORY_AVAILABLE_BYTES, MEMORY_BYTES_MIN, MEMORY_CRITICAL_BYTES
    ),
    Alarm.CLOCK_SKEW: _clock_skew,
    Alarm.REFUSING_NEWCOMERS: _refusing_newcomers,
    Alarm.VERSION_SPLIT: _version_split,
    Alarm.NOTHING_TO_LEARN: _nothing_to_learn,
    Alarm.CUT_THOUGHTS: _cut_thoughts,
    Alarm.LAGGING_VERSION: _lagging_version,
    Alarm.WENT_BACK: _went_back,
}
