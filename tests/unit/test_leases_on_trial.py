"""Leases of workers that have nothing to show: what they hold together, and
how a worker gets more."""

from dataclasses import replace

import pytest

from node.config.run import LearnerRules
from node.run.learner import lease_rules
from swarm.errors import LocalProtocolError
from swarm.leases import lease_table
from swarm.leases.known_workers import WorkerOrigin
from swarm.leases.lease_table import Lease, LeaseBook, LeaseRules
from swarm.leases.staleness import Account, Denial, Discard, StalenessRules
from tests.unit.leases_support import (
    deliver,
    granted,
    group_of,
    open_book,
    prove,
    restored,
)
from tests.wire_samples import ALICE

SMALL = LeaseRules(first_s=30.0, slack=3.0, life_s_min=300.0, groups_max=64)
BUSY = StalenessRules(bound=4, groups_per_step=16, groups_max=32)
SHORT, LONG = 16, 8  # credits on trial by these rules, in leases as long as a first one or longer


def take(
    book: LeaseBook, names: list[str], now: float, place: WorkerOrigin | None = None
) -> list[Lease]:
    """What these get who ask for all that they can get."""
    asked = [book.request(name, 0, now, place) for name in names for _ in range(3)]
    return [each for each in asked if isinstance(each, Lease)]


def keys(count: int, of: str = "key") -> list[str]:
    return [f"{of} {number}" for number in range(count)]


def test_all_that_never_delivered_hold_a_part_together_and_keep_nobody_else_waiting() -> None:
    book = open_book(SMALL, BUSY)
    prove(book, "w")
    taken = take(book, keys(30), 0.0)
    assert sum(lease.groups for lease in taken) == book.account.on_trial == SHORT
    assert book.request("late", 0, 0.0) is Denial.TRIAL_FULL
    assert book.account.credits_left == 32
    deliver(book, granted(book), 5.0)
    state = book.trial_state(0.0)
    assert (state.held, state.most, state.workers) == (SHORT, SHORT + LONG, 8)
    assert (state.places, state.waiting) == (8, 23)
    assert not book.trial_state(100.0).waiting  # they have stopped asking


def test_new_keys_gain_nothing() -> None:
    """Ten minutes, a new key for each request: never more at a time, and a worker that has
    delivered gets all that it asks for."""
    book = open_book(SMALL, BUSY)
    prove(book, "w", credits=32.0)
    for second in range(600):
        take(book, keys(3, f"at {second}"), float(second))
        assert book.account.on_trial <= SHORT
        assert book.account.credits_left == 32
    assert isinstance(book.request("w", 0, 600.0), Lease)


def test_without_the_cap_they_take_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    out = property(lambda account: account.reserved + account.buffered)
    monkeypatch.setattr(Account, "_counted_on", out)
    book = open_book(replace(SMALL, trial_share=1.0), BUSY)
    prove(book, "w", credits=32.0)
    assert len(take(book, keys(30), 0.0)) == 32
    assert book.request("w", 0, 0.0) is Denial.NO_CREDIT


def test_a_place_holds_a_part_of_that_and_others_the_rest() -> None:
    book = open_book(SMALL, BUSY)
    block = WorkerOrigin("198.51.100.0/24", 0.25)
    assert len(take(book, keys(30), 0.0, block)) == (SHORT + LONG) // 4
    elsewhere = take(book, keys(30, "other"), 0.0, WorkerOrigin("203.0.113.0/24", 0.25))
    assert len(elsewhere) == (SHORT + LONG) // 4
    assert book.trial_state(0.0).places == 2


def test_what_is_never_delivered_is_soon_free_and_goes_to_who_came_first() -> None:
    book = open_book(SMALL, BUSY)
    taken = take(book, keys(20), 0.0)
    assert {lease.deadline for lease in taken} == {90.0}
    for now in range(1, 90, 5):
        assert book.request("honest", 0, float(now)) is Denial.TRIAL_FULL
        take(book, keys(2, f"later, at {now}"), float(now))
    lease = granted(book, "honest", now=90.0)  # before all that came after it
    deliver(book, lease, 96.0)
    assert not book._workers["honest"].limit.is_on_trial
    take(book, keys(40, "still more"), 96.0)
    assert isinstance(book.request("honest", 0, 97.0), Lease)


def test_who_cannot_use_a_credit_keeps_nobody_waiting_for_it() -> None:
    """Those at the head of the line have a version that would come too late."""
    book = open_book(SMALL, BUSY)
    take(book, keys(30), 0.0)
    book.account.finish_step(9, 1.0)
    stale = keys(20, "stale")
    for name in stale:
        assert book.request(name, 0, 1.0) is Denial.WOULD_BE_STALE
    assert book.request("honest", 9, 80.0) is Denial.TRIAL_FULL
    for name in stale:
        assert book.request(name, 0, 85.0) is Denial.WOULD_BE_STALE
    assert isinstance(book.request("honest", 9, 90.0), Lease)


