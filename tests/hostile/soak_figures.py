"""The table of a soak: what grew, what was shared and what was lost."""

import math
import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy.stats import linregress
from scipy.stats import t as student

from node.observe.event_log import read_events
from node.observe.records import RoundDone, StepDone, WorkDone
from tests.hostile.targets import MIB, aligned, heading

WARM_S = 90.0  # of each life, in which a process grows into its work
BINS = 24  # of the time after the first third
GROWTH_MAX = 0.05  # over that time, of its mean
STEP_MIN = {"memory": 4 * MIB, "descriptors": 2.0, "threads": 1.0, "disk": MIB, "database": MIB}
ARRIVES_S = 180.0  # within which a group is to be somewhere else
LOGS = ("events.jsonl", "console.log")  # they grow with the work done, and are told apart


def sizes_of(data_dir: Path) -> dict[str, int]:
    """Bytes in a data directory: all but logs, logs, and databases."""
    sizes = {"disk": 0, "logs": 0, "database": 0}
    for folder, _, names in os.walk(data_dir):
        for name in names:
            with suppress(OSError):
                size = (Path(folder) / name).stat().st_size
                sizes["logs" if name in LOGS else "disk"] += size
                if ".sqlite" in name:
                    sizes["database"] += size
    return sizes


# --- groups --------------------------------------------------------------------------------


@dataclass(slots=True)
class Groups:
    """Groups by id: when they were made, by whom, and who else had them."""

    made: dict[bytes, tuple[int, str]] = field(default_factory=dict)
    seen_at: dict[bytes, set[str]] = field(default_factory=dict)
    trained: set[bytes] = field(default_factory=set)
    newest_s: int = 0

    def look(self, data_dir: Path, name: str) -> None:
        """Into a node's pool, read-only, whether it runs or not."""
        path = data_dir / "pool.sqlite"
        if not path.exists():
            return
        query = "SELECT group_id, own, created_at_s, trained_round FROM groups"
        with (
            suppress(sqlite3.Error),
            closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5.0)) as pool,
        ):
            for group_id, own, created_at_s, trained in pool.execute(query):
                self._note(bytes(group_id), name, own, created_at_s, trained)
            for (group_id,) in pool.execute(
                "SELECT group_id FROM tombstones WHERE trained_round IS NOT NULL"
            ):
                self._arrived(bytes(group_id), name)

    def _note(self, group_id: bytes, name: str, own: int, made_s: int, trained: object) -> None:
        self.newest_s = max(self.newest_s, made_s)
        if own:
            self.made[group_id] = (made_s, name)
        else:
            self.seen_at.setdefault(group_id, set()).add(name)
            if trained is not None:
                self.trained.add(group_id)

    def _arrived(self, group_id: bytes, name: str) -> None:
        maker = self.made.get(group_id)
        if maker is None or maker[1] != name:
            self.seen_at.setdefault(group_id, set()).add(name)
            self.trained.add(group_id)

    @property
    def due(self) -> list[bytes]:
        """Those that have had their time to be somewhere else."""
        return [g for g, (made_s, _) in self.made.items() if made_s < self.newest_s - ARRIVES_S]

    @property
    def lost(self) -> int:
        """Those of these that nobody else ever had."""
        return sum(group_id not in self.seen_at for group_id in self.due)


# --- growth --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Growth:
    """A line through the time after the first third: in shares of the mean, over all that time."""

    start: float
    third: float
    end: float
    change: float
    low: float
    high: float
    step: float  # the change in its own unit

    def verdict(self, least: float) -> str:
        """Judge it: a change of less than `least` in all is no growth."""
        if math.isnan(self.change):
            return "too few samples"
        if abs(self.step) < least or self.change <= 0:
            return "flat"
        if self.low > GROWTH_MAX:
            return "grows"
        if self.change > GROWTH_MAX:
            return "may grow"
        return "flat" if self.high <= GROWTH_MAX else "flat, by a wide margin of error"


