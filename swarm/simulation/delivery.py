"""Deliveries in a simulated run: which groups were due where, and which came in time. Pure.

A group is due at each other honest host if that host and the producer are up, joined and with
moving links until `patience_s` after sharing. Of all due pairs one in `hosts` may be missing, as
one deaf host costs as much; of one host's, half (`HOST_SHARE_MIN`).
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from swarm.rollouts import GroupId
from swarm.simulation.invariants import PublishedGroup
from swarm.simulation.network_faults import FaultEvent

PAIRS_MIN: Final = 12
HOST_SHARE_MIN: Final = 0.5


@dataclass(frozen=True, slots=True)
class Away:
    intervals: Mapping[int, Sequence[tuple[float, float]]]  # by host, down or paused
    stalls: Mapping[int, Sequence[tuple[float, float]]]  # by host, with a stalled link
    cuts: Sequence[tuple[float, float, frozenset[int]]]

    @classmethod
    def of(cls, joined_s: Mapping[int, float], events: Collection[FaultEvent]) -> "Away":
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
        return not any(a < until_s and b > from_s for a, b in self.intervals[host])

    def is_stalled(self, host: int, from_s: float, until_s: float) -> bool:
        return any(a < until_s and b > from_s for a, b in self.stalls[host])

    def are_joined(self, one: int, other: int, from_s: float, until_s: float) -> bool:
        return not any(
            a < until_s and b > from_s and (one in hosts) != (other in hosts)
            for a, b, hosts in self.cuts
        )


@dataclass(slots=True)
class Deliveries:
    """(group, host) pairs that were due."""

    due: int = 0
    delivered: int = 0  # in time
    latencies_s: list[float] = field(default_factory=list)  # of all due, sorted; inf for never
    orphans_due: int = 0  # pairs with an absent producer
    orphans_delivered: int = 0
    stalled_due: int = 0  # pairs with a stalled link
    stalled_delivered: int = 0
    due_at: Counter[int] = field(default_factory=Counter)  # this and the next by receiving host
    delivered_at: Counter[int] = field(default_factory=Counter)
    due_of: Counter[int] = field(default_factory=Counter)  # by producing host
    delivered_of: Counter[int] = field(default_factory=Counter)

    @property
    def ratio(self) -> float:
        """Delivered share of the due pairs; 1.0 if none were due."""
        return self.delivered / self.due if self.due else 1.0


def count_deliveries(
    published: Collection[PublishedGroup],
    arrived_s: Mapping[tuple[GroupId, int], float],
    hosts: Collection[int],
    away: Away,
    patience_s: float,
    end_s: float,
) -> Deliveries:
    """Count groups whose time is over. `arrived_s`: when a host had stored a group."""
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
                counts.due += 1
                counts.delivered += in_time
                counts.latencies_s.append(took_s)
                counts.due_at[host] += 1
                counts.delivered_at[host] += in_time
                counts.due_of[group.host] += 1
                counts.delivered_of[group.host] += in_time
    counts.latencies_s.sort()
    return counts


def shortfalls(counts: Deliveries, hosts: int) -> list[str]:
    """Deliveries below the floor, one line each."""
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
