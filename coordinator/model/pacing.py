"""The pacing depth: the staleness that leases and plans aim at, below the run's bound S. Pure.

Fresher groups make better steps, so the depth is as small as the links allow. It rises by one if
the learner starves because leases are refused as too old, and only while training is healthy: high
effective sample size, low KL. It falls by one if training is not, or after many calm steps. The
back-off of a depth that starved the learner doubles, so that it does not go up and down. It is
short again once a depth held as long as the last back-off.
"""

from dataclasses import dataclass, replace

from coordinator.model.capacity import WrongSetting, require_range

BACKOFF_DOUBLINGS_MAX = 10
DEPTH_MAX = 1_024  # steps


def check_depth(value: object) -> int:
    """
    Raises:
        WrongSetting: it is no pacing depth.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= DEPTH_MAX:
        raise WrongSetting(f"depth = {value}: must be a whole number from 0 to {DEPTH_MAX}")
    return value


@dataclass(frozen=True, slots=True)
class PacingRules:
    """The thresholds at which the depth moves."""

    effective_share_min: float = 0.5
    """Least effective sample size per token of a healthy batch."""
    mismatch_k3_max: float = 0.05
    """It is healthy while the KL from what generated the tokens to what is trained is at most
    this."""
    idle_share_max: float = 0.1
    """Waiting of the learner beyond the prediction that is tolerated, as a share of the time."""
    steps: int = 5
    """The least steps from one change of the depth to the next."""
    calm_steps: int = 50
    """The steps without a shortage after which a smaller depth is tried."""
    depth: int | None = None
    """Plan for this staleness. Left out: the least that keeps the learner busy is found."""

    def __post_init__(self) -> None:
        if self.depth is not None:
            check_depth(self.depth)
        require_range(self, 0.0, 1.0, "effective_share_min", "idle_share_max")
        require_range(self, 0.0, float("inf"), "mismatch_k3_max")
        require_range(self, 1, 1_000_000, "steps", "calm_steps")


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one moment."""

    step: int
    bound: int
    least: int | None  # the depth that the links allow; None: unknown or infeasible
    idle_share: float
    predicted_idle_share: float
    refused: int  # leases refused as too old since the last look
    effective_share: float | None
    mismatch_k3: float | None


@dataclass(frozen=True, slots=True)
class Pacing:
    """The depth and its history."""

    depth: int
    since: int = 0  # step of the last change
    starved: int = -1  # depths up to this starved the learner
    starved_until: int = 0  # step until which they are not tried
    failures: int = 0  # in a row: no depth held as long as the pause before
    why: str = "the run's bound"


def next_pacing(pacing: Pacing, seen: Measured, rules: PacingRules) -> Pacing:
    """The pacing after the measurements; an equal value if nothing changes."""
    if rules.depth is not None:
        wanted = min(rules.depth, seen.bound)
        return pacing if pacing.depth == wanted else _moved(pacing, wanted, seen, "as was asked")
    return _found(pacing, seen, rules)


def _found(pacing: Pacing, seen: Measured, rules: PacingRules) -> Pacing:
    if pacing.depth > seen.bound:
        return _moved(pacing, seen.bound, seen, "the run's bound")
    floor = pacing.depth if seen.least is None else min(seen.least, seen.bound)
    is_ill = _is_ill(seen, rules)
    if pacing.depth < floor and not is_ill:
        return _moved(pacing, floor, seen, "the links do not allow less")
    if seen.step - pacing.since < rules.steps:
        return pacing
    if is_ill:
        if pacing.depth > floor:
            return _moved(pacing, pacing.depth - 1, seen, "importance weights are unhealthy")
        return pacing
    waits = seen.idle_share - seen.predicted_idle_share > rules.idle_share_max
    if waits and seen.refused:
        is_measured = None not in (seen.effective_share, seen.mismatch_k3)
        if pacing.depth < seen.bound and is_measured:
            held = seen.step - pacing.since >= _pause(pacing.failures, rules)
            failures = 1 if held else pacing.failures + 1
            again = _pause(failures, rules)
            raised = _moved(pacing, pacing.depth + 1, seen, "the learner starved")
            return replace(
                raised, starved=pacing.depth, starved_until=seen.step + again, failures=failures
            )
        return pacing
    if pacing.depth > floor and pacing.since == 0:
        return _moved(pacing, floor, seen, "as little as the links allow")
    starved = pacing.depth - 1 <= pacing.starved and seen.step < pacing.starved_until
    if pacing.depth > floor and not starved and seen.step - pacing.since >= rules.calm_steps:
        return _moved(pacing, pacing.depth - 1, seen, "fresher groups suffice")
    return pacing


def _pause(failures: int, rules: PacingRules) -> int:
    """The steps for which a depth that starved the learner so often is not tried."""
    return rules.calm_steps << min(failures, BACKOFF_DOUBLINGS_MAX)


def _is_ill(seen: Measured, rules: PacingRules) -> bool:
    share, k3 = seen.effective_share, seen.mismatch_k3
    return (share is not None and share < rules.effective_share_min) or (
        k3 is not None and k3 > rules.mismatch_k3_max
    )


def _moved(pacing: Pacing, depth: int, seen: Measured, why: str) -> Pacing:
    return replace(pacing, depth=depth, since=max(seen.step, 1), why=why)
