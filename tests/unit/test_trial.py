"""Who on trial gets the next credit, and what a worker has to show to be on trial no more."""

import pytest

from swarm.leases import known_workers
from swarm.leases.known_workers import (
    BEHIND_S,
    CREDIT_LASTS_S,
    ESTABLISHED,
    LOST_SHARE,
    WAITS_S,
    Allowance,
    CreditLimit,
    KnownWorker,
    Trial,
    TrialQueue,
    TrialsOut,
    WorkerOrigin,
)
from swarm.plain_records import record_of, restored

ALLOWANCE = Allowance(short=8, least=1)
HOME, BLOCK = WorkerOrigin("10.0.0.7"), WorkerOrigin("198.51.100.0/24", 0.25)
SHORT, LONG = Trial(HOME, is_long=False), Trial(HOME, is_long=True)
NOTHING = TrialsOut()


def queue_of(*workers: str, where: WorkerOrigin = HOME) -> TrialQueue:
    queue = TrialQueue()
    for at, worker in enumerate(workers):
        queue.ask(worker, Trial(where, is_long=False), 0.0, float(at))
    return queue


# --- parts -----------------------------------------------------------------------------------


def test_each_part_has_an_end() -> None:
    assert (ALLOWANCE.long, ALLOWANCE.total) == (4, 12)
    out = TrialsOut.of([(SHORT, 5), (LONG, 3)])
    assert ALLOWANCE.left(SHORT, out) == 3
    assert ALLOWANCE.left(LONG, out) == 1
    assert ALLOWANCE.left_after(2, SHORT, out) == 1
    assert ALLOWANCE.left_after(4, SHORT, out) < 0


def test_a_place_gets_its_part_and_one_credit_at_least() -> None:
    mine = Trial(BLOCK, is_long=False)
    assert ALLOWANCE.left(mine, NOTHING) == 3  # a quarter of 12
    assert ALLOWANCE.left(mine, TrialsOut.of([(mine, 2)])) == 1
    assert ALLOWANCE.left(mine, TrialsOut.of([(mine, 2), (Trial(BLOCK, is_long=True), 1)])) == 0
    assert ALLOWANCE.left(mine, TrialsOut.of([(SHORT, 7)])) == 1  # others take none of its part
    assert (
        Allowance(short=2, least=1).left(Trial(WorkerOrigin("b", 0.01), is_long=False), NOTHING)
        == 1
    )


# --- the queue --------------------------------------------------------------------------------


def ahead(queue: TrialQueue, worker: str, now: float, out: TrialsOut = NOTHING) -> int:
    return queue.ahead_of(worker, ALLOWANCE, out, now)


def test_the_line_is_in_the_order_of_coming_however_often_one_asks() -> None:
    queue = queue_of("a", "b", "c")
    for _ in range(100):
        queue.ask("c", SHORT, 0.0, 3.0)
    assert [ahead(queue, each, 3.0) for each in "abc"] == [0, 1, 2]
    queue.leave("a")
    assert [ahead(queue, each, 3.0) for each in "bc"] == [0, 1]
    queue.ask("a", SHORT, 0.0, 4.0)  # with another key it would be no sooner
    assert ahead(queue, "a", 4.0) == 2


def test_who_stops_asking_loses_its_turn() -> None:
    queue = queue_of("a", "b")
    queue.ask("b", SHORT, 0.0, WAITS_S)
    assert ahead(queue, "b", WAITS_S) == 0
    assert queue.count(WAITS_S) == 1
    queue.ask("a", SHORT, 0.0, WAITS_S + 1.0)
    assert ahead(queue, "a", WAITS_S + 1.0) == 1


