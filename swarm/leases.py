"""Who generates what by when: leases of tasks to rollout workers. Pure: time and the number of the
start are passed in.

A lease is some groups' worth of credits (`staleness.Account`) in one worker's hands until a
deadline, and the tasks to use them on. The tasks follow from a secret of the learner, the run, the
worker, the start and the lease's number: a worker can neither choose them nor work out those of
its next lease, and a group of any other task is refused by name. What a worker leaves out stays its
choice, and lowers its rate.

How much a worker gets follows from its measured rate: admitted groups a second, over its last
leases and the breaks that it took before them. It says nothing about itself that would count, so a
lie about speed gains nothing.

    book = LeaseBook(rules, account, run_id, secret, start)
    lease = book.request(worker, version, now)      a Lease, or a Denial that says why not
    answer = book.judge(submission, now)            what to answer without looking at the group;
                                                    None: verify it, then
    answer = book.submit(submission, now, fault)    `fault`: what verification found, "" if nothing
    book.give_back(worker, now)                     a worker leaves
    book.stand_by(worker, version, now)             a worker asked, and is not wanted
    book.expire(now)                                deadlines; each lease that ended
    book.account                                    `consume`, `finish_step`, counters
    book.to_record(now); LeaseBook.from_record(…)   across a restart, under another `start`

A submission that comes twice gets the same answer twice and counts once, as long as its lease is
remembered; then it is of an unknown lease, and refused. After a restart from a record, leases of
the record go on with the time that they had left; those granted since are unknown, which is no
fault of their workers.
"""

import hashlib
import hmac
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from swarm.errors import LocalProtocolError, require
from swarm.staleness import Account, BufferedGroup, Denial, Discard, StalenessRules

LEASE_GROUPS_MAX: Final = 256  # what `groups_max` may be
WORKERS_MAX: Final = 4096  # kept account of; the one unheard of for longest makes room
LEASES_REMEMBERED_MAX: Final = 1024  # that ended, with their answers
RATE_EWMA_SHARE: Final = 0.3  # of what was measured before, forgotten with each lease
BREAK_S_MAX: Final = 60.0  # who stays away for longer was away, not slow
FORGIVEN_EVERY: Final = 10  # leases, of which one may be lost and say nothing of speed
TURNAROUND_EWMA_SHARE: Final = 0.2  # of the newest group
SECRET_BYTES_MIN: Final = 16
LEASE_ID_BYTES: Final = 16
SEED_BITS: Final = 62

_ID_DOMAIN: Final = b"swarm/lease-id/1"
_STREAM_DOMAIN: Final = b"swarm/lease-stream/1"
_SEED_DOMAIN: Final = b"swarm/lease-seed/1"


@dataclass(frozen=True, slots=True)
class LeaseRules:
    """How large leases are and how long they last."""

    target_s: float = 60.0  # what a lease should take its worker; several groups' generation
    first_s: float = 120.0  # what the first lease of an unmeasured worker is taken to take
    first_groups: int = 1  # in it: a worker that never delivers costs no more
    slack: float = 3.0  # a lease lasts so many times what it should take
    life_s_min: float = 30.0  # and at least as long
    life_s_max: float = 3600.0  # and no longer
    groups_max: int = 64  # in one lease
    open_max: int = 2  # leases of one worker at a time, so that it need not wait for the next

    def __post_init__(self) -> None:
        checks = (
            ("target_s", self.target_s > 0, "take more than 0"),
            ("first_s", self.first_s > 0, "take more than 0"),
            ("first_groups", 1 <= self.first_groups <= self.groups_max, "take 1 to groups_max"),
            ("slack", self.slack >= 1, "take at least 1"),
            ("life_s_min", 0 < self.life_s_min <= self.life_s_max, "above 0, up to life_s_max"),
            ("groups_max", 1 <= self.groups_max <= LEASE_GROUPS_MAX, f"1 to {LEASE_GROUPS_MAX}"),
            ("open_max", 1 <= self.open_max <= 16, "take 1 to 16"),
        )
        require(self, checks, "lease ")


