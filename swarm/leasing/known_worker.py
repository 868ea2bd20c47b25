"""A learner's account of one worker: its rate, and the credits that it may hold. Pure.

The rate is admitted groups over the time that the worker's leases took, and its breaks between
them. The credit limit bounds the groups that a worker may hold. A key costs nothing, so that credit
is earned: each admitted group is worth one, and a lease that comes to nothing takes most of it
back.
"""

from dataclasses import dataclass, field
from typing import Final

from swarm.storage.records import Moment

RATE_EWMA_SHARE: Final = 0.3  # of what was measured before, forgotten with each lease
BREAK_S_MAX: Final = 60.0  # who stays away for longer was away, not slow
FORGIVEN_EVERY: Final = 10  # leases, of which one may be lost and say nothing of speed
TURNAROUND_EWMA_SHARE: Final = 0.2  # of the newest group
LOST_SHARE: Final = 0.75  # of a worker's credit, taken by a lease of which nothing came in
CREDIT_LASTS_S: Final = 14_400.0  # after the last admitted group
ESTABLISHED: Final = 64.0  # credits from which a worker gets long leases


@dataclass(slots=True)
class CreditLimit:
    """A worker's credit limit, earned by the groups that it delivered."""

    credits: float = 0.0  # credits that it may hold; below 1 it is on trial
    wasted_s: float = 0.0  # how long its last lease on trial was, where that came to nothing
    at: Moment | None = None  # when a group of it was admitted last

    @property
    def is_on_trial(self) -> bool:
        """True for a worker without credit: it delivered nothing, or not lately."""
        return self.credits < 1.0

    @property
    def is_established(self) -> bool:
        """True once it has delivered for a while."""
        return self.credits >= ESTABLISHED

    def asks(self, now: float) -> None:
        """Forget credit that was earned too long ago."""
        if self.at is not None and now - self.at >= CREDIT_LASTS_S:
            self.credits, self.at = 0.0, None

    def delivered(self, most: int, now: float) -> None:
        """A group was admitted; `most` a worker may ever hold."""
        self.credits = min(float(most), self.credits + 1.0)
        self.wasted_s, self.at = 0.0, now

    def lost(self, share: float) -> None:
        """This share of a lease's groups came to nothing."""
        self.credits *= 1.0 - LOST_SHARE * share


@dataclass(slots=True)
class KnownWorker:
    """`done` over `busy_s` is a worker's rate. Both forget alike, so that two leases which end
    together are worth what they took together, in whatever order."""

    done: float = 0.0  # admitted groups
    failed: float = 0.0  # granted groups that were not admitted
    busy_s: float = 0.0  # with at least one lease, or away before the next
    measured_at: Moment | None = None  # when its last lease ended
    whole: int = FORGIVEN_EVERY  # leases with all groups in since the last one without
    has_died: bool = False  # for all that is known: a loss that is put down to that
    break_s: float | None = None  # from then until it asked again; None: it has not
    turnaround_s: float = 0.0  # from grant to admission, in the mean
    admitted: int = 0
    refused: int = 0
    version: int = 0  # that it said it had
    heard_at: Moment | None = None
    limit: CreditLimit = field(default_factory=CreditLimit)

    @property
    def rate(self) -> float | None:
        """Admitted groups a second of work; None before a lease ended."""
        return self.done / self.busy_s if self.busy_s > 0.0 else None

    def asks(self, version: int, now: float) -> None:
        """It wants work. What it waits from now on is not its own doing."""
        self.version, self.heard_at = version, now
        self.limit.asks(now)
        if self.break_s is None and self.measured_at is not None:
            away_s = min(BREAK_S_MAX, max(0.0, now - self.measured_at))
            self.break_s = 0.0 if self.has_died else away_s  # who died did not rest

    def delivers(self, took_s: float, credits_max: int, now: float) -> None:
        """A group was admitted, so long after it was granted."""
        self.admitted += 1
        self.limit.delivered(credits_max, now)
        share = TURNAROUND_EWMA_SHARE if self.turnaround_s else 1.0
        self.turnaround_s += share * (took_s - self.turnaround_s)

    def lease_ends(
        self,
        *,
        admitted: int,
        groups: int,
        unanswered: int,
        busy_from: float,
        answered_at: float | None,
        now: float,
    ) -> None:
        """Put a lease that ended into the rate: what was admitted, and the time since the grant and
        the break before it, or since the lease before ended where the worker had two.

        Where groups are missing, the worker died or is slow, and nobody can tell. Now and then it
        is taken to have died after its last answer, which says nothing of its speed; not often, or
        to lose leases would pay."""
        since = busy_from
        if self.measured_at is not None:
            since = max(since, self.measured_at)
        self.measured_at, self.break_s = now, None
        self.has_died = False
        if not unanswered:
            self.whole += 1
        else:
            self.has_died = self.whole >= FORGIVEN_EVERY and self.rate is not None
            self.whole = 0
            if self.has_died:
                now = answered_at or since
        self.done += admitted - RATE_EWMA_SHARE * self.done
        self.failed += groups - admitted - RATE_EWMA_SHARE * self.failed
        self.busy_s += max(0.0, now - since) - RATE_EWMA_SHARE * self.busy_s

    def restarted(self) -> None:
        """The learner was away: nobody could ask meanwhile."""
        self.break_s, self.heard_at, self.version = 0.0, None, 0


@dataclass(frozen=True, slots=True)
class WorkerAccount:
    """A worker's figures, all measured here but the version, which the worker says."""

    worker: str
    version: int
    heard_at: float | None  # None: not since the restart
    rate: float | None  # admitted groups a second; None: not measured
    failed_share: float  # of the groups that it was granted
    turnaround_s: float  # from grant to admission; 0: not measured
    admitted: int
    refused: int
    leased: int  # groups in its open leases

    @classmethod
    def of(cls, worker: str, known: KnownWorker, leased: int) -> "WorkerAccount":
        """The account of a worker with so many groups in its hands."""
        return cls(
            worker=worker,
            version=known.version,
            heard_at=known.heard_at,
            rate=known.rate,
            failed_share=known.failed / max(known.failed + known.done, 1e-9),
            turnaround_s=known.turnaround_s,
            admitted=known.admitted,
            refused=known.refused,
            leased=leased,
        )
