"""Decisions from evaluations on a node's validation tasks. Pure: an evaluation in, an action out.

    keep     the best pass rate so far: keep this policy
    return   far below the best twice in a row: roll back to the best, at half the rate
    none     go on

The step guard takes back single steps that ruin a policy; a slow decline shows only here.

"Far below" is measured as for two independent samples. An unchanging policy rolls back within 100
evaluations on 64 tasks with a chance of 1 % if tasks are of all difficulties, and of 16 % if each
is passed half of the time. At 2.5 standard errors these would be 16 % and 75 %.
"""

from dataclasses import dataclass, replace
from math import sqrt
from typing import Final, Literal

FALL_MIN: Final = 0.10  # smallest drop of the pass rate that counts, however many tasks there are
FALL_ERRORS: Final = 3.0  # standard errors of the difference
FALLS: Final = 2  # consecutive evaluations far below the best before a rollback
RATE_SHARE_MIN: Final = 1 / 16

Act = Literal["none", "keep", "return"]


@dataclass(frozen=True, slots=True)
class Validated:
    """Results of a node's evaluations. Saved with each checkpoint."""

    last: float | None = None  # pass rate, in [0, 1]; None: there was no evaluation
    best: float | None = None  # of the policy that is kept; None: none is
    best_tasks: int = 0  # that this was measured on
    best_round: int = 0
    falls: int = 0  # consecutive evaluations far below the best
    rate_share: float = 1.0  # of the learning rate: it is never raised again
    returns: int = 0  # to the best, since the node's first start
    went_back: bool = False  # after the last evaluation: the policy is the best again

    def with_best_of(self, kept: "Validated | None") -> "Validated":
        """The results with the best policy that is on disk; None if it is lost."""
        kept = kept or Validated()
        return replace(self, best=kept.best, best_tasks=kept.best_tasks, best_round=kept.best_round)


def fall_bound(best: float, best_tasks: int, passed: float, tasks: int) -> float:
    """Largest gap to the best pass rate that counts as chance or as harmless."""
    variance = best * (1 - best) / best_tasks + passed * (1 - passed) / tasks
    return max(FALL_MIN, FALL_ERRORS * sqrt(variance))


def decide(
    before: Validated, passed: float, tasks: int, round_: int, *, returns: bool = True
) -> tuple[Act, Validated]:
    """The action after an evaluation of a round: `passed`, in [0, 1], on `tasks` > 0 tasks."""
    now = replace(before, last=passed, went_back=False)
    if now.best is None or passed > now.best:
        best = replace(now, best=passed, best_tasks=tasks, best_round=round_, falls=0)
        return "keep", best
    fell = now.best - passed > fall_bound(now.best, now.best_tasks, passed, tasks)
    now = replace(now, falls=now.falls + 1 if fell else 0)
    if returns and now.falls >= FALLS:
        rate_share = max(RATE_SHARE_MIN, now.rate_share / 2)
        back = replace(now, falls=0, rate_share=rate_share, returns=now.returns + 1, went_back=True)
        return "return", back
    return "none", now
