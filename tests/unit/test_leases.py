"""Leases: what a worker is given, and what it may hand in."""

from dataclasses import replace

import pytest

from swarm.errors import ConfigError, LocalProtocolError
from swarm.leases import known_workers, lease_table
from swarm.leases.known_workers import CreditLimit, KnownWorker
from swarm.leases.lease_table import Answer, LeaseBook, LeaseRules, SubmittedGroup, task_seeds
from swarm.leases.staleness import Denial, Discard, StalenessRules
from tests.unit.leases_support import (
    PATIENT,
    RULES,
    SECRET,
    STALENESS,
    deliver,
    granted,
    group_of,
    open_book,
    prove,
    restored,
)


def reason(book: LeaseBook, submission: SubmittedGroup, now: float = 1.0) -> Discard | None:
    """The answer, and that asking before gave the same one and changed nothing."""
    before = book.to_record(0.0)
    judged = book.judge(submission, now)
    assert book.to_record(0.0) == before
    answer = book.submit(submission, now)
    assert judged is None or judged == answer
    return answer.reason


# --- tasks -----------------------------------------------------------------------------------


def test_the_tasks_of_a_lease_are_the_same_for_whoever_has_it_and_for_no_other() -> None:
    lease = granted(open_book())
    assert lease.seeds == task_seeds(lease.stream, 4) == granted(open_book()).seeds
    assert all(0 <= seed < 2**62 for seed in lease.seeds)
    assert tuple(lease.seed(place) for place in range(4)) == lease.seeds
    assert lease.seed(-1) == lease.seed(4) == -1
    others = [
        granted(open_book(), worker="x"),
        granted(open_book(run_id="other")),
        granted(open_book(secret=b"another secret of 24 B..")),
        granted(open_book(start=2)),
    ]
    book = open_book()
    granted(book)
    others.append(granted(book))  # the second lease of one worker
    for other in others:
        assert other.lease_id != lease.lease_id
        assert set(other.seeds).isdisjoint(lease.seeds)


def test_parts_of_a_lease_name_do_not_run_into_each_other() -> None:
    one = granted(open_book(run_id="ab"), worker="c")
    other = granted(open_book(run_id="a"), worker="bc")
    assert one.lease_id != other.lease_id


def test_the_seeds_stay_what_they_are() -> None:
    """Written down: a worker and a learner of different releases agree on them."""
    assert task_seeds("00" * 32, 2) == (SEED_ONE, SEED_TWO)


SEED_ONE, SEED_TWO = 2266549101634346962, 23798641717292155


def test_a_short_secret_is_our_own_mistake() -> None:
    with pytest.raises(LocalProtocolError):
        open_book(secret=b"short")


# --- answers ---------------------------------------------------------------------------------


def test_each_refusal_has_its_name() -> None:
    book = open_book()
    book.account.finish_step(5, 0.0)
    lease = granted(book, version=4)
    assert reason(book, group_of(lease, 0, lease_id=b"?" * 16)) is Discard.UNKNOWN_LEASE
    assert reason(book, group_of(lease, 0, worker="x")) is Discard.OTHER_WORKER
    assert reason(book, group_of(lease, 0, seed=7)) is Discard.NOT_ASSIGNED
    assert reason(book, group_of(lease, 0, (4, 5))) is None
    assert reason(book, group_of(lease, 0, (4,), group_id=b"better")) is Discard.OTHER_GROUP
    same = group_of(lease, 0).group_id
    assert reason(book, group_of(lease, 1, (4,), group_id=same)) is Discard.DUPLICATE
    assert book.account.reserved == 3  # all that was refused so far may still come
    assert reason(book, group_of(lease, 1, (6,))) is Discard.UNKNOWN_VERSION
    assert reason(book, group_of(lease, 2, (3, 5))) is Discard.OLDER_THAN_LEASE
    assert book.submit(group_of(lease, 3, (5,)), 1.0, "reward is not 1").reason is Discard.FAULTY
    assert book.account.reserved == 0
    late = granted(book, worker="y", version=5)
    assert reason(book, group_of(late, 0, (5,)), late.deadline) is Discard.LATE
    book.expire(late.deadline)
    assert reason(book, group_of(late, 1, (5,)), late.deadline) is Discard.LATE
    every = {why: 1 for why in Discard if why not in (Discard.STALE, Discard.OVERTAKEN)}
    every |= {Discard.LATE: 2, Discard.EXPIRED: 4}
    del every[Discard.RETURNED]
    assert book.account.discarded == every


