"""Admission of work, and the age at which started work is dropped."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated

from annotated_types import Ge, Le

from node.methods.checked import whole
from node.methods.method import Count, MethodSettings


class Admission(MethodSettings, kind="admission"):
    """Work starts while what is started can be learned from before it is too old."""

    # eta, in versions; 0: learner and workers take turns. Published runs had 4 and 8.
    staleness_max: Annotated[int, Ge(0)] = 4
    batch: Count = 512  # pieces of work in one step of the learner
    running_max: Count = 1_024  # pieces of work at once; ours


@dataclass(frozen=True, slots=True)
class Credits:
    """A learner's account: its version, work that went into a batch or is kept for one, and work
    under way."""

    version: int = 0
    accepted: int = 0
    running: int = 0


def admission(credit: Credits, set_to: Admission) -> int:
    """Pieces of work that may start (AReaL, arXiv 2505.24298): accepted and running ones together
    are at most (eta + version + 1) batches. The bound on staleness is exact only where work ends in
    the order in which it began: ask `is_too_old` of what arrives."""
    whole(credit.version, "version")
    begun = whole(credit.accepted, "accepted") + whole(credit.running, "running")
    fresh = (set_to.staleness_max + credit.version + 1) * set_to.batch - begun
    return max(0, min(set_to.running_max - credit.running, fresh))


def pending_max(set_to: Admission) -> int:
    """Bound on pieces that wait to start: (eta + 1) batches."""
    return (set_to.staleness_max + 1) * set_to.batch


def started(credit: Credits, count: int, set_to: Admission) -> Credits:
    if whole(count, "count") > admission(credit, set_to):
        raise ValueError(f"{count} started where {admission(credit, set_to)} may")
    return replace(credit, running=credit.running + count)


def ended(credit: Credits, accepted: int, lost: int = 0) -> Credits:
    """The credits after some work ended. Lost work (rejected, or its lease ran out) frees its
    place."""
    left = credit.running - whole(accepted, "accepted") - whole(lost, "lost")
    if left < 0:
        raise ValueError(f"{accepted + lost} ended of {credit.running} that ran")
    return replace(credit, accepted=credit.accepted + accepted, running=left)


def after_restart(version: int, set_to: Admission) -> Credits:
    """The credits of a learner that begins at a version: a batch is accepted for each version."""
    return Credits(whole(version, "version"), version * set_to.batch, 0)


def is_too_old(sampled: int, version: int, set_to: Admission) -> bool:
    """True if a sample is too old to train another version."""
    return version - sampled > set_to.staleness_max


class Reclamation(MethodSettings, kind="reclamation"):
    """Work that began too many steps ago is given up, wherever it is."""

    # batches by which work may run ahead, of a fraction that share of the oldest step; ours
    ratio: Annotated[float, Ge(0), Le(64)] = 1.0

    @property
    def steps(self) -> int:
        """Steps by which work may run ahead."""
        return math.ceil(self.ratio)

    @property
    def oldest_share(self) -> Fraction:
        """Share of a batch that may come from the oldest step."""
        exact = Fraction(str(self.ratio))
        return exact - (self.steps - 1) if self.steps else Fraction(1)


def reclamation(starts: Sequence[int], step: int, set_to: Reclamation) -> tuple[int, ...]:
    """Places of the works that are too old after a step took its batch (ROLL), by the steps at
    which they began: `step` - `ratio`, rounded up, or before."""
    oldest = step - set_to.steps
    return tuple(place for place, start in enumerate(starts) if start <= oldest)


def starts_allowed(step: int, taken: int, batch: int, set_to: Reclamation) -> int:
    """Works that may still start in a step, counted from 0: a batch for each step so far and
    `ratio` batches more, less those `taken` that have started and were not given up."""
    ahead = math.ceil(Fraction(str(set_to.ratio)) * whole(batch, "batch"))
    return max(0, (whole(step, "step") + 1) * batch + ahead - whole(taken, "taken"))


def drained(starts: Sequence[int], step: int, batch: int, set_to: Reclamation) -> tuple[int, ...]:
    """Places of the stored works in a step's batch, by the steps at which they began: the oldest
    first, without those too old. The oldest admitted step fills at most its share of the batch."""
    if any(start > step for start in starts):
        raise ValueError(f"work that begins after step {step}, which is to take it")
    oldest = step - set_to.steps
    of_oldest = math.floor(set_to.oldest_share * whole(batch, "batch"))
    ordered = sorted(range(len(starts)), key=lambda place: starts[place])
    last = [place for place in ordered if starts[place] == oldest][:of_oldest]
    return tuple((last + [place for place in ordered if starts[place] > oldest])[:batch])
