"""A learner's intake: it grants leases, checks submissions, and buffers groups until a step.

`lease_table` and `staleness` decide on grants and consumption, the node's `Checks` on a group's
worth. Checks go from cheap to dear: quota, size, signature, schema, lease, task, versions, rewards,
and for some groups the log-probs. Fewer groups of a worker are re-scored the more of its groups
passed.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final, Protocol

import trio

from swarm.errors import ChildFailed, ConfigError, LocalProtocolError, Reject, RemoteProtocolError
from swarm.identity import PeerId
from swarm.leases.known_workers import WorkerOrigin
from swarm.leases.lease_table import Answer, Lease, LeaseBook, SubmittedGroup, TrialState
from swarm.leases.staleness import Denial
from swarm.limits.quotas import RELAYED, Kind
from swarm.peers.connection_gater import ConnectionGater
from swarm.plain_records import record_of, restored
from swarm.rollouts import GroupId, RolloutGroup, ScoredGroup, version_spans
from swarm.transport.base import ServeLimits, Transport
from swarm.wire import codec
from swarm.wire.messages import (
    DETAIL_CHARS_MAX,
    LEASE_MS_MAX,
    LEASE_REPLY_BYTES_MAX,
    LEASES_PROTOCOL,
    SUBMISSION_BYTES_MAX,
    SUBMISSION_REPLY_BYTES_MAX,
    SUBMISSIONS_PROTOCOL,
    WANT_LEASE_BYTES_MAX,
    LeaseReply,
    SubmissionReply,
    WantLease,
)

RETRY_S: Final[dict[Denial, float]] = {
    Denial.NO_CREDIT: 0.5,
    Denial.TRIAL_FULL: 2.0,
    Denial.WOULD_BE_STALE: 0.5,  # the next version may be on its way to the worker
    Denial.UNKNOWN_VERSION: 2.0,
    Denial.LEASES_OPEN: 1.0,
    Denial.WORKERS_FULL: 60.0,
}
STANDBY_RETRY_S: Final = 5.0
BLOCK_PART: Final = 0.25  # of the credits on trial, for the workers of one address block
RELAYED_PART: Final = 0.5  # of the same, for all relayed workers
STANDBY: Final = "standby"  # the reason for no lease to a worker that is not needed
NO_LEASE: Final = bytes(16)
ANSWER_TIMEOUT_S: Final = 50.0  # for all checks of one submission
CHECKED_AT_ONCE_MAX: Final = 64
CHECKED_AT_ONCE_PER_PEER_MAX: Final = 16
CHECKS_MAX: Final = 3  # of one group that fail on our side
TRIED_MAX: Final = 1024  # groups whose failed checks are counted
FIRST_RESCORED: Final = 4.0  # passed groups of a worker until half of its groups are re-scored
HISTORIES_MAX: Final = 4096  # workers whose re-scoring results are kept
GROUP_BYTES_EWMA_SHARE: Final = 0.05  # of the newest group, in the mean size


class Checks(Protocol):
    """Checks that need the learner's own node: rewards and log-probs."""

    async def reward(self, lease: Lease, group: RolloutGroup) -> tuple[str, tuple[float, ...]]:
        """The prompt of a group's task and the reward of each completion.

        Raises:
            RemoteProtocolError: another task than that of its place, or no group to score.
            ChildFailed, ConfigError: the check failed on our side; the group may come again.
        """
        ...

    async def rescore(self, group: RolloutGroup, prompt: str) -> str | None:
        """The reason why tokens or log-probs are not those of the versions that the group claims;
        None: they may be; "": unknown. Raises `ChildFailed` and `ConfigError` as `reward`."""
        ...


@dataclass(frozen=True, slots=True)
class IntakeRules:
    run_id: str
    group_size: int
    tokenizer: str  # fingerprint; groups of another one are refused
    temperature: float
    top_p: float
    rescored_share: float  # least share of a worker's groups that are re-scored, 0 to 1


@dataclass(frozen=True, slots=True)
class _Kept:
    """A group that waits to be consumed, and its signed record."""

    admitted: ScoredGroup
    record: bytes


@dataclass(slots=True)
class _Record:
    """The state of an intake that survives a restart, besides its leases."""

    groups: list[tuple[bytes, bytes, str, tuple[float, ...]]]  # id, signed, prompt, rewards
    rescored_of: dict[str, int]  # groups that passed in a row, by worker
    rescored: Counter[str]


