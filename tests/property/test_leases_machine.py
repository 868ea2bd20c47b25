"""Leases and credits under everything that workers, time and restarts can do, against a model that
keeps the same rules with plain sets. Variants with one check taken out must be found out.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import msgpack
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from swarm.errors import LocalProtocolError
from swarm.leases.known_workers import Allowance, WorkerOrigin
from swarm.leases.lease_table import Answer, Lease, LeaseBook, LeaseRules, SubmittedGroup
from swarm.leases.staleness import Account, BufferedGroup, Denial, Discard, Room, StalenessRules

BOUND, STEP, CREDITS = 2, 2, 6
STALENESS = StalenessRules(BOUND, STEP, CREDITS)
RULES = LeaseRules(
    target_s=20.0, first_s=10.0, first_groups=2, slack=2.0, life_s_min=5.0, groups_max=4,
    trial_share=0.5, trial_groups_min=1,
)  # fmt: skip
SHORT, LONG = 3, 2  # credits of workers on trial, in leases of either kind, by these rules
TRIAL = SHORT + LONG
PLACES = (WorkerOrigin("a block", 0.4), WorkerOrigin("a machine"))
STRANGERS_MAX = 30
WORKERS = ("ann", "bob", "cem")
SECRET = b"the learner's secret"


@dataclass
class Promise:
    """What the model knows of a lease."""

    lease: Lease
    answered: dict[int, tuple[bytes, Answer]] = field(default_factory=dict)
    over: bool = False
    on_trial: bool = False  # as the account counts it
    place: WorkerOrigin | None = None
    by_nobody: bool = False  # of whom no group had ever been admitted

    @property
    def out(self) -> int:
        return 0 if self.over else self.lease.groups - len(self.answered)

    def copy(self) -> "Promise":
        return replace(self, answered=dict(self.answered))


class LeaseMachine(RuleBasedStateMachine):
    """`out` and `waiting` are credits as the model counts them; `consumed` is of all times, across
    restarts from the latest record."""

    account_class: ClassVar[type[Account]] = Account
    book_class: ClassVar[type[LeaseBook]] = LeaseBook

    def __init__(self) -> None:
        super().__init__()
        self.book = self.book_class(RULES, self.account_class(STALENESS), "run", SECRET, 0)
        self.now = 0.0
        self.starts = 0
        self.promises: list[Promise] = []
        self.lost: list[Lease] = []  # by a restart
        self.waiting: dict[bytes, int] = {}  # buffered: oldest version
        self.consumed: set[bytes] = set()
        self.fresh = 0  # group ids so far
        self.strangers = 0
        self.expected: dict[str, int] = dict.fromkeys(["granted", "gone", "purged"], 0)
        self.saved: tuple[Any, ...] | None = None

    # --- what the model works out for itself -------------------------------------------------

    @property
    def version(self) -> int:
        return self.book.account.version

    def out(self) -> int:
        return sum(p.out for p in self.promises)

    def on_trial(self) -> int:
        return sum(p.out for p in self.promises if p.on_trial)

    def counted_on(self) -> int:
        """Credits that others have to wait for."""
        return self.out() - self.on_trial() + len(self.waiting)

    def has_delivered(self, worker: str) -> bool:
        mine = [p for p in self.promises if p.lease.worker == worker]
        return any(answer.admitted for p in mine for _, answer in p.answered.values())

    def admitted(self) -> list[bytes]:
        """Groups that were, of leases that are remembered."""
        answers = [each for p in self.promises for each in p.answered.values()]
        return [group_id for group_id, answer in answers if answer.admitted]

    def unanswered(self) -> list[tuple[Lease, int]]:
        """Tasks that may still be handed in."""
        return [
            (p.lease, seed)
            for p in self.promises
            if not p.over and self.now < p.lease.deadline
            for seed in p.lease.seeds
            if seed not in p.answered
        ]

    def answer_to(self, promise: Promise, sent: SubmittedGroup, fault: str) -> Answer:
        lease = promise.lease
        if sent.worker != lease.worker:
            return Answer(Discard.OTHER_WORKER)
        if sent.seed not in lease.seeds:
            return Answer(Discard.NOT_ASSIGNED)
        if sent.seed in promise.answered:
            group_id, earlier = promise.answered[sent.seed]
            return earlier if group_id == sent.group_id else Answer(Discard.OTHER_GROUP)
        if promise.over or self.now >= lease.deadline:
            return Answer(Discard.LATE)
        if sent.group_id in self.admitted():
            return Answer(Discard.DUPLICATE)
        oldest, newest = min(sent.versions), max(sent.versions)
        if newest > self.version:
            return Answer(Discard.UNKNOWN_VERSION)
        if oldest < lease.version:
            return Answer(Discard.OLDER_THAN_LEASE)
        if fault:
            return Answer(Discard.FAULTY)
        at = self.version + self.book.account.training
        return Answer(Discard.STALE if at - oldest > BOUND else None)

    def end_late(self) -> None:
        for promise in self.promises:
            if not promise.over and self.now >= promise.lease.deadline:
                self.expected["gone"] += promise.lease.groups - len(promise.answered)
                promise.over = True

    def purge(self) -> set[bytes]:
        gone = {each for each, oldest in self.waiting.items() if self.version - oldest > BOUND}
        for each in gone:
            del self.waiting[each]
        self.expected["purged"] += len(gone)
        return gone

    # --- what happens ------------------------------------------------------------------------

    @rule(
        worker=st.sampled_from(WORKERS),
        behind=st.integers(-1, 4),
        place=st.sampled_from((None, *PLACES)),
    )
    def request(self, worker: str, behind: int, place: WorkerOrigin | None) -> None:
        self.ask(worker, behind, place)

    @precondition(lambda self: self.strangers < STRANGERS_MAX)
    @rule(place=st.sampled_from(PLACES), count=st.integers(1, 4))
    def request_by_strangers(self, place: WorkerOrigin, count: int) -> None:
        """Keys that nobody has seen before, and that cost nothing."""
        for _ in range(count):
            self.strangers += 1
            self.ask(f"stranger {self.strangers}", 0, place)

    def ask(self, worker: str, behind: int, place: WorkerOrigin | None) -> None:
        free = CREDITS - self.counted_on()
        self.end_late()
        freed = CREDITS - self.counted_on()
        assert freed >= free
        version = self.version - behind
        held = [p for p in self.promises if not p.over and p.lease.worker == worker]
        known = self.has_delivered(worker)
        tried = self.on_trial()
        lease = self.book.request(worker, version, self.now, place)
        if isinstance(lease, Denial):
            return
        assert 0 <= version <= self.version
        assert len(held) < RULES.open_max
        on_trial = self.book.account.on_trial > tried
        assert known or on_trial
        assert 0 < lease.groups <= (TRIAL - tried if on_trial else freed)
        # the last of its groups is consumed, a batch a version, within the bound, if no more comes
        # in from workers on trial than was counted on
        ahead = len(self.waiting) + self.out() if on_trial else self.counted_on()
        last = ahead + lease.groups - 1
        due = self.version + self.book.account.training + last // STEP
        assert due - version <= BOUND
        assert (lease.worker, lease.version) == (worker, version)
        known_leases = [p.lease for p in self.promises] + self.lost
        assert all(set(lease.seeds).isdisjoint(other.seeds) for other in known_leases)
        assert all(lease.lease_id != other.lease_id for other in known_leases)
        place = place or WorkerOrigin(worker)
        self.promises.append(Promise(lease, on_trial=on_trial, place=place, by_nobody=not known))
        self.expected["granted"] += lease.groups

    @precondition(lambda self: self.promises)
    @rule(
        data=st.data(),
        kind=st.sampled_from(["new", "new", "new", "other group", "not assigned", "stolen"]),
        spread=st.tuples(st.integers(-1, 4), st.integers(-1, 1)),
        fault=st.sampled_from(["", "", "", "edited"]),
    )
    def submit(self, data: st.DataObject, kind: str, spread: tuple[int, int], fault: str) -> None:
        promise = data.draw(st.sampled_from(self.promises))
        seed = data.draw(st.sampled_from(promise.lease.seeds))
        self.fresh += 1
        group_id, worker = self.fresh.to_bytes(4, "big"), promise.lease.worker
        if kind == "not assigned":
            seed += 1
        elif kind == "stolen":
            worker = data.draw(st.sampled_from(WORKERS))
        behind, more = spread
        oldest = max(0, self.version - behind)
        versions = (oldest + max(0, more), oldest)
        sent = SubmittedGroup(promise.lease.lease_id, worker, seed, group_id, versions)
        expected = self.answer_to(promise, sent, fault)
        answered_before = seed in promise.answered and worker == promise.lease.worker
        judged = self.book.judge(sent, self.now)
        answer = self.book.submit(sent, self.now, fault)
        assert judged is None or judged == answer
        assert not answer.repeated
        assert answer.reason == expected.reason
        if answered_before or answer.reason in TO_BE_TRIED_AGAIN:
            return
        promise.answered[seed] = (group_id, answer)
        if answer.admitted:
            self.waiting[group_id] = min(versions)
        else:
            self.expected["gone"] += 1
        if len(promise.answered) == promise.lease.groups:
            promise.over = True

    @precondition(lambda self: self.admitted() and self.unanswered())
    @rule(data=st.data())
    def submit_a_copy(self, data: st.DataObject) -> None:
        """A group that was admitted for one task, for another."""
        group_id = data.draw(st.sampled_from(self.admitted()))
        lease, seed = data.draw(st.sampled_from(self.unanswered()))
        sent = SubmittedGroup(lease.lease_id, lease.worker, seed, group_id, (self.version,))
        assert self.book.submit(sent, self.now).reason is Discard.DUPLICATE

    @precondition(lambda self: any(p.answered for p in self.promises))
    @rule(data=st.data(), fault=st.sampled_from(["", "edited"]))
    def submit_again(self, data: st.DataObject, fault: str) -> None:
        """The same answer, whatever has happened in between, and nothing more."""
        promise = data.draw(st.sampled_from([p for p in self.promises if p.answered]))
        seed = data.draw(st.sampled_from(sorted(promise.answered)))
        group_id, earlier = promise.answered[seed]
        lease = promise.lease
        sent = SubmittedGroup(lease.lease_id, lease.worker, seed, group_id, (self.version,))
        answer = self.book.submit(sent, self.now, fault)
        assert answer == earlier
        assert answer.repeated

    @precondition(lambda self: self.unanswered())
    @rule(data=st.data())
    def submit_when_it_is_too_late(self, data: st.DataObject) -> None:
        """At the deadline, before anybody has looked which leases have ended."""
        lease, seed = data.draw(st.sampled_from(self.unanswered()))
        self.now = lease.deadline
        self.fresh += 1
        group_id = self.fresh.to_bytes(4, "big")
        sent = SubmittedGroup(lease.lease_id, lease.worker, seed, group_id, (self.version,))
        assert self.book.submit(sent, self.now).reason is Discard.LATE

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def submit_under_a_lost_lease(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.lost))
        self.fresh += 1
        group_id = self.fresh.to_bytes(4, "big")
        sent = SubmittedGroup(
            lease.lease_id, lease.worker, lease.seeds[0], group_id, (self.version,)
        )
        assert self.book.submit(sent, self.now).reason is Discard.UNKNOWN_LEASE

    @precondition(lambda self: not self.book.account.training)
    @rule()
    def consume(self) -> None:
        self.purge()
        enough = len(self.waiting) >= STEP
        oldest_first = sorted(self.waiting.values())[:STEP]
        batch = self.book.account.consume()
        assert bool(batch) == enough
        if batch:
            assert [group.oldest for group in batch] == oldest_first
        for group in batch:
            assert self.version - group.oldest <= BOUND
            assert group.group_id not in self.consumed
            assert self.waiting.pop(group.group_id) == group.oldest
            self.consumed.add(group.group_id)

    @rule(more=st.integers(0, 3))
    def finish_step(self, more: int) -> None:
        gone = self.book.account.finish_step(self.version + more, self.now)
        assert {group.group_id for group in gone} == self.purge()

    @rule(seconds=st.sampled_from([0.5, 3.0, 12.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        due = {p.lease.lease_id for p in self.promises if not p.over} & {
            p.lease.lease_id for p in self.promises if self.now >= p.lease.deadline
        }
        self.end_late()
        assert {lease.lease_id for lease in self.book.expire(self.now)} == due

    @rule(worker=st.sampled_from(WORKERS))
    def give_back(self, worker: str) -> None:
        self.book.give_back(worker, self.now)
        for promise in self.promises:
            if promise.lease.worker == worker and not promise.over:
                self.expected["gone"] += promise.lease.groups - len(promise.answered)
                promise.over = True

    # --- restarts ----------------------------------------------------------------------------

    @rule()
    def save(self) -> None:
        """A checkpoint: the learner's weights and this record, at once."""
        model = (
            [promise.copy() for promise in self.promises],
            dict(self.waiting),
            set(self.consumed),
            dict(self.expected),
        )
        self.saved = (msgpack.packb(self.book.to_record(self.now)), self.now, *model)

    @precondition(lambda self: self.saved is not None)
    @rule(clock=st.sampled_from([0.0, 1e6]))
    def restart(self, clock: float) -> None:
        """All since the checkpoint is lost: what was consumed since has left no trace in the
        weights either, so it may be consumed again. The new clock is another one."""
        assert self.saved is not None
        packed, then, promises, waiting, consumed, expected = self.saved
        granted_since = {p.lease.lease_id for p in self.promises}
        granted_since -= {p.lease.lease_id for p in promises}
        self.lost += [p.lease for p in self.promises if p.lease.lease_id in granted_since]
        self.promises = [promise.copy() for promise in promises]
        self.waiting, self.consumed = dict(waiting), set(consumed)
        self.expected = dict(expected)
        self.starts += 1
        self.now = clock
        self.book = restored(self.book_class, self.account_class, packed, self.starts, clock)
        for promise in self.promises:  # the time that they had left
            lease = promise.lease
            promise.lease = Lease(
                lease.lease_id,
                lease.worker,
                lease.stream,
                lease.groups,
                lease.version,
                clock - (then - lease.granted_at),
                clock + (lease.deadline - then),
            )
        self.saved = None

    # --- what always holds -------------------------------------------------------------------

    @invariant()
    def credits_are_what_the_model_counts(self) -> None:
        account = self.book.account
        assert account.reserved == self.out()
        assert account.buffered == len(self.waiting)
        assert account.reserved + account.buffered <= CREDITS + TRIAL
        assert account.credits_left == max(0, CREDITS - self.counted_on())

    @invariant()
    def who_delivered_nothing_holds_a_capped_part(self) -> None:
        """In all, and of one place, whatever keys there are and however they come and go."""
        assert self.book.account.on_trial == self.on_trial() <= TRIAL
        nobodys = [p for p in self.promises if p.by_nobody]
        assert sum(p.out for p in nobodys) <= TRIAL
        block = [p for p in nobodys if p.place == PLACES[0]]
        assert sum(p.out for p in block) <= max(RULES.first_groups, int(0.4 * TRIAL))

    @invariant()
    def nothing_is_buffered_that_is_over_the_bound(self) -> None:
        buffer = self.book.account.to_record(0.0)["_buffer"]
        assert all(self.version - each["oldest"] <= BOUND for each in buffer.values())

    @invariant()
    def every_granted_group_is_somewhere(self) -> None:
        account = self.book.account
        assert account.granted == self.expected["granted"]
        assert account.consumed == len(self.consumed)
        assert account.discarded[Discard.OVERTAKEN] == self.expected["purged"]
        assert account.granted == (
            account.reserved
            + account.buffered
            + account.consumed
            + self.expected["gone"]
            + self.expected["purged"]
        )

    def teardown(self) -> None:
        """When everything has expired, no credit is out, and what is not buffered is free."""
        self.book.expire(self.now + 1e9)
        assert self.book.account.reserved == 0
        assert self.book.account.on_trial == 0
        assert self.book.account.credits_left == max(0, CREDITS - len(self.waiting))
        assert not self.book.expire(self.now + 2e9)  # nothing is open


