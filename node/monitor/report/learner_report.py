"""Summaries of a learner's steps and a worker's batches, for reports. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Final

from node.records.format import amount, percent, printable
from node.records.records import StepDone, WorkDone

STEPS_COLUMNS: Final = (
    "learner", "steps", "groups trained on", "of the pool", "workers", "tokens trained on",
    "waited", "staleness mean", "staleness most", "k3", "effective sample",
    "groups discarded",
)  # fmt: skip
WORK_COLUMNS: Final = (
    "worker", "batches", "generated tokens", "tokens a second", "waited",
    "groups handed in", "of these accepted",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepsSummary:
    """A learner's numbers, over all of its steps."""

    steps: int
    groups: int  # trained on
    shared_groups: int  # of these, from the pool
    workers: int  # whose groups these were
    trained_tokens: int
    idle_share: float  # of its time it waited for groups, in [0, 1]
    staleness_mean: float | None  # over steps; None: nothing was measured
    staleness_max: int
    mismatch_k3: float | None  # mean over steps, as the next
    effective_share: float | None
    discarded: int

    def cells(self) -> tuple[str, ...]:
        """For `STEPS_COLUMNS` after the first."""
        return (
            f"{self.steps:,}",
            f"{self.groups:,}",
            f"{self.shared_groups:,}",
            f"{self.workers:,}",
            amount(self.trained_tokens),
            percent(self.idle_share),
            "–" if self.staleness_mean is None else f"{self.staleness_mean:.1f}",
            f"{self.staleness_max}",
            "–" if self.mismatch_k3 is None else f"{self.mismatch_k3:.2g}",
            percent(self.effective_share),
            f"{self.discarded:,}",
        )


@dataclass(frozen=True, slots=True)
class WorkSummary:
    """A worker's numbers, over all of its batches and starts."""

    batches: int
    generated_tokens: int
    tokens_per_s: float  # while it generated
    idle_share: float  # of its time it waited for leases, in [0, 1]
    verdicts: dict[str, int]  # on groups that it handed in: `accepted`, or why not

    @property
    def handed_in(self) -> int:
        """Groups whose fate is known."""
        return sum(self.verdicts.values())

    @property
    def accepted(self) -> int:
        """Groups of these that the learner accepted."""
        return self.verdicts.get("accepted", 0)

    def cells(self) -> tuple[str, ...]:
        """For `WORK_COLUMNS` after the first."""
        return (
            f"{self.batches:,}",
            amount(self.generated_tokens),
            f"{self.tokens_per_s:,.0f}",
            percent(self.idle_share),
            f"{self.handed_in:,}",
            f"{self.accepted:,}",
        )


def steps_summary(steps: Sequence[StepDone]) -> StepsSummary | None:
    """None: there was no step."""
    if not steps:
        return None
    return StepsSummary(
        steps=len(steps),
        groups=sum(each.groups for each in steps),
        shared_groups=sum(each.shared_groups for each in steps),
        workers=len({worker for each in steps for worker in each.groups_by_worker}),
        trained_tokens=steps[-1].trained_tokens_total,
        idle_share=_share(sum(s.idle_s for s in steps), sum(s.train_s for s in steps)),
        staleness_mean=_mean(each.staleness_mean for each in steps),
        staleness_max=max(each.staleness_max for each in steps),
        mismatch_k3=_mean(each.mismatch_k3 for each in steps),
        effective_share=_mean(each.effective_share for each in steps),
        discarded=sum(steps[-1].discarded_total.values()),
    )


def work_summary(work: Sequence[WorkDone]) -> WorkSummary | None:
    """None: there was no batch."""
    if not work:
        return None
    tokens, seconds = sum(w.generated_tokens for w in work), sum(w.generate_s for w in work)
    verdicts: Counter[str] = Counter()
    for last in _last_of_each_start(work):
        verdicts.update(last.verdicts_total)
    return WorkSummary(
        batches=len(work),
        generated_tokens=tokens,
        tokens_per_s=tokens / seconds if seconds > 0 else 0.0,
        idle_share=_share(sum(w.wait_s for w in work), seconds),
        verdicts=dict(verdicts),
    )


def _last_of_each_start(work: Sequence[WorkDone]) -> list[WorkDone]:
    """Batches are counted from one at each start, and so are totals."""
    return [a for a, b in pairwise(work) if b.batch <= a.batch] + [work[-1]]


def work_sentence(works: Sequence[WorkSummary]) -> list[str]:
    """One sentence on the verdicts on all workers' groups; none without workers."""
    if not works:
        return []
    refused: Counter[str] = Counter()
    for work in works:
        refused.update(work.verdicts)
    handed_in, taken = refused.total(), refused.pop("accepted", 0)
    groups = "1 group" if handed_in == 1 else f"{handed_in:,} groups"
    reasons = "".join(f", {printable(why, 40)} {n:,}" for why, n in refused.most_common() if n)
    return [f"Workers handed in {groups}: accepted {taken:,}{reasons}."]


def grown(totals: Iterable[int]) -> int:
    """The sum of a total over all starts of a process, at each of which it begins at zero."""
    before, done = 0, 0
    for total in totals:
        if total < before:
            done += before
        before = total
    return done + before


def _share(waited_s: float, worked_s: float) -> float:
    whole_s = waited_s + worked_s
    return waited_s / whole_s if whole_s > 0 else 0.0


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and isfinite(value)]
    return sum(known) / len(known) if known else None
