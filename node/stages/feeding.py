"""A learner's leases: how far ahead of its steps work may run."""

from node.config.node import rules_of
from node.methods.admission_control import (
    Admission,
    Credits,
    Reclamation,
    admission,
    reclamation,
    starts_allowed,
)
from node.stages.stage import Stage, View
from swarm.leases.intake import Intake


class AdmitInTime(Stage[Admission]):
    """AReaL: leases are granted while their groups will be fresh when they are trained on."""

    def feed(self, intake: Intake, at: View) -> None:
        counts, batch = intake.counts(), rules_of(at.config).groups_per_step
        accepted = counts.consumed + counts.buffered
        credit = Credits(counts.consumed // batch, accepted, counts.leased)
        allowed = admission(credit, batch, self.set_to)
        intake.book.account.set_pacing(
            min(self.set_to.staleness_max, rules_of(at.config).staleness_max)
        )
        intake.book.account.set_groups_max(counts.buffered + counts.leased + allowed)
        oldest = intake.version - self.set_to.staleness_max
        self.acted += 1 + (intake.reclaim(oldest) if oldest > 0 else 0)


class GiveUpOld(Stage[Reclamation]):
    """ROLL: leases and buffered groups of too old a version are given up."""

    def feed(self, intake: Intake, at: View) -> None:
        batch = rules_of(at.config).groups_per_step
        self.acted += 1 + intake.reclaim(reclamation(intake.version, self.set_to))
        counts = intake.counts()
        begun = counts.buffered + counts.leased
        done = counts.consumed // batch
        allowed = starts_allowed(done, counts.consumed + begun, batch, self.set_to)
        intake.book.account.set_groups_max(begun + allowed)
