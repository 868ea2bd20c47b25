"""Bounds on the fetches that wait for slow peers. Pure.

A late batch keeps no place from others, but it counts among the batches under way, whose number is
bounded. A peer with many names that answers everything late would fill them all. So late batches
have a bound of their own, and those that wait for one peer or one address block a lower one. Beyond
a bound, the oldest batch of the most crowded block is given up.

Producers whose last batch was late, or of whom nothing came yet, may be honest, with a slow uplink
or new. They get places too, but not all of them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.limits.quotas import RELAYED

BATCHES_FACTOR = 4  # times `fetch_parallel`: batches under way, late ones included, at most
LATE_FACTOR = 3  # times `fetch_parallel`: late batches, at most
LATE_OF_ONE_FACTOR = 1  # times `fetch_parallel`: late batches of one peer or one block, at most
LATE_OF_RELAYED_SHARE = 0.5  # of all late batches, those of relayed peers, at most


def to_give_up(waiting_for: Sequence[str], parallel: int) -> int | None:
    """The index of the late batch to give up; None: there are not too many.

    `waiting_for` says for each, the oldest first, whose it is: a peer's, a block's, `RELAYED`.
    """
    most = LATE_FACTOR * parallel
    crowds = Counter(waiting_for)

    def is_over(whose: str) -> bool:
        part = LATE_OF_RELAYED_SHARE * most
        return crowds[whose] > (part if whose == RELAYED else LATE_OF_ONE_FACTOR * parallel)

    over = [whose for whose in crowds if is_over(whose)]
    if not over and len(waiting_for) <= most:
        return None
    return waiting_for.index(max(over or crowds, key=lambda whose: crowds[whose]))


@dataclass(slots=True)
class Trials:
    """The numbers of doubtful producers that may be tried now."""

    unproven: int  # of those that have delivered nothing yet, or not since they last failed
    slow: int  # of those that delivered late
    doubtful: int  # of both together

    @classmethod
    def left(cls, parallel: int, unproven: Sequence[bool], slow: Sequence[bool]) -> "Trials":
        """The numbers left beside the batches under way, given as one flag each, True if late. Each
        kind gets half of the places, and one place stays free of both. Unproven producers get
        half of all batches."""
        half = max(1, parallel // 2)
        unproven_in_place, slow_in_place = unproven.count(False), slow.count(False)
        return cls(
            unproven=min(half - unproven_in_place, BATCHES_FACTOR * parallel // 2 - len(unproven)),
            slow=half - slow_in_place,
            doubtful=max(1, parallel - 1) - unproven_in_place - slow_in_place,
        )

    def take(self, is_proven: bool, is_slow: bool) -> bool:
        """True if this producer may be tried; counts it. Proven, quick ones always may."""
        if is_proven and not is_slow:
            return True
        if self.doubtful <= 0 or (self.slow if is_proven else self.unproven) <= 0:
            return False
        self.doubtful -= 1
        if is_proven:
            self.slow -= 1
        else:
            self.unproven -= 1
        return True