def test_what_a_place_holds_puts_its_workers_back_and_not_for_ever() -> None:
    queue = TrialQueue()
    queue.ask("crowd", Trial(HOME, is_long=False), 0.0, 0.0)
    queue.ask("other", Trial(WorkerOrigin("10.0.0.9"), is_long=False), 0.0, 1.0)
    out = TrialsOut.of([(SHORT, 2)])
    assert (ahead(queue, "crowd", 1.0, out), ahead(queue, "other", 1.0, out)) == (1, 0)
    queue.leave("other")
    late = 2 * BEHIND_S + 1.0
    queue.ask("crowd", Trial(HOME, is_long=False), 0.0, 9.0)
    for now in range(9, int(late) + 1, 9):
        queue.ask("crowd", Trial(HOME, is_long=False), 0.0, float(now))
    queue.ask("other", Trial(WorkerOrigin("10.0.0.9"), is_long=False), 0.0, late)
    assert ahead(queue, "crowd", late, out) == 0


def test_who_could_not_be_served_keeps_nobody_waiting() -> None:
    queue = TrialQueue()
    mine = Trial(BLOCK, is_long=False)
    queue.ask("full", mine, 0.0, 0.0)  # its block holds all that it may
    queue.ask("slow", LONG, 0.0, 0.0)  # served from another part
    queue.ask("next", SHORT, 0.0, 1.0)
    assert ahead(queue, "next", 1.0, TrialsOut.of([(mine, 3)])) == 0


def test_of_those_that_wasted_credits_who_wasted_less_comes_first() -> None:
    queue = TrialQueue()
    queue.ask("hoarder", LONG, 360.0, 0.0)
    queue.ask("slow", LONG, 90.0, 1.0)
    assert (ahead(queue, "slow", 1.0), ahead(queue, "hoarder", 1.0)) == (0, 1)


def test_a_full_line_forgets_who_has_gone_and_takes_nobody_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_workers, "WAITING_MAX", 2)
    queue = queue_of("a", "b", "c")
    assert ahead(queue, "c", 2.0) == 2  # not in it, and behind all
    assert queue.count(2.0) == 2
    queue.ask("b", SHORT, 0.0, WAITS_S)
    queue.ask("c", SHORT, 0.0, WAITS_S)  # `a` has gone
    assert ahead(queue, "c", WAITS_S) == 1


# --- standing --------------------------------------------------------------------------------


def test_each_admitted_group_is_worth_a_credit_up_to_a_limit() -> None:
    limit = CreditLimit()
    assert limit.is_on_trial
    limit.delivered(3, 1.0)
    assert (limit.is_on_trial, limit.credits) == (False, 1.0)
    for _ in range(5):
        limit.delivered(3, 2.0)
    assert limit.credits == 3.0


def test_leases_that_come_to_nothing_put_a_worker_back_on_trial() -> None:
    limit = CreditLimit(credits=128.0)
    lost = 0
    while not limit.is_on_trial:
        limit.lost(1.0)
        lost += 1
    assert lost == 4
    half = CreditLimit(credits=8.0)
    half.lost(0.5)
    assert half.credits == 8.0 * (1.0 - 0.5 * LOST_SHARE)


def test_what_was_delivered_long_ago_is_no_proof() -> None:
    limit = CreditLimit()
    limit.delivered(8, 10.0)
    limit.asks(10.0 + CREDIT_LASTS_S - 1.0)
    assert not limit.is_on_trial
    limit.asks(10.0 + CREDIT_LASTS_S)
    assert limit.is_on_trial


def test_a_worker_comes_back_from_its_record() -> None:
    known = KnownWorker(done=4.0, failed=1.0, busy_s=8.0, admitted=5, refused=2, turnaround_s=3.0)
    known.limit = CreditLimit(5.0, wasted_s=90.0, at=20.0)
    record = record_of(known, 30.0)
    again = restored(KnownWorker, record, 100.0)
    assert record_of(again, 100.0) == record
    assert again.limit == CreditLimit(5.0, wasted_s=90.0, at=90.0)
    assert CreditLimit(ESTABLISHED).is_established
