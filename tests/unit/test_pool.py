"""The pool: dedupe, shares, eviction, training marks, expiry, and files that are not sound."""

import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.errors import ConfigError, LocalProtocolError
from swarm.exchange.pool import DAMAGED_KEPT_MAX, AddResult, Pool, PoolLimits
from swarm.rollouts import GroupId
from swarm.wire.codec import decode
from swarm.wire.messages import GROUP_BYTES_MAX, GroupBody, Signed
from tests.pool_samples import CREATED_AT_S, EXPIRES_AT_S, PRODUCERS, add, make_group

NOW_S = 1_500.0
LIMITS = PoolLimits()


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(":memory:", LIMITS) as opened:
        yield opened


def put(pool: Pool, producer: int, index: int, *, own: bool = False) -> GroupId:
    record, verified = make_group(producer, index)
    assert add(pool, record, verified, NOW_S, own=own) is AddResult.ADDED
    return verified.group_id


def held(pool: Pool, ids: Iterable[GroupId]) -> list[bool]:
    return [bool(pool.groups([each])) for each in ids]


def test_a_group_comes_back_as_it_was_verified(pool: Pool) -> None:
    record, verified = make_group(0, 3)
    assert add(pool, record, verified, NOW_S) is AddResult.ADDED
    assert pool.groups([verified.group_id]) == [verified]
    assert pool.record(verified.group_id, NOW_S) == record
    (candidate,) = pool.eligible(own=False, now_s=NOW_S)
    assert candidate.group_id == verified.group_id
    assert candidate.producer == PRODUCERS[0].peer_id
    assert candidate.rewards == verified.rewards
    assert candidate.round == verified.group.round
    assert candidate.created_at_s == CREATED_AT_S
    assert pool.eligible(own=True, now_s=NOW_S) == []


def test_groups_come_in_the_order_asked_for_without_those_not_here(pool: Pool) -> None:
    ids = [put(pool, 0, index) for index in range(3)]
    wanted = [ids[2], GroupId(bytes(32)), ids[0]]
    assert [each.group_id for each in pool.groups(wanted)] == [ids[2], ids[0]]


def test_candidates_are_in_order_of_their_ids(pool: Pool) -> None:
    ids = [put(pool, index % 4, index) for index in range(12)]
    assert ids != sorted(ids)
    assert [each.group_id for each in pool.eligible(own=False, now_s=NOW_S)] == sorted(ids)


def test_the_same_group_and_the_same_task_are_kept_once(pool: Pool) -> None:
    put(pool, 0, 0)
    for variant, result in ((0, AddResult.KNOWN), (1, AddResult.DUPLICATE_TASK)):
        record, verified = make_group(0, 0, variant=variant)
        assert add(pool, record, verified, NOW_S) is result
    put(pool, 1, 0)  # another producer's group for that task is another matter
    assert pool.statistics().groups == 2


def test_what_expired_is_not_served_nor_drawn_nor_taken_again(pool: Pool) -> None:
    group_id = put(pool, 0, 0)
    assert pool.record(group_id, EXPIRES_AT_S) is None
    assert pool.held([group_id, GroupId(bytes(32))], NOW_S) == {group_id}
    assert pool.held([group_id], NOW_S, without=[PRODUCERS[0].peer_id]) == set()
    assert pool.held([group_id], EXPIRES_AT_S) == set()
    assert pool.eligible(own=False, now_s=EXPIRES_AT_S) == []
    assert pool.expire(EXPIRES_AT_S - 1) == 0
    assert pool.expire(EXPIRES_AT_S) == 1
    assert not pool.groups([group_id])
    assert pool.ids_seen([group_id, GroupId(bytes(32))]) == {group_id}
    for variant, result in ((0, AddResult.KNOWN), (1, AddResult.DUPLICATE_TASK)):
        record, verified = make_group(0, 0, variant=variant)
        assert add(pool, record, verified, NOW_S) is result


def test_a_producer_at_its_share_gives_up_its_trained_then_its_oldest_groups() -> None:
    with Pool(":memory:", PoolLimits(groups_per_producer_max=2)) as pool:
        other = put(pool, 1, 0)
        ids = [put(pool, 0, 0), put(pool, 0, 1)]
        pool.mark_trained([ids[1]], 1)
        ids.append(put(pool, 0, 2))
        assert held(pool, ids) == [True, False, True]  # trained on before older
        ids.append(put(pool, 0, 3))
        assert held(pool, ids) == [False, False, True, True]
        assert pool.groups([other])
        assert pool.ids_seen(ids) == set(ids)  # what left is not fetched again


