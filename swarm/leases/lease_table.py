"""Leases of tasks to rollout workers, each with a deadline. Pure: time and the number of the start
are passed in.

A lease gives credits for some groups (`staleness.Account`) to one worker until a deadline. Its
tasks follow from a secret of the learner, so a worker can neither choose nor foresee them; groups
of other tasks are refused. Its size follows from the worker's measured rate and the groups that it
delivered lately; a worker that delivered nothing is on trial.

A submission that comes twice gets the same answer and counts once while its lease is remembered.
After a restart, leases of the record go on with the time that they had left.
"""

import hashlib
import hmac
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from swarm.errors import LocalProtocolError, require
from swarm.leases.known_workers import (
    Allowance,
    KnownWorker,
    Trial,
    TrialQueue,
    TrialsOut,
    WorkerAccount,
    WorkerOrigin,
)
from swarm.leases.staleness import Account, BufferedGroup, Denial, Discard, Room, StalenessRules
from swarm.plain_records import Moment, record_of, restored

LEASE_GROUPS_MAX: Final = 256  # bound on `groups_max`
WORKERS_MAX: Final = 4096  # known; the idle one unheard of for longest makes room
LEASES_REMEMBERED_MAX: Final = 1024  # ended leases, with their answers
SECRET_BYTES_MIN: Final = 16
RECONNECT_S: Final = 30.0  # at least, for workers to come back after a restart of the learner
LEASE_ID_BYTES: Final = 16
SEED_BITS: Final = 62

_ID_DOMAIN: Final = b"swarm/lease-id/1"
_STREAM_DOMAIN: Final = b"swarm/lease-stream/1"
_SEED_DOMAIN: Final = b"swarm/lease-seed/1"


@dataclass(frozen=True, slots=True)
class LeaseRules:
    """The sizes and durations of leases."""

    target_s: float = 60.0  # expected duration of a lease
    first_s: float = 30.0  # assumed duration of a new worker's first lease
    first_groups: int = 1  # in a lease on trial
    slack: float = 3.0  # time until the deadline, over the expected duration
    life_s_min: float = 30.0  # shortest time until it for an established worker
    life_s_max: float = 3600.0
    trial_share: float = 0.5  # of the credits, and beyond them, for workers on trial
    trial_groups_min: int = 8  # credits for workers on trial, where `trial_share` gives fewer
    groups_max: int = 64  # in one lease
    open_max: int = 2  # leases of one worker at a time: it need not wait for the next

    def __post_init__(self) -> None:
        checks = (
            ("target_s", self.target_s > 0, "take more than 0"),
            ("first_s", self.first_s > 0, "take more than 0"),
            ("first_groups", 1 <= self.first_groups <= self.groups_max, "take 1 to groups_max"),
            ("slack", self.slack >= 1, "take at least 1"),
            ("life_s_min", 0 < self.life_s_min <= self.life_s_max, "above 0, up to life_s_max"),
            ("groups_max", 1 <= self.groups_max <= LEASE_GROUPS_MAX, f"1 to {LEASE_GROUPS_MAX}"),
            ("open_max", 1 <= self.open_max <= 16, "take 1 to 16"),
            ("trial_share", 0 < self.trial_share <= 1, "above 0, up to 1"),
            ("trial_groups_min", self.trial_groups_min >= 1, "take at least 1"),
        )
        require(self, checks, "lease ")

    @property
    def first_life_s(self) -> float:
        return self.slack * self.first_s


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease as its worker knows it. Each task follows from `stream` and its place."""

    lease_id: bytes
    worker: str
    stream: str
    groups: int
    version: int  # the worker's when it asked
    granted_at: Moment
    deadline: Moment
    width: int = 0  # completions of each task; 0: those of the run
    limit: int = 0  # most tokens of a completion; 0: those of the run

    @property
    def seeds(self) -> tuple[int, ...]:
        return task_seeds(self.stream, self.groups)

    def seed(self, place: int) -> int:
        """The seed of a place; -1: the lease has no such place."""
        return _seed(self.stream, place) if 0 <= place < self.groups else -1


@dataclass(frozen=True, slots=True)
class SubmittedGroup:
    """A group that a worker sent."""

    lease_id: bytes
    worker: str  # its sender, by connection or signature
    seed: int
    group_id: bytes
    versions: tuple[int, ...]  # of all its tokens, each at least once


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a submission."""

    reason: Discard | None  # None: admitted
    detail: str = ""
    repeated: bool = field(default=False, compare=False)  # answered before; counted only then

    @property
    def admitted(self) -> bool:
        return self.reason is None


