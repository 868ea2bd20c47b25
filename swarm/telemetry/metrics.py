"""The registry of metrics: name, kind, unit, help, group, and the records that set each one.

Reports, Prometheus, trackers, Grafana, the web page and the saved report read it. A metric of a
value that a record has is one row of `metrics.toml`. A new figure of a round is one field of
`RoundFigures`: the event log, the status and all readers above then have it. Code names a metric
by this module's attribute in capitals: `ROUND_S` is "round_s".
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from importlib.resources import files
from math import isfinite
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

ALWAYS: Final = "always"  # key of a figure's metadata: it needs no common distribution
METRIC: Final = "metric"  # key of a figure's metadata: its metric's name; empty: none
SHOWN: Final = "shown"  # key of a figure's metadata: makes its text for people; None: it has none

Text = Annotated[str, Field(min_length=1)]


class Metric(BaseModel):
    """One figure of a node: a row of `metrics.toml`, which says what the fields mean."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    unit: str
    group: Text
    help: Text
    set_by: Annotated[dict[str, str | list[str]], Field(min_length=1)]
    label: Text | None = None

    @property
    def kind(self) -> Literal["counter", "gauge"]:
        """A counter never falls while a node runs."""
        return "counter" if self.name.endswith("_total") else "gauge"


def read_metrics(text: str) -> dict[str, Metric]:
    """The metrics of a table in TOML, by name; ValueError: a row is wrong."""
    return {name: Metric(name=name, **row) for name, row in tomllib.loads(text).items()}


_TABLE: Final = read_metrics(files(__package__).joinpath("metrics.toml").read_text("utf-8"))
METRICS: Final[Mapping[str, Metric]] = {
    name: metric for name, metric in _TABLE.items() if "PeerTraffic" not in metric.set_by
}
"""All metrics by name, in the order in which they are shown, but those of each peer."""
PEER_METRICS: Final[Mapping[str, Metric]] = {
    name: metric for name, metric in _TABLE.items() if name not in METRICS
}


def __getattr__(name: str) -> str:
    if name.isupper() and name.lower() in METRICS:
        return name.lower()
    raise AttributeError(f"no metric {name}")


def _share(part_s: float, rest_s: float) -> float:
    return _rate(part_s, part_s + rest_s)


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


COMPUTED: Final[Mapping[tuple[str, str], Callable[[Any], float | None]]] = {
    ("local_groups", "StepDone"): lambda step: step.groups - step.shared_groups,
    ("external_groups_wanted", "StatusSnapshot"): lambda status: (
        status.external_groups_wanted if status.role == "node" else None
    ),
    ("rate_share_ratio", "StatusSnapshot"): lambda status: (
        None if status.validation_passed is None else status.rate_share
    ),
    ("tokens_per_s", "StatusSnapshot"): lambda status: status.tokens_per_s or None,
    ("tokens_per_s", "WorkDone"): lambda work: _rate(work.generated_tokens, work.generate_s),
    ("entropy_nats", "RoundDone"): lambda done: -done.own_logprob,
    ("entropy_nats", "StepDone"): lambda step: (
        None if step.own_logprob is None else -step.own_logprob
    ),
    ("idle_ratio", "StepDone"): lambda step: _share(step.idle_s, step.train_s),
    ("idle_ratio", "WorkDone"): lambda work: _share(work.wait_s, work.generate_s),
    ("broadcast_bound_ratio", "VersionOutcome"): lambda outcome: (
        outcome.applied.fetch_s / outcome.bound_s if outcome.bound_s else None
    ),
    ("predicted_idle_ratio", "Capacity"): lambda capacity: 1.0 - capacity.utilisation,
}
"""By metric and source: readings that are more than attributes."""


def _figure(
    shown: Callable[[float], str] | None = None, metric: str = "", *, always: bool = False
) -> float | None:  # the default of a field
    return field(default=None, metadata={SHOWN: shown, METRIC: metric, ALWAYS: always})


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFigures:
    """Figures of a round beside its counts; None: not measured.

    Records and the status inherit these fields, so a new figure is one field here.
    """

    # The engine's log-probs of this round's own tokens against the trainer's. None without own
    # tokens, or where a temperature or a nucleus makes them another distribution's.
    mismatch_mean: float | None = _figure("mean {:.2g}".format)  # of |delta log p|
    mismatch_max: float | None = _figure("max {:.2g}".format)
    # KL from what sampled to what is trained
    mismatch_k3: float | None = _figure("k3 {:.2g}".format, "mismatch_k3_nats")
    effective_share: float | None = _figure(
        lambda share: f"effective sample {100 * share:.1f} %", "effective_sample_ratio"
    )
    # Share of what was learned that rounding keeps from the policy that generates, as last measured
    version_lag: float | None = _figure(
        "version lags by {:.0%}".format, "version_lag_ratio", always=True
    )
    step_rate: float | None = _figure(None, "learning_rate", always=True)  # of the last update
    completion_tokens_mean: float | None = _figure(None, "completion_mean_tokens")
    completion_tokens_max: float | None = _figure(None, "completion_max_tokens")
    paused_s: float | None = _figure()  # of the engine, for the new policy; None: it needs none

    def with_figures(self, record: object) -> Self:
        """These figures with those that a record has; None has none."""
        found: dict[str, Any] = figures_of(record)
        return replace(self, **found)


FIGURES: Final = {each.name: each.metadata for each in fields(RoundFigures)}


def figures_of(record: object) -> dict[str, float | None]:
    """The fields of `RoundFigures` that a record has: a learner's step has some."""
    return {name: getattr(record, name) for name in FIGURES if hasattr(record, name)}


def figure_texts(record: object) -> list[str]:
    """A record's measured figures, for people."""
    found = [(FIGURES[name][SHOWN], value) for name, value in figures_of(record).items()]
    return [shown(value) for shown, value in found if shown and value is not None]


def measured(record: object, part: str = "") -> dict[str, float]:
    """The metrics that a record sets, by name, its round's figures among them; those without a
    value are left out. `part`: another name in `set_by` than the record's class."""
    readings = _readings(part or type(record).__name__)
    found = {name: reading(record) for name, reading in readings.items()}
    if not part:
        found |= {FIGURES[name][METRIC]: value for name, value in figures_of(record).items()}
    return finite({name: float(v) for name, v in found.items() if name and v is not None})


@cache
def _readings(source: str) -> Mapping[str, Callable[[Any], float | None]]:
    return {
        name: COMPUTED.get((name, source)) or partial(_sum, paths)
        for name, metric in _TABLE.items()
        if (paths := metric.set_by.get(source)) or (name, source) in COMPUTED
    }


def _sum(paths: str | list[str] | None, record: Any) -> float | None:
    """A path ends where a part is None, and so does the reading."""
    total = 0.0
    for path in [paths] if isinstance(paths, str) else paths or ():
        value: float | None = record
        for part in path.split("."):
            value = getattr(value, part, None)
        if value is None:
            return None
        total += value
    return total


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Without what is no number, as the mean of nothing is."""
    return {name: value for name, value in values.items() if isfinite(value)}