@dataclass(frozen=True, slots=True)
class IntakeCounts:
    buffered: int
    leased: int  # granted and not in
    on_trial: int  # of these, in the hands of workers that have nothing to show yet
    granted: int  # ever, as all below
    consumed: int
    consumed_by_staleness: dict[int, int]
    discarded: dict[str, int]  # by reason
    denied: dict[str, int]  # leases that were asked for and not granted, by reason
    rescored: dict[str, int]  # passed, failed, unknown
    rates: dict[str, float]  # admitted groups a second, by worker


# Long: a submission's way through checks, leases and credit.
class Intake:
    """Takes groups in for one learner. `run` serves until cancelled."""

    def __init__(
        self,
        rules: IntakeRules,
        book: LeaseBook,
        transport: Transport,
        gater: ConnectionGater,
        checks: Checks,
        rng: Random,
        now_s: Callable[[], float] = trio.current_time,
    ) -> None:
        """`now_s`: the clock of `book`."""
        self._rules = rules
        self.book = book
        self._transport = transport
        self._gater = gater
        self._checks = checks
        self._rng = rng
        self._now_s = now_s
        self._kept: dict[bytes, _Kept] = {}  # those buffered in the account, by id
        self._checking: set[tuple[bytes, int]] = set()  # leases and places
        self.check_failures = 0  # checks that failed on our side
        self.last_check_failure = ""
        self._tried: OrderedDict[GroupId, int] = OrderedDict()  # number of such checks
        self.faulty = 0  # groups that failed verification
        self.last_fault = ""
        self._passed: dict[str, int] = {}  # re-scored groups that passed in a row, by worker
        self._rescored: Counter[str] = Counter()
        self._arrived = trio.Event()
        self.group_bytes = 0  # mean size of admitted groups on the wire
        self.standby: frozenset[str] = frozenset()  # workers that get no leases

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self._transport.serve(
            LEASES_PROTOCOL,
            self._serve_lease,
            ServeLimits(WANT_LEASE_BYTES_MAX, LEASE_REPLY_BYTES_MAX, concurrent_max=64),
        )
        self._transport.serve(
            SUBMISSIONS_PROTOCOL,
            self._serve_submission,
            ServeLimits(
                SUBMISSION_BYTES_MAX,
                SUBMISSION_REPLY_BYTES_MAX,
                concurrent_max=CHECKED_AT_ONCE_MAX,
                concurrent_per_peer_max=CHECKED_AT_ONCE_PER_PEER_MAX,
                timeout_s=ANSWER_TIMEOUT_S,
            ),
        )
        task_status.started()
        while True:
            self.book.expire(self._now_s())
            await trio.sleep(1.0)

    def staleness_buffered(self) -> int | None:
        """Steps since the oldest version among buffered groups; None: there are none."""
        waiting = (min(_versions(each.admitted.group)) for each in self._kept.values())
        oldest = min(waiting, default=None)
        return None if oldest is None else max(0, self.version - oldest)

    @property
    def version(self) -> int:
        return self.book.account.version

    async def take(self) -> list[ScoredGroup]:
        """Wait for a step's worth of groups within the bound. `advance` ends the step."""
        while True:
            batch = self.book.account.consume()
            taken = [self._kept.pop(each.group_id).admitted for each in batch]
            self._forget_gone()
            for each in taken:
                self._gater.ledger.train(each.group.producer, each.group_id)
            if taken:
                return taken
            self._arrived = trio.Event()
            await self._arrived.wait()

    def reclaim(self, oldest: int) -> int:
        """Give up work of an older version, leased or buffered; the number of its groups."""
        account = self.book.account
        before = account.reserved + account.buffered
        self.book.reclaim(oldest, self._now_s())
        account.drop_before(oldest)
        self._forget_gone()
        return before - account.reserved - account.buffered

    def trial_state(self) -> TrialState:
        return self.book.trial_state(self._now_s())

    def advance(self, version: int) -> None:
        """Set the version of the learner's policy; the same as before if a step failed."""
        self.book.account.finish_step(version, self._now_s())
        self._forget_gone()

    def _forget_gone(self) -> None:
        """Drop groups that the account no longer holds."""
        for group_id in self._kept.keys() - self.book.account.buffered_ids():
            del self._kept[group_id]

    def counts(self) -> IntakeCounts:
        account = self.book.account
        return IntakeCounts(
            buffered=account.buffered,
            leased=account.reserved,
            on_trial=account.on_trial,
            granted=account.granted,
            consumed=account.consumed,
            consumed_by_staleness=dict(sorted(account.consumed_by_staleness.items())),
            discarded={str(why): count for why, count in sorted(account.discarded.items())},
            denied={str(why): count for why, count in sorted(self.book.denied.items())},
            rescored=dict(sorted(self._rescored.items())),
            rates=self.book.rates(),
        )

    async def _serve_lease(self, peer: PeerId, payload: bytes) -> bytes:
        asked = self._gater.read(Kind.LEASE, peer, payload, WantLease, WANT_LEASE_BYTES_MAX)
        self._gater.check_run(peer, asked.run_id, self._rules.run_id)
        await trio.lowlevel.checkpoint()
        now_s = self._now_s()
        if str(peer) in self.standby:
            self.book.stand_by(str(peer), asked.version, now_s)
            return self._no_lease(STANDBY, STANDBY_RETRY_S)
        lease = self.book.request(str(peer), asked.version, now_s, self._place_of(peer))
        if isinstance(lease, Denial):
            return self._no_lease(str(lease), RETRY_S[lease])
        return codec.encode(
            LeaseReply(
                type="lease",
                lease=lease.lease_id,
                learner_version=self.version,
                stream=lease.stream,
                groups=lease.groups,
                width=lease.width,
                limit=lease.limit,
                life_ms=min(LEASE_MS_MAX, int(1e3 * (lease.deadline - now_s))),
                retry_ms=0,
                reason="",
            )
        )

    def _place_of(self, peer: PeerId) -> WorkerOrigin:
        """The origin of a worker's requests. Many honest workers may share a private address."""
        share = self._gater.share_of(peer)
        if share == RELAYED:
            return WorkerOrigin(share, RELAYED_PART)
        if share == peer:
            return WorkerOrigin(self._transport.ip_of(peer) or share)
        return WorkerOrigin(share, BLOCK_PART)

    def _no_lease(self, reason: str, retry_s: float) -> bytes:
        return codec.encode(
            LeaseReply(
                type="lease",
                lease=NO_LEASE,
                learner_version=self.version,
                stream="",
                groups=0,
                width=0,
                limit=0,
                life_ms=0,
                retry_ms=int(1e3 * retry_s * (0.75 + 0.5 * self._rng.random())),
                reason=reason,
            )
        )

    async def _serve_submission(self, peer: PeerId, payload: bytes) -> bytes:
        self._gater.check_quota(Kind.SUBMISSION, peer)
        judge = self._gater.ledger.judge
        lease_id, group_id, record, group = judge(peer, codec.decode_submission, payload)
        self._check_form(peer, lease_id, group)
        task = (lease_id, group.task.index)
        if task in self._checking:
            return self._reply("again", "", "a group of that task is being looked at")
        self._checking.add(task)
        try:
            answer, admitted = await self._judge(peer, lease_id, group_id, group)
        except (ChildFailed, ConfigError):
            return self._reply("again", "", "it could not be looked at")
        finally:
            self._checking.discard(task)
        if admitted is not None:
            self._kept[group_id] = _Kept(admitted, record)
            share = GROUP_BYTES_EWMA_SHARE if self.group_bytes else 1.0
            self.group_bytes += int(share * (len(payload) - self.group_bytes))
            self._arrived.set()
        if answer.admitted:
            return self._reply("accepted", "", "")
        return self._reply("refused", str(answer.reason), answer.detail)

    def _check_form(self, peer: PeerId, lease_id: bytes, group: RolloutGroup) -> None:
        """Refuse faults that no honest worker of this run makes, another width than the lease
        was for and longer completions among them."""
        rules = self._rules
        lease = self.book.lease(lease_id)
        width = lease.width if lease is not None and lease.width else rules.group_size
        limit = lease.limit if lease is not None else 0
        fault = None
        if group.producer != peer:
            fault = (Reject.WRONG_PRODUCER, f"{peer} handed in a group of {group.producer}")
        elif group.run_id != rules.run_id:
            fault = (Reject.WRONG_RUN, group.run_id)
        elif not all(completion.token_ids for completion in group.completions):
            fault = (Reject.MALFORMED, "a completion without tokens")
        elif group.tokenizer != rules.tokenizer:
            fault = (Reject.MALFORMED, "of another tokenizer")
        elif (group.temperature, group.top_p) != (rules.temperature, rules.top_p):
            fault = (Reject.MALFORMED, "sampled by other rules")
        elif lease is not None and len(group.completions) != width:
            fault = (Reject.MALFORMED, f"{len(group.completions)} completions instead of {width}")
        elif limit and any(len(each.token_ids) > limit for each in group.completions):
            fault = (Reject.MALFORMED, f"a completion of more than {limit} tokens")
        if fault is not None:
            self._gater.ledger.reject(peer, fault[0])
            raise RemoteProtocolError(fault[0], fault[1][:DETAIL_CHARS_MAX])

    async def _judge(
        self, peer: PeerId, lease_id: bytes, group_id: GroupId, group: RolloutGroup
    ) -> tuple[Answer, ScoredGroup | None]:
        """The answer to a submission, and the group if it was admitted."""
        worker = str(peer)
        lease = self.book.lease(lease_id)
        seed = -1 if lease is None else lease.seed(group.task.index)
        submission = SubmittedGroup(lease_id, worker, seed, group_id, _versions(group))
        answer = self.book.judge(submission, self._now_s())
        if answer is not None or lease is None:
            return self.book.submit(submission, self._now_s()), None
        try:
            prompt, rewards = await self._checks.reward(lease, group)
            await self._look_closer(peer, group, prompt)
        except RemoteProtocolError as error:
            self._gater.ledger.reject(peer, error.reason)
            fault = error.detail or str(error.reason)
            blames = error.reason is not Reject.UNDECIDED
            if blames:
                self.faulty, self.last_fault = self.faulty + 1, f"{peer}: {fault}"
            return self.book.submit(submission, self._now_s(), fault, blames=blames), None
        except (ChildFailed, ConfigError) as error:
            # Perhaps the group causes the failure, so its submissions are counted.
            self.check_failures += 1
            self.last_check_failure = str(error)
            self._tried[group_id] = self._tried.pop(group_id, 0) + 1
            if len(self._tried) > TRIED_MAX:
                self._tried.popitem(last=False)
            if self._tried[group_id] < CHECKS_MAX:
                raise
            fault = "it could not be looked at, and was handed in often enough"
            return self.book.submit(submission, self._now_s(), fault, blames=False), None
        answer = self.book.submit(submission, self._now_s())
        if not answer.admitted or answer.repeated:
            return answer, None
        self._gater.ledger.accept(peer)
        return answer, ScoredGroup(group_id, group, prompt, rewards)

    async def _look_closer(self, peer: PeerId, group: RolloutGroup, prompt: str) -> None:
        """Re-score a share of a worker's groups; raises `RemoteProtocolError` (FALSE_LOGPROBS)."""
        passed = self._passed.setdefault(str(peer), 0)
        while len(self._passed) > HISTORIES_MAX:
            del self._passed[next(iter(self._passed))]
        share = max(self._rules.rescored_share, 1.0 / (1.0 + passed / FIRST_RESCORED))
        if self._rng.random() >= share:
            return
        fault = await self._checks.rescore(group, prompt)
        if fault is None:
            self._passed[str(peer)] = self._passed.get(str(peer), 0) + 1
            self._rescored["passed"] += 1
        elif not fault:
            self._rescored["unknown"] += 1
        else:
            self._passed[str(peer)] = 0
            self._rescored["failed"] += 1
            raise RemoteProtocolError(Reject.FALSE_LOGPROBS, fault)

    def _reply(self, verdict: Any, reason: str, detail: str) -> bytes:
        return codec.encode(
            SubmissionReply(
                type="submission_reply",
                verdict=verdict,
                reason=reason,
                detail=detail[:DETAIL_CHARS_MAX],
                learner_version=self.version,
            )
        )

    def to_record(self) -> dict[str, Any]:
        """Leases, counters and buffered groups as plain values."""
        kept = _Record(
            [(g, k.record, k.admitted.prompt, k.admitted.rewards) for g, k in self._kept.items()],
            self._passed,
            self._rescored,
        )
        return {"book": self.book.to_record(self._now_s()), **record_of(kept)}

    def restore(self, book: LeaseBook, record: dict[str, Any] | None) -> None:
        """Go on with another book and its record, if any; raises `LocalProtocolError`."""
        self.book = book
        self._kept = {}
        if record is None:
            return
        kept = restored(_Record, {name: record[name] for name in record if name != "book"})
        for group_id, signed, prompt, rewards in kept.groups:
            try:
                _, group = codec.decode_group(signed)
            except RemoteProtocolError as error:
                raise LocalProtocolError(f"no record of an intake: {error}") from None
            admitted = ScoredGroup(GroupId(group_id), group, prompt, rewards)
            self._kept[group_id] = _Kept(admitted, signed)
        self._passed, self._rescored = kept.rescored_of, kept.rescored
        self._forget_gone()
        if self._kept.keys() != self.book.account.buffered_ids():
            raise LocalProtocolError("groups and account of an intake do not go together")


def _versions(group: RolloutGroup) -> tuple[int, ...]:
    """The versions of all tokens, each once; of a group without tokens, those that it names."""
    found = {run[0] for each in group.completions for run in version_spans(each)}
    return tuple(sorted(found)) or tuple(sorted({c.policy_version for c in group.completions}))
