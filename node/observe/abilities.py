"""A policy's results on held-out tasks, with 95 % intervals that hold for few tasks, too."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Final

# Quantiles of Student's distribution at 0.975 for 1, 2, 3... degrees of freedom.
_T: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def interval(values: Sequence[float], least: float, most: float) -> tuple[float, float, float]:
    """(mean, low, high) of independent values from `least` to `most`, at least one.

    Student's t over these and one more at each end (Agresti's way): values that are all alike are
    too few to be sure of. Of shares and paired differences at least 93 % are covered, whatever is
    true. Beyond 31 values the quantile of 31 counts: a little too wide, never too narrow.
    """
    more = [*values, least, most]
    quantile = _T[min(len(more) - 2, len(_T) - 1)]
    middle, half = fmean(more), quantile * stdev(more) / sqrt(len(more))
    return fmean(values), max(least, middle - half), min(most, middle + half)


def half_width(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval around the mean of independent runs, by Student's t. None: fewer
    than two. Beyond 31 values as `interval`."""
    if len(values) < 2:
        return None
    return _T[min(len(values) - 1, len(_T)) - 1] * stdev(values) / sqrt(len(values))


@dataclass(frozen=True, slots=True)
class TaskResult:
    environment: str
    greedy: bool  # the likeliest completion passes
    passed: int  # of the sampled completions
    samples: int


def by_environment(results: Sequence[TaskResult]) -> dict[str, list[TaskResult]]:
    """Each environment's results, by name; all of them first, under an empty name."""
    found: dict[str, list[TaskResult]] = {"": list(results)}
    for each in sorted(results, key=lambda result: result.environment):
        found.setdefault(each.environment, []).append(each)
    return found


def told(results: Sequence[TaskResult]) -> list[str]:
    """A table for people: a row for all tasks and one for each environment, in percent."""
    samples = min(each.samples for each in results)
    rows = [["", "tasks", "greedy", *(["sampled", f"pass@{samples}"] if samples else [])]]
    for name, part in by_environment(results).items():
        if len(part) < 2:
            continue
        row = [name or "all", str(len(part)), _percent([float(each.greedy) for each in part])]
        if samples:
            row += [
                _percent([each.passed / each.samples for each in part]),
                _percent([float(each.passed > 0) for each in part]),
            ]
        rows.append(row)
    return _aligned(rows)


def told_compared(before: Sequence[TaskResult], after: Sequence[TaskResult]) -> list[str]:
    """A table of differences of two policies on the same tasks in the same order, in points.

    Gained: solved greedily by the second policy only. Unlocked: never solved by the first, greedily
    or in a sample, and solved greedily by the second.
    """
    sampled = min(each.samples for each in [*before, *after]) > 0
    rows = [["", "tasks", "greedy", *(["sampled"] * sampled), "gained", "lost", "unlocked"]]
    second = by_environment(after)
    for name, part in by_environment(before).items():
        if len(part) < 2:
            continue
        pairs = list(zip(part, second[name], strict=True))
        greedy = [float(now.greedy) - float(was.greedy) for was, now in pairs]
        row = [name or "all", str(len(pairs)), points(greedy)]
        if sampled:
            rises = [now.passed / now.samples - was.passed / was.samples for was, now in pairs]
            row.append(points(rises))
        gained = sum(now.greedy and not was.greedy for was, now in pairs)
        lost = sum(was.greedy and not now.greedy for was, now in pairs)
        locked = [now for was, now in pairs if not was.greedy and not was.passed]
        unlocked = sum(now.greedy for now in locked)
        rows.append([*row, str(gained), str(lost), f"{unlocked} of {len(locked)}"])
    return _aligned(rows)


def _percent(values: Sequence[float]) -> str:
    mean, low, high = (100 * each for each in interval(values, 0.0, 1.0))
    return f"{mean:.1f} % [{low:.1f}, {high:.1f}]"


def points(values: Sequence[float]) -> str:
    """The mean of paired differences in [-1, 1] with its interval, in points."""
    mean, low, high = (100 * each for each in interval(values, -1.0, 1.0))
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
