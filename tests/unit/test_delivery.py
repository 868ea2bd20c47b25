"""What was due, what came in time, and what is below the floor."""

from dataclasses import replace
from math import inf

from swarm.rollouts import GroupId
from swarm.simulation.delivery import PAIRS_MIN, Away, count_deliveries, shortfalls
from swarm.simulation.invariants import PublishedGroup
from swarm.simulation.network_faults import Fault, FaultEvent, Kind

HOSTS = 6
PATIENCE_S = 20.0
GROUPS = [
    PublishedGroup(GroupId(bytes([host, number])), host, number, 100.0 + number, 900.0)
    for host in range(HOSTS)
    for number in range(10)
]
PAIRS = len(GROUPS) * (HOSTS - 1)
ARRIVED_S = {
    (group.group_id, host): group.at_s + 1.0
    for group in GROUPS
    for host in range(HOSTS)
    if host != group.host
}


def event(kind: Kind, hosts: tuple[int, ...], at_s: float, until_s: float) -> FaultEvent:
    return FaultEvent(at_s, until_s, hosts, Fault(kind=kind))


def count(*events: FaultEvent, arrived_s: dict = ARRIVED_S, end_s: float = 500.0):  # type: ignore[no-untyped-def, type-arg]
    away = Away.of(dict.fromkeys(range(HOSTS), 2.0), events)
    return count_deliveries(GROUPS, arrived_s, range(HOSTS), away, PATIENCE_S, end_s)


def test_in_a_calm_run_every_pair_is_due() -> None:
    counts = count()
    assert (counts.due, counts.delivered, counts.ratio) == (PAIRS, PAIRS, 1.0)
    assert not shortfalls(counts, HOSTS)


def test_what_comes_too_late_or_never_is_missing() -> None:
    first, second = list(ARRIVED_S)[:2]
    late = ARRIVED_S | {first: ARRIVED_S[first] + PATIENCE_S, second: inf}
    counts = count(arrived_s=late)
    assert counts.due - counts.delivered == 2
    assert counts.latencies_s[-2:] == [PATIENCE_S + 1.0, inf]


def test_a_group_whose_time_is_not_over_is_not_due() -> None:
    assert count(end_s=100.0 + PATIENCE_S).due == HOSTS * (HOSTS - 1)
    assert count(end_s=99.0).due == 0


def test_faults_excuse_those_they_hit_while_they_hit_them() -> None:
    of_one = 10 * (HOSTS - 1)  # pairs that one host produces; it receives as many
    for kind in ("crash", "pause"):
        counts = count(event(kind, (2,), 90.0, 140.0))
        assert (counts.due, counts.orphans_due) == (PAIRS - 2 * of_one, of_one)
    counts = count(event("clog", (2,), 90.0, 140.0))
    assert (counts.due, counts.stalled_due) == (PAIRS - 2 * of_one, 2 * of_one)
    assert count(event("partition", (2,), 90.0, 140.0)).due == PAIRS - 2 * of_one
    assert count(event("partition", tuple(range(3)), 90.0, 140.0)).due == PAIRS - 2 * 9 * 10
    assert count(event("bad_link", (2,), 90.0, 140.0)).due == PAIRS
    for kind in ("crash", "pause", "clog", "partition"):
        assert count(event(kind, (2,), 10.0, 99.0)).due == PAIRS


def test_a_host_that_gets_nothing_is_below_the_floor() -> None:
    deaf = {pair: s for pair, s in ARRIVED_S.items() if pair[1] != 3}
    assert any("due at host 3" in line for line in shortfalls(count(arrived_s=deaf), HOSTS))


def test_a_host_whose_groups_nobody_gets_is_below_the_floor() -> None:
    dumb = {pair: s for pair, s in ARRIVED_S.items() if pair[0][0] != 3}
    assert any("shared by host 3" in line for line in shortfalls(count(arrived_s=dumb), HOSTS))


def test_all_that_is_missing_together_is_below_the_floor() -> None:
    # without a quarter of all pairs, evenly over hosts
    kept = {
        pair: s for pair, s in ARRIVED_S.items() if (pair[0][0] + pair[0][1] + pair[1]) % 4 != 0
    }
    lines = shortfalls(count(arrived_s=kept), HOSTS)
    assert len(lines) == 1
    assert "one of 6 hosts" in lines[0]


def test_a_few_pairs_are_not_judged() -> None:
    counts = count(arrived_s={}, end_s=500.0)
    assert shortfalls(counts, HOSTS)
    few = replace(counts, due=PAIRS_MIN - 1, due_at=counts.due_at, due_of=counts.due_of)
    few.due_at.clear()
    few.due_of.clear()
    assert not shortfalls(few, HOSTS)
