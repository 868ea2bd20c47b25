"""The state file that `serve` writes and `swarm-coordinator workers` shows."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from coordinator.model.capacity import Capacity
from swarm.errors import ConfigError
from swarm.storage import write_whole
from swarm.wire.messages import LearnerReport

STATE_FILE: Final = "state.json"
STATE_BYTES_MAX: Final = 4_194_304
NAME_CHARS: Final = 22


@dataclass(frozen=True, slots=True)
class MachineRow:
    """One line of the table."""

    name: str
    provider: str
    peer: str
    phase: str
    condition: str
    version: int | None
    groups_per_s: float  # measured, or guessed
    measured: bool
    price_per_h: float
    admitted: int
    heard_s: float | None
    note: str


@dataclass(frozen=True, slots=True)
class CoordinatorView:
    """The observations and decisions of one beat."""

    learner: str
    reachable: bool = True
    why: str = ""
    problem: str = ""
    report: LearnerReport | None = None
    plan: int = 0
    depth: int = 0
    depth_why: str = ""
    predicted: Capacity | None = None
    error: float | None = None  # of predicted waiting, in the mean of the last looks
    cost_per_h: float = 0.0
    rows: tuple[MachineRow, ...] = ()


def view_json(view: CoordinatorView, unix_s: float, interval_s: float) -> dict[str, Any]:
    state = {"unix_s": unix_s, "interval_s": interval_s, **asdict(view)}
    state["workers"] = state.pop("rows")
    if view.report is not None:
        state["report"] = view.report.model_dump(exclude={"workers"})
    return state


def save_state(directory: Path, state: dict[str, Any]) -> None:
    write_whole(directory / STATE_FILE, json.dumps(state, allow_nan=False))


def load_state(directory: Path) -> dict[str, Any]:
    """
    Raises:
        ConfigError: no coordinator has worked on this data directory.
    """
    try:
        with (directory / STATE_FILE).open("rb") as file:
            state = json.loads(file.read(STATE_BYTES_MAX))
    except FileNotFoundError:
        raise ConfigError(
            f"--data-dir {directory}: no coordinator has worked here; start one with "
            "swarm-coordinator serve"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--data-dir {directory}: {error}") from None
    if not isinstance(state, dict):
        raise ConfigError(f"--data-dir {directory}: {STATE_FILE} is damaged")
    return state


def render_state(state: dict[str, Any], now_s: float) -> str:
    """A few lines and a table, 80 columns and a little more."""
    return "\n".join((*_head(state, now_s), "", *_table(state["workers"])))


def _head(state: dict[str, Any], now_s: float) -> Iterable[str]:
    age_s = max(0.0, now_s - state["unix_s"])
    yield f"learner {state['learner']}, as of {age_s:.0f} s ago"
    if age_s > 3.0 * state["interval_s"] + 30.0:
        yield "! the coordinator does not run; the learner follows its last plan"
    if not state["reachable"]:
        yield f"! {state['why']}"
    report, predicted = state["report"], state["predicted"]
    if report is None:
        return
    pace, bound = report["pace"], report["rules"]["staleness_max"]
    yield (
        f"version {report['version']}, step {pace['step_s']:.1f} s, of it "
        f"{pace['train_s']:.1f} s not waiting; waits {pace['idle_share']:.0%} of the time"
        + (f", predicted {1.0 - predicted['utilisation']:.0%}" if predicted else "")
        + (f" (off by {100 * state['error']:.0f} points lately)" if state.get("error") else "")
    )
    yield (
        f"staleness {pace['staleness_mean']:.1f}, at most {pace['staleness_worst']}"
        + (f" (predicted {predicted['staleness_worst']})" if predicted else "")
        + f"; planned for {state['depth']} ({state['depth_why']}), bound {bound}"
    )
    if predicted:
        yield (
            f"needs {predicted['required_per_s']:.3g} groups a second, has "
            f"{predicted['offered_per_s']:.3g}; a version reaches all in "
            f"{predicted['broadcast_s']:.1f} s, published every {predicted['period_steps']} steps"
        )
    yield f"${state['cost_per_h']:.3f} an hour for workers; {state['why']}"
    if state["problem"]:
        yield f"! {state['problem']}"


def _table(rows: list[dict[str, Any]]) -> Iterable[str]:
    if not rows:
        yield "no workers"
        return
    yield (
        f"{'worker':<{NAME_CHARS + 2}}{'phase':<10}{'version':>8}{'groups/s':>10}{'admitted':>10}"
        f"{'$/h':>8}  heard"
    )
    for row in rows:
        name = (
            row["name"] if len(row["name"]) <= NAME_CHARS else f"…{row['name'][1 - NAME_CHARS :]}"
        )
        version = "-" if not row["version"] else str(row["version"])
        rate = f"{row['groups_per_s']:.3g}" + (" " if row["measured"] else "?")
        heard = "never" if row["heard_s"] is None else f"{row['heard_s']:.0f} s ago"
        note = f"; {row['note']}" if row["note"] else ""
        yield (
            f"{name:<{NAME_CHARS + 2}}{row['phase']:<10}{version:>8}{rate:>10}"
            f"{row['admitted']:>10}{row['price_per_h']:>8.2f}  {heard}{note}"
        )
    if not all(row["measured"] for row in rows):
        yield "? a guess, not measured yet"