@dataclass(slots=True)
class _Held:
    """A lease with the answers given under it, by seed."""

    lease: Lease
    busy_from: Moment  # start of the worker's time for it
    trial: Trial | None = None  # None: the worker was not on trial
    answered_at: Moment | None = None  # last
    answers: dict[int, tuple[bytes, Answer]] = field(default_factory=dict)
    seeds: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.seeds = frozenset(self.lease.seeds)

    @property
    def unanswered(self) -> int:
        return self.lease.groups - len(self.answers)

    @property
    def admitted(self) -> int:
        return sum(answer.admitted for _, answer in self.answers.values())

    @property
    def delivered(self) -> int:
        """Groups that passed verification; late ones are not all the worker's doing."""
        good = (None, Discard.STALE)
        return sum(answer.reason in good for _, answer in self.answers.values())


@dataclass(slots=True)
class _Kept:
    """The state of a lease book that survives a restart, besides its account."""

    open: list[_Held]
    ended: list[_Held]
    workers: dict[str, KnownWorker]  # in order
    denied: Counter[Denial]
    repeated: int


@dataclass(frozen=True, slots=True)
class TrialState:
    held: int  # credits
    most: int
    workers: int  # that hold them
    places: int  # of these
    waiting: int  # workers that asked and found none left


def task_seeds(stream: str, count: int) -> tuple[int, ...]:
    """The seeds of a lease's places, 0 <= seed < 2**`SEED_BITS`. Tasks are not made from them."""
    return tuple(_seed(stream, place) for place in range(count))


def _seed(stream: str, place: int) -> int:
    digest = hashlib.sha256(_SEED_DOMAIN + stream.encode() + b"/" + str(place).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)


