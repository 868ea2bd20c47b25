"""The bound on staleness, and the account of granted and buffered groups. Pure: events and their
times, in seconds of any clock, are passed in.

A learner's steps make versions 0, 1, 2, ... of its policy. The staleness of a group is the
learner's version when it consumes the group, less the oldest version that generated any of its
tokens. **At consumption it is at most the bound S, always.** To waste little, it is also checked
before a grant, when a group comes in, and at each new version.

Each granted group takes one credit until it is consumed or discarded, so granted and buffered
groups together never exceed `groups_max`: a slow learner slows its workers down. `lease_table`
records which worker holds which credits.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from swarm.errors import LocalProtocolError, require
from swarm.plain_records import Moment, record_of, restored

GROUPS_MAX_MAX: Final = 65_536  # bound on `groups_max`
BOUND_MAX: Final = 1024
OF_A_PROCESS: Final = ("rules", "training")  # fields of an account that no record has
STEP_EWMA_SHARE: Final = 0.1  # least weight of the last interval between versions in their mean


class Discard(StrEnum):
    """Why a group is not trained on. Counted by these names."""

    STALE = "stale"  # came in too old to be consumed
    OVERTAKEN = "overtaken"  # became too old while it was buffered
    EXPIRED = "expired"  # granted, and not in when its lease ended
    RETURNED = "returned"  # granted, and given back by its worker
    LATE = "late"  # came in after its lease had ended
    UNKNOWN_LEASE = "unknown_lease"  # never granted, or so long ago that it is forgotten
    OTHER_WORKER = "other_worker"  # under a lease of somebody else
    NOT_ASSIGNED = "not_assigned"  # of a task that its lease does not have
    OTHER_GROUP = "other_group"  # a second, different group for one task
    DUPLICATE = "duplicate"  # a group that came in for another task
    UNKNOWN_VERSION = "unknown_version"  # of a version that the learner has not made, or of none
    OLDER_THAN_LEASE = "older_than_lease"  # of an older version than its worker said it had
    FAULTY = "faulty"  # did not stand up to verification


class Denial(StrEnum):
    """Why nothing is granted. Counted by these names."""

    NO_CREDIT = "no_credit"  # as much is buffered and under way as may be
    TRIAL_FULL = "trial_full"  # workers that have delivered nothing yet hold as much as they may
    WOULD_BE_STALE = "would_be_stale"  # work begun now with this version would come too late
    UNKNOWN_VERSION = "unknown_version"  # the learner has not made it
    LEASES_OPEN = "leases_open"  # the worker holds as many leases as it may
    WORKERS_FULL = "workers_full"  # as many workers are at work as are kept account of


@dataclass(frozen=True, slots=True)
class StalenessRules:
    """The bounds of a learner's work.

    A `groups_max` of 1.6 to 2 steps suits: less starves the learner, more makes groups grow old.
    """

    bound: int  # S, in versions
    groups_per_step: int  # R
    groups_max: int  # credits: buffered and granted groups together

    def __post_init__(self) -> None:
        checks = (
            ("bound", 0 <= self.bound <= BOUND_MAX, f"take 0 to {BOUND_MAX}"),
            ("groups_per_step", self.groups_per_step >= 1, "take at least 1"),
            (
                "groups_max",
                self.groups_per_step <= self.groups_max <= GROUPS_MAX_MAX,
                f"take {self.groups_per_step} (groups_per_step) to {GROUPS_MAX_MAX}",
            ),
        )
        require(self, checks)


@dataclass(frozen=True, slots=True)
class BufferedGroup:
    """A group that came in and waits to be consumed."""

    group_id: bytes
    worker: str
    oldest: int  # version that generated any token of it
    newest: int


@dataclass(frozen=True, slots=True)
class Room:
    """The number of groups that may be granted."""

    groups: int
    denial: Denial | None = None  # the reason where there are none


def staleness(versions: Iterable[int], learner_version: int) -> int:
    """The staleness of a group with tokens of these versions (at least one)."""
    return learner_version - min(versions)


@dataclass(slots=True)
class Account:
    """Buffered and granted groups of one learner, its version and its counters.

    Callers that settle more than they reserved get a `LocalProtocolError`.
    """

    rules: StalenessRules
    version: int = 0
    training: bool = False  # a batch was consumed and its step is not finished
    reserved: int = 0  # granted groups that are not in
    on_trial: int = 0  # of these, in the hands of workers on trial
    granted: int = 0  # ever
    consumed: int = 0  # ever
    consumed_by_staleness: Counter[int] = field(default_factory=Counter)
    discarded: Counter[Discard] = field(default_factory=Counter)
    _buffer: dict[bytes, BufferedGroup] = field(default_factory=dict)  # in order of arrival
    _pacing: int | None = None
    _step_s: float = 0.0  # mean time from version to version
    _intervals: int = 0  # of which that is the mean
    _stepped_at: Moment | None = None

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    def buffered_ids(self) -> set[bytes]:
        return set(self._buffer)

    @property
    def credits_left(self) -> int:
        """Groups that may still be granted; those on trial take none of them."""
        return max(0, self.rules.groups_max - self._counted_on)

    def trial_credits_left(self, most: int) -> int:
        """The same for workers on trial, who hold `most` at most."""
        in_all = self.rules.groups_max + most - self.reserved - self.buffered
        return max(0, min(most - self.on_trial, in_all))

    @property
    def _counted_on(self) -> int:
        """Groups that are expected to be consumed: trials may come to nothing."""
        return self.reserved - self.on_trial + self.buffered

    @property
    def next_version(self) -> int:
        """The version that will consume the next batch."""
        return self.version + self.training

    def step_s(self, now: float) -> float | None:
        """The mean duration of a version, or that of the present one if longer; None: no version
        yet. A starving learner takes longer, and so grants leases to slower workers."""
        if self._stepped_at is None or self._intervals == 0:
            return None
        return max(self._step_s, now - self._stepped_at)

    @property
    def pacing(self) -> int:
        """The staleness that grants aim at: the bound, or less by `set_pacing`."""
        return self.rules.bound if self._pacing is None else min(self._pacing, self.rules.bound)

    def set_pacing(self, depth: int | None) -> None:
        """Grant only groups for a staleness of at most `depth`; None: of the bound."""
        self._pacing = None if depth is None else max(0, depth)

    def set_groups_max(self, groups: int) -> None:
        """Set the limit on granted and buffered groups, within what the rules allow."""
        least, most = self.rules.groups_per_step, GROUPS_MAX_MAX
        self.rules = replace(self.rules, groups_max=max(least, min(groups, most)))

    def room(self, worker_version: int, wanted: int, duration_s: float, now: float) -> Room:
        """The groups, of `wanted` >= 1, for a worker that takes `duration_s` with that version."""
        if not 0 <= worker_version <= self.version:
            return Room(0, Denial.UNKNOWN_VERSION)
        credits_left = self.credits_left
        if credits_left == 0:
            return Room(0, Denial.NO_CREDIT)
        in_time = self._in_time(worker_version, duration_s, now)
        if in_time <= 0:
            return Room(0, Denial.WOULD_BE_STALE)
        return Room(min(wanted, credits_left, in_time))

    def trial_room(
        self, worker_version: int, wanted: int, duration_s: float, now: float, most: int
    ) -> Room:
        """As `room`, for a worker on trial, of which all hold `most` groups at most. All granted
        groups are assumed to come in before."""
        if not 0 <= worker_version <= self.version:
            return Room(0, Denial.UNKNOWN_VERSION)
        in_time = self._in_time(worker_version, duration_s, now) - self.on_trial
        if in_time <= 0:
            return Room(0, Denial.WOULD_BE_STALE)
        credits_left = self.trial_credits_left(most)
        if credits_left == 0:
            return Room(0, self.trial_denial())
        return Room(min(wanted, credits_left, in_time))

    def trial_denial(self) -> Denial:
        """The reason why a worker on trial gets nothing."""
        is_full = self.reserved + self.buffered >= self.rules.groups_max
        return Denial.NO_CREDIT if is_full else Denial.TRIAL_FULL

    def _in_time(self, worker_version: int, duration_s: float, now: float) -> int:
        """The number of further groups of a version that will be consumed within the pacing."""
        versions_left = worker_version + self.pacing - self.next_version
        step_s = self.step_s(now)
        if step_s and duration_s >= (versions_left + 1) * step_s:
            return 0
        return (versions_left + 1) * self.rules.groups_per_step - self._counted_on

    def reserve(self, groups: int, trial_most: int | None = None) -> None:
        """Take credits that `room` found, or `trial_room` with its `most`."""
        left = self.credits_left if trial_most is None else self.trial_credits_left(trial_most)
        if not 0 < groups <= left:
            raise LocalProtocolError(f"{groups} groups granted with {left} credits")
        self.reserved += groups
        self.granted += groups
        if trial_most is not None:
            self.on_trial += groups

    def end_trial(self, groups: int) -> None:
        """Take groups off trial; `admit` or `release` settles them next."""
        if not 0 <= groups <= self.on_trial:
            raise LocalProtocolError(f"{groups} groups on trial settled of {self.on_trial}")
        self.on_trial -= groups

    def release(self, groups: int, why: Discard) -> None:
        """Give back the credits of granted groups that will not be buffered."""
        if not 0 <= groups <= self.reserved:
            raise LocalProtocolError(f"{groups} credits returned of {self.reserved}")
        self.reserved -= groups
        if groups:
            self.discarded[why] += groups

    def admit(self, group: BufferedGroup) -> Discard | None:
        """Buffer a granted group, or give its credit back and return the reason.

        During a step, the group must be fresh enough for the next version.
        """
        if group.group_id in self._buffer:
            raise LocalProtocolError("a group is buffered already")
        versions = (group.oldest, group.newest)
        if min(versions) < 0 or max(versions) > self.version:
            why = Discard.UNKNOWN_VERSION
        elif self._too_old(group, self.next_version):
            why = Discard.STALE
        else:
            if self.reserved < 1:
                raise LocalProtocolError("a group came in that was not granted")
            self.reserved -= 1
            self._buffer[group.group_id] = group
            return None
        self.release(1, why)
        return why

    def consume(self) -> tuple[BufferedGroup, ...]:
        """A step's worth of groups, oldest versions first, then by arrival; () until there are
        enough. Groups over the bound are discarded. Then the step is under way."""
        if self.training:
            raise LocalProtocolError("a batch was consumed before the last one's step was finished")
        self._purge(self.version)
        if self.buffered < self.rules.groups_per_step:
            return ()
        ordered = sorted(self._buffer.values(), key=lambda group: group.oldest)  # a stable sort
        batch = tuple(ordered[: self.rules.groups_per_step])
        for group in batch:
            del self._buffer[group.group_id]
            self.consumed_by_staleness[staleness((group.oldest,), self.version)] += 1
        self.consumed += len(batch)
        self.training = True
        return batch

    def finish_step(self, version: int, now: float) -> tuple[BufferedGroup, ...]:
        """Set the learner's version, the same as before if the step failed. Returns the groups that
        became too old."""
        if version < self.version:
            raise LocalProtocolError(f"version {version} after {self.version}")
        if version > self.version:
            if self._stepped_at is not None:
                each_s = max(0.0, now - self._stepped_at) / (version - self.version)
                self._intervals += 1
                share = max(STEP_EWMA_SHARE, 1 / self._intervals)  # all alike, until they are many
                self._step_s += share * (each_s - self._step_s)
            self._stepped_at = now
        self.version = version
        self.training = False
        return self._purge(version)

    def _too_old(self, group: BufferedGroup, version: int) -> bool:
        return staleness((group.oldest,), version) > self.rules.bound

    def drop_before(self, oldest: int) -> None:
        """Discard buffered groups with tokens of an older version."""
        self._purge(oldest + self.rules.bound)

    def _purge(self, version: int) -> tuple[BufferedGroup, ...]:
        gone = tuple(group for group in self._buffer.values() if self._too_old(group, version))
        for group in gone:
            del self._buffer[group.group_id]
        if gone:
            self.discarded[Discard.OVERTAKEN] += len(gone)
        return gone

    def to_record(self, now: float) -> dict[str, Any]:
        """Everything but the rules as plain values."""
        return record_of(self, now, OF_A_PROCESS)

    @classmethod
    def from_record(cls, rules: StalenessRules, record: Any, now: float) -> "Account":
        """The account of a record under rules that may have changed; raises `LocalProtocolError`.

        A step that was under way is undone, as the learner's checkpoint is of before it.
        """
        account = restored(cls, record, now, rules=rules, training=False)
        account._purge(account.version)
        return account
