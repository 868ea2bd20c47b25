"""Admission of work, and the age at which started work is dropped."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from annotated_types import Ge, Le

from node.methods.checked import whole
from node.methods.method import LEARNER, Count, MethodSettings


class Admission(MethodSettings, kind="admission", roles=LEARNER):
    """Work starts while what is started can be learned from before it is too old."""

    # eta, in versions; 0: learner and workers take turns. Published runs had 4 and 8.
    staleness_max: Annotated[int, Ge(0)] = 4
    running_max: Count = 1_024  # pieces of work at once; ours


@dataclass(frozen=True, slots=True)
class Credits:
    """A learner's account: its version, work that went into a batch or is kept for one, and work
    under way."""

    version: int = 0
    accepted: int = 0
    running: int = 0


def admission(credit: Credits, batch: int, set_to: Admission) -> int:
    """Pieces of work that may start (AReaL, arXiv 2505.24298): accepted and running ones together
    are at most (eta + version + 1) batches. The bound on staleness is exact only where work ends in
    the order in which it began."""
    whole(credit.version, "version")
    begun = whole(credit.accepted, "accepted") + whole(credit.running, "running")
    fresh = (set_to.staleness_max + credit.version + 1) * batch - begun
    return max(0, min(set_to.running_max - credit.running, fresh))


class Reclamation(MethodSettings, kind="reclamation", roles=LEARNER):
    """Work that began too many steps ago is given up, wherever it is."""

    # batches by which work may run ahead; ours
    ratio: Annotated[float, Ge(0), Le(64)] = 1.0


def reclamation(step: int, set_to: Reclamation) -> int:
    """The oldest step whose work is kept once a step took its batch (ROLL): work that began at
    `step` - `ratio`, rounded up, or before is given up."""
    return max(0, whole(step, "step") - math.ceil(set_to.ratio) + 1)


def starts_allowed(step: int, taken: int, batch: int, set_to: Reclamation) -> int:
    """Works that may still start in a step, counted from 0: a batch for each step so far and
    `ratio` batches more, less those `taken` that have started and were not given up."""
    ahead = math.ceil(Fraction(str(set_to.ratio)) * whole(batch, "batch"))
    return max(0, (whole(step, "step") + 1) * batch + ahead - whole(taken, "taken"))
