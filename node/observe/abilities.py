"""A policy's results on held-out tasks, with 95 % intervals by Student's t or Wilson's score."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Final

NORMAL_95: Final = 1.96
# Quantiles of Student's distribution at 0.975 for 1, 2, 3... degrees of freedom.
_T: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of independent values, at least two.

    Beyond 31 values the quantile of 31 counts: it is a little too wide, never too narrow.
    """
    mean = fmean(values)
    quantile = _T[min(len(values) - 2, len(_T) - 1)]
    half = quantile * stdev(values) / sqrt(len(values))
    return mean, mean - half, mean + half


def share_interval(passed: int, of: int) -> tuple[float, float, float]:
    """(share, low, high) of independent trials, at least one, by Wilson's score: it says something
    where all of them or none passed, too."""
    share, square = passed / of, NORMAL_95**2 / of
    middle = (share + square / 2) / (1 + square)
    half = sqrt(share * (1 - share) * square + square**2 / 4) / (1 + square)
    return share, max(0.0, middle - half), min(1.0, middle + half)


Figure = tuple[float, float, float]  # mean, and the ends of its 95 % interval, in shares of one


@dataclass(frozen=True, slots=True)
class TaskResult:
    """A policy's results on one task."""

    environment: str
    greedy: bool  # the likeliest completion passes
    passed: int  # of the sampled completions
    samples: int

    @property
    def is_solved_ever(self) -> bool:
        """True if any completion passed."""
        return self.greedy or self.passed > 0


@dataclass(frozen=True, slots=True)
class Abilities:
    """Of a set of tasks. What needs samples is None without them."""

    tasks: int
    greedy: Figure
    sampled: Figure | None
    any_of: Figure | None  # pass@k, with all samples


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of two policies on the same tasks: the second's figures less the first's, in pairs."""

    tasks: int
    greedy: Figure
    sampled: Figure | None
    gained: int  # tasks that the second solves greedily and the first does not
    lost: int
    locked: int  # tasks that the first never solved, greedily or in a sample
    unlocked: int  # of these, those that the second solves greedily


def by_environment(results: Sequence[TaskResult]) -> dict[str, list[TaskResult]]:
    """Each environment's results, by name; all of them first, under an empty name."""
    found: dict[str, list[TaskResult]] = {"": list(results)}
    for each in sorted(results, key=lambda result: result.environment):
        found.setdefault(each.environment, []).append(each)
    return found


def abilities(results: Sequence[TaskResult]) -> Abilities:
    """Over at least two tasks."""
    samples = min(each.samples for each in results)
    solved = sum(each.greedy for each in results)
    found = None if not samples else [each.passed / each.samples for each in results]
    some = sum(each.passed > 0 for each in results)
    return Abilities(
        tasks=len(results),
        greedy=share_interval(solved, len(results)),
        sampled=None if found is None else interval(found),
        any_of=None if found is None else share_interval(some, len(results)),
    )


def compared(before: Sequence[TaskResult], after: Sequence[TaskResult]) -> Comparison:
    """Both are of the same tasks in the same order, at least two."""
    pairs = list(zip(before, after, strict=True))
    sampled = None
    if all(was.samples and now.samples for was, now in pairs):
        sampled = interval(
            [now.passed / now.samples - was.passed / was.samples for was, now in pairs]
        )
    locked = [(was, now) for was, now in pairs if not was.is_solved_ever]
    return Comparison(
        tasks=len(pairs),
        greedy=interval([float(now.greedy) - float(was.greedy) for was, now in pairs]),
        sampled=sampled,
        gained=sum(now.greedy and not was.greedy for was, now in pairs),
        lost=sum(was.greedy and not now.greedy for was, now in pairs),
        locked=len(locked),
        unlocked=sum(now.greedy for _, now in locked),
    )


def told(results: Sequence[TaskResult]) -> list[str]:
    """A table for people: a row for all tasks and one for each environment, in percent."""
    samples = min(each.samples for each in results)
    heads = ["sampled", f"pass@{samples}"] if samples else []
    rows = [["", "tasks", "greedy", *heads]]
    for name, part in by_environment(results).items():
        if len(part) < 2:
            continue
        found = abilities(part)
        row = [name or "all", str(found.tasks), _percent(found.greedy)]
        if found.sampled is not None and found.any_of is not None:
            row += [_percent(found.sampled), _percent(found.any_of)]
        rows.append(row)
    return _aligned(rows)


def told_compared(before: Sequence[TaskResult], after: Sequence[TaskResult]) -> list[str]:
    """A table of differences for people, in points."""
    sampled = min(each.samples for each in [*before, *after]) > 0
    rows = [["", "tasks", "greedy", *(["sampled"] * sampled), "gained", "lost", "unlocked"]]
    first, second = by_environment(before), by_environment(after)
    for name, part in first.items():
        if len(part) < 2:
            continue
        found = compared(part, second[name])
        row = [name or "all", str(found.tasks), _points(found.greedy)]
        if found.sampled is not None:
            row.append(_points(found.sampled))
        row += [str(found.gained), str(found.lost), f"{found.unlocked} of {found.locked}"]
        rows.append(row)
    return _aligned(rows)


def _percent(figure: Figure) -> str:
    mean, low, high = (100 * each for each in figure)
    return f"{mean:.1f} % [{max(0.0, low):.1f}, {min(100.0, high):.1f}]"


def _points(figure: Figure) -> str:
    mean, low, high = (100 * each for each in figure)
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