TO_BE_TRIED_AGAIN = (
    Discard.UNKNOWN_LEASE,
    Discard.OTHER_WORKER,
    Discard.NOT_ASSIGNED,
    Discard.OTHER_GROUP,
    Discard.DUPLICATE,
    Discard.LATE,
)


def restored(
    book_class: type[LeaseBook],
    account_class: type[Account],
    packed: bytes,
    start: int,
    now: float,
) -> LeaseBook:
    record = msgpack.unpackb(packed, strict_map_key=False)
    book = book_class.from_record(
        record,
        rules=RULES,
        staleness_rules=STALENESS,
        run_id="run",
        secret=SECRET,
        start=start,
        now=now,
    )
    if account_class is not Account:
        book.account = account_class.from_record(STALENESS, record["account"], now)
    return book


QUICK = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
# A fault has to be found, not told: without shrinking it costs little.
FIND = settings(
    QUICK,
    max_examples=10_000,  # how many it may take to find a fault; most take a few
    phases=(Phase.generate,),
    print_blob=False,
    report_multiple_bugs=False,
)

LeaseMachine.TestCase.settings = QUICK
TestLeaseMachine = LeaseMachine.TestCase


# --- variants with one check taken out ---------------------------------------------------------


class NoPurge(Account):
    def finish_step(self, version: int, now: float) -> tuple[BufferedGroup, ...]:
        self.version, self.training = version, False
        return ()


