"""Who is served next, on a clock of its own; and a whole flood on it."""

import heapq
from collections.abc import Iterable
from contextlib import suppress
from statistics import median

import pytest

from node.verify import fair_queue
from node.verify.fair_queue import (
    BATCH_GROUPS_MAX,
    BATCH_SIZE_MAX,
    HALF_LIFE_S,
    PROVEN_GROUPS,
    UNPROVEN_MAX,
    WAITING_LAST_MAX,
    WAITING_MAX,
    WAITING_PER_PRODUCER_MAX,
    WAITING_UNPROVEN_MAX,
    End,
    FairQueue,
    QueueFull,
    Ticket,
)
from swarm.identity import PeerId

ANN, BEN = PeerId("ann"), PeerId("ben")


def prove(queue: FairQueue[str], *producers: PeerId, now: float = 0.0) -> None:
    for producer in producers:
        for _ in range(PROVEN_GROUPS):
            queue.charge(producer, 0.0, now, End.DONE)
        assert queue.is_proven(producer)


def served(queue: FairQueue[str], now: float = 0.0) -> list[str]:
    found = []
    while batch := queue.pop(now):
        found += [ticket.item for ticket in batch]
    return found


def test_equals_are_served_as_they_came() -> None:
    queue = FairQueue[str]()
    for at, producer in enumerate([ANN, BEN, ANN, PeerId("cid")]):
        queue.add(producer, str(at))
    assert served(queue) == ["0", "1", "2", "3"]
    assert queue.pop(0.0) == []


def test_who_used_less_goes_first_and_what_was_used_fades() -> None:
    queue = FairQueue[str]()
    prove(queue, ANN, BEN)
    queue.charge(ANN, 1.0, 0.0, End.DONE)
    queue.charge(BEN, 0.6, HALF_LIFE_S, End.DONE)
    for producer in (BEN, ANN):
        queue.add(producer, producer)
    assert served(queue, HALF_LIFE_S) == [ANN, BEN]


def test_last_tickets_wait_for_all_others() -> None:
    queue = FairQueue[str]()
    prove(queue, ANN, BEN)
    queue.charge(BEN, 9.0, 0.0, End.OVERRUN)
    queue.add(ANN, "last", last=True)
    queue.add(BEN, "other")
    assert served(queue) == ["other", "last"]


def test_an_overrun_counts_more_than_it_used_and_takes_the_own_account() -> None:
    queue = FairQueue[str]()
    prove(queue, ANN, BEN)
    queue.charge(ANN, 0.5, 0.0, End.OVERRUN)
    queue.charge(BEN, 4.0, 0.0, End.DONE)
    assert not queue.is_proven(ANN)
    queue.add(ANN, "overran")
    queue.add(BEN, "used more")
    assert served(queue) == ["used more", "overran"]


def test_new_keys_share_one_account_and_newcomers_are_not_punished_for_each_other() -> None:
    queue = FairQueue[str]()
    prove(queue, ANN)
    queue.charge(ANN, 0.1, 0.0, End.DONE)
    for number in range(20):
        queue.charge(PeerId(f"key{number}"), 0.5, 0.0, End.OVERRUN)
    queue.add(PeerId("key1"), "overran")
    queue.add(PeerId("key99"), "new")
    queue.add(ANN, "proven")
    assert served(queue) == ["proven", "new", "overran"]


def test_a_doubtful_group_is_remembered_and_proves_nobody() -> None:
    queue = FairQueue[str]()
    prove(queue, ANN)
    for count in range(3):
        assert queue.doubtful(ANN) == count
        queue.charge(ANN, 1.0, 0.0, End.DOUBTFUL)
        assert not queue.is_proven(ANN)
    prove(queue, ANN)
    assert queue.doubtful(ANN) == 0
    queue.charge(BEN, 1.0, 0.0, End.OVERRUN)
    assert queue.doubtful(BEN) == queue.doubtful(PeerId("nobody")) == 0


def test_what_failed_proves_nobody() -> None:
    queue = FairQueue[str]()
    for _ in range(3 * PROVEN_GROUPS):
        queue.charge(ANN, 0.0, 0.0, End.FAILED)
    assert not queue.is_proven(ANN)


def fill(queue: FairQueue[str], producers: Iterable[PeerId], bound: str = "") -> int:
    """How many find room, before this bound is met if there is one."""
    found = 0
    refusals: list[str] = []
    for producer in producers:
        try:
            queue.add(producer, "")
        except QueueFull as error:
            refusals.append(str(error))
            continue
        found += 1
    assert not bound or any(f" groups {bound} wait" in each for each in refusals)
    return found