def test_own_groups_over_the_share_replace_the_oldest_own() -> None:
    with Pool(":memory:", PoolLimits(groups_per_producer_max=2)) as pool:
        ids = [put(pool, 0, index, own=True) for index in range(3)]
        assert held(pool, ids) == [False, True, True]
        pool.mark_trained([ids[2]], 1)
        ids.append(put(pool, 0, 3, own=True))
        assert held(pool, ids) == [False, True, False, True]  # trained on before older


def test_eviction_takes_trained_then_the_largest_producer_then_own() -> None:
    with Pool(":memory:", PoolLimits(groups_max=6)) as pool:
        own = [put(pool, 0, index, own=True) for index in range(2)]
        few = [put(pool, 1, 0)]
        many = [put(pool, 2, index) for index in range(3)]
        pool.mark_trained([own[1], few[0]], 1)
        more = [put(pool, 3, 0)]
        assert not pool.groups([own[1]])  # trained, the older of two
        more.append(put(pool, 3, 1))
        assert not pool.groups([few[0]])  # trained
        more.append(put(pool, 3, 2))
        assert held(pool, many) == [False, True, True]  # most groups, the older of two producers
        put(pool, 4, 0)
        assert held(pool, more) == [False, True, True]
        assert pool.groups([own[0]])
        assert pool.statistics().groups == 6


def test_own_groups_go_only_when_nothing_foreign_is_left() -> None:
    with Pool(":memory:", PoolLimits(groups_max=2)) as pool:
        own = put(pool, 0, 0, own=True)
        foreign = put(pool, 1, 0)
        second = put(pool, 0, 1, own=True)
        assert held(pool, [own, foreign, second]) == [True, False, True]
        third = put(pool, 0, 2, own=True)
        assert held(pool, [own, second, third]) == [False, True, True]


def test_bytes_are_bounded_and_taken_from_who_holds_most_of_them() -> None:
    sizes = []
    with Pool(":memory:", LIMITS) as pool:
        put(pool, 0, 0)
        sizes.append(pool.statistics().bytes)
    with Pool(":memory:", PoolLimits(bytes_max=4 * sizes[0] + 3)) as pool:
        ids = [put(pool, 0, 0), put(pool, 1, 0), put(pool, 1, 1), put(pool, 2, 0)]
        ids.append(put(pool, 3, 0))
        assert held(pool, ids) == [True, False, True, True, True]
        assert pool.statistics().bytes <= 4 * sizes[0] + 3
    with Pool(":memory:", PoolLimits(bytes_max=sizes[0] - 1)) as pool:
        record, verified = make_group(0, 0)
        assert add(pool, record, verified, NOW_S) is AddResult.QUOTA


def test_few_large_groups_cannot_push_out_many_small_ones() -> None:
    with Pool(":memory:", LIMITS) as pool:
        put(pool, 0, 0)
        small = pool.statistics().bytes
    with Pool(":memory:", PoolLimits(bytes_max=20 * small)) as pool:
        many = [put(pool, 0, index) for index in range(6)]
        large = []
        for index in range(3):
            record, verified = make_group(1, index)
            verified = replace(verified, prompt="p" * (6 * small))
            assert add(pool, record, verified, NOW_S) is AddResult.ADDED
            large.append(verified.group_id)
        assert held(pool, many) == [True] * 6
        assert held(pool, large) == [False, True, True]


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    with Pool(path, PoolLimits(groups_max=10)) as pool:
        ids = [put(pool, index % 2, index) for index in range(10)]
        before = pool.statistics(NOW_S)
        (pages,) = pool._db.execute("PRAGMA page_count").fetchone()
        pool._db.execute(f"PRAGMA max_page_count = {pages}")
        record, verified = make_group(2, 0)
        large = replace(verified, prompt="p" * 100_000)
        with pytest.raises(sqlite3.OperationalError, match="full"):
            add(pool, record, large, NOW_S)
        assert pool.statistics(NOW_S) == before
        assert held(pool, ids) == [True] * 10
        pool._db.execute(f"PRAGMA max_page_count = {10 * pages}")
        assert add(pool, record, verified, NOW_S) is AddResult.ADDED