def test_a_group_that_grew_too_old_on_its_way_is_refused() -> None:
    book = open_book()
    lease = granted(book)
    book.account.finish_step(3, 0.0)
    assert reason(book, group_of(lease, 0, (0, 3))) is Discard.STALE
    assert reason(book, group_of(lease, 1, (1, 3))) is None  # the worker had swapped in time


def test_the_same_submission_has_the_same_answer_and_counts_once() -> None:
    book = open_book()
    lease = granted(book)
    good, bad = group_of(lease, 0), group_of(lease, 1)
    first = [book.submit(good, 1.0), book.submit(bad, 1.0, "edited text")]
    before = book.account.to_record(0.0)
    for now in (2.0, lease.deadline, 1e9):
        book.expire(now)
        again = [book.submit(good, now), book.submit(bad, now)]
        assert again == first == [Answer(None), Answer(Discard.FAULTY, "edited text")]
        assert [each.repeated for each in again] == [True, True]
    assert book.repeated == 6
    assert (before["_buffer"], book.account.discarded[Discard.FAULTY]) == (
        book.account.to_record(0.0)["_buffer"],
        1,
    )


def test_a_forgotten_lease_is_unknown_and_its_groups_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(lease_table, "LEASES_REMEMBERED_MAX", 2)
    book = open_book()
    first = granted(book)
    deliver(book, first, 1.0)
    deliver(book, granted(book, worker="a"), 1.0)
    assert book.submit(group_of(first, 0), 1.0).repeated
    deliver(book, granted(book, worker="b"), 1.0)
    assert reason(book, group_of(first, 0)) is Discard.UNKNOWN_LEASE
    assert book.account.buffered == 12
    assert len(book._places) == 8  # of the two that are remembered


# --- credits ---------------------------------------------------------------------------------


def test_expiry_and_leaving_return_the_credits_of_what_is_missing() -> None:
    book = open_book()
    prove(book, "w", "x")
    lease = granted(book)
    book.submit(group_of(lease, 0), 1.0)
    assert book.account.credits_left == 60
    assert lease.deadline == 30.0
    assert book.expire(29.9) == []
    assert book.expire(30.0) == [lease]
    assert (book.account.credits_left, book.account.discarded) == (63, {Discard.EXPIRED: 3})
    second = granted(book, now=30.0)
    other = granted(book, worker="x", now=30.0)
    assert book.give_back("w", 31.0) == [second]
    assert book.account.discarded[Discard.RETURNED] == second.groups
    assert book.open_leases("x") == [other]
    assert book.expire(other.deadline) == [other]


def test_denials_have_names_and_are_counted() -> None:
    rules = LeaseRules(first_groups=32, groups_max=32, open_max=1)
    book = open_book(rules, StalenessRules(2, 32, 64))
    prove(book, "w", "x", "y")
    assert book.request("w", 1, 0.0) is Denial.UNKNOWN_VERSION
    granted(book)
    assert book.request("w", 0, 0.0) is Denial.LEASES_OPEN
    granted(book, worker="x")
    assert book.request("y", 0, 0.0) is Denial.NO_CREDIT
    book.expire(1e6)
    book.account.finish_step(3, 1e6)
    assert book.request("y", 0, 1e6) is Denial.WOULD_BE_STALE
    assert sorted(book.denied) == sorted(
        [Denial.UNKNOWN_VERSION, Denial.LEASES_OPEN, Denial.NO_CREDIT, Denial.WOULD_BE_STALE]
    )


def test_a_large_lease_that_would_be_late_becomes_a_small_one() -> None:
    book = open_book(LeaseRules(target_s=100.0, groups_max=32), StalenessRules(0, 40, 64))
    worker = KnownWorker(done=8.0, busy_s=40.0)  # 0.2 a second: 21 groups in 100 s
    worker.limit = CreditLimit(64.0)
    book._workers["w"] = worker
    assert granted(book).groups == 21
    book.expire(1e6)
    worker.done, worker.busy_s = 8.0, 40.0
    book.account.finish_step(1, 1e6)
    book.account.finish_step(2, 1e6 + 30.0)
    assert granted(book, version=2, now=1e6 + 30.0).groups == 3  # 7 would take 35 s