def growth(points: Sequence[tuple[float, float]], total_s: float) -> Growth:
    """Of (time, value): level at the start, after the first third, at the end, and the slope over
    means of equal times in between, with its interval of 95 %."""
    tail = [(at, value) for at, value in points if at >= total_s / 3]
    if len(tail) < 6:
        return Growth(*[math.nan] * 7)
    bins = binned(tail)
    slope, error = line_through(bins)
    mean = fmean(value for _, value in bins) or 1.0
    span = bins[-1][0] - bins[0][0] or 1.0
    return Growth(
        start=fmean(value for _, value in points[: max(1, len(points) // 20)]),
        third=bins[0][1],
        end=bins[-1][1],
        change=slope * span / mean,
        low=(slope - error) * span / mean,
        high=(slope + error) * span / mean,
        step=slope * span,
    )


def binned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means of equal times: neighbours in time are no independent samples."""
    first, last = points[0][0], points[-1][0]
    width = (last - first) / min(BINS, max(2, len(points) // 3)) or 1.0
    parts: dict[int, list[tuple[float, float]]] = {}
    for at, value in points:
        parts.setdefault(int((at - first) / width), []).append((at, value))
    return [
        (fmean(at for at, _ in part), fmean(value for _, value in part))
        for _, part in sorted(parts.items())
    ]


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope, and half the width of its interval of 95 %."""
    if len(points) < 3:
        return 0.0, float("inf")
    fit = linregress(*zip(*points, strict=True))
    return float(fit.slope), float(student.ppf(0.975, len(points) - 2)) * fit.stderr


# --- the table -----------------------------------------------------------------------------

FIGURES: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("memory (PSS)", "pss", "memory", lambda value: f"{value / MIB:.0f} MB"),
    ("memory (RSS)", "rss", "memory", lambda value: f"{value / MIB:.0f} MB"),
    ("children's PSS", "children_pss", "memory", lambda value: f"{value / MIB:.0f} MB"),
    ("descriptors", "fds", "descriptors", lambda value: f"{value:.1f}"),
    ("threads", "threads", "threads", lambda value: f"{value:.1f}"),
    ("tasks", "tasks", "threads", lambda value: f"{value:.1f}"),
    ("disk without logs", "disk", "disk", lambda value: f"{value / MIB:.1f} MB"),
    ("logs", "logs", "", lambda value: f"{value / MIB:.2f} MB"),
    ("database", "database", "database", lambda value: f"{value / MIB:.2f} MB"),
)


def table(soak: Any, settings: Any) -> tuple[str, bool]:
    """The end of a soak for a person, and whether it is to count as failed."""
    samples = soak.samples
    total_s = max((each["at_s"] for each in samples), default=0.0)
    lines = heading("soak")
    whole = "" if soak.whole else " (ended before its time: what follows is partial)"
    lines.append(f"{total_s / 60:.1f} minutes of {settings.minutes:g}{whole}, seed {settings.seed}")
    lines.append(
        f"flat: at most {GROWTH_MAX:.0%} of its mean over the last two thirds; by role, without "
        f"the first {WARM_S:.0f} s of each life; logs grow with the work and are not judged"
    )
    rows = [("role", "what", "start", "after 1/3", "end", "change after 1/3", "95 %", "verdict")]
    grew = False
    for role in dict.fromkeys(each["role"] for each in samples):
        for name, key, unit, told in FIGURES:
            found = growth(points_of(samples, role, key), total_s)
            if math.isnan(found.change):
                continue
            verdict = found.verdict(STEP_MIN[unit]) if unit else "–"
            grew = grew or verdict == "grows"
            rows.append(
                (
                    role, name, told(found.start), told(found.third), told(found.end),
                    f"{found.change:+.1%}", f"{found.low:+.1%} to {found.high:+.1%}", verdict,
                )
            )  # fmt: skip
    lines += aligned(rows)
    lines += ["", *happened(soak)]
    trained = bool(steps_of(soak)) or bool(soak.groups.trained)
    if not trained:
        lines.append("nothing was trained: this soak shows nothing")
    return "\n".join(lines), grew or not trained


def points_of(samples: Sequence[dict[str, Any]], role: str, key: str) -> list[tuple[float, float]]:
    """A figure of one role over time; what is in files has no youth."""
    young = key not in ("disk", "logs", "database")
    return [
        (each["at_s"], float(each[key]))
        for each in samples
        if each["role"] == role and key in each and not (young and each["age_s"] < WARM_S)
    ]


def happened(soak: Any) -> list[str]:
    """The groups, the steps and the ends of each member."""
    groups = soak.groups
    due = len(groups.due)
    lost = f"{groups.lost} ({groups.lost / due:.1%})" if due else "–"
    lines = [
        f"groups: {len(groups.made)} shared, {len(groups.seen_at)} seen at others, "
        f"{len(groups.trained)} drawn by others; of {due} older than {ARRIVES_S:.0f} s "
        f"nobody else ever had {lost}"
    ]
    steps = steps_of(soak)
    if steps:
        last = steps[-1]
        lines.append(
            f"learner: {len(steps)} steps, the last is number {last.step}; discarded "
            f"{last.discarded_total or 'nothing'}; staleness at most "
            f"{max(step.staleness_max for step in steps)}"
        )
    for member in soak.members:
        ends = {what: n for what, n in member.ends.items() if n}
        lines.append(f"{member.name}: {member.starts} starts, {work_of(member)}; ends {ends}")
    return lines


def steps_of(soak: Any) -> list[StepDone]:
    """All steps that the learner logged."""
    for member in soak.members:
        if member.role == "learner":
            return [r for r in records_of(member) if isinstance(r, StepDone)]
    return []


def work_of(member: Any) -> str:
    """The work of a member, from its own log."""
    records = records_of(member)
    rounds = [each for each in records if isinstance(each, RoundDone)]
    batches = [each for each in records if isinstance(each, WorkDone)]
    if rounds:
        shared = sum(each.groups_shared for each in rounds)
        foreign = sum(each.external_groups for each in rounds)
        return f"{len(rounds)} rounds, {shared} groups shared, {foreign} of others trained on"
    return f"{len(batches)} batches" if batches else "nothing logged"


def records_of(member: Any) -> list[Any]:
    """The member's event log."""
    try:
        return [record for _, record in read_events(member.data_dir / "events.jsonl")]
    except (OSError, ValueError):
        return []