def test_tombstones_are_bounded_and_the_newest_stay() -> None:
    with Pool(":memory:", PoolLimits(groups_max=1, tombstones_max=3)) as pool:
        ids = [put(pool, 0, index) for index in range(6)]
        assert pool.ids_seen(ids) == set(ids[2:])


def test_nothing_is_trained_on_twice(pool: Pool) -> None:
    ids = [put(pool, 0, index) for index in range(3)]
    pool.mark_trained(ids[:2], 4)
    pool.mark_trained(ids[:1], 4)  # the same again
    assert [each.group_id for each in pool.eligible(own=False, now_s=NOW_S)] == ids[2:]
    with pytest.raises(LocalProtocolError, match="round 4"):
        pool.mark_trained([ids[2], ids[0]], 5)
    pool.mark_trained([ids[2]], 6)  # the failed call marked nothing


def test_a_group_that_left_since_it_was_drawn_is_marked_all_the_same(pool: Pool) -> None:
    group_id = put(pool, 0, 0)
    pool.expire(EXPIRES_AT_S)
    pool.mark_trained([group_id], 1)
    with pytest.raises(LocalProtocolError, match="round 1"):
        pool.mark_trained([group_id], 2)
    with pytest.raises(LocalProtocolError, match="never"):
        pool.mark_trained([GroupId(bytes(32))], 2)


def test_statistics_count_what_is_there(pool: Pool) -> None:
    put(pool, 0, 0, own=True)
    ids = [put(pool, 1, index) for index in range(3)]
    pool.mark_trained(ids[:1], 1)
    statistics = pool.statistics(NOW_S)
    assert (statistics.groups, statistics.own, statistics.foreign) == (4, 1, 3)
    assert statistics.foreign_eligible == 2
    assert statistics.oldest_eligible_at_s == CREATED_AT_S
    assert statistics.by_producer == {PRODUCERS[0].peer_id: 1, PRODUCERS[1].peer_id: 3}
    assert pool.statistics(EXPIRES_AT_S).foreign_eligible == 0
    assert pool.statistics(EXPIRES_AT_S).oldest_eligible_at_s is None


def test_everything_is_there_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    with Pool(path, LIMITS) as pool:
        ids = [put(pool, index % 2, index) for index in range(6)]
        pool.mark_trained(ids[:2], 3)
        before = pool.statistics(NOW_S)
    with Pool(path, LIMITS) as pool:
        assert pool.statistics(NOW_S) == before
        assert pool.damaged_path is None
        with pytest.raises(LocalProtocolError):
            pool.mark_trained(ids[:1], 4)
    with Pool(path, PoolLimits(groups_max=3)) as pool:  # lower limits hold at once
        assert held(pool, ids) == [False] * 3 + [True] * 3


def test_groups_that_their_producer_left_far_behind_leave(tmp_path: Path) -> None:
    def add_at(pool: Pool, index: int, round_: int, created_at_s: int) -> tuple[AddResult, GroupId]:
        record, verified = make_group(0, index, round_=round_, created_at_s=created_at_s)
        return add(pool, record, verified, NOW_S), verified.group_id

    path = tmp_path / "pool.sqlite"
    with Pool(path, PoolLimits(rounds_max=10)) as pool:
        ids = [add_at(pool, index, index, 1_000 + index)[1] for index in range(15)]
        assert held(pool, ids) == [False] * 5 + [True] * 10
        assert add_at(pool, 20, 4, 1_004) == (AddResult.TOO_OLD, make_group_id(20, 4, 1_004))
        assert pool.ids_seen(ids) == set(ids)
        recent = pool.eligible(own=False, now_s=NOW_S, rounds_max=4)
        assert {each.round for each in recent} == {11, 12, 13, 14}
        pool.mark_trained([ids[0]], 1)  # it was drawn before it left
    with Pool(path, PoolLimits(rounds_max=3)) as pool:  # lower limits hold at once
        assert held(pool, ids) == [False] * 12 + [True] * 3
        assert add_at(pool, 21, 11, 1_003)[0] is AddResult.TOO_OLD
        set_back = add_at(pool, 22, 2, 1_500)  # created last, at a lower round
        assert set_back[0] is AddResult.ADDED
        assert held(pool, ids) == [False] * 12 + [True] * 3
        assert add_at(pool, 23, 3, 1_501)[0] is AddResult.ADDED


