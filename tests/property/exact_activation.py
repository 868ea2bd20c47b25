"""The cheapest set of workers, by looking at all of them: what the choice of workers is held to.

Written from the definition, with code of its own for what is required, for staleness and for cost;
only the time of a broadcast is predicted by the same function. For up to 14 workers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.model.capacity import Form, Run, Worker, predicted_broadcast

EXACT_WORKERS_MAX = 14


@dataclass(frozen=True, slots=True)
class Exact:
    """The best set and its dollars an hour; no names: no set suffices."""

    names: tuple[str, ...]
    cost_per_h: float


def exact(run: Run, workers: Sequence[Worker], form: Form, margin: float) -> Exact:
    """Sets in the order of their rents, which a set's cost is never below, until no rent is below
    the best cost."""
    if len(workers) > EXACT_WORKERS_MAX:
        raise ValueError(f"{len(workers)} workers are too many to look at all sets")
    rents, rates = np.zeros(1), np.zeros(1)
    for each in workers:
        lives = 1.0 if each.lifetime_s is None else math.exp(-each.start_s / each.lifetime_s)
        rents = np.concatenate([rents, rents + each.price_per_h])
        rate = each.groups_per_s * (1.0 - each.failed_share) * lives
        rates = np.concatenate([rates, rates + rate])
    least = margin * run.groups_per_step / run.train_s
    best = Exact((), math.inf)
    for mask in np.argsort(rents, kind="stable"):
        if rents[mask] >= best.cost_per_h:
            break
        if rates[mask] < least * (1.0 - 1e-12):
            continue
        members = [each for bit, each in enumerate(workers) if mask >> bit & 1]
        cost = set_cost(run, members, form, margin, float(rates[mask]))
        if cost < best.cost_per_h:
            best = Exact(tuple(each.name for each in members), cost)
    return best


def set_cost(
    run: Run, members: Sequence[Worker], form: Form, margin: float, rate_per_s: float
) -> float:
    """Dollars an hour with the longest period in which no group grows too old; inf: none."""
    for period in range(run.staleness_max, 0, -1):
        size_bytes = run.published_bytes(period)
        arrives_s = predicted_broadcast(run, members, size_bytes)
        window_s = period * run.train_s
        if (
            1.05 * arrives_s >= window_s
            or oldest(run, members, form, period, arrives_s) > run.staleness_max
        ):
            continue
        pause_s = arrives_s if form is Form.PAUSED else 0.0
        needed = period * run.groups_per_step / (window_s - pause_s)
        if rate_per_s < margin * needed * (1.0 - 1e-12):
            return math.inf
        sent = (arrives_s - run.load_s) * run.up_bytes_per_s / size_bytes
        copies = min(len(members), max(1.0, sent))
        gb_per_h = size_bytes / 1e9 * 3600.0 / window_s
        cost = (
            sum(each.price_per_h for each in members) + copies * gb_per_h * run.egress_price_per_gb
        )
        cost += sum(gb_per_h * each.egress_price_per_gb for each in members if not each.relayed)
        handed_in = run.groups_per_step * run.group_bytes / 1e9 * 3600.0 / run.train_s
        total = sum(each.groups_per_s for each in members)
        shares = sum(each.groups_per_s / total * each.egress_price_per_gb for each in members)
        return cost + handed_in * shares
    return math.inf


def oldest(run: Run, members: Sequence[Worker], form: Form, period: int, arrives_s: float) -> int:
    """Steps between the version of a group and its consumption, at most, at full utilisation."""
    step_s = run.train_s
    total = sum(each.groups_per_s for each in members)
    mean_s = sum(each.groups_per_s * each.generation_s for each in members) / total
    longest_s = max(each.generation_s for each in members)
    if form is Form.OVERLAPPED:
        flying = math.ceil(run.groups_per_step * (1.0 + 1.1 * mean_s / step_s) - 1e-9)
        flying = run.inflight_groups_max or flying
        waits = max(math.ceil(flying / run.groups_per_step - 1e-9), longest_s / step_s + 1.0)
        return period - 1 + math.ceil(arrives_s / step_s + waits - 1e-9)
    window_s = period * step_s
    stretched_s = mean_s * window_s / (window_s - arrives_s) + arrives_s
    flying = math.ceil(run.groups_per_step * (1.0 + 1.1 * stretched_s / step_s) - 1e-9)
    flying = run.inflight_groups_max or flying
    stops = math.ceil(longest_s / (window_s - arrives_s) - 1e-9)
    ready = math.ceil((stops * arrives_s + longest_s + step_s) / step_s - 1e-9)
    return period - 1 + max(math.ceil(flying / run.groups_per_step - 1e-9), ready)