class NoAgeAtAdmission(Account):
    def admit(self, group: BufferedGroup) -> Discard | None:
        self.reserved -= 1
        self._buffer[group.group_id] = group
        return None


class NoLimit(Account):
    @property
    def credits_left(self) -> int:
        return 1000


class NoVersionAtGrant(Account):
    def room(self, worker_version: int, wanted: int, duration_s: float, now: float) -> Room:
        if worker_version > self.version or worker_version < 0 or not self.credits_left:
            return Room(0, Denial.NO_CREDIT)
        return Room(min(wanted, self.credits_left))

    def trial_room(
        self, worker_version: int, wanted: int, duration_s: float, now: float, most: int
    ) -> Room:
        left = self.trial_credits_left(most)
        if worker_version > self.version or worker_version < 0 or not left:
            return Room(0, Denial.NO_CREDIT)
        return Room(min(wanted, left))


class NoPlaceAtGrant(Account):
    def _in_time(self, worker_version: int, duration_s: float, now: float) -> int:
        return 1000 if worker_version + self.pacing >= self.next_version else 0


class ForgetfulAccount(Account):
    def to_record(self, now: float) -> dict[str, Any]:
        return {**super().to_record(now), "_buffer": {}}


class LeakyExpiry(LeaseBook):
    def _free(self, held: Any, why: Discard) -> None:
        self.account.discarded[why] += held.unanswered