def test_everything_that_waits_is_bounded() -> None:
    queue = FairQueue[str]()
    for number in range(WAITING_LAST_MAX):
        queue.add(PeerId(f"key{number}"), "", last=True)
    with pytest.raises(QueueFull, match="groups for last wait"):
        queue.add(BEN, "", last=True)
    assert len(served(queue)) == WAITING_LAST_MAX
    assert fill(queue, [ANN] * 100, "of one producer") == WAITING_PER_PRODUCER_MAX
    keys = [PeerId(f"key{number}") for number in range(1_000)]
    assert (
        fill(queue, keys, "of unproven producers")
        == WAITING_UNPROVEN_MAX - WAITING_PER_PRODUCER_MAX
    )
    prove(queue, *keys[500:])
    assert fill(queue, keys[500:], "of all") == WAITING_MAX - WAITING_UNPROVEN_MAX
    assert len(queue) == WAITING_MAX
    ticket, *others = queue.pop(0.0)
    for other in others:
        queue.put_back(other)
    assert len(queue) == WAITING_MAX - 1
    queue.discard(ticket)  # it does not wait any longer: nothing happens
    assert len(queue) == WAITING_MAX - 1


def test_accounts_are_bounded_and_new_keys_push_out_no_proven_producer() -> None:
    queue = FairQueue[str]()
    prove(queue, ANN)
    for number in range(3 * UNPROVEN_MAX):
        queue.charge(PeerId(f"key{number}"), 0.1, 0.0, End.OVERRUN)
    assert queue.is_proven(ANN)
    assert len(queue._unproven) == UNPROVEN_MAX


def items(batch: Iterable[Ticket[str]]) -> list[str]:
    return [ticket.item for ticket in batch]


def test_only_proven_producers_share_a_batch_and_turns_are_kept() -> None:
    queue = FairQueue[str]()
    cid = PeerId("cid")
    prove(queue, ANN, BEN)
    queue.charge(BEN, 1.0, 0.0, End.DONE)
    for at, producer in enumerate([BEN, ANN, BEN, ANN, cid, cid]):
        queue.add(producer, f"{producer}{at}")
    queue.add(ANN, "last", last=True)
    queue.charge(cid, 0.5, 0.0, End.FAILED)
    assert items(queue.pop(0.0)) == ["ann1", "ann3"]  # then comes one that shares no batch
    assert [items(queue.pop(0.0)) for _ in range(4)] == [
        ["cid4"],
        ["cid5"],
        ["ben0", "ben2"],
        ["last"],
    ]
    assert queue.pop(0.0) == []


