"""Every metric's one name: what reports, Prometheus' page, the web page and alarms call it.

A metric is a constant here, its name in reports, and an entry of `METRICS`. One that is measured of
a round is a field of `RoundFigures` as well, which records and the status inherit: a further one
takes a line here and what computes it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from typing import Any, Final, Literal, Self

METRIC: Final = "metric"  # of a figure: its metric's name; empty: it is none
SHOWN: Final = "shown"  # of a figure: what makes its text for people; None: it has none

Kind = Literal["counter", "gauge"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a node. The name ends in its unit; a counter never falls while a node runs."""

    name: str
    kind: Kind
    help: str
    label: str | None = None  # what its values are told apart by


_METRICS: Final[dict[str, Metric]] = {}
METRICS: Final[Mapping[str, Metric]] = _METRICS
"""All metrics by name, in the order in which they are shown."""


def _metric(metric: Metric) -> str:
    assert metric.name not in METRICS
    _METRICS[metric.name] = metric
    return metric.name


def _gauge(name: str, text: str) -> str:
    return _metric(Metric(name, "gauge", text))


def _counter(name: str, text: str, label: str | None = None) -> str:
    return _metric(Metric(name, "counter", text, label))


def _figure(shown: Callable[[float], str] | None = None, metric: str = "") -> float | None:
    return field(default=None, metadata={SHOWN: shown, METRIC: metric})


UPTIME_S: Final = _gauge("uptime_s", "seconds since this process started")
PEERS: Final = _gauge("peers", "connected peers")
CONNECTIONS: Final = _gauge("connections", "connections that have a place")
CONNECTIONS_MAX: Final = _gauge("connections_max", "places for connections")
LARGEST_ORIGIN_CONNECTIONS: Final = _gauge(
    "largest_origin_connections", "connections of the address that has most"
)
TURNED_AWAY_TOTAL: Final = _counter(
    "turned_away_total", "newcomers that were refused, by reason", "reason"
)
BYTES_IN_TOTAL: Final = _counter("bytes_in_total", "bytes from peers")
BYTES_OUT_TOTAL: Final = _counter("bytes_out_total", "bytes to peers")
PROTOCOL_BYTES_IN_TOTAL: Final = _counter(
    "protocol_bytes_in_total", "bytes from peers, by protocol", "protocol"
)
PROTOCOL_BYTES_OUT_TOTAL: Final = _counter(
    "protocol_bytes_out_total", "bytes to peers, by protocol", "protocol"
)
ACCEPTED_TOTAL: Final = _counter("accepted_total", "groups of others that passed every check")
REJECTED_TOTAL: Final = _counter(
    "rejected_total", "what others sent and was refused, by reason", "reason"
)
ADVERTS_IN_TOTAL: Final = _counter("adverts_in_total", "adverts heard")
FETCHES_TOTAL: Final = _counter("fetches_total", "requests for groups to other peers")
POOL_GROUPS: Final = _gauge("pool_groups", "groups in the pool")
POOL_FOREIGN_GROUPS: Final = _gauge(
    "pool_foreign_groups", "groups of others that may still be drawn"
)
POOL_BYTES: Final = _gauge("pool_bytes", "bytes of the pool's groups")
POOL_AGE_S: Final = _gauge(
    "pool_age_s", "age of the oldest group of others that may still be drawn"
)
ROUND: Final = _gauge("round", "rounds or steps done")
ROUND_S: Final = _gauge("round_s", "seconds that the last round or step took")
POLICY_VERSION: Final = _gauge("policy_version", "of the policy that generates")
LOCAL_GROUPS: Final = _gauge("local_groups", "own groups trained on in the last round")
EXTERNAL_GROUPS: Final = _gauge("external_groups", "foreign groups trained on in the last round")
EXTERNAL_GROUPS_WANTED: Final = _gauge(
    "external_groups_wanted", "foreign groups that a round wants"
)
FOREIGN_GRADIENT_RATIO: Final = _gauge(
    "foreign_gradient_ratio", "others' share of what pulled at log-probs in the last round, 0 to 1"
)
SHARING_PER_TOKEN_RATIO: Final = _gauge(
    "sharing_per_token_ratio",
    "groups that teach for each generated token, over those of own groups alone, at most 20",
)
GROUPS_TOTAL: Final = _counter("groups_total", "own and foreign groups in batches")
INFORMATIVE_GROUPS_TOTAL: Final = _counter(
    "informative_groups_total", "of these, those whose rewards differ"
)
COMPLETIONS_TOTAL: Final = _counter(
    "completions_total", "completions of the run that were scored here"
)
UNREAD_COMPLETIONS_TOTAL: Final = _counter(
    "unread_completions_total", "of these, those without an answer"
)
RIGHT_COMPLETIONS_TOTAL: Final = _counter(
    "right_completions_total", "of these, those that are right"
)
CUT_COMPLETIONS_TOTAL: Final = _counter(
    "cut_completions_total", "of these, those that the token limit cut"
)
OWN_REWARD: Final = _gauge("own_reward", "mean reward of own completions in the last round")
HELD_OUT_RATIO: Final = _gauge(
    "held_out_ratio", "held-out pass rate at the last evaluation, 0 to 1"
)
VALIDATION_RATIO: Final = _gauge(
    "validation_ratio", "pass rate on the validation tasks at the last evaluation, 0 to 1"
)
VALIDATION_BEST_RATIO: Final = _gauge(
    "validation_best_ratio", "that of the policy that is kept as the best"
)
RETURNS_TOTAL: Final = _counter(
    "returns_total", "times that the policy fell and went back to the best"
)
RATE_SHARE_RATIO: Final = _gauge(
    "rate_share_ratio", "of the learning rate, what evaluations left of it, 0 to 1"
)
TOKENS_PER_S: Final = _gauge("tokens_per_s", "tokens generated a second, while generating")
GENERATED_TOKENS_TOTAL: Final = _counter("generated_tokens_total", "tokens generated")
TRAINED_TOKENS_TOTAL: Final = _counter("trained_tokens_total", "tokens trained on")
IDLE_RATIO: Final = _gauge(
    "idle_ratio", "share of its time that a learner or worker waited, 0 to 1"
)
STALENESS_MEAN_STEPS: Final = _gauge(
    "staleness_mean_steps", "of the groups of a learner's last step"
)
STALENESS_MAX_STEPS: Final = _gauge("staleness_max_steps", "the oldest of these")
STALENESS_BOUND_STEPS: Final = _gauge("staleness_bound_steps", "S of the run")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFigures:
    """What is measured of a round beside its counts; None: it was not, or cannot be. The event log,
    the status and its lines, and telemetry have what stands here, and no list of their own."""

    # What the engine said of this round's own tokens against what the trainer says of them; None
    # without such tokens, or where a temperature or a nucleus makes them another distribution's.
    mismatch_mean: float | None = _figure("mean {:.2g}".format)  # of |delta log p|
    mismatch_max: float | None = _figure("max {:.2g}".format)
    # KL from what sampled to what is trained
    mismatch_k3: float | None = _figure(
        "k3 {:.2g}".format,
        _gauge("mismatch_k3_nats", "KL from what generates to what is trained, by k3"),
    )
    effective_share: float | None = _figure(
        lambda share: f"effective sample {100 * share:.1f} %",
        _gauge("effective_sample_ratio", "effective sample size of that, over its tokens"),
    )
    paused_s: float | None = _figure()  # of the engine, for the new policy; None: it needs none

    def with_figures(self, record: object) -> Self:
        """These figures with those that a record has; None has none."""
        found: dict[str, Any] = figures_of(record)
        return replace(self, **found)