class DoubleExpiry(LeaseBook):
    def _free(self, held: Any, why: Discard) -> None:
        self.account.release(min(self.account.reserved, held.unanswered + 1), why)


class NoHolder(LeaseBook):
    def _is_holder(self, lease: Lease, worker: str) -> bool:
        return True


class AnyTask(LeaseBook):
    def _is_assigned(self, held: Any, seed: int) -> bool:
        return True


class NoDeadline(LeaseBook):
    def _is_over(self, held: Any, now: float) -> bool:
        return held.lease.lease_id not in self._open


class NoMemory(LeaseBook):
    def _earlier(self, held: Any, submission: SubmittedGroup) -> Answer | None:
        return None


class AnyVersion(LeaseBook):
    def _judge_versions(self, lease: Lease, versions: Any) -> Answer | None:
        return None


class NoDuplicates(LeaseBook):
    def _note(self, held: Any, submission: SubmittedGroup, answer: Answer, now: float) -> None:
        super()._note(held, submission, answer, now)
        self._places.clear()


class ForgetfulBook(LeaseBook):
    """Answers do not survive a restart."""

    def to_record(self, now: float) -> dict[str, Any]:
        record = super().to_record(now)
        record["ended"] = [{**each, "answers": {}} for each in record["ended"]]
        return record