def test_a_batch_is_bounded_in_number_and_in_size() -> None:
    queue = FairQueue[str]()
    prove(queue, ANN, BEN)
    assert fill(queue, [ANN, BEN] * BATCH_GROUPS_MAX) == 2 * BATCH_GROUPS_MAX
    assert [len(queue.pop(0.0)) for _ in range(3)] == [BATCH_GROUPS_MAX, BATCH_GROUPS_MAX, 0]
    for size in (BATCH_SIZE_MAX // 2, BATCH_SIZE_MAX // 2, 1, 2 * BATCH_SIZE_MAX, 1):
        queue.add(ANN, str(size), size=size)
    assert [len(queue.pop(0.0)) for _ in range(5)] == [2, 1, 1, 1, 0]


def test_what_is_put_back_keeps_its_place_unless_nobody_waits_for_it() -> None:
    queue = FairQueue[str]()
    prove(queue, ANN)
    for at in range(4):
        queue.add(ANN, str(at))
    batch = queue.pop(0.0)
    assert not queue.discard(batch[1])  # it does not wait
    for ticket in reversed(batch):
        queue.put_back(ticket, alone=ticket.item == "2")
    queue.add(ANN, "4")
    assert [items(queue.pop(0.0)) for _ in range(3)] == [["0"], ["2"], ["3", "4"]]


# --- a flood -------------------------------------------------------------------------------------

FIRST_S, FULL_S = 0.5, 2.0  # what a group may take, at its first and second try
HONEST_S, HONEST_EACH_S, NEWCOMER_EACH_S = 0.02, 0.14, 5.0
FLOOD_S = 300.0


Waiting = tuple[str, float, float]  # what it is, when it came, how much it may take


class Fifo(FairQueue[Waiting]):
    """What there was before: first come, first served, with the whole budget."""

    def pop(self, now: float) -> list[Ticket[Waiting]]:
        return [self._waiting.pop(0)] if self._waiting else []


class Flood:
    """Five minutes. Sixteen attackers have a dear group waiting for its first try at all times,
    each with one key or with a new one for each group."""

    def __init__(self, queue: FairQueue[Waiting], *, is_fair: bool, rotating: bool) -> None:
        self._queue, self._is_fair, self._rotating = queue, is_fair, rotating
        self._arrivals: list[tuple[float, int, PeerId, str]] = []
        self._arrived = 0
        self._now = 0.0
        self.waits: dict[str, list[float]] = {"honest": [], "newcomer": []}
        for _ in range(PROVEN_GROUPS):
            queue.charge(ANN, HONEST_S, 0.0, End.DONE)
        for number in range(int(FLOOD_S / HONEST_EACH_S)):
            self._arrive(number * HONEST_EACH_S, ANN, "honest")
        for number in range(int(FLOOD_S / NEWCOMER_EACH_S)):
            self._arrive(number * NEWCOMER_EACH_S, PeerId(f"newcomer{number}"), "newcomer")
        for number in range(16):
            self._arrive(0.0, PeerId(f"attacker{number}"), "dear")

    def _arrive(self, at: float, producer: PeerId, kind: str) -> None:
        self._arrived += 1
        heapq.heappush(self._arrivals, (at, self._arrived, producer, kind))

    def run(self) -> dict[str, list[float]]:
        """How long groups waited, by what they are."""
        while self._arrivals or len(self._queue):
            if not len(self._queue):
                self._now = max(self._now, self._arrivals[0][0])
            while self._arrivals and self._arrivals[0][0] <= self._now:
                at, _, producer, kind = heapq.heappop(self._arrivals)
                self._queue.add(producer, (kind, at, FIRST_S if self._is_fair else FULL_S))
            ticket, *others = self._queue.pop(self._now)
            for other in others:
                self._queue.put_back(other)
            kind, came, budget_s = ticket.item
            takes_s = budget_s if kind == "dear" else HONEST_S
            if kind != "dear":
                self.waits[kind].append(self._now - came)
            self._now += takes_s
            end = End.OVERRUN if kind == "dear" else End.DONE
            self._queue.charge(ticket.producer, takes_s, self._now, end)
            if kind == "dear" and not ticket.last:
                self._go_on(ticket.producer)
        return self.waits

    def _go_on(self, attacker: PeerId) -> None:
        if self._is_fair:
            with suppress(QueueFull):
                self._queue.add(attacker, ("dear", self._now, FULL_S), last=True)
        if self._now < FLOOD_S:
            key = PeerId(f"attacker{self._arrived}") if self._rotating else attacker
            self._arrive(self._now, key, "dear")


@pytest.fixture
def unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many groups may wait as like to."""
    monkeypatch.setattr(fair_queue, "WAITING_MAX", 1_000_000)
    monkeypatch.setattr(fair_queue, "WAITING_PER_PRODUCER_MAX", 1_000_000)


@pytest.mark.parametrize("rotating", [False, True])
def test_in_a_flood_an_honest_group_waits_for_one_budget_at_most(rotating: bool) -> None:
    waits = Flood(FairQueue(), is_fair=True, rotating=rotating).run()
    assert max(waits["honest"]) <= FULL_S + HONEST_S
    assert median(waits["honest"]) <= FIRST_S
    # Sixteen unproven keys came before, each with one first try; and honest groups in between.
    assert max(waits["newcomer"]) <= 17 * (FIRST_S + 4 * HONEST_S)


@pytest.mark.parametrize("rotating", [False, True])
def test_first_come_first_served_would_let_it_wait_for_all(rotating: bool, unbounded: None) -> None:
    """The negative control of the test above."""
    waits = Flood(Fifo(), is_fair=False, rotating=rotating).run()
    assert median(waits["honest"]) > 10 * FULL_S


class EachAlone(FairQueue[Waiting]):
    """Planted: a key that nobody has seen has an account of its own, and nothing on it."""

    def _levels(self, producer: PeerId, shared: float, now: float) -> tuple[float, float]:
        return super()._levels(producer, 0.0, now)


@pytest.mark.slow
def test_without_a_shared_account_new_keys_would_go_first(unbounded: None) -> None:
    waits = Flood(EachAlone(), is_fair=True, rotating=True).run()
    assert median(waits["honest"]) > 10 * FIRST_S
