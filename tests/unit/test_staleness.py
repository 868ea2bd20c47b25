"""The bound, and the account of credits: each rule on its own."""

import msgpack
import pytest

from swarm.errors import ConfigError, LocalProtocolError
from swarm.leases.staleness import (
    Account,
    BufferedGroup,
    Denial,
    Discard,
    Room,
    StalenessRules,
    staleness,
)

RULES = StalenessRules(bound=2, groups_per_step=4, groups_max=8)


def group(number: int, oldest: int, newest: int | None = None) -> BufferedGroup:
    return BufferedGroup(bytes([number]), "w", oldest, oldest if newest is None else newest)


def filled(*oldest: int, version: int = 0, rules: StalenessRules = RULES) -> Account:
    account = Account(rules, version)
    account.reserve(len(oldest))
    for number, each in enumerate(oldest):
        assert account.admit(group(number, each)) is None
    return account


def test_staleness_is_by_the_oldest_token() -> None:
    assert staleness((5, 3, 4), 6) == 3
    assert staleness((6,), 6) == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"bound": -1}, "bound = -1: take 0 to 1024"),
        ({"groups_per_step": 0}, "groups_per_step = 0: take at least 1"),
        ({"groups_max": 3}, r"groups_max = 3: take 4 \(groups_per_step\) to 65536"),
        ({"groups_max": 65_537}, "groups_max = 65537"),
    ],
)
def test_rules_that_cannot_be_are_refused_in_one_line(wrong, said) -> None:
    with pytest.raises(ConfigError, match=said):
        StalenessRules(**{"bound": 2, "groups_per_step": 4, "groups_max": 8, **wrong})


# --- granting --------------------------------------------------------------------------------


def test_no_more_is_granted_than_there_are_credits() -> None:
    account = Account(RULES)
    assert account.room(0, 100, 1.0, 0.0) == Room(8)
    account.reserve(5)
    assert account.room(0, 100, 1.0, 0.0) == Room(3)
    account.reserve(3)
    assert account.room(0, 100, 1.0, 0.0) == Room(0, Denial.NO_CREDIT)
    with pytest.raises(LocalProtocolError):
        account.reserve(1)


def test_what_a_version_has_no_time_for_is_not_granted() -> None:
    """Versions 3 and 5 at learner version 5 with a bound of 2: the next batch is the last one for
    3, and there are three for 5."""
    rules = StalenessRules(bound=2, groups_per_step=4, groups_max=100)
    account = Account(rules, version=5)
    assert account.room(2, 50, 1.0, 0.0) == Room(0, Denial.WOULD_BE_STALE)
    assert account.room(3, 50, 1.0, 0.0) == Room(4)
    assert account.room(4, 50, 1.0, 0.0) == Room(8)
    assert account.room(5, 50, 1.0, 0.0) == Room(12)
    account.reserve(4)
    assert account.room(3, 50, 1.0, 0.0) == Room(0, Denial.WOULD_BE_STALE)
    assert account.room(4, 50, 1.0, 0.0) == Room(4)
    assert account.room(6, 50, 1.0, 0.0) == Room(0, Denial.UNKNOWN_VERSION)
    assert account.room(-1, 50, 1.0, 0.0) == Room(0, Denial.UNKNOWN_VERSION)


def test_while_a_step_is_under_way_work_is_for_the_version_after_it() -> None:
    account = filled(5, 5, 5, 5, version=5)
    assert account.room(3, 1, 1.0, 0.0).groups == 0  # four are ahead
    account.consume()
    assert account.next_version == 6
    assert account.room(3, 1, 1.0, 0.0) == Room(0, Denial.WOULD_BE_STALE)
    assert account.room(4, 9, 1.0, 0.0) == Room(4)


def test_a_lease_that_takes_too_long_is_not_granted() -> None:
    """Versions last 100 s: what takes 299 s is there two versions later, what takes 300 s three."""
    account = Account(RULES, version=0)
    for version, now in ((1, 0.0), (2, 100.0), (3, 200.0)):
        account.finish_step(version, now)
    assert account.step_s(200.0) == 100.0
    assert account.room(3, 1, 299.0, 200.0) == Room(1)
    assert account.room(3, 1, 300.0, 200.0) == Room(0, Denial.WOULD_BE_STALE)
    assert account.room(2, 1, 199.0, 200.0) == Room(1)
    assert account.room(2, 1, 200.0, 200.0) == Room(0, Denial.WOULD_BE_STALE)
    assert account.room(3, 1, 1e6, 1e6) == Room(1)  # meanwhile the learner starves


@pytest.mark.parametrize("bound", [0, 1])
def test_a_small_bound_stops_nothing_for_good(bound: int) -> None:
    """Work that takes ten times a learner's step goes on with a bound of zero, in turns."""
    account = Account(StalenessRules(bound, 2, 4))
    now, steps = 0.0, 0
    while steps < 20:
        assert now < 1e5, "nothing is granted any more"
        granted = account.room(account.version, 4, 100.0, now).groups
        if not granted:
            now += 10.0
            continue
        account.reserve(granted)
        now += 100.0
        for number in range(granted):
            account.admit(group(number, account.version))
        while account.consume():
            now += 10.0
            account.finish_step(account.version + 1, now)
            steps += 1
    assert set(account.consumed_by_staleness) <= set(range(bound + 1))