class SameStart(LeaseBook):
    """Leases after a restart are numbered as those before it."""

    def __init__(self, rules: Any, account: Account, run_id: str, secret: bytes, start: int):
        super().__init__(rules, account, run_id, secret, 0)


class OneStream(LeaseBook):
    """Every lease of a worker has the same tasks."""

    def _lease(self, worker: str, version: int, groups: int, now: float) -> Lease:
        lease = super()._lease(worker, version, groups, now)
        return Lease(lease.lease_id, worker, worker, groups, version, now, lease.deadline)


class AnyTrials(LeaseBook):
    """Workers on trial may hold what they like."""

    allowance = Allowance(1000, RULES.first_groups)


class NoPlaces(LeaseBook):
    """They all have a place to themselves."""

    def request(self, worker: str, version: int, now: float, place: Any = None) -> Any:
        return super().request(worker, version, now)


class NoTrial(LeaseBook):
    """Everybody is trusted at once."""

    def _know(self, worker: str) -> bool:
        found = super()._know(worker)
        self._workers[worker].limit.credits = 8.0
        return found


class EndlessTrials(LeaseBook):
    """What was held on trial is never given back."""

    def _end_trial(self, held: Any, groups: int) -> None:
        """Nothing."""


class ForgetfulTrials(LeaseBook):
    """After a restart nobody is on trial."""

    def to_record(self, now: float) -> dict[str, Any]:
        record = super().to_record(now)
        record["open"] = [{**each, "trial": None} for each in record["open"]]
        record["account"]["on_trial"] = 0
        return record