@dataclass(frozen=True, slots=True)
class Lease:
    """What a worker is told. `stream` decides the tasks: see `task_seeds`."""

    lease_id: bytes
    worker: str
    stream: str
    groups: int
    version: int  # that the worker had when it asked
    granted_at: float
    deadline: float

    @property
    def seeds(self) -> tuple[int, ...]:
        return task_seeds(self.stream, self.groups)


@dataclass(frozen=True, slots=True)
class Submission:
    """A group that a worker sent. `versions` are those of all its tokens, each at least once."""

    lease_id: bytes
    worker: str  # who sent it, by its connection or signature
    seed: int
    group_id: bytes
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a submission: None is admitted. Equal answers say the same to the worker."""

    reason: Discard | None
    detail: str = ""
    repeated: bool = field(default=False, compare=False)  # answered before; counted only then

    @property
    def admitted(self) -> bool:
        return self.reason is None


@dataclass(slots=True)
class _Held:
    """A lease with the answers that were given under it, by seed."""

    lease: Lease
    busy_from: float  # since when the worker's time went into it
    answered_at: float | None = None  # the last time
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


@dataclass(slots=True)
class _Worker:
    """`done` over `busy_s` is a worker's rate. Both forget alike, so that two leases which end
    together are worth what they took together, in whatever order."""

    done: float = 0.0  # admitted groups
    failed: float = 0.0  # granted groups that were not admitted
    busy_s: float = 0.0  # with at least one lease, or away before the next
    measured_at: float | None = None  # when its last lease ended
    whole: int = FORGIVEN_EVERY  # leases with all groups in since the last one without
    has_died: bool = False  # for all that is known: a loss that is put down to that
    break_s: float | None = None  # from then until it asked again; None: it has not
    turnaround_s: float = 0.0  # from grant to admission, in the mean
    admitted: int = 0
    refused: int = 0
    version: int = 0  # that it said it had
    heard_at: float | None = None

    @property
    def rate(self) -> float | None:
        """Admitted groups a second of work; None before a lease ended."""
        return self.done / self.busy_s if self.busy_s > 0.0 else None

    def asks(self, version: int, now: float) -> None:
        """It wants work. What it waits from now on is not its own doing."""
        self.version, self.heard_at = version, now
        if self.break_s is None and self.measured_at is not None:
            away_s = min(BREAK_S_MAX, max(0.0, now - self.measured_at))
            self.break_s = 0.0 if self.has_died else away_s  # who died did not rest


@dataclass(frozen=True, slots=True)
class WorkerAccount:
    """What is known of a worker, measured here but for the version, which it says."""

    worker: str
    version: int
    heard_at: float | None  # None: not since the restart
    rate: float | None  # admitted groups a second; None: not measured
    failed_share: float  # of the groups that it was granted
    turnaround_s: float  # from grant to admission; 0: not measured
    admitted: int
    refused: int
    leased: int  # groups in its open leases


def task_seeds(stream: str, count: int) -> tuple[int, ...]:
    """The seeds of a lease's tasks, 0 <= seed < 2**`SEED_BITS`, for whoever has the lease."""
    return tuple(_seed(stream, place) for place in range(count))


def _seed(stream: str, place: int) -> int:
    digest = hashlib.sha256(_SEED_DOMAIN + stream.encode() + b"/" + str(place).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)


def _framed(*parts: str) -> bytes:
    """Parts that no other parts give the same bytes as."""
    return b"".join(len(raw).to_bytes(8, "big") + raw for raw in (p.encode() for p in parts))


