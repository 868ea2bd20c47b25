"""The capacity model's view of a fleet at one moment. Pure, and slow where workers are many.

A bound on staleness that the links do not allow has no plan. Then the least depth beyond it that
has one is planned with: some of what is made will be refused as too old, which is said, and shows
in what is admitted; to stop what works on account of an estimate would be worse.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from coordinator.estimates import calibrated_load_s
from coordinator.model.activation import ActivationState, Decision, Seen, Settings, decide
from coordinator.model.capacity import Capacity, Form, Infeasible, Obstacle, Run, Worker, assess

DEPTHS_TRIED_MAX: Final = 64


def soonest(run: Run, members: Sequence[Worker], least: int = 1) -> Capacity | None:
    """The run's capacity with these workers at the least staleness, from `least` up, at which their
    groups are in time, published as often as links allow; None: there is none."""
    for depth in range(least, DEPTHS_TRIED_MAX + 1):
        found = assess(replace(run, staleness_max=depth), members, Form.OVERLAPPED)
        if isinstance(found, Capacity):
            return found
        if found.obstacle in (Obstacle.NO_WORKERS, Obstacle.SUPPLY):
            return None
    return None


def decided(
    run: Run, state: ActivationState, seen: Seen, now_s: float, settings: Settings, bound: int
) -> Decision:
    """Decide on the workers, at the least depth, from the run's up, at which the groups of those
    wanted now are in time, and so are those of all. Beyond `bound` the decision's problem says
    so."""
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


@dataclass(frozen=True, slots=True)
class Forecast:
    """The outlook for the machines that run: `capacity` at the depth that is planned for or
    the least above it, and `least`, the least depth of all; None where there is none."""

    capacity: Capacity | None
    least: int | None


def outlook(run: Run, members: Sequence[Worker], broadcast_s: float) -> Forecast:
    """`broadcast_s`: what broadcasts were measured to take; 0: nothing was."""
    run = replace(run, load_s=calibrated_load_s(run, members, broadcast_s))
    fresh = soonest(run, members)
    if fresh is None or fresh.staleness_max >= run.staleness_max:
        return Forecast(fresh, None if fresh is None else fresh.staleness_max)
    return Forecast(soonest(run, members, run.staleness_max), fresh.staleness_max)