FIGURES: Final = {each.name: each.metadata for each in fields(RoundFigures)}


def figures_of(record: object) -> dict[str, float | None]:
    """Those of `RoundFigures` that a record has, by field: a learner's step has some."""
    return {name: getattr(record, name) for name in FIGURES if hasattr(record, name)}


def figure_metrics(record: object) -> dict[str, float]:
    """Those of them that were measured and are metrics, by the metric's name."""
    found = {FIGURES[name][METRIC]: value for name, value in figures_of(record).items()}
    return {name: value for name, value in found.items() if name and value is not None}


def figure_texts(record: object) -> list[str]:
    """Those of them that were measured, for people."""
    found = [(FIGURES[name][SHOWN], value) for name, value in figures_of(record).items()]
    return [shown(value) for shown, value in found if shown and value is not None]


IN_FLIGHT_GROUPS: Final = _gauge("in_flight_groups", "groups in workers' hands")
TRIAL_GROUPS: Final = _gauge(
    "trial_groups", "of these, in the hands of workers that delivered nothing yet"
)
QUEUED_GROUPS: Final = _gauge("queued_groups", "groups handed in and not trained on yet")
QUEUED_STALENESS_MAX_STEPS: Final = _gauge(
    "queued_staleness_max_steps", "the oldest of these, in steps"
)
DISCARDED_TOTAL: Final = _counter(
    "discarded_total", "groups that a learner gave up, by reason", "reason"
)
PUBLISHED_VERSION: Final = _gauge("published_version", "the newest version on offer, or heard of")
BROADCAST_S: Final = _gauge("broadcast_s", "seconds from a version's publication until it was here")
BROADCAST_BOUND_RATIO: Final = _gauge(
    "broadcast_bound_ratio", "that over the least that the links allow"
)
PAUSED_S: Final = _gauge("paused_s", "seconds that sampling paused for the last version")
SAVED_BYTES_TOTAL: Final = _counter("saved_bytes_total", "bytes that deltas made unnecessary")
COST_PER_H: Final = _gauge("cost_per_h", "dollars an hour for workers")
PREDICTED_IDLE_RATIO: Final = _gauge(
    "predicted_idle_ratio", "the learner's, by the capacity model, 0 to 1"
)
PREDICTED_STALENESS_STEPS: Final = _gauge(
    "predicted_staleness_steps", "the worst, by the capacity model"
)
PREDICTED_BROADCAST_S: Final = _gauge(
    "predicted_broadcast_s", "until a version is at all workers, by that model"
)
REQUIRED_GROUPS_PER_S: Final = _gauge(
    "required_groups_per_s", "groups a second that keep the learner busy, by it"
)
OFFERED_GROUPS_PER_S: Final = _gauge(
    "offered_groups_per_s", "groups a second that the workers make, by it"
)
MEMORY_BYTES: Final = _gauge("memory_bytes", "resident memory of the node's processes")
MEMORY_AVAILABLE_BYTES: Final = _gauge("memory_available_bytes", "of the machine, without swapping")
DISK_FREE_BYTES: Final = _gauge("disk_free_bytes", "left where the data directory is")
ERRORS_TOTAL: Final = _counter("errors_total", "troubles that the event log tells of")
TELEMETRY_DROPPED_TOTAL: Final = _counter(
    "telemetry_dropped_total", "reports that could not be sent and were dropped"
)


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Without what is no number, as the mean of nothing is."""
    return {name: value for name, value in values.items() if isfinite(value)}