def test_a_newcomer_is_measured_where_steps_are_short() -> None:
    book = open_book(LeaseRules(first_s=120.0, groups_max=8), StalenessRules(3, 8, 64))
    for step in range(1, 4):
        book.account.finish_step(step, 3.0 * step)  # a step takes 3 s
    lease = granted(book, version=3, now=9.0)
    assert lease.groups == 1  # no more than that is risked on it
    assert lease.deadline >= 9.0 + 120.0
    book.expire(lease.deadline)
    for step in range(4, 200):
        book.account.finish_step(step, 3.0 * step)
    assert book.request("w", 199, 600.0) is Denial.WOULD_BE_STALE  # it was in vain


def test_workers_beyond_the_limit_make_room_or_are_denied(monkeypatch) -> None:
    monkeypatch.setattr(lease_table, "WORKERS_MAX", 2)
    book = open_book()
    first = granted(book, worker="a")
    granted(book, worker="b")
    assert book.request("c", 0, 0.0) is Denial.WORKERS_FULL
    deliver(book, first, 1.0)
    granted(book, worker="c")
    assert set(book._workers) == {"b", "c"}
    assert not reason(book, group_of(first, 0))  # still answered, though its worker is forgotten


# --- rates -----------------------------------------------------------------------------------


def work(book: LeaseBook, worker: str, now: float, seconds_each: float, leases_: int) -> float:
    for _ in range(leases_):
        lease = granted(book, worker, book.account.version, now)
        now += seconds_each * lease.groups
        deliver(book, lease, now, (book.account.version,))
        while book.account.consume():
            book.account.finish_step(book.account.version + 1, now)
    return now


def test_leases_follow_the_measured_rate() -> None:
    book = open_book(staleness=PATIENT)
    prove(book, "fast", "slow")
    work(book, "fast", 0.0, 2.0, 4)
    work(book, "slow", 1e3, 7.0, 4)
    assert book.rates() == pytest.approx({"fast": 1 / 2.0, "slow": 1 / 7.0})
    version = book.account.version
    assert granted(book, "fast", version, 1e4).groups == 31  # what it does in 60 s, and one more
    slow = granted(book, "slow", version, 1e4)
    assert slow.groups == 9
    assert slow.deadline - slow.granted_at == pytest.approx(3 * 9 * 7.0)


def test_a_worker_slower_than_its_first_lease_gets_longer_ones_up_to_a_limit() -> None:
    book, now, lives = open_book(), 0.0, []
    for _ in range(8):
        lease = granted(book, now=now)
        lives.append(round(lease.deadline - now, 6))
        now = lease.deadline
        book.expire(now)
    assert lives == sorted(lives)
    assert (lives[0], lives[-1]) == (30.0, RULES.life_s_max)


def test_two_leases_that_end_together_are_worth_what_they_took_together() -> None:
    """Whatever the order and however close: else a worker would look as fast as it likes."""
    book = open_book(staleness=PATIENT)
    now = 0.0
    for _ in range(10):
        version = book.account.version
        pair = [granted(book, "w", version, now) for _ in range(2)]
        now += 2.0 * sum(lease.groups for lease in pair)
        now = min(now, min(lease.deadline for lease in pair) - 1e-3)
        started = pair[0].granted_at
        for lease in pair:
            deliver(book, lease, now, (version,))
            now += 1e-6
        while book.account.consume():
            book.account.finish_step(book.account.version + 1, now)
        done = sum(lease.groups for lease in pair)
        assert book.rates()["w"] <= 1.5 * done / (now - started)


