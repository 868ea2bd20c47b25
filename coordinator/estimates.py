"""The capacity model's inputs from measurements, or from the fleet file's guesses. Pure.

A worker's speed is what the learner admitted. Of its own claims only the links count: a worker
that claims a faster uplink is asked to pass on more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from coordinator.fleet_file import LearnerCosts, Machine
from coordinator.model.activation import ActivationState, Decision, Seen, Settings, decide
from coordinator.model.capacity import (
    STALENESS_MAX,
    Capacity,
    Form,
    Infeasible,
    Obstacle,
    Run,
    Worker,
    assess,
    predicted_broadcast,
)
from swarm.leases.coordination import ReportedWorker
from swarm.wire.messages import LearnerReport

MEASURED_GROUPS_MIN: Final = 3  # granted groups before a rate counts
LINK_MIN_BYTES_PER_S: Final = 16_384.0  # slower claims are below the timeouts of transfers
FAILED_SHARE_MAX: Final = 0.95
RATE_MIN: Final = 1e-6  # groups a second of a worker that delivers nothing
START_EWMA_SHARE: Final = 0.3  # weight of the latest start
UNKNOWN_BYTES: Final = 1_000_000  # of a version, before the first


@dataclass(frozen=True, slots=True)
class MachineHistory:
    """The history of a machine's starts."""

    start_s: float | None = None  # mean time from its start to its first fresh version
    up_s: float = 0.0  # total time with fresh weights
    losses: int = 0  # while it had them

    def started(self, took_s: float) -> "MachineHistory":
        old = self.start_s
        mean_s = took_s if old is None else old + START_EWMA_SHARE * (took_s - old)
        return replace(self, start_s=mean_s)

    def served(self, for_s: float) -> "MachineHistory":
        return replace(self, up_s=self.up_s + for_s)

    def lost(self) -> "MachineHistory":
        return replace(self, losses=self.losses + 1)

    def lifetime_s(self, guess_s: float | None) -> float | None:
        """Mean time until a loss. A guess counts as one loss."""
        if guess_s is not None:
            return (guess_s + self.up_s) / (1 + self.losses)
        return None if self.losses == 0 else max(self.up_s, 1.0) / self.losses


def is_measured(reported: ReportedWorker) -> bool:
    """True if its rate counts: after a few groups, or after a loss."""
    granted = reported.admitted + reported.refused
    is_known = granted >= MEASURED_GROUPS_MIN or reported.failed_share > 0.0
    return reported.groups_per_s is not None and is_known


def worker_of(machine: Machine, reported: ReportedWorker | None, history: MachineHistory) -> Worker:
    rate, failed, generation_s = machine.groups_per_s, 0.0, machine.generation_s
    up, down, relayed = machine.up_bytes_per_s, machine.down_bytes_per_s, False
    if reported is not None:
        up, down = (
            max(LINK_MIN_BYTES_PER_S, float(said)) if said else guess
            for said, guess in ((reported.up_bytes_per_s, up), (reported.down_bytes_per_s, down))
        )
        relayed = reported.relayed
        if is_measured(reported):
            assert reported.groups_per_s is not None
            failed = min(reported.failed_share, FAILED_SHARE_MAX)
            rate = max(reported.groups_per_s / (1.0 - failed), RATE_MIN)
            generation_s = reported.turnaround_s or generation_s
    return Worker(
        name=machine.name,
        groups_per_s=rate,
        generation_s=generation_s,
        up_bytes_per_s=up,
        down_bytes_per_s=down,
        price_per_h=machine.price_per_h,
        egress_price_per_gb=machine.egress_price_per_gb,
        failed_share=failed,
        start_s=machine.start_s if history.start_s is None else history.start_s,
        lifetime_s=history.lifetime_s(machine.lifetime_s),
        relayed=relayed,
    )


def run_of(report: LearnerReport, costs: LearnerCosts, depth: int, *, aimed: bool) -> Run | None:
    """The learner for the capacity model, at a pacing depth. None: the step time is unknown.
    `aimed`: with the file's `step_s` if training is faster."""
    train_s = report.pace.train_s or costs.train_s or 0.0
    if aimed:
        train_s = max(train_s, costs.step_s or 0.0)
    if train_s <= 0.0:
        return None
    whole = report.sizes.weights_bytes or UNKNOWN_BYTES
    has_delta = 0 < report.sizes.delta_bytes < whole
    return Run(
        groups_per_step=max(1, report.rules.groups_per_step),
        train_s=train_s,
        staleness_max=min(depth, STALENESS_MAX),
        weights_bytes=whole,
        up_bytes_per_s=float(report.sizes.up_bytes_per_s) or costs.up_bytes_per_s,
        delta_bytes=((max(1, report.rules.publish_every), report.sizes.delta_bytes),)
        if has_delta
        else (),
        latency_s=costs.latency_s,
        load_s=costs.load_s,
        group_bytes=report.sizes.group_bytes,
        price_per_h=costs.price_per_h,
        egress_price_per_gb=costs.egress_price_per_gb,
    )


def calibrated_load_s(run: Run, active: Sequence[Worker], measured_s: float) -> float:
    """Broadcast time that the links do not explain: encoding, patching, loading."""
    if not active or measured_s <= 0.0:
        return run.load_s
    size_bytes = run.published_bytes(1)
    sent_s = predicted_broadcast(run, active, size_bytes) - run.load_s
    return max(run.load_s, measured_s - sent_s)


# The capacity model's view of a fleet at one moment. Slow with many workers.


def soonest(run: Run, members: Sequence[Worker], least: int = 1) -> Capacity | None:
    """The run's capacity at the least staleness, from `least` up, that is feasible. None: none."""
    for depth in range(least, STALENESS_MAX + 1):
        found = assess(replace(run, staleness_max=depth), members, Form.OVERLAPPED)
        if isinstance(found, Capacity):
            return found
        if found.obstacle in (Obstacle.NO_WORKERS, Obstacle.SUPPLY):
            return None
    return None


def decided(
    run: Run, state: ActivationState, seen: Seen, now_s: float, settings: Settings, bound: int
) -> Decision:
    """Decide at the least depth, from the run's up, that is feasible for the wanted workers and
    for all. Beyond `bound` the decision has a problem."""
    wanted = [each for each in seen.workers if each.name in state.wanted]
    depth = run.staleness_max
    for members in (wanted, seen.workers):
        found = soonest(run, members, depth)
        depth = depth if found is None else found.staleness_max
    decision = decide(state, seen, replace(run, staleness_max=depth), now_s, settings)
    if decision.problem is None and depth > bound:
        problem = Infeasible(
            Obstacle.STALENESS,
            f"groups may be {depth} steps old when their turn comes, and S = {bound}: some will be "
            "refused",
        )
        return replace(decision, problem=problem)
    return decision


def outlook(
    run: Run, members: Sequence[Worker], broadcast_s: float
) -> tuple[Capacity | None, int | None]:
    """The active workers' capacity at the planned depth or the least feasible one above it, and the
    least feasible depth of all. None: infeasible. `broadcast_s`: measured; 0: unknown."""
    run = replace(run, load_s=calibrated_load_s(run, members, broadcast_s))
    fresh = soonest(run, members)
    if fresh is None or fresh.staleness_max >= run.staleness_max:
        return fresh, None if fresh is None else fresh.staleness_max
    return soonest(run, members, run.staleness_max), fresh.staleness_max