class LeaseBook:
    """All leases of one learner, open and remembered, and what its workers deliver.

    `start` is a number that no earlier start of this learner had (a random one, or the time of
    it), so that no lease that was lost in a crash comes again under the same id. `secret` stays
    with the learner.
    """

    def __init__(
        self, rules: LeaseRules, account: Account, run_id: str, secret: bytes, start: int
    ) -> None:
        if len(secret) < SECRET_BYTES_MIN:
            raise LocalProtocolError(f"a lease secret of {len(secret)} bytes")
        self.rules = rules
        self.account = account
        self._run_id = run_id
        self._secret = secret
        self._start = start
        self._number = 0  # of the next lease
        self._open: OrderedDict[bytes, _Held] = OrderedDict()
        self._ended: OrderedDict[bytes, _Held] = OrderedDict()
        self._workers: OrderedDict[str, _Worker] = OrderedDict()
        self._places: dict[bytes, tuple[bytes, int]] = {}  # admitted group: its lease and seed
        self.denied: Counter[Denial] = Counter()
        self.repeated = 0  # submissions that had been answered

    # --- granting ----------------------------------------------------------------------------

    def request(self, worker: str, version: int, now: float) -> Lease | Denial:
        """Grant what a worker with this version of the policy may do next."""
        self.expire(now)
        result = self._grant(worker, version, now)
        if isinstance(result, Denial):
            self.denied[result] += 1
        return result

    def stand_by(self, worker: str, version: int, now: float) -> None:
        """A worker asked, and is not wanted now."""
        self.expire(now)
        if self._is_version(version) and self._know(worker):
            self._workers[worker].asks(version, now)

    def _grant(self, worker: str, version: int, now: float) -> Lease | Denial:
        if not self._is_version(version):  # nothing that is said along with it counts
            return Denial.UNKNOWN_VERSION
        if not self._know(worker):
            return Denial.WORKERS_FULL
        known = self._workers[worker]
        known.asks(version, now)
        if len(self.open_leases(worker)) >= self.rules.open_max:
            return Denial.LEASES_OPEN
        groups = self._size(worker, now)
        room = self.account.room(version, groups, self._expected_s(worker, groups), now)
        while room.denial is Denial.WOULD_BE_STALE and groups > 1:
            groups //= 2  # what takes less time may still be in time
            room = self.account.room(version, groups, self._expected_s(worker, groups), now)
        if room.denial is not None:
            return room.denial
        self.account.reserve(room.groups)
        lease = self._lease(worker, version, room.groups, now)
        self._open[lease.lease_id] = _Held(lease, now - (known.break_s or 0.0))
        known.break_s = 0.0
        return lease

    def _is_version(self, version: int) -> bool:
        return 0 <= version <= self.account.version

    def _lease(self, worker: str, version: int, groups: int, now: float) -> Lease:
        who = _framed(self._run_id, worker, str(self._start), str(self._number))
        self._number += 1
        lease_id = hmac.digest(self._secret, _ID_DOMAIN + who, "sha256")[:LEASE_ID_BYTES]
        stream = hmac.digest(self._secret, _STREAM_DOMAIN + who, "sha256").hex()
        life_s = max(self.rules.life_s_min, self.rules.slack * self._duration_s(worker, groups))
        life_s = min(life_s, self.rules.life_s_max)
        return Lease(lease_id, worker, stream, groups, version, now, now + life_s)

    def _size(self, worker: str, now: float) -> int:
        """How many groups a worker is given: what it does in `target_s`, and one more. Where steps
        are shorter than that, in one of these: a lease's groups come in together, and those that
        wait for the last of them grow old."""
        rate = self._workers[worker].rate
        if rate is None:
            return self.rules.first_groups
        target_s = min(self.rules.target_s, self.account.step_s(now) or self.rules.target_s)
        return min(self.rules.groups_max, 1 + int(rate * target_s))

    def _expected_s(self, worker: str, groups: int) -> float:
        """What so many groups should take a worker, as far as anything was measured. A newcomer is
        taken to be in time: else none would ever be measured where steps are short."""
        known = self._workers[worker]
        return groups / known.rate if known.rate else known.busy_s

    def _duration_s(self, worker: str, groups: int) -> float:
        """How long a lease on so many groups has to be enough for. A worker that has delivered
        nothing yet may only be slow: it is taken to need as long as it has had."""
        known = self._workers[worker]
        if not known.rate:
            return max(self.rules.first_s, known.busy_s)
        return groups / known.rate

    def _know(self, worker: str) -> bool:
        """Have an account of a worker; whether there was room for it."""
        if worker not in self._workers and len(self._workers) >= WORKERS_MAX:
            busy = {held.lease.worker for held in self._open.values()}
            idle = next((each for each in self._workers if each not in busy), None)
            if idle is None:
                return False
            del self._workers[idle]
        self._workers.setdefault(worker, _Worker())
        self._workers.move_to_end(worker)
        return True

    # --- answering ---------------------------------------------------------------------------

    def judge(self, submission: Submission, now: float) -> Answer | None:
        """What the answer is without a look at the group; None where that has to decide. Changes
        nothing and counts nothing: `submit` follows in any case."""
        return self._judge(submission, now)[1]

    def submit(self, submission: Submission, now: float, fault: str = "") -> Answer:
        """Take a group in, or say why not. `fault`: what is wrong with it, one line; it is heard
        only where the group would have been taken."""
        held, answer = self._judge(submission, now)
        if held is not None and held.lease.worker in self._workers:
            self._workers[held.lease.worker].heard_at = now
        if answer is None:
            assert held is not None
            return self._settle(held, submission, fault, now)
        if answer.repeated:
            self.repeated += 1
            return answer
        assert answer.reason is not None
        if held is not None and self._is_of_the_group(answer.reason):
            self.account.release(1, answer.reason)
            self._note(held, submission, answer, now)
        else:
            self.account.discarded[answer.reason] += 1
            self._refused(submission.worker)
        return answer

    @staticmethod
    def _is_of_the_group(reason: Discard) -> bool:
        """Whether a refusal ends what its task was granted; else the worker may try again."""
        return reason in (Discard.UNKNOWN_VERSION, Discard.OLDER_THAN_LEASE)

    def _judge(self, submission: Submission, now: float) -> tuple[_Held | None, Answer | None]:
        """The lease, if it is the sender's, and the answer, if it is clear."""
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

    def _judge_versions(self, lease: Lease, versions: Sequence[int]) -> Answer | None:
        version = self.account.version
        if not versions or min(versions) < 0 or max(versions) > version:
            return Answer(Discard.UNKNOWN_VERSION, f"the learner is at version {version}")
        if min(versions) < lease.version:
            return Answer(Discard.OLDER_THAN_LEASE, f"the lease is for version {lease.version}")
        return None

    def _is_holder(self, lease: Lease, worker: str) -> bool:
        return lease.worker == worker

    def _is_assigned(self, held: _Held, seed: int) -> bool:
        return seed in held.seeds

    def _is_over(self, held: _Held, now: float) -> bool:
        return held.lease.lease_id not in self._open or now >= held.lease.deadline

    def _earlier(self, held: _Held, submission: Submission) -> Answer | None:
        """The answer that the task has had."""
        found = held.answers.get(submission.seed)
        if found is None:
            return None
        group_id, answer = found
        if group_id != submission.group_id:
            return Answer(Discard.OTHER_GROUP)
        return Answer(answer.reason, answer.detail, repeated=True)

    def _settle(self, held: _Held, submission: Submission, fault: str, now: float) -> Answer:
        """Answer a submission for the first time that only verification or its age decides."""
        if fault:
            self.account.release(1, Discard.FAULTY)
            answer = Answer(Discard.FAULTY, fault)
        else:
            versions = submission.versions
            group = BufferedGroup(
                submission.group_id, submission.worker, min(versions), max(versions)
            )
            answer = Answer(self.account.admit(group))
        self._note(held, submission, answer, now)
        return answer

    def _note(self, held: _Held, submission: Submission, answer: Answer, now: float) -> None:
        held.answers[submission.seed] = (submission.group_id, answer)
        held.answered_at = now
        if answer.admitted:
            self._places[submission.group_id] = (submission.lease_id, submission.seed)
            worker = self._workers[submission.worker]
            worker.admitted += 1
            took_s = max(0.0, now - held.lease.granted_at)
            share = TURNAROUND_EWMA_SHARE if worker.turnaround_s else 1.0
            worker.turnaround_s += share * (took_s - worker.turnaround_s)
        else:
            self._refused(submission.worker)
        if held.unanswered == 0:
            self._end(held, now)

    def _refused(self, worker: str) -> None:
        known = self._workers.get(worker)
        if known is not None:
            known.refused += 1

    # --- ending ------------------------------------------------------------------------------

    def expire(self, now: float) -> list[Lease]:
        """End the leases whose deadline has come; their unused credits are free again."""
        over = [held for held in self._open.values() if now >= held.lease.deadline]
        for held in over:
            self._free(held, Discard.EXPIRED)
            self._end(held, now)
        return [held.lease for held in over]

    def give_back(self, worker: str, now: float) -> list[Lease]:
        """End a worker's leases because it says that it goes."""
        left = [held for held in self._open.values() if held.lease.worker == worker]
        for held in left:
            self._free(held, Discard.RETURNED)
            self._end(held, now)
        return [held.lease for held in left]

    def _free(self, held: _Held, why: Discard) -> None:
        self.account.release(held.unanswered, why)

    def _end(self, held: _Held, now: float) -> None:
        del self._open[held.lease.lease_id]
        self._ended[held.lease.lease_id] = held
        self._measure(held, now)
        while len(self._ended) > LEASES_REMEMBERED_MAX:
            _, forgotten = self._ended.popitem(last=False)
            for group_id, answer in forgotten.answers.values():
                if answer.admitted:
                    del self._places[group_id]

    def _measure(self, held: _Held, now: float) -> None:
        """Put a lease that ended into its worker's rate: what was admitted, and the time since the
        grant and the break before it, or since the lease before ended where the worker had two.

        Where groups are missing, the worker died or is slow, and nobody can tell. Now and then it
        is taken to have died after its last answer, which says nothing of its speed; not often, or
        to lose leases would pay."""
        worker = self._workers[held.lease.worker]
        since = held.busy_from
        if worker.measured_at is not None:
            since = max(since, worker.measured_at)
        worker.measured_at, worker.break_s = now, None
        worker.has_died = False
        if not held.unanswered:
            worker.whole += 1
        else:
            worker.has_died = worker.whole >= FORGIVEN_EVERY and worker.rate is not None
            worker.whole = 0
            if worker.has_died:
                now = held.answered_at or since
        worker.done += held.admitted - RATE_EWMA_SHARE * worker.done
        lost = held.lease.groups - held.admitted
        worker.failed += lost - RATE_EWMA_SHARE * worker.failed
        worker.busy_s += max(0.0, now - since) - RATE_EWMA_SHARE * worker.busy_s

    # --- looking -----------------------------------------------------------------------------

    def open_leases(self, worker: str) -> list[Lease]:
        """A worker's leases, oldest first: what to tell it again when an answer got lost."""
        return [held.lease for held in self._open.values() if held.lease.worker == worker]

    def lease(self, lease_id: bytes) -> Lease | None:
        """A lease that is open or remembered."""
        held = self._open.get(lease_id) or self._ended.get(lease_id)
        return None if held is None else held.lease

    def rates(self) -> dict[str, float]:
        """Admitted groups a second of each worker that has been measured."""
        return {
            name: worker.rate for name, worker in self._workers.items() if worker.rate is not None
        }

    def accounts(self) -> list[WorkerAccount]:
        """All workers, the one heard of for longest first."""
        leased: Counter[str] = Counter()
        for held in self._open.values():
            leased[held.lease.worker] += held.unanswered
        return [
            WorkerAccount(
                worker=name,
                version=each.version,
                heard_at=each.heard_at,
                rate=each.rate,
                failed_share=each.failed / max(each.failed + each.done, 1e-9),
                turnaround_s=each.turnaround_s,
                admitted=each.admitted,
                refused=each.refused,
                leased=leased[name],
            )
            for name, each in self._workers.items()
        ]

    def next_deadline(self) -> float | None:
        """When `expire` has something to do; None without an open lease."""
        return min((held.lease.deadline for held in self._open.values()), default=None)

    # --- across a restart --------------------------------------------------------------------

    def to_record(self, now: float) -> dict[str, Any]:
        """Everything but the secret as plain values, MessagePack's; the account is in it."""
        return {
            "account": self.account.to_record(now),
            "open": [_held_record(held, now) for held in self._open.values()],
            "ended": [_held_record(held, now) for held in self._ended.values()],
            "workers": [
                [
                    name,
                    w.done,
                    w.busy_s,
                    _ago(w.measured_at, now),
                    w.admitted,
                    w.refused,
                    w.failed,
                    w.turnaround_s,
                ]
                for name, w in self._workers.items()
            ],
            "denied": {str(why): count for why, count in sorted(self.denied.items())},
            "repeated": self.repeated,
        }

    @classmethod
    def from_record(
        cls,
        record: dict[str, Any],
        *,
        rules: LeaseRules,
        staleness_rules: StalenessRules,
        run_id: str,
        secret: bytes,
        start: int,
        now: float,
    ) -> "LeaseBook":
        """As it was. The secret has to be the same only for new leases not to be foreseen.

        Raises:
            LocalProtocolError: no record of a lease book, or one that contradicts itself.
        """
        try:
            account = Account.from_record(staleness_rules, record["account"], now)
            book = cls(rules, account, run_id, secret, start)
            for name, done, busy_s, measured_s_ago, admitted, refused, *new in record["workers"]:
                failed, turnaround_s = new or (0.0, 0.0)  # which records of before do not have
                book._workers[name] = _Worker(
                    done=done,
                    failed=failed,
                    busy_s=busy_s,
                    measured_at=None if measured_s_ago is None else now - measured_s_ago,
                    break_s=0.0,  # nobody could ask meanwhile
                    turnaround_s=turnaround_s,
                    admitted=admitted,
                    refused=refused,
                )
            book._open.update(_held_items(record["open"], now))
            book._ended.update(_held_items(record["ended"], now))
            book.denied.update({Denial(k): v for k, v in record["denied"].items()})
            book.repeated = record["repeated"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise LocalProtocolError(f"no record of leases: {error!r}") from None
        for held in (*book._ended.values(), *book._open.values()):
            for seed, (group_id, answer) in held.answers.items():
                if answer.admitted:
                    book._places[group_id] = (held.lease.lease_id, seed)
        book._check_credits()
        return book

    def _check_credits(self) -> None:
        unanswered = sum(held.unanswered for held in self._open.values())
        if unanswered != self.account.reserved:
            raise LocalProtocolError(
                f"leases hold {unanswered} credits and the account says {self.account.reserved}"
            )


def _ago(at: float | None, now: float) -> float | None:
    return None if at is None else now - at


def _held_record(held: _Held, now: float) -> list[Any]:
    lease = held.lease
    times = [now - lease.granted_at, lease.deadline - now]
    about = [lease.lease_id, lease.worker, lease.stream, lease.groups, lease.version, *times]
    answers = [
        [seed, group_id, None if answer.reason is None else str(answer.reason), answer.detail]
        for seed, (group_id, answer) in held.answers.items()
    ]
    return [about, answers]


def _held_items(records: Sequence[Any], now: float) -> list[tuple[bytes, _Held]]:
    items = []
    for about, answers in records:
        lease_id, worker, stream, groups, version, granted_s_ago, left_s = about
        times = (now - granted_s_ago, now + left_s)
        lease = Lease(lease_id, worker, stream, groups, version, *times)
        held = _Held(lease, lease.granted_at)
        for seed, group_id, reason, detail in answers:
            answer = Answer(None if reason is None else Discard(reason), detail)
            held.answers[seed] = (group_id, answer)
        items.append((lease.lease_id, held))
    return items