def test_what_is_not_admitted_or_not_delivered_makes_no_worker_fast() -> None:
    book = open_book()
    lease = granted(book)
    for place in range(4):  # at once, and made up
        book.submit(group_of(lease, place), 0.001, "no completion of this policy")
    assert book.rates() == {"w": 0.0}
    assert granted(book).groups == 1
    book = open_book()
    lease = granted(book)
    book.submit(group_of(lease, 0), 0.001)  # the easy one alone
    book.expire(lease.deadline)
    assert book.rates() == {"w": pytest.approx(1 / lease.deadline)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"target_s": 0.0},
        {"first_s": 0.0},
        {"first_groups": 0},
        {"first_groups": 65},
        {"slack": 0.5},
        {"life_s_min": 0.0},
        {"life_s_min": 4000.0},
        {"groups_max": 257},
        {"open_max": 0},
    ],
)
def test_rules_that_cannot_be_are_refused_by_name(wrong) -> None:
    with pytest.raises(ConfigError, match=f"lease {next(iter(wrong))} = "):
        LeaseRules(**wrong)


# --- across a restart ------------------------------------------------------------------------


def test_leases_answers_rates_and_counters_survive_a_restart() -> None:
    book = open_book()
    work(book, "w", 0.0, 2.0, 2)
    lease = granted(book, version=book.account.version, now=100.0)
    taken = group_of(lease, 0, (book.account.version,))
    assert book.submit(taken, 101.0).admitted
    book.submit(group_of(lease, 1), 101.0, "wrong")
    book.request("x", 99, 101.0)
    again = restored(book, 110.0, 5.0)
    expected = book.to_record(110.0)
    for each in expected["workers"].values():  # nobody could ask meanwhile
        each.update(break_s=0.0, heard_at=None, version=0)
    assert again.to_record(5.0) == expected
    assert again.submit(taken, 6.0).repeated
    assert again.account.buffered == book.account.buffered
    [same] = again.open_leases("w")
    assert same.deadline - 5.0 == pytest.approx(lease.deadline - 110.0)
    assert reason(again, group_of(lease, 2, (book.account.version,)), 6.0) is None
    assert again.expire(same.deadline) == [same]
    assert again.account.reserved == 0


def test_a_lease_after_a_restart_is_none_that_was_lost() -> None:
    book = open_book()
    record_time = book.to_record(0.0)
    lost = granted(book)
    again = LeaseBook.from_record(
        record_time,
        rules=RULES,
        staleness_rules=STALENESS,
        run_id="run",
        secret=SECRET,
        start=2,
        now=0.0,
    )
    new = granted(again)
    assert set(new.seeds).isdisjoint(lost.seeds)
    assert reason(again, group_of(lost, 0)) is Discard.UNKNOWN_LEASE


def test_a_record_that_contradicts_itself_is_refused() -> None:
    book = open_book()
    granted(book)
    book.account.reserved = 3
    with pytest.raises(LocalProtocolError, match=r"hold 4 credits.*account says 3 and 4"):
        restored(book, 0.0, 0.0)


@pytest.mark.parametrize("record", [{}, [], {"account": {}}])
def test_no_record_is_our_own_mistake(record) -> None:
    with pytest.raises(LocalProtocolError, match="no record"):
        LeaseBook.from_record(
            record,
            rules=RULES,
            staleness_rules=STALENESS,
            run_id="run",
            secret=SECRET,
            start=2,
            now=0.0,
        )


def rate_of(book: LeaseBook, worker: str = "w") -> float:
    return book.rates()[worker]


def test_a_break_between_leases_lowers_the_rate_and_a_denial_does_not() -> None:
    book = open_book(staleness=PATIENT)
    deliver(book, granted(book, now=0.0), 4.0)  # 4 groups in 4 s
    assert rate_of(book) == pytest.approx(1.0)
    resting = open_book(staleness=PATIENT)
    deliver(resting, granted(resting, now=0.0), 4.0)
    lease = granted(resting, now=10.0)  # it asks 6 s later
    deliver(resting, lease, 10.0 + lease.groups)
    kept = 1 - known_workers.RATE_EWMA_SHARE
    expected = (kept * 4 + lease.groups) / (kept * 4 + 6 + lease.groups)
    assert rate_of(resting) == pytest.approx(expected)
    book.stand_by("w", 0, 4.0)  # it asks at once, and is not wanted before 10.0
    lease = granted(book, now=10.0)
    deliver(book, lease, 10.0 + lease.groups)
    assert rate_of(book) == pytest.approx(1.0)


def test_who_was_away_for_long_was_not_slow_for_so_long() -> None:
    book = open_book(staleness=PATIENT)
    deliver(book, granted(book, now=0.0), 4.0)
    lease = granted(book, now=1e5)
    deliver(book, lease, 1e5 + lease.groups)
    assert rate_of(book) > 4 / (4 + known_workers.BREAK_S_MAX + lease.groups) * 0.7


