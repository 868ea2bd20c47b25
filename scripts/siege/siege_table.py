"""What came of a siege, as a table for a person."""

import os
import platform
from dataclasses import dataclass, field
from typing import Any

MIB = 1024 * 1024


@dataclass(slots=True)
class Row:
    """What came of a round."""

    kind: str
    names: tuple[str, ...]
    rate: str
    attacker_cpu_s: float = 0.0
    attacker_bytes: int = 0
    node_cpu_s: float = 0.0
    memory_gain_bytes: int = 0
    memory_left_bytes: int = 0
    back_s: float | None = None  # None: not within the time
    descriptors_gain: int = 0
    descriptors_left: int = 0
    honest: int = 0
    honest_failed: int = 0
    honest_why: str = ""  # what most of these say
    p50_ms: float = float("nan")
    p99_ms: float = float("nan")
    base_p50_ms: float = float("nan")
    base_p99_ms: float = float("nan")
    lag_p50_ms: float = float("nan")
    lag_max_ms: float = float("nan")
    newcomers: int = 0
    newcomers_in: int = 0
    after: int = 0
    after_in: int = 0
    places_lost: int | None = None
    pace_per_min: float = float("nan")  # rounds or steps of the target itself
    base_pace_per_min: float = float("nan")
    refused: int = 0
    banned: int = 0
    attacks: list[dict[str, Any]] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)


def label(row: Row) -> str:
    """What a row is called."""
    if len(row.names) == 1:
        return row.names[0]
    return f"{row.kind}: {len(row.names)} together"


HEAD = (
    "attack", "costs it cpu s, MB", "node cpu s", "memory +MB peak, left", "fds peak, left",
    "honest p50/p99 ms", "in peace", "lag p50/max ms", "newcomers", "after", "places lost",
    "rounds/min, in peace", "refused", "banned", "misses",
)  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    """One row of the table."""
    return (
        label(row),
        f"{row.attacker_cpu_s:.1f}, {row.attacker_bytes / 1e6:.1f}",
        f"{row.node_cpu_s:.1f}",
        f"{row.memory_gain_bytes / MIB:.0f}, {row.memory_left_bytes / MIB:.0f}",
        f"{row.descriptors_gain}, {row.descriptors_left}",
        f"{row.p50_ms:.0f}/{row.p99_ms:.0f}",
        f"{row.base_p50_ms:.0f}/{row.base_p99_ms:.0f}",
        f"{row.lag_p50_ms:.0f}/{row.lag_max_ms:.0f}",
        f"{row.newcomers_in}/{row.newcomers}",
        f"{row.after_in}/{row.after}",
        "–" if row.places_lost is None else str(row.places_lost),
        f"{row.pace_per_min:.0f}, {row.base_pace_per_min:.0f}",
        str(row.refused),
        str(row.banned),
        "; ".join(row.misses) or "none",
    )


def machine() -> str:
    """Where this ran, and how busy it was."""
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    return (
        f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python "
        f"{platform.python_version()}, load {load}"
    )
