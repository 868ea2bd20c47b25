"""Own tokens, rounds and seconds until policies reach a level, for conditions with `levels`.

A level lies between a policy's first pass rate and the goal: `goal`, in percent, or the level of
the nodes that are not `counted` (the veterans). It is reached once the `reached_by` part of the
counted nodes passes so many held-out tasks; between two evaluations the curve is a straight line.

A swarm that never gets there counts as if it had at its end. This favours the slower arm, so a
ratio with such swarms is a lower bound where controls have them, and an upper one where others do.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any, NamedTuple

from scipy.stats import t as student

Result = Mapping[str, Any]
Condition = Mapping[str, Any]


class Reached(NamedTuple):
    """The first time at a level, on one axis."""

    at: float
    ever: bool


def passed(point: Mapping[str, Any]) -> float:
    """Greedy answers that are right, in percent."""
    return 100 * fmean(right for _, right, _ in point["tasks"])


def counted(condition: Condition, result: Result) -> list[int]:
    """The nodes of a swarm that count."""
    nodes = sorted({point["node"] for point in result["points"]})
    return [node for node in nodes if node in condition.get("counted", nodes)]


def veterans_level(condition: Condition, results: Sequence[Result]) -> float:
    """The first pass rate of the other nodes, in percent; NaN if none ran."""
    found = [
        passed(point)
        for result in results
        for point in result["points"]
        if point["round"] == 0 and point["node"] not in counted(condition, result)
    ]
    return fmean(found) if found else math.nan


def reached(condition: Condition, result: Result, axis: str, level: float, goal: float) -> Reached:
    """When the counted nodes came to `level`, a share of the way from their start to `goal`."""
    firsts = []
    for points in _by_node(condition, result):
        curve = [(float(point[axis]), passed(point)) for point in points]
        start = curve[0][1]
        firsts.append(first(curve, start + level * (goal - start)))
    in_order = sorted(firsts, key=lambda each: (not each.ever, each.at))
    return in_order[_last_needed(condition, len(firsts))]


def _by_node(condition: Condition, result: Result) -> list[list[Mapping[str, Any]]]:
    """The points of each counted node, by round."""
    points = sorted(result["points"], key=lambda point: point["round"])
    return [[p for p in points if p["node"] == node] for node in counted(condition, result)]


def _last_needed(condition: Condition, nodes: int) -> int:
    """The place, among so many nodes in order, of the one with which enough of them are there."""
    return math.ceil(condition.get("reached_by", 1.0) * nodes) - 1


def is_over(condition: Condition, result: Result) -> bool:
    """True if the last level is reached: the rest of a swarm's rounds says no more."""
    if "levels" not in condition:
        return False
    goal = condition.get("goal", veterans_level(condition, [result]))
    nodes = condition.get("counted", range(len(condition["nodes"])))
    if math.isnan(goal) or counted(condition, result) != list(nodes):
        return False
    return reached(condition, result, "round", max(condition["levels"]), goal).ever


def first(curve: Sequence[tuple[float, float]], wanted: float) -> Reached:
    """The place at which a curve of (place, value) first reaches a value, on straight lines."""
    if curve[0][1] >= wanted:
        return Reached(0.0, ever=True)
    for (begin, low), (end, high) in pairwise(curve):
        if low < wanted <= high:
            return Reached(begin + (end - begin) * (wanted - low) / (high - low), ever=True)
    return Reached(curve[-1][0], ever=False)


def ratio(
    mine: Sequence[Reached], others: Sequence[Reached], comparisons: int
) -> tuple[float, float, float]:
    """The factor by which `mine` needed fewer: the geometric mean of pairs, and its interval of
    95 % for so many comparisons together (Student's t of the logarithms)."""
    pairs = zip(mine, others, strict=True)
    logs = [math.log(max(b.at, 1.0) / max(a.at, 1.0)) for a, b in pairs]
    half = math.inf
    if len(logs) > 1:
        quantile = float(student.ppf(1 - 0.025 / comparisons, len(logs) - 1))
        half = quantile * stdev(logs) / math.sqrt(len(logs))
    mean = fmean(logs)
    return math.exp(mean), math.exp(mean - half), math.exp(min(mean + half, 700.0))