def test_pacing_holds_grants_to_less_than_the_bound_and_consumption_not() -> None:
    account = filled(3, 3, 3, 3, version=5)
    account.set_pacing(0)
    assert account.room(5, 9, 1.0, 0.0) == Room(0, Denial.WOULD_BE_STALE)
    assert len(account.consume()) == 4
    account.set_pacing(99)
    assert account.pacing == RULES.bound
    account.set_pacing(None)
    assert account.pacing == RULES.bound


# --- in and out ------------------------------------------------------------------------------


def test_a_group_that_is_too_old_gives_its_credit_back() -> None:
    account = Account(RULES, version=5)
    account.reserve(3)
    assert account.admit(group(1, 2)) is Discard.STALE
    assert account.admit(group(2, 5, 6)) is Discard.UNKNOWN_VERSION
    assert account.admit(group(3, 3, 5)) is None
    assert (account.reserved, account.buffered, account.credits_left) == (0, 1, 7)
    assert account.discarded == {Discard.STALE: 1, Discard.UNKNOWN_VERSION: 1}


def test_what_the_step_under_way_will_make_too_old_is_refused_at_once() -> None:
    account = filled(5, 5, 5, 5, version=5)
    account.reserve(2)
    account.consume()
    assert account.admit(group(8, 3)) is Discard.STALE
    assert account.admit(group(9, 4)) is None


def test_what_was_not_granted_is_our_own_mistake() -> None:
    account = Account(RULES)
    with pytest.raises(LocalProtocolError):
        account.admit(group(1, 0))
    account.reserve(2)
    assert account.admit(group(1, 0)) is None
    with pytest.raises(LocalProtocolError):
        account.admit(group(1, 0))
    with pytest.raises(LocalProtocolError):
        account.release(2, Discard.EXPIRED)


def test_a_batch_is_whole_and_the_oldest_come_first() -> None:
    account = filled(5, 4, 5, version=5)
    assert account.consume() == ()
    account = filled(5, 4, 3, 5, 4, 3, version=5)
    assert [g.group_id[0] for g in account.consume()] == [2, 5, 1, 4]
    assert account.consumed_by_staleness == {2: 2, 1: 2}
    with pytest.raises(LocalProtocolError):
        account.consume()


def test_a_new_version_purges_what_it_makes_too_old() -> None:
    account = filled(3, 5, 3, 4, version=5)
    assert [g.oldest for g in account.finish_step(6, 0.0)] == [3, 3]
    assert (account.buffered, account.discarded) == (2, {Discard.OVERTAKEN: 2})
    with pytest.raises(LocalProtocolError):
        account.finish_step(5, 0.0)


def test_a_step_that_came_to_nothing_leaves_the_version() -> None:
    account = filled(5, 5, 5, 5, version=5)
    account.consume()
    account.finish_step(5, 0.0)
    assert (account.version, account.training, account.step_s(9.0)) == (5, False, None)


# --- across a restart ------------------------------------------------------------------------


def restored(account: Account, rules: StalenessRules = RULES, now: float = 0.0) -> Account:
    record = msgpack.unpackb(msgpack.packb(account.to_record(now)), strict_map_key=False)
    return Account.from_record(rules, record, 1_000_000.0)


def test_a_record_holds_everything_and_no_point_in_time() -> None:
    account = filled(4, 5, 5, 5, 3, version=5)
    account.consume()
    account.finish_step(6, 10.0)
    account.finish_step(7, 30.0)
    account.reserve(2)
    account.release(1, Discard.EXPIRED)
    account.set_pacing(1)
    again = restored(account, now=35.0)
    assert again.to_record(1_000_000.0) == account.to_record(35.0)
    assert (again.step_s(1_000_000.0), again.step_s(1_000_100.0)) == (20.0, 105.0)
    assert (again.version, again.reserved, again.pacing) == (7, 1, 1)


def test_a_lower_bound_after_a_restart_holds_at_once() -> None:
    account = filled(3, 4, 5, 5, version=5)
    again = restored(account, StalenessRules(1, 3, 3))
    assert (again.buffered, again.credits_left) == (3, 0)
    assert again.discarded == {Discard.OVERTAKEN: 1}
    assert {g.oldest for g in again.consume()} == {4, 5}


def test_a_buffer_from_elsewhere_does_not_get_past_consumption() -> None:
    """What is over the bound is not consumed, however it came to be buffered."""
    account = filled(5, 5, 5, 5, version=5)
    account._buffer[b"old"] = BufferedGroup(b"old", "w", 2, 5)
    assert b"old" not in {g.group_id for g in account.consume()}
    assert account.discarded == {Discard.OVERTAKEN: 1}


@pytest.mark.parametrize("record", [{}, {"version": 1}, [], None])
def test_no_record_is_our_own_mistake(record) -> None:
    with pytest.raises(LocalProtocolError, match="no record of Account"):
        Account.from_record(RULES, record, 0.0)
