"""Predictions of the capacity model, corrected by what came of the earlier ones. Pure.

The model knows rates, sizes and links. What queues, leases and disks take shows in the learner's
steps alone.
"""

from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from coordinator.model.capacity import Capacity
from swarm.wire.messages import LearnerReport

LOOKS: Final = 10  # that count, for the error and for calm
LATEST_SHARE: Final = 0.3  # weight of the latest look
CORRECTION_MAX: Final = 20.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """The lessons of the looks at one learner."""

    correction: float = 1.0  # measured over modelled time from step to step
    overhead: float = 1.0  # time that steps do not wait over `train_s`: evaluations, disks
    waits: float | None = None  # the predicted share of the time, for the next look
    errors: tuple[float, ...] = ()  # measured less predicted share, of the last looks
    calm: int = 0  # looks in a row at which no group was too old
    _before: tuple[int, int, int] = (0, 0, 0)  # version, discarded, refused

    @property
    def error(self) -> float | None:
        """The mean distance of prediction and measurement; None: no prediction could be checked."""
        return fmean(map(abs, self.errors)) if self.errors else None

    @property
    def is_calm(self) -> bool:
        """True if no group was too old for so long that a warning of it is wrong."""
        return self.calm >= LOOKS

    def looked(self, report: LearnerReport, modelled: Capacity | None) -> "Forecast":
        """After a look at the learner. `modelled`: of its active workers."""
        pace, work = report.pace, report.work
        now = (report.version, work.discarded, work.would_be_stale)
        steps, discarded, refused = (a - b for a, b in zip(now, self._before, strict=True))
        if steps <= 0:
            return self
        is_calm = not discarded and not refused
        is_calm &= pace.staleness_worst <= report.rules.staleness_max
        found = replace(self, calm=(self.calm + 1) * is_calm, _before=now)
        if modelled is None or pace.train_s <= 0.0:
            return replace(found, waits=None)
        errors = self.errors
        if self.waits is not None:
            errors = (*errors, pace.idle_share - self.waits)[-LOOKS:]
        working_s = pace.step_s * (1.0 - pace.idle_share)
        found = replace(
            found,
            correction=_nearer(self.correction, pace.step_s / modelled.step_s),
            overhead=_nearer(self.overhead, working_s / pace.train_s),
            errors=errors,
        )
        return replace(found, waits=1.0 - found.corrected(modelled, report).utilisation)

    def corrected(self, modelled: Capacity, report: LearnerReport) -> Capacity:
        """The model's capacity with the time that steps take, and no age that is never admitted."""
        train_s = modelled.utilisation * modelled.step_s * self.overhead
        step_s = max(train_s, modelled.step_s * self.correction)
        worst = report.pace.staleness_worst if self.is_calm else report.rules.staleness_max
        return replace(
            modelled,
            step_s=step_s,
            utilisation=train_s / step_s,
            staleness_worst=min(modelled.staleness_worst, worst),
        )


def _nearer(before: float, measured: float) -> float:
    within = min(max(measured, 1.0 / CORRECTION_MAX), CORRECTION_MAX)
    return before + LATEST_SHARE * (within - before)