def test_a_death_says_nothing_of_speed_and_two_lost_leases_in_a_row_do() -> None:
    book = open_book(staleness=PATIENT)
    deliver(book, granted(book, now=0.0), 4.0)
    lost = granted(book, now=4.0)
    book.expire(lost.deadline)
    assert rate_of(book) == pytest.approx(1.0)
    (account,) = book.accounts()
    assert account.known.failed_share > 0.5
    back = granted(book, now=lost.deadline + 40.0)  # the time until it is back is no break
    deliver(book, back, lost.deadline + 40.0 + back.groups)
    assert rate_of(book) == pytest.approx(1.0)


def test_to_lose_every_other_lease_does_not_pay() -> None:
    book, now = open_book(staleness=StalenessRules(1000, 8, 60_000)), 0.0
    for turn in range(20):
        lease = granted(book, now=now)
        now = lease.deadline
        if turn % 2:
            book.expire(now)
        else:
            deliver(book, lease, lease.granted_at + lease.groups)
            now = lease.granted_at + lease.groups
    assert rate_of(book) < 0.5  # of one a second while it works


def test_what_is_said_with_an_impossible_version_counts_for_nothing() -> None:
    book = open_book(staleness=PATIENT)
    deliver(book, granted(book, now=0.0), 4.0)
    assert book.request("w", 2**31 - 1, 5.0) is Denial.UNKNOWN_VERSION
    book.stand_by("w", 2**31 - 1, 5.0)
    lease = granted(book, now=34.0)  # and the break before it does
    deliver(book, lease, 34.0 + lease.groups)
    kept = 4 * (1 - known_workers.RATE_EWMA_SHARE)
    assert rate_of(book) == pytest.approx((kept + lease.groups) / (kept + 30.0 + lease.groups))
    assert book.accounts()[0].known.version == 0


def test_accounts_say_what_is_known_of_each_worker() -> None:
    book = open_book(staleness=PATIENT)
    lease = granted(book, now=0.0)
    book.stand_by("idle", 0, 3.0)
    deliver(book, lease, 8.0)
    after = granted(book, now=8.0)
    accounts = {each.worker: each for each in book.accounts()}
    assert accounts["idle"].known.heard_at == 3.0
    assert accounts["idle"].known.rate is None
    known = accounts["w"].known
    assert (known.admitted, known.refused) == (4, 0)
    assert accounts["w"].leased == after.groups
    assert known.turnaround_s == pytest.approx(8.0)
    again = LeaseBook.from_record(
        book.to_record(9.0),
        rules=RULES,
        staleness_rules=PATIENT,
        run_id="run",
        secret=SECRET,
        start=2,
        now=100.0,
    )
    kept = {each.worker: each for each in again.accounts()}["w"].known
    assert (kept.rate, kept.turnaround_s) == (known.rate, known.turnaround_s)
    assert kept.heard_at is None


def test_a_group_that_nobody_is_to_blame_for_costs_its_worker_nothing() -> None:
    book = open_book()
    lease = granted(book)
    answer = book.submit(group_of(lease, 0), 1.0, "near a limit", blames=False)
    assert answer.reason is Discard.FAULTY
    assert book._workers["w"].refused == 0
    book.submit(group_of(lease, 1), 1.0, "forged")
    assert book._workers["w"].refused == 1


def test_after_a_restart_leases_end_once_their_workers_could_have_delivered() -> None:
    """What came in after the record was written does not come again."""
    book = open_book()
    newcomers = granted(book, worker="new")
    prove(book, "w")
    deliver(book, granted(book), now=4.0)
    lease = granted(book, now=4.0)
    held = book._open[lease.lease_id]
    held.lease = lease = replace(lease, deadline=1_004.0)  # a long one, for an established worker
    again = restored(book, now=5.0, later=105.0)
    left_s = RULES.slack * lease.groups / book.rates()["w"]
    assert again.lease(lease.lease_id).deadline == 105.0 + left_s < lease.deadline
    assert again.lease(newcomers.lease_id).deadline == newcomers.deadline + 100.0  # no rate yet