# Long: grants, ends and credit are one set of books.
class LeaseBook:
    """All leases of one learner, open and remembered, and the accounts of its workers.

    `start` differs from those of all earlier starts of this learner: no lease that a crash lost
    gets the same id again. `secret` stays with the learner.
    """

    def __init__(
        self, rules: LeaseRules, account: Account, run_id: str, secret: bytes, start: int
    ) -> None:
        if len(secret) < SECRET_BYTES_MIN:
            raise LocalProtocolError(f"a lease secret of {len(secret)} bytes")
        self.rules = rules
        self.account = account
        # completions of a task and tokens of one, for the next leases; 0: those of the run
        self.terms = (0, 0)
        self._run_id = run_id
        self._secret = secret
        self._start = start
        self._number = 0  # of the next lease
        self._open: OrderedDict[bytes, _Held] = OrderedDict()
        self._ended: OrderedDict[bytes, _Held] = OrderedDict()
        self._workers: OrderedDict[str, KnownWorker] = OrderedDict()
        self._places: dict[bytes, tuple[bytes, int]] = {}  # admitted group: its lease and seed
        self._queue = TrialQueue()
        self.denied: Counter[Denial] = Counter()
        self.repeated = 0  # submissions that had been answered

    def request(
        self, worker: str, version: int, now: float, place: WorkerOrigin | None = None
    ) -> Lease | Denial:
        """Grant a lease to a worker with this version. `place`: its origin; None: its own."""
        self.expire(now)
        result = self._grant(worker, version, now, place or WorkerOrigin(worker))
        if isinstance(result, Denial):
            self.denied[result] += 1
        return result

    def stand_by(self, worker: str, version: int, now: float) -> None:
        """Record a request of a worker that is to get no lease."""
        self.expire(now)
        self._queue.leave(worker)
        if 0 <= version <= self.account.version and self._know(worker):
            self._workers[worker].asks(version, now)

    def _grant(self, worker: str, version: int, now: float, place: WorkerOrigin) -> Lease | Denial:
        if not 0 <= version <= self.account.version:
            return Denial.UNKNOWN_VERSION
        if not self._know(worker):
            return Denial.WORKERS_FULL
        known = self._workers[worker]
        known.asks(version, now)
        if len(self.open_leases(worker)) >= self.rules.open_max:
            return Denial.LEASES_OPEN
        groups = self._size(worker, now)
        if groups < 1:
            return Denial.LEASES_OPEN
        trial = None
        if known.limit.is_on_trial:
            trial = Trial(place, is_long=self._life_s(worker, groups) > self.rules.first_life_s)
        room = self._room(worker, version, groups, trial, now)
        while room.denial is Denial.WOULD_BE_STALE and groups > 1:
            groups //= 2  # fewer may still be in time
            room = self._room(worker, version, groups, trial, now)
        if room.denial is not None:
            return room.denial
        self._queue.leave(worker)
        self.account.reserve(room.groups, None if trial is None else self.allowance.total)
        lease = self._lease(worker, version, room.groups, now)
        self._open[lease.lease_id] = _Held(lease, now - (known.break_s or 0.0), trial)
        known.break_s = 0.0
        return lease

    def _room(
        self, worker: str, version: int, groups: int, trial: Trial | None, now: float
    ) -> Room:
        known = self._workers[worker]
        # a newcomer's is assumed to be short
        expected_s = groups / known.rate if known.rate else known.busy_s
        if trial is None:
            return self.account.room(version, groups, expected_s, now)
        most = self.allowance.total
        room = self.account.trial_room(version, groups, expected_s, now, most)
        if room.denial is Denial.WOULD_BE_STALE:
            self._queue.leave(worker)  # others need not wait for it
            return room
        left = self._left_on_trial(worker, trial, now)
        if room.denial is not None or left >= room.groups:
            return room
        return Room(left) if left > 0 else Room(0, self.account.trial_denial())

    def _left_on_trial(self, worker: str, trial: Trial, now: float) -> int:
        """The credits left for a worker after those ahead of it in the queue."""
        allowance, out = self.allowance, self._trials_out()
        self._queue.ask(worker, trial, self._workers[worker].limit.wasted_s, now)
        if allowance.left(trial, out) <= 0:
            return 0
        ahead = self._queue.ahead_of(worker, allowance, out, now)
        return allowance.left_after(ahead, trial, out)

    def _trials_out(self) -> TrialsOut:
        open_ = self._open.values()
        return TrialsOut.of((each.trial, each.unanswered) for each in open_ if each.trial)

    @property
    def allowance(self) -> Allowance:
        """The credits for workers on trial."""
        rules, credits_ = self.rules, self.account.rules.groups_max
        short = max(rules.trial_groups_min, int(rules.trial_share * credits_))
        return Allowance(max(short, rules.first_groups), rules.first_groups)

    def _lease(self, worker: str, version: int, groups: int, now: float) -> Lease:
        parts = (self._run_id, worker, str(self._start), str(self._number))
        who = b"".join(len(raw).to_bytes(8, "big") + raw for raw in map(str.encode, parts))
        self._number += 1
        lease_id = hmac.digest(self._secret, _ID_DOMAIN + who, "sha256")[:LEASE_ID_BYTES]
        stream = hmac.digest(self._secret, _STREAM_DOMAIN + who, "sha256").hex()
        life_s = min(self._life_s(worker, groups), self.rules.life_s_max)
        ends = now + life_s
        return Lease(lease_id, worker, stream, groups, version, now, ends, *self.terms)

    def _size(self, worker: str, now: float) -> int:
        """The number of groups in a lease: of `target_s`, or of a shorter step, and one more.

        A lease's groups come in together, so in a longer one the first grow old.
        """
        known, rules = self._workers[worker], self.rules
        most = rules.first_groups
        if not known.limit.is_on_trial:
            mine = (held for held in self._open.values() if held.lease.worker == worker)
            left = int(known.limit.credits) - sum(held.unanswered for held in mine)
            most = min(left, max(most, int(known.limit.credits) // rules.open_max))
        if known.rate is None:
            return min(rules.first_groups, most)
        target_s = min(rules.target_s, self.account.step_s(now) or rules.target_s)
        return min(rules.groups_max, 1 + int(known.rate * target_s), most)

    def _life_s(self, worker: str, groups: int) -> float:
        """The life of a lease on so many groups. A worker that delivered nothing may only be slow,
        and gets twice the time of before; only an established one is trusted with `life_s_min`."""
        known, rules = self._workers[worker], self.rules
        first_s = rules.first_life_s
        measured_s = rules.slack * groups / known.rate if known.rate else 0.0
        if known.limit.is_on_trial:
            return max(first_s, measured_s, 2.0 * known.limit.wasted_s)
        least_s = rules.life_s_min if known.limit.is_established else min(rules.life_s_min, first_s)
        return max(least_s, measured_s or first_s)

    def _know(self, worker: str) -> bool:
        """Have an account of a worker; False: there is no room."""
        if worker not in self._workers and len(self._workers) >= WORKERS_MAX:
            busy = {held.lease.worker for held in self._open.values()}
            idle = [each for each in self._workers if each not in busy]
            if not idle:
                return False
            nobody = (each for each in idle if self._workers[each].limit.is_on_trial)
            del self._workers[next(nobody, idle[0])]
        self._workers.setdefault(worker, KnownWorker())
        self._workers.move_to_end(worker)
        return True

    def judge(self, submission: SubmittedGroup, now: float) -> Answer | None:
        """The answer that needs no verification; None: verify. Counts nothing: `submit` follows."""
        return self._judge(submission, now)[1]

    def submit(
        self, submission: SubmittedGroup, now: float, fault: str = "", *, blames: bool = True
    ) -> Answer:
        """Admit or refuse a group. `fault`: one line, used only where the group would have been
        admitted. `blames`: it counts against the worker."""
        held, answer = self._judge(submission, now)
        if held is not None and held.lease.worker in self._workers:
            self._workers[held.lease.worker].heard_at = now
        if answer is None:
            assert held is not None
            return self._settle(held, submission, fault, now, blames)
        if answer.repeated:
            self.repeated += 1
            return answer
        assert answer.reason is not None
        uses_credit = answer.reason in (Discard.UNKNOWN_VERSION, Discard.OLDER_THAN_LEASE)
        if held is not None and uses_credit:
            self._end_trial(held, 1)
            self.account.release(1, answer.reason)
            self._note(held, submission, answer, now)
        else:
            self.account.discarded[answer.reason] += 1
            self._refused(submission.worker)  # it may try again
        return answer

    def _judge(self, submission: SubmittedGroup, now: float) -> tuple[_Held | None, Answer | None]:
        """The sender's lease, if any, and the answer, if it needs no verification."""
        held = self._open.get(submission.lease_id) or self._ended.get(submission.lease_id)
        if held is None:
            return None, Answer(Discard.UNKNOWN_LEASE)
        if not self._is_holder(held.lease, submission.worker):
            return None, Answer(Discard.OTHER_WORKER)
        if not self._is_assigned(held, submission.seed):
            return held, Answer(Discard.NOT_ASSIGNED)
        earlier = self._earlier(held, submission)
        if earlier is not None:
            return held, earlier
        if self._is_over(held, now):
            return held, Answer(Discard.LATE)
        if submission.group_id in self._places:
            return held, Answer(Discard.DUPLICATE)
        return held, self._judge_versions(held.lease, submission.versions)

    # Each check is a method of its own, so that tests can take one out.

    def _is_holder(self, lease: Lease, worker: str) -> bool:
        return lease.worker == worker

    def _is_assigned(self, held: _Held, seed: int) -> bool:
        return seed in held.seeds

    def _is_over(self, held: _Held, now: float) -> bool:
        return held.lease.lease_id not in self._open or now >= held.lease.deadline

    def _judge_versions(self, lease: Lease, versions: Sequence[int]) -> Answer | None:
        version = self.account.version
        if not versions or min(versions) < 0 or max(versions) > version:
            return Answer(Discard.UNKNOWN_VERSION, f"the learner is at version {version}")
        if min(versions) < lease.version:
            return Answer(Discard.OLDER_THAN_LEASE, f"the lease is for version {lease.version}")
        return None

    def _earlier(self, held: _Held, submission: SubmittedGroup) -> Answer | None:
        """The answer that the task already has."""
        found = held.answers.get(submission.seed)
        if found is None:
            return None
        group_id, answer = found
        if group_id != submission.group_id:
            return Answer(Discard.OTHER_GROUP)
        return Answer(answer.reason, answer.detail, repeated=True)

    def _settle(
        self, held: _Held, submission: SubmittedGroup, fault: str, now: float, blames: bool
    ) -> Answer:
        """Answer a verified submission for the first time."""
        self._end_trial(held, 1)
        if fault:
            self.account.release(1, Discard.FAULTY)
            answer = Answer(Discard.FAULTY, fault)
        else:
            oldest, newest = min(submission.versions), max(submission.versions)
            group = BufferedGroup(submission.group_id, submission.worker, oldest, newest)
            answer = Answer(self.account.admit(group))
        self._note(held, submission, answer, now, blames=blames)
        return answer

    def _note(
        self,
        held: _Held,
        submission: SubmittedGroup,
        answer: Answer,
        now: float,
        *,
        blames: bool = True,
    ) -> None:
        held.answers[submission.seed] = (submission.group_id, answer)
        held.answered_at = now
        if answer.admitted:
            self._places[submission.group_id] = (submission.lease_id, submission.seed)
            took_s = max(0.0, now - held.lease.granted_at)
            credits_max = self.rules.open_max * self.rules.groups_max
            self._workers[submission.worker].delivers(took_s, credits_max, now)
        elif blames:
            self._refused(submission.worker)
        if held.unanswered == 0:
            self._end(held, now)

    def _refused(self, worker: str) -> None:
        known = self._workers.get(worker)
        if known is not None:
            known.refused += 1

    def expire(self, now: float) -> list[Lease]:
        """End the leases that are over; their unused credits are free again."""
        over = [held for held in self._open.values() if now >= held.lease.deadline]
        return self._take_back(over, Discard.EXPIRED, now)

    def give_back(self, worker: str, now: float) -> list[Lease]:
        """End the leases of a worker that leaves."""
        left = [held for held in self._open.values() if held.lease.worker == worker]
        return self._take_back(left, Discard.RETURNED, now)

    def reclaim(self, oldest: int, now: float) -> list[Lease]:
        """End the leases of an older version, for which no worker is blamed."""
        old = [held for held in self._open.values() if held.lease.version < oldest]
        return self._take_back(old, Discard.OVERTAKEN, now)

    def _take_back(self, some: Sequence[_Held], why: Discard, now: float) -> list[Lease]:
        for held in some:
            self._end_trial(held, held.unanswered)
            self._free(held, why)
            self._end(held, now, returned=0 if why is Discard.EXPIRED else held.unanswered)
        return [held.lease for held in some]

    def _free(self, held: _Held, why: Discard) -> None:
        self.account.release(held.unanswered, why)

    def _end_trial(self, held: _Held, groups: int) -> None:
        if held.trial is not None:
            self.account.end_trial(groups)

    def _end(self, held: _Held, now: float, returned: int = 0) -> None:
        del self._open[held.lease.lease_id]
        self._ended[held.lease.lease_id] = held
        self._judge_worker(held, returned, now)
        while len(self._ended) > LEASES_REMEMBERED_MAX:
            _, forgotten = self._ended.popitem(last=False)
            for group_id, answer in forgotten.answers.values():
                if answer.admitted:
                    del self._places[group_id]

    def _judge_worker(self, held: _Held, returned: int, now: float) -> None:
        """Update a worker's account by a lease that ended."""
        worker, lease = self._workers[held.lease.worker], held.lease
        lost = lease.groups - held.delivered - returned
        worker.limit.lost(lost / lease.groups)
        if held.trial is not None and lost == lease.groups:
            worker.limit.wasted_s = lease.deadline - lease.granted_at
        worker.lease_ends(
            admitted=held.admitted,
            groups=lease.groups,
            unanswered=held.unanswered,
            busy_from=held.busy_from,
            answered_at=held.answered_at,
            now=now,
        )

    def open_leases(self, worker: str) -> list[Lease]:
        """A worker's leases, oldest first."""
        return [held.lease for held in self._open.values() if held.lease.worker == worker]

    def lease(self, lease_id: bytes) -> Lease | None:
        """A lease that is open or remembered."""
        held = self._open.get(lease_id) or self._ended.get(lease_id)
        return None if held is None else held.lease

    def rates(self) -> dict[str, float]:
        """Admitted groups/s of each worker that has been measured."""
        found = {name: worker.rate for name, worker in self._workers.items()}
        return {name: rate for name, rate in found.items() if rate is not None}

    def accounts(self) -> list[WorkerAccount]:
        """All workers, the one unheard of for longest first."""
        leased: Counter[str] = Counter()
        for held in self._open.values():
            leased[held.lease.worker] += held.unanswered
        return [WorkerAccount(name, each, leased[name]) for name, each in self._workers.items()]

    def trial_state(self, now: float) -> TrialState:
        held = [each for each in self._open.values() if each.trial is not None]
        return TrialState(
            held=self.account.on_trial,
            most=self.allowance.total,
            workers=len({each.lease.worker for each in held}),
            places=len(self._trials_out().by_place),
            waiting=self._queue.count(now),
        )

    def to_record(self, now: float) -> dict[str, Any]:
        """Everything but the secret, with the account, as plain values."""
        kept = _Kept(
            open=[*self._open.values()],
            ended=[*self._ended.values()],
            workers=dict(self._workers),
            denied=self.denied,
            repeated=self.repeated,
        )
        return {"account": self.account.to_record(now), **record_of(kept, now)}

    @classmethod
    def from_record(
        cls,
        record: Any,
        *,
        rules: LeaseRules,
        staleness_rules: StalenessRules,
        run_id: str,
        secret: bytes,
        start: int,
        now: float,
    ) -> "LeaseBook":
        """The lease book of a record; `LocalProtocolError` if it is none or contradicts itself."""
        if not isinstance(record, dict):
            raise LocalProtocolError("no record of leases")
        account = Account.from_record(staleness_rules, record.get("account"), now)
        kept = restored(_Kept, {k: v for k, v in record.items() if k != "account"}, now)
        book = cls(rules, account, run_id, secret, start)
        book._open.update((held.lease.lease_id, held) for held in kept.open)
        book._ended.update((held.lease.lease_id, held) for held in kept.ended)
        for name, known in kept.workers.items():
            known.restarted()
            book._workers[name] = known
        book.denied, book.repeated = kept.denied, kept.repeated
        for held in (*book._ended.values(), *book._open.values()):
            for seed, (group_id, answer) in held.answers.items():
                if answer.admitted:
                    book._places[group_id] = (held.lease.lease_id, seed)
        unanswered = sum(held.unanswered for held in book._open.values())
        on_trial = book._trials_out().by_kind.total()
        if (unanswered, on_trial) != (account.reserved, account.on_trial):
            raise LocalProtocolError(
                f"leases hold {unanswered} credits, {on_trial} on trial; the account says "
                f"{account.reserved} and {account.on_trial}"
            )
        book._shorten(now)
        return book

    def _shorten(self, now: float) -> None:
        """After a restart, let leases end once their workers could have delivered. Groups that came
        in after the record was written are lost, and do not come again."""
        for held in self._open.values():
            known, lease = self._workers.get(held.lease.worker), held.lease
            if known is not None and known.rate:
                left_s = max(RECONNECT_S, self.rules.slack * held.unanswered / known.rate)
                held.lease = replace(lease, deadline=min(lease.deadline, now + left_s))