def make_group_id(index: int, round_: int, created_at_s: int) -> GroupId:
    return make_group(0, index, round_=round_, created_at_s=created_at_s)[1].group_id


def test_groups_are_added_all_or_none(pool: Pool) -> None:
    first, second = make_group(0, 0), make_group(0, 1)
    unfit = (second[0], replace(second[1], rewards=(float("nan"), 1.0)))
    with pytest.raises(ValueError, match="JSON"):
        pool.add_all([first, unfit], own=False, now_s=NOW_S)
    assert pool.statistics().groups == 0
    results = pool.add_all([first, first, second], own=False, now_s=NOW_S)
    assert results == [AddResult.ADDED, AddResult.KNOWN, AddResult.ADDED]


def test_a_second_process_on_one_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    with Pool(path, LIMITS), pytest.raises(ConfigError, match="in use"):
        Pool(path, LIMITS)


@pytest.mark.parametrize("damage", ["text", "truncated", "overwritten"])
def test_a_damaged_file_is_moved_aside(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "pool.sqlite"
    with Pool(path, LIMITS) as pool:
        for index in range(40):
            put(pool, 0, index)
    content = path.read_bytes()
    damaged = {
        "text": b"this is no database, and longer than a header of one hundred bytes " * 3,
        "truncated": content[: len(content) // 2],
        "overwritten": content[:4096] + b"\xff" * 8192 + content[12288:],
    }[damage]
    path.write_bytes(damaged)
    with Pool(path, LIMITS) as pool:
        assert pool.damaged_path == tmp_path / "pool.sqlite.damaged-1"
        assert pool.damaged_path.read_bytes() == damaged
        assert pool.statistics().groups == 0
        put(pool, 0, 0)


def test_damaged_files_do_not_pile_up(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    for _ in range(DAMAGED_KEPT_MAX + 2):
        path.write_bytes(b"x" * 200)
        Pool(path, LIMITS).close()
    names = sorted(each.name for each in tmp_path.glob("*.damaged-*"))
    assert names == [f"pool.sqlite.damaged-{n}" for n in range(3, DAMAGED_KEPT_MAX + 3)]


@pytest.mark.parametrize("sql", ["PRAGMA user_version = 99", "CREATE TABLE other (x)"])
def test_a_file_of_another_kind_is_left_alone(tmp_path: Path, sql: str) -> None:
    path = tmp_path / "pool.sqlite"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE first (x)")
    db.execute(sql)
    db.commit()
    db.close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="another file or a newer program"):
        Pool(path, LIMITS)
    assert path.read_bytes() == before


def kept_temperature(record: bytes) -> float:
    payload = decode(record, Signed, GROUP_BYTES_MAX).payload
    return decode(payload, GroupBody, GROUP_BYTES_MAX).temperature


@pytest.mark.parametrize("whole", [True, False])
def test_a_record_that_was_damaged_is_dropped_and_counted(tmp_path: Path, whole: bool) -> None:
    path = tmp_path / "pool.sqlite"
    with Pool(path, LIMITS) as pool:
        ids = [put(pool, 0, index) for index in range(2)]
    db = sqlite3.connect(path)
    (record,) = db.execute("SELECT record FROM records WHERE seq = 1").fetchone()
    at = record.index(b"temperature") + len(b"temperature") + 3  # a byte of a number
    changed = record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]
    assert kept_temperature(changed) != kept_temperature(record)  # it still decodes
    rot = b"rot" if whole else changed
    db.execute("UPDATE records SET record = ? WHERE seq = 1", (rot,))
    db.commit()
    db.close()
    with Pool(path, LIMITS) as pool:
        assert [each.group_id for each in pool.groups(ids)] == ids[1:]
        assert pool.damaged_records == 1
        assert held(pool, ids) == [False, True]
        assert pool.ids_seen(ids) == set(ids)


def test_limits_must_leave_room() -> None:
    with pytest.raises(ConfigError, match="groups_max"):
        PoolLimits(groups_max=0)
