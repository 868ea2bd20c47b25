"""Who keeps a place in a table that strangers fill, and who has to go."""

from random import Random

import pytest

from swarm.limits.address_blocks import RELAYED_PATH, OriginPath, path_of
from swarm.limits.bounded_table import BoundedTable, Evicted

GREEDY = path_of("203.0.113.7")
NEIGHBOUR = path_of("203.0.113.8")
ELSEWHERE = path_of("198.51.100.1")


def put_all(table: BoundedTable[str, int], name: str, count: int, path: OriginPath) -> None:
    for number in range(count):
        table.put(f"{name} {number}", number, path)


def test_the_oldest_of_the_greediest_goes() -> None:
    table: BoundedTable[str, int] = BoundedTable(8)
    table.put("honest", 0, ELSEWHERE)
    put_all(table, "greedy", 1_000, GREEDY)
    assert list(table) == ["honest", *(f"greedy {number}" for number in range(993, 1_000))]


def test_the_newest_goes_where_that_is_wanted_so_that_a_newcomer_is_turned_away() -> None:
    table: BoundedTable[str, int] = BoundedTable(8, newest_first=True)
    put_all(table, "greedy", 8, GREEDY)
    assert table.put("greedy more", 9, GREEDY) == Evicted("greedy more", 9, ())
    assert table.put("neighbour", 1, NEIGHBOUR) == Evicted("greedy 7", 7, ())
    assert table.put("elsewhere", 1, ELSEWHERE) == Evicted("greedy 6", 6, ())
    for _ in range(2):  # within a block and outside it there is a share for each
        put_all(table, "neighbour", 50, NEIGHBOUR)
        put_all(table, "elsewhere", 50, ELSEWHERE)
    sizes = [table.size_of(path) for path in (GREEDY, NEIGHBOUR, ELSEWHERE)]
    assert sizes[2] == 4
    assert sizes[0] == sizes[1] == 2


def test_an_origin_has_no_more_than_its_share_and_gives_way_to_itself() -> None:
    table: BoundedTable[str, int] = BoundedTable(
        100, limit_of=lambda path: {2: 4, 3: 3}.get(len(path))
    )
    put_all(table, "greedy", 9, GREEDY)
    assert list(table.values()) == [6, 7, 8]
    table.put("neighbour", 0, NEIGHBOUR)
    assert table.put("another", 0, NEIGHBOUR) == Evicted("greedy 6", 6, GREEDY[:2])
    assert list(table.values()) == [7, 8, 0, 0]
    assert [table.size_of(path) for path in (GREEDY, GREEDY[:2], ELSEWHERE)] == [2, 4, 0]


def test_what_was_used_last_stays() -> None:
    table: BoundedTable[str, int] = BoundedTable(2)
    table.put("one", 1)
    table.put("two", 2)
    assert table.use("one") == 1
    assert table.use("three") is None
    assert table.put("three", 3) == Evicted("two", 2, ())


def test_what_is_obtained_is_made_once() -> None:
    table: BoundedTable[str, list[int]] = BoundedTable(2)
    table.obtain("one", list).append(1)
    table.obtain("two", list)
    assert table.obtain("one", list) == [1]
    table.obtain("three", list)
    assert list(table) == ["one", "three"]


def test_of_origins_that_have_as_many_the_longest_unused_gives_way() -> None:
    table: BoundedTable[str, int] = BoundedTable(3)
    for name in ("one", "two", "three"):
        table.put(name, 0, (name,))
    table.use("one")
    assert table.put("four", 0, ("four",)) == Evicted("two", 0, ())


def test_a_higher_rank_goes_last_even_where_it_came_later() -> None:
    proven: set[str] = set()
    table: BoundedTable[str, int] = BoundedTable(3, rank_of=lambda key, _: key in proven)
    for name in ("one", "two", "three"):
        table.put(name, 0, GREEDY)
    proven |= {"one", "two"}
    table.put("four", 0, ELSEWHERE)
    table.put("five", 0, ELSEWHERE)
    assert list(table) == ["one", "two", "five"]
    proven.add("five")
    proven.add("six")
    assert table.put("six", 0, ELSEWHERE) == Evicted("one", 0, ())  # all are proven


def test_a_choice_has_one_of_each_origin_before_two_of_any() -> None:
    table: BoundedTable[str, int] = BoundedTable(2_000)
    put_all(table, "greedy", 1_000, GREEDY)
    table.put("neighbour", 0, NEIGHBOUR)
    table.put("elsewhere", 0, ELSEWHERE)
    table.put("hidden", 0, RELAYED_PATH)
    chosen = table.spread(5, Random(1))
    assert {"neighbour", "elsewhere", "hidden"} < set(chosen)
    assert len(set(chosen)) == 5
    assert len(table.spread(9_999, Random(1))) == len(table)


def test_nothing_goes_of_an_origin_that_has_nothing() -> None:
    table: BoundedTable[str, int] = BoundedTable(2)
    with pytest.raises(KeyError):
        table.evict()
    with pytest.raises(KeyError):
        table.oldest()
    table.put("one", 1, GREEDY)
    with pytest.raises(KeyError):
        table.evict(ELSEWHERE)
    assert table.evict(GREEDY[:1]).key == "one"
    assert not table


@pytest.mark.parametrize(
    ("ip", "path"),
    [
        ("203.0.113.7", ("203.0.0.0/16", "203.0.113.0/24", "203.0.113.7/32")),
        ("::ffff:203.0.113.7", ("203.0.0.0/16", "203.0.113.0/24", "203.0.113.7/32")),
        ("2001:db8:0:1::7", ("2001:db8::/32", "2001:db8::/56", "2001:db8:0:1::/64")),
        ("fe80::7%eth0", ("fe80::/32", "fe80::/56", "fe80::7/128")),
        (None, RELAYED_PATH),
        ("behind a relay", RELAYED_PATH),
    ],
)
def test_an_address_is_in_networks_from_wide_to_narrow(ip: str | None, path: OriginPath) -> None:
    assert path_of(ip) == path
