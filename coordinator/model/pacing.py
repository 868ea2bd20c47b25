"""The pacing depth: the staleness that plans aim at, below the run's bound. Pure.

The bound S is the user's, and holds at consumption whatever is planned. The depth is what leases
aim at and what the capacity model plans with. Fresher groups make better steps, so it is kept as
small as the links allow. It is raised by one where the learner starves because leases are refused
as too old, and only while what is trained on is healthy: the effective sample size of importance
weights is high, and the KL from what generated the tokens to the policy is low. It is lowered by
one where they are not, or where it has been more than needed for long. Where the model knows no
depth, it stays as it is. A depth that starved the
learner is not tried again for ever longer times, so that it does not go up and down.
"""

from dataclasses import dataclass, replace

from coordinator.model.capacity import WrongSetting

BACKOFF_DOUBLINGS_MAX = 10
DEPTH_MAX = 1_024


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
    """The thresholds at which the depth moves.

    Raises:
        WrongSetting: a value is out of its range.
    """

    effective_share_min: float = 0.5
    """What is trained on is healthy while its effective sample size over its number of tokens
    is at least this."""
    mismatch_k3_max: float = 0.05
    """It is healthy while the KL from what generated the tokens to what is trained is at most
    this."""
    idle_share_max: float = 0.1
    """How much more than predicted the learner may wait, as a share of the time."""
    steps: int = 5
    """The least steps from one change of the depth to the next."""
    calm_steps: int = 50
    """The steps without a shortage after which a smaller depth is tried."""
    depth: int | None = None
    """Plan for this staleness. Left out: the least that keeps the learner busy is found."""

    def __post_init__(self) -> None:
        if self.depth is not None:
            check_depth(self.depth)
        for name in ("effective_share_min", "idle_share_max"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise WrongSetting(f"{name} = {getattr(self, name)}: must be from 0 to 1")
        if not self.mismatch_k3_max >= 0.0:
            raise WrongSetting(f"mismatch_k3_max = {self.mismatch_k3_max}: must be 0 or more")
        for name in ("steps", "calm_steps"):
            if not 1 <= getattr(self, name) <= 1_000_000:
                raise WrongSetting(f"{name} = {getattr(self, name)}: must be from 1 to 1000000")


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one moment. `least`: the depth that the links allow by the model; None:
    there is none, or it is not known yet. `refused`: leases refused as too old since the last
    look."""

    step: int
    bound: int
    least: int | None
    idle_share: float
    predicted_idle_share: float
    refused: int
    effective_share: float | None
    mismatch_k3: float | None


@dataclass(frozen=True, slots=True)
class Pacing:
    """The depth, and what is remembered. `starved`: depths at or below this starved the learner,
    until `starved_until` (a step), for the `failures`th time in a row."""

    depth: int
    since: int = 0  # step of the last change
    starved: int = -1
    starved_until: int = 0
    failures: int = 0
    why: str = "the run's bound"


def next_pacing(pacing: Pacing, seen: Measured, rules: PacingRules) -> Pacing:
    """The depth from now on; an equal value where nothing changes."""
    if rules.depth is not None:
        wanted = min(rules.depth, seen.bound)
        return pacing if pacing.depth == wanted else _moved(pacing, wanted, seen, "as was asked")
    return _found(pacing, seen, rules)


def _found(pacing: Pacing, seen: Measured, rules: PacingRules) -> Pacing:
    if pacing.depth > seen.bound:
        return _moved(pacing, seen.bound, seen, "the run's bound")
    floor = pacing.depth if seen.least is None else min(seen.least, seen.bound)
    if pacing.depth < floor and not _is_ill(seen, rules):
        return _moved(pacing, floor, seen, "the links do not allow less")
    if seen.step - pacing.since < rules.steps:
        return pacing
    if _is_ill(seen, rules):
        if pacing.depth > floor:
            return _moved(pacing, pacing.depth - 1, seen, "importance weights are unhealthy")
        return pacing
    waits = seen.idle_share - seen.predicted_idle_share > rules.idle_share_max
    if waits and seen.refused:
        if pacing.depth < seen.bound and _is_known_well(seen):
            failures = pacing.failures + 1
            again = rules.calm_steps * 2 ** min(failures, BACKOFF_DOUBLINGS_MAX)
            raised = _moved(pacing, pacing.depth + 1, seen, "the learner starved")
            return replace(
                raised, starved=pacing.depth, starved_until=seen.step + again, failures=failures
            )
        return pacing
    if pacing.depth > floor and pacing.since == 0:
        return _moved(pacing, floor, seen, "as little as the links allow")
    if pacing.depth > floor and _may_try(pacing, seen, rules):
        return _moved(pacing, pacing.depth - 1, seen, "fresher groups suffice")
    return pacing


def _is_ill(seen: Measured, rules: PacingRules) -> bool:
    share, k3 = seen.effective_share, seen.mismatch_k3
    return (share is not None and share < rules.effective_share_min) or (
        k3 is not None and k3 > rules.mismatch_k3_max
    )


def _is_known_well(seen: Measured) -> bool:
    """True if the weights' health is measured; unmeasured weights do not count as healthy."""
    return seen.effective_share is not None and seen.mismatch_k3 is not None


def _may_try(pacing: Pacing, seen: Measured, rules: PacingRules) -> bool:
    if pacing.depth - 1 <= pacing.starved and seen.step < pacing.starved_until:
        return False
    return seen.step - pacing.since >= rules.calm_steps


def _moved(pacing: Pacing, depth: int, seen: Measured, why: str) -> Pacing:
    return replace(pacing, depth=depth, since=max(seen.step, 1), why=why)