def test_who_lost_a_lease_is_served_from_another_part() -> None:
    """Keys that are kept take no first leases away, and a slow machine still gets a longer one."""
    book = open_book(SMALL, BUSY)
    crowd = keys(16)
    first = granted(book, "slow", now=0.0)
    assert len(take(book, crowd, 0.0)) == SHORT - 1
    book.expire(90.0)
    second = granted(book, "slow", now=90.0)
    assert second.deadline - second.granted_at == 2 * (first.deadline - first.granted_at) == 180.0
    for now in range(90, 110):
        take(book, crowd, float(now))
    assert book.account.on_trial == SHORT + LONG  # half of them had had no lease yet
    book.expire(200.0)
    take(book, crowd, 200.0)
    assert book.account.on_trial == LONG
    assert len(take(book, keys(16, "newcomer"), 201.0)) == SHORT
    deliver(book, second, 202.0)
    assert not book._workers["slow"].limit.is_on_trial


def test_what_a_worker_holds_grows_with_what_it_delivered_and_is_lost_with_leases() -> None:
    book = open_book(SMALL, StalenessRules(1000, 16, 1000))
    now, sizes = 0.0, []
    for _ in range(10):
        pair = [book.request("w", book.account.version, now) for _ in range(2)]
        held = [lease for lease in pair if isinstance(lease, Lease)]
        delivered = book._workers["w"].admitted
        assert sum(lease.groups for lease in held) <= max(2, delivered)  # two at first, on trial
        sizes.append(sum(lease.groups for lease in held))
        for lease in held:
            now += 0.1 * lease.groups
            deliver(book, lease, now, (book.account.version,))
    assert sizes[:6] == [2, 2, 4, 8, 16, 32]
    assert max(sizes) == sizes[-1] == 128
    for left in (32.0, 8.0, 2.0):
        lease = granted(book, "w", book.account.version, now)
        now = lease.deadline
        book.expire(now)
        assert book._workers["w"].limit.credits == left
    assert granted(book, "w", book.account.version, now).groups == 1


def test_where_leases_are_to_last_first_ones_do() -> None:
    lives = {}
    for life_s in (30, 300, 900):
        rules = lease_rules(LearnerRules(peer=ALICE.peer_id, lease_life_s=life_s))
        assert rules.life_s_min == life_s
        lives[life_s] = rules.first_life_s
    assert lives == {30: 90.0, 300: 90.0, 900: 270.0}


def test_one_cheap_group_buys_one_credit_for_a_short_time() -> None:
    book = open_book(SMALL, BUSY)
    deliver(book, granted(book, now=0.0), 0.1)  # ten a second, it seems
    assert not book._workers["w"].limit.is_on_trial
    lease = granted(book, now=0.2)
    assert (lease.groups, lease.deadline - lease.granted_at) == (1, 90.0)
    assert book.request("w", 0, 0.3) is Denial.LEASES_OPEN
    book.expire(lease.deadline)
    assert book._workers["w"].limit.is_on_trial


def test_giving_back_costs_no_standing() -> None:
    book = open_book(SMALL, BUSY)
    prove(book, "w", credits=8.0)
    granted(book)
    book.give_back("w", 1.0)
    granted(book, "x")
    book.give_back("x", 1.0)
    assert book._workers["w"].limit.credits == 8.0
    assert book._workers["x"].limit.wasted_s == 0.0
    assert book.account.on_trial == 0


def test_groups_that_grew_too_old_on_their_way_cost_no_standing() -> None:
    book = open_book(SMALL, StalenessRules(0, 16, 32))
    prove(book, "w", credits=8.0)
    lease = granted(book)
    book.account.finish_step(1, 1.0)
    for place in range(lease.groups):
        assert book.submit(group_of(lease, place), 2.0).reason is Discard.STALE
    assert book._workers["w"].limit.credits == 8.0


def test_who_delivered_stays_known_when_keys_fill_the_accounts(monkeypatch) -> None:
    monkeypatch.setattr(lease_table, "WORKERS_MAX", 4)
    book = open_book(SMALL, BUSY)
    prove(book, "w")
    for number in range(10):
        book.stand_by(f"key {number}", 0, float(number))
    assert "w" in book._workers
    assert len(book._workers) == 4


def test_trials_survive_a_restart() -> None:
    book = open_book()
    deliver(book, granted(book, "known"), 1.0)
    lease = granted(book, "new", now=2.0)
    again = restored(book, 3.0, 50.0)
    assert again.account.on_trial == lease.groups
    assert again._workers["known"].limit.credits == 4.0
    again.expire(1e3)
    assert (again.account.on_trial, again.account.reserved) == (0, 0)
    assert again._workers["new"].limit.wasted_s == pytest.approx(30.0)


def test_a_record_whose_trials_contradict_each_other_is_refused() -> None:
    book = open_book()
    granted(book)
    book.account.on_trial = 1
    with pytest.raises(LocalProtocolError, match="4 on trial; the account says 4 and 1"):
        restored(book, 0.0, 0.0)