VARIANTS = [
    NoPurge, NoAgeAtAdmission, NoLimit, NoVersionAtGrant, NoPlaceAtGrant, ForgetfulAccount,
    LeakyExpiry, DoubleExpiry, NoHolder, AnyTask, NoDeadline, NoMemory, AnyVersion, NoDuplicates,
    ForgetfulBook, SameStart, OneStream, AnyTrials, NoPlaces, NoTrial, EndlessTrials,
    ForgetfulTrials,
]  # fmt: skip


def machine_of(*classes: type) -> type[LeaseMachine]:
    parts = {
        "account_class" if issubclass(each, Account) else "book_class": each for each in classes
    }
    return type(LeaseMachine)("Variant", (LeaseMachine,), parts)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.slow
def test_a_variant_without_a_check_is_found_out(variant: type) -> None:
    with pytest.raises((AssertionError, LocalProtocolError)):
        run_state_machine_as_test(machine_of(variant), settings=FIND)


# --- the bound holds by the last check alone ---------------------------------------------------


class LastCheckAlone(Account):
    """Neither grants, nor what comes in, nor a new version is judged by age; consumption is."""

    room = NoVersionAtGrant.room
    admit = NoAgeAtAdmission.admit

    def finish_step(self, version: int, now: float) -> tuple[BufferedGroup, ...]:
        self.version, self.training = version, False
        return ()


class NoCheckAtAll(LastCheckAlone):
    def _purge(self, version: int) -> tuple[BufferedGroup, ...]:
        return ()


class BoundMachine(RuleBasedStateMachine):
    """The bound, and nothing else."""

    account_class: ClassVar[type[Account]] = LastCheckAlone

    def __init__(self) -> None:
        super().__init__()
        self.account = self.account_class(STALENESS)
        self.fresh = 0

    @precondition(lambda self: self.account.credits_left)
    @rule(behind=st.integers(0, 5))
    def come_in(self, behind: int) -> None:
        self.fresh += 1
        oldest = max(0, self.account.version - behind)
        self.account.reserve(1)
        self.account.admit(BufferedGroup(str(self.fresh).encode(), "w", oldest, oldest))

    @rule(more=st.integers(0, 3))
    def finish_step(self, more: int) -> None:
        self.account.finish_step(self.account.version + more, 0.0)

    @rule()
    def restart(self) -> None:
        record = self.account.to_record(0.0)
        self.account = self.account_class.from_record(STALENESS, record, 0.0)

    @precondition(lambda self: not self.account.training)
    @rule()
    def consume(self) -> None:
        for group in self.account.consume():
            assert self.account.version - group.oldest <= BOUND


def test_the_bound_holds_where_only_consumption_looks_at_ages() -> None:
    run_state_machine_as_test(BoundMachine, settings=QUICK)


def test_without_that_it_does_not() -> None:
    blind = type(BoundMachine)("Blind", (BoundMachine,), {"account_class": NoCheckAtAll})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(blind, settings=FIND)