def _of_same_seeds(
    by_arm: Mapping[str, Sequence[Result]], controls: Sequence[str], mine: Sequence[Result]
) -> dict[str, list[Result]]:
    """The controls that have all seeds of an arm, in its order."""
    found = {}
    for name in controls:
        theirs = {each["seed"]: each for each in by_arm.get(name, ())}
        if all(each["seed"] in theirs for each in mine):
            found[name] = [theirs[each["seed"]] for each in mine]
    return found


def waited(condition: Condition, result: Result) -> float:
    """The first evaluation, by its round, at which enough of the counted nodes had once passed more
    than at their start. A node that never does counts as the last one."""
    rounds = []
    for points in _by_node(condition, result):
        rise = (each["round"] for each in points if passed(each) > passed(points[0]))
        rounds.append(next(rise, points[-1]["round"]))
    return float(sorted(rounds)[_last_needed(condition, len(rounds))])


def table(
    condition: Condition, results: Sequence[Result], controls: Sequence[str], comparisons: int
) -> str:
    """Of each arm what it needed to each level, and its ratios to the control that needs the fewest
    tokens, of those that have its seeds."""
    by_arm: dict[str, list[Result]] = {}
    for result in results:
        by_arm.setdefault(str(result["arm"]), []).append(result)
    goal = condition.get("goal", veterans_level(condition, results))
    heads = ["arm", "seeds", "round of the first gain"]
    for level in condition["levels"]:
        heads += [f"tokens to {level:.0%}", "rounds", "seconds", "never"]
        heads += ["times fewer tokens", "rounds", "seconds"]
    heads += ["greedy at the end"]
    lines = [
        f"{condition['says']}. The goal is {goal:.1f} % of greedy answers. Tokens are own ones.",
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
    ]
    for arm, mine in by_arm.items():
        theirs = {} if arm in controls else _of_same_seeds(by_arm, controls, mine)
        cells = [str(len(mine)), f"{fmean(waited(condition, each) for each in mine):.1f}"]
        for level in condition["levels"]:
            cells += _to_level(condition, mine, theirs, level, goal, comparisons)
        ends = [
            passed(point)
            for each in mine
            for point in each["points"]
            if point["node"] in counted(condition, each)
            and point["round"] == max(p["round"] for p in each["points"])
        ]
        cells.append(f"{fmean(ends):.1f}")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _to_level(
    condition: Condition,
    mine: Sequence[Result],
    controls: Mapping[str, Sequence[Result]],
    level: float,
    goal: float,
    comparisons: int,
) -> list[str]:
    """The cells of one arm and one level."""

    def needed(results: Sequence[Result], axis: str) -> list[Reached]:
        return [reached(condition, each, axis, level, goal) for each in results]

    found = {axis: needed(mine, axis) for axis in ("tokens", "round", "seconds")}
    cells = [f"{fmean(each.at for each in found[axis]):,.0f}" for axis in found]
    cells.append(str(sum(not each.ever for each in found["tokens"])))
    if not controls:
        return [*cells, "", "", ""]
    best = min(
        controls, key=lambda name: fmean(each.at for each in needed(controls[name], "tokens"))
    )
    factors = [
        told_ratio(*ratio(found[axis], needed(controls[best], axis), comparisons)) for axis in found
    ]
    return [*cells, f"{factors[0]} than {best}", *factors[1:]]


def told_ratio(factor: float, low: float, high: float) -> str:
    """A ratio and its interval; of too few seeds the interval says nothing."""
    return f"{factor:.2f} ({low:.2f} to {high:.2f})" if high < 100 else f"{factor:.2f} (unbounded)"
