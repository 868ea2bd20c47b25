"""Which groups were due where in a simulated run, which came in time, and what is too few. Pure.

**Due.** A group is due at each other honest host if that host and the producer are up, running and
not cut off from each other, and the link of neither stands still, from when the group is shared
until `patience_s` later, by the plan of faults. A bad link excuses nothing: loss, delay and
disorder are what the network is for. Nor does a fault of a third host, nor one that has just ended.

Pairs whose producer is away (`orphans_*`) or whose link stands still meanwhile (`stalled_*`) are
counted and not judged: a stalled host is behind by as long as its link stood still, and for good
with groups that their producer has moved on from by then. What such hosts are owed in the end is
the rule of reach, in `invariants.py`.

**The floor** (`shortfalls`) asks for what holds unless a host that should take part does not, and
follows from the number of hosts alone:

- Of `hosts` hosts, one that receives nothing, or whose groups nobody gets, costs one in `hosts` of
  all that is due. So no more than that may be missing.
- Of what is due at one host, and of what one host shared, at least half comes in time.

Fewer than `PAIRS_MIN` pairs are not judged: they may hang on one group or one bad moment.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from swarm.rollouts import GroupId
from swarm.simulation.checks.invariants import PublishedGroup
from swarm.simulation.faults import FaultEvent

PAIRS_MIN: Final = 12
HOST_SHARE_MIN: Final = 0.5


@dataclass(frozen=True, slots=True)
class Away:
    """When which hosts could not take part."""

    intervals: Mapping[int, Sequence[tuple[float, float]]]  # by host: down or paused
    stalls: Mapping[int, Sequence[tuple[float, float]]]  # by host: it has no link that carries
    cuts: Sequence[tuple[float, float, frozenset[int]]]

    @classmethod
    def of(cls, joined_s: Mapping[int, float], events: Collection[FaultEvent]) -> "Away":
        """Who is away when, from each host's first time there and the plan of faults."""
        intervals: dict[int, list[tuple[float, float]]] = {
            host: [(0.0, at_s)] for host, at_s in joined_s.items()
        }
        stalls: dict[int, list[tuple[float, float]]] = {host: [] for host in joined_s}
        for event in events:
            if event.kind in ("crash", "pause"):
                intervals[event.hosts[0]].append((event.at_s, event.until_s))
            elif event.kind in ("clog", "stillborn"):
                stalls[event.hosts[0]].append((event.at_s, event.until_s))
        cuts = [
            (event.at_s, event.until_s, frozenset(event.hosts))
            for event in events
            if event.kind == "partition"
        ]
        return cls(intervals, stalls, cuts)

    def is_up(self, host: int, from_s: float, until_s: float) -> bool:
        """Whether the host is there and runs at all times between."""
        return not any(a < until_s and b > from_s for a, b in self.intervals[host])

    def is_stalled(self, host: int, from_s: float, until_s: float) -> bool:
        """Whether the host's link stands still at any time between."""
        return any(a < until_s and b > from_s for a, b in self.stalls[host])

    def are_joined(self, one: int, other: int, from_s: float, until_s: float) -> bool:
        """Whether no partition is between the two at any time between."""
        return not any(
            a < until_s and b > from_s and (one in hosts) != (other in hosts)
            for a, b, hosts in self.cuts
        )


@dataclass(slots=True)
class Deliveries:
    """Pairs of a group and a host that was to get it."""

    due: int = 0
    delivered: int = 0  # of those, in time
    latencies_s: list[float] = field(default_factory=list)  # of all due, inf for never; sorted
    orphans_due: int = 0  # pairs whose host was up while the producer was not for all of the time
    orphans_delivered: int = 0
    stalled_due: int = 0  # pairs that would be due if no link stood still
    stalled_delivered: int = 0
    due_at: Counter[int] = field(default_factory=Counter)  # by receiving host; so the next three
    delivered_at: Counter[int] = field(default_factory=Counter)
    due_of: Counter[int] = field(default_factory=Counter)  # by producing host
    delivered_of: Counter[int] = field(default_factory=Counter)

    def add(self, producer: int, host: int, took_s: float, in_time: bool) -> None:
        """Count one pair that was due."""
        self.due += 1
        self.delivered += in_time
        self.latencies_s.append(took_s)
        self.due_at[host] += 1
        self.delivered_at[host] += in_time
        self.due_of[producer] += 1
        self.delivered_of[producer] += in_time

    @property
    def ratio(self) -> float:
        """The share of what was due that came; 1.0 where nothing was due."""
        return self.delivered / self.due if self.due else 1.0


def count_deliveries(
    published: Collection[PublishedGroup],
    arrived_s: Mapping[tuple[GroupId, int], float],
    hosts: Collection[int],
    away: Away,
    patience_s: float,
    end_s: float,
) -> Deliveries:
    """What became of all groups of `hosts` at `hosts`, but those whose time is not over at the end.

    `arrived_s` says when a host had verified and stored a foreign group.
    """
    counts = Deliveries()
    for group in published:
        since_s, until_s = group.at_s, group.at_s + patience_s
        if until_s > end_s or group.host not in hosts:
            continue
        is_there = away.is_up(group.host, since_s, until_s)
        for host in hosts:
            if host == group.host or not away.is_up(host, since_s, until_s):
                continue
            took_s = arrived_s.get((group.group_id, host), inf) - since_s
            in_time = took_s <= patience_s
            if not is_there:
                counts.orphans_due += 1
                counts.orphans_delivered += in_time
            elif not away.are_joined(group.host, host, since_s, until_s):
                continue
            elif any(away.is_stalled(each, since_s, until_s) for each in (group.host, host)):
                counts.stalled_due += 1
                counts.stalled_delivered += in_time
            else:
                counts.add(group.host, host, took_s, in_time)
    counts.latencies_s.sort()
    return counts


def shortfalls(counts: Deliveries, hosts: int) -> list[str]:
    """Where deliveries are below the floor, a line each."""
    found: list[str] = []
    if counts.due >= PAIRS_MIN and counts.delivered < counts.due * (1.0 - 1.0 / hosts):
        found.append(
            f"{counts.delivered} of {counts.due} came in time: more is missing than one of {hosts} "
            "hosts accounts for"
        )
    for due, came, what in (
        (counts.due_at, counts.delivered_at, "due at"),
        (counts.due_of, counts.delivered_of, "shared by"),
    ):
        found += [
            f"{came[host]} of {number} {what} host {host} came in time: less than half"
            for host, number in sorted(due.items())
            if number >= PAIRS_MIN and came[host] < HOST_SHARE_MIN * number
        ]
    return found
