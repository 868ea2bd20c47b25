"""The registry of metrics: name, kind, unit, help, group, and the records that set each one.

Reports, Prometheus, trackers, Grafana, the web page and the saved report read it. A metric of a
value that a record has is one entry here. A new figure of a round is one field of `RoundFigures`:
the event log, the status and all readers above then have it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from math import isfinite
from typing import Any, Final, Literal, Self

METRIC: Final = "metric"  # key of a figure's metadata: its metric's name; empty: none
SHOWN: Final = "shown"  # key of a figure's metadata: makes its text for people; None: it has none

Kind = Literal["counter", "gauge"]
Reading = str | Callable[[Any], float | None] | None
"""Reads a metric from a record: dotted attributes, or a function. None: code sets it."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a node. The name ends in its unit; a counter never falls while a node runs.

    `set_by` names the classes whose records set it, with a reading for each. `RoundDone_sums` and
    `StepDone_sums` are added up over records, `logged` are totals of all records. Other names are
    of code that sets it.
    """

    name: str
    kind: Kind
    unit: str  # of a value; empty: a plain number
    group: str  # metrics of a group stand together on the page and share a panel in Grafana
    help: str
    set_by: Mapping[str, Reading]
    label: str | None = None  # what its values are told apart by


_METRICS: Final[dict[str, Metric]] = {}
METRICS: Final[Mapping[str, Metric]] = _METRICS
"""All metrics by name, in the order in which they are shown."""


def _gauge(name: str, unit: str, group: str, text: str, **set_by: Reading) -> str:
    return _metric(Metric(name, "gauge", unit, group, text, set_by))


def _counter(
    name: str, unit: str, group: str, text: str, label: str | None = None, **set_by: Reading
) -> str:
    return _metric(Metric(name, "counter", unit, group, text, set_by, label))


def _metric(metric: Metric) -> str:
    assert metric.name not in METRICS
    _METRICS[metric.name] = metric
    return metric.name


def _figure(
    shown: Callable[[float], str] | None = None, metric: str = ""
) -> float | None:  # the default of a field
    return field(default=None, metadata={SHOWN: shown, METRIC: metric})


def _share(part_s: float, rest_s: float) -> float:
    return _rate(part_s, part_s + rest_s)


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


# --- the node and its connections --------------------------------------------------------------

UPTIME_S: Final = _gauge(
    "uptime_s", "s", "Uptime", "seconds since this process started", StatusSnapshot="uptime_s"
)
PEERS: Final = _gauge(
    "peers", "peers", "Connections", "connected peers", logged="peers", traffic=None
)
CONNECTIONS: Final = _gauge(
    "connections",
    "",
    "Connections",
    "connections that have a place",
    StatusSnapshot="door.connections",
)
CONNECTIONS_MAX: Final = _gauge(
    "connections_max",
    "",
    "Connections",
    "places for connections",
    StatusSnapshot="door.connections_max",
)
LARGEST_ORIGIN_CONNECTIONS: Final = _gauge(
    "largest_origin_connections", "", "Connections",
    "connections of the address that has most", StatusSnapshot="door.of_largest",
)  # fmt: skip
TURNED_AWAY_TOTAL: Final = _counter(
    "turned_away_total", "newcomers", "Newcomers refused",
    "newcomers that were refused, by reason", "reason", traffic=None,
)  # fmt: skip
BYTES_IN_TOTAL: Final = _counter(
    "bytes_in_total", "bytes", "Network throughput", "bytes from peers",
    StatusSnapshot="bytes_in", logged="bytes_in_total", coordinator=None,
)  # fmt: skip
BYTES_OUT_TOTAL: Final = _counter(
    "bytes_out_total", "bytes", "Network throughput", "bytes to peers",
    StatusSnapshot="bytes_out", logged="bytes_out_total", coordinator=None,
)  # fmt: skip
PROTOCOL_BYTES_IN_TOTAL: Final = _counter(
    "protocol_bytes_in_total", "bytes", "Traffic by protocol",
    "bytes from peers, by protocol", "protocol", traffic=None,
)  # fmt: skip
PROTOCOL_BYTES_OUT_TOTAL: Final = _counter(
    "protocol_bytes_out_total", "bytes", "Traffic by protocol",
    "bytes to peers, by protocol", "protocol", traffic=None,
)  # fmt: skip

# --- groups of others --------------------------------------------------------------------------

ACCEPTED_TOTAL: Final = _counter(
    "accepted_total", "groups", "Accepted and refused",
    "groups of others that passed every check", StatusSnapshot="accepted", logged="accepted_total",
)  # fmt: skip
REJECTED_TOTAL: Final = _counter(
    "rejected_total", "records", "Accepted and refused",
    "what others sent and was refused, by reason", "reason", traffic=None,
)  # fmt: skip
ADVERTS_IN_TOTAL: Final = _counter(
    "adverts_in_total", "adverts", "Adverts and fetches", "adverts heard", traffic=None
)
FETCHES_TOTAL: Final = _counter(
    "fetches_total", "requests", "Adverts and fetches",
    "requests for groups to other peers", traffic=None,
)  # fmt: skip
POOL_GROUPS: Final = _gauge(
    "pool_groups", "groups", "Pool", "groups in the pool",
    StatusSnapshot="pool_groups", logged="pool_groups",
)  # fmt: skip
POOL_FOREIGN_GROUPS: Final = _gauge(
    "pool_foreign_groups", "groups", "Pool", "groups of others that may still be drawn",
    StatusSnapshot="pool_foreign",
)  # fmt: skip
POOL_BYTES: Final = _gauge(
    "pool_bytes", "bytes", "Size of the pool", "bytes of the pool's groups",
    StatusSnapshot="pool_bytes", logged="pool_bytes",
)  # fmt: skip
POOL_AGE_S: Final = _gauge(
    "pool_age_s", "s", "Age of the pool",
    "age of the oldest group of others that may still be drawn", StatusSnapshot="pool_age_s",
)  # fmt: skip

# --- rounds, steps and batches -----------------------------------------------------------------

ROUND: Final = _gauge(
    "round", "", "Rounds and steps", "rounds or steps done",
    StatusSnapshot="round", RoundDone="round", StepDone="step", WorkDone="batch",
)  # fmt: skip
ROUND_S: Final = _gauge(
    "round_s", "s", "Round or step", "seconds that the last round or step took",
    RoundDone=lambda record: record.generate_s + record.score_s + record.train_s,
    StepDone=lambda record: record.idle_s + record.train_s,
    WorkDone=lambda record: record.wait_s + record.generate_s,
    LearnerReport="pace.step_s",
)  # fmt: skip
POLICY_VERSION: Final = _gauge(
    "policy_version", "", "Versions", "version of the policy that generates",
    RoundDone="policy_version", StepDone="version", WorkDone="policy_version",
    LearnerReport="version",
)  # fmt: skip
LOCAL_GROUPS: Final = _gauge(
    "local_groups", "groups", "Groups trained on", "own groups trained on in the last round",
    RoundDone="own_taught", StepDone=lambda record: record.groups - record.shared_groups,
    WorkDone="groups",
)  # fmt: skip
EXTERNAL_GROUPS: Final = _gauge(
    "external_groups", "groups", "Groups trained on",
    "foreign groups trained on in the last round", RoundDone="external_groups",
    StepDone="shared_groups",
)  # fmt: skip
EXTERNAL_GROUPS_WANTED: Final = _gauge(
    "external_groups_wanted", "groups", "Groups trained on", "foreign groups that a round wants",
    RoundDone="external_wanted",
    StatusSnapshot=lambda status: status.external_groups_wanted if status.role == "node" else None,
)  # fmt: skip
FOREIGN_GRADIENT_RATIO: Final = _gauge(
    "foreign_gradient_ratio", "share", "Share of the gradient",
    "others' share of what pulled at log-probs in the last round, 0 to 1",
    RoundDone="foreign_gradient", StatusSnapshot="foreign_gradient",
)  # fmt: skip
SHARING_PER_TOKEN_RATIO: Final = _gauge(
    "sharing_per_token_ratio", "times", "What sharing brings",
    "groups that teach for each generated token, over those of own groups alone, at most 20",
    StatusSnapshot="sharing_per_token",
)  # fmt: skip
GROUPS_TOTAL: Final = _counter(
    "groups_total", "groups", "Groups that teach", "own and foreign groups in batches",
    RoundDone_sums=lambda record: record.local_groups + record.external_groups,
    StepDone_sums="groups",
)  # fmt: skip
INFORMATIVE_GROUPS_TOTAL: Final = _counter(
    "informative_groups_total", "groups", "Groups that teach",
    "of these, those whose rewards differ",
    RoundDone_sums="informative_groups", StepDone_sums="informative_groups",
)  # fmt: skip
COMPLETIONS_TOTAL: Final = _counter(
    "completions_total", "completions", "Completions",
    "completions of the run that were scored here",
    RoundDone_sums="answers.completions", StepDone_sums="answers.completions",
)  # fmt: skip
UNREAD_COMPLETIONS_TOTAL: Final = _counter(
    "unread_completions_total", "completions", "Completions",
    "of these, those without an answer", RoundDone_sums="answers.unread",
    StepDone_sums="answers.unread",
)  # fmt: skip
RIGHT_COMPLETIONS_TOTAL: Final = _counter(
    "right_completions_total", "completions", "Completions",
    "of these, those that are right", RoundDone_sums="answers.right", StepDone_sums="answers.right",
)  # fmt: skip
CUT_COMPLETIONS_TOTAL: Final = _counter(
    "cut_completions_total", "completions", "Completions",
    "of these, those that the token limit cut", RoundDone_sums="answers.cut",
    StepDone_sums="answers.cut",
)  # fmt: skip
OWN_REWARD: Final = _gauge(
    "own_reward", "share", "Held-out pass rate and reward",
    "mean reward of own completions in the last round",
    StatusSnapshot="own_reward", RoundDone="own_reward", StepDone="reward",
)  # fmt: skip
HELD_OUT_RATIO: Final = _gauge(
    "held_out_ratio", "share", "Held-out pass rate and reward",
    "held-out pass rate at the last evaluation, 0 to 1",
    StatusSnapshot="held_out_passed", HeldOut="passed",
)  # fmt: skip
VALIDATION_RATIO: Final = _gauge(
    "validation_ratio", "share", "Validation",
    "pass rate on the validation tasks at the last evaluation, 0 to 1",
    StatusSnapshot="validation_passed", HeldOut="validation",
)  # fmt: skip
VALIDATION_BEST_RATIO: Final = _gauge(
    "validation_best_ratio", "share", "Validation",
    "pass rate of the policy that is kept as the best", StatusSnapshot="validation_best",
)  # fmt: skip
RETURNS_TOTAL: Final = _counter(
    "returns_total", "times", "Troubles, and telemetry lost",
    "times that the policy fell and went back to the best", node=None,
)  # fmt: skip
RATE_SHARE_RATIO: Final = _gauge(
    "rate_share_ratio", "share", "Validation",
    "of the learning rate, what evaluations left of it, 0 to 1",
    StatusSnapshot=lambda status: None if status.validation_passed is None else status.rate_share,
)  # fmt: skip
TOKENS_PER_S: Final = _gauge(
    "tokens_per_s", "tokens/s", "Tokens a second, while generating",
    "tokens generated a second, while generating",
    StatusSnapshot=lambda status: status.tokens_per_s or None,
    WorkDone=lambda record: _rate(record.generated_tokens, record.generate_s),
)  # fmt: skip
GENERATED_TOKENS_TOTAL: Final = _counter(
    "generated_tokens_total", "tokens", "Tokens", "tokens generated",
    RoundDone="generated_tokens_total", WorkDone="generated_tokens_total",
)  # fmt: skip
TRAINED_TOKENS_TOTAL: Final = _counter(
    "trained_tokens_total", "tokens", "Tokens", "tokens trained on",
    RoundDone="trained_tokens_total", StepDone="trained_tokens_total",
)  # fmt: skip
IDLE_RATIO: Final = _gauge(
    "idle_ratio", "share", "Idle", "share of its time that a learner or worker waited, 0 to 1",
    StepDone=lambda record: _share(record.idle_s, record.train_s),
    WorkDone=lambda record: _share(record.wait_s, record.generate_s),
    LearnerReport="pace.idle_share",
)  # fmt: skip
STALENESS_MEAN_STEPS: Final = _gauge(
    "staleness_mean_steps", "steps", "Staleness",
    "mean staleness of the groups of a learner's last step",
    StepDone="staleness_mean", LearnerReport="pace.staleness_mean",
)  # fmt: skip
STALENESS_MAX_STEPS: Final = _gauge(
    "staleness_max_steps", "steps", "Staleness", "staleness of the oldest of these groups",
    StepDone="staleness_max", LearnerReport="pace.staleness_worst",
)  # fmt: skip
STALENESS_BOUND_STEPS: Final = _gauge(
    "staleness_bound_steps", "steps", "Staleness", "bound on staleness, S of the run",
    learner=None, LearnerReport="rules.staleness_max",
)  # fmt: skip


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
    mismatch_k3: float | None = _figure(
        "k3 {:.2g}".format,
        _gauge(
            "mismatch_k3_nats", "nats", "Mismatch",
            "KL from what generates to what is trained, by k3", figures=None,
        ),
    )  # fmt: skip
    effective_share: float | None = _figure(
        lambda share: f"effective sample {100 * share:.1f} %",
        _gauge(
            "effective_sample_ratio", "share", "Effective sample",
            "effective sample size of the importance weights, over their tokens", figures=None,
        ),
    )  # fmt: skip
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


# --- learners, workers and coordinators --------------------------------------------------------

IN_FLIGHT_GROUPS: Final = _gauge(
    "in_flight_groups", "groups", "Groups under way", "groups in workers' hands",
    learner=None, LearnerReport="work.leased",
)  # fmt: skip
TRIAL_GROUPS: Final = _gauge(
    "trial_groups", "groups", "Groups under way",
    "of these, in the hands of workers that delivered nothing yet", learner=None,
)  # fmt: skip
QUEUED_GROUPS: Final = _gauge(
    "queued_groups", "groups", "Groups under way", "groups handed in and not trained on yet",
    learner=None, LearnerReport="work.buffered",
)  # fmt: skip
QUEUED_STALENESS_MAX_STEPS: Final = _gauge(
    "queued_staleness_max_steps", "steps", "Staleness",
    "staleness of the oldest group handed in and not trained on yet", learner=None,
)  # fmt: skip
DISCARDED_TOTAL: Final = _counter(
    "discarded_total", "groups", "Groups given up",
    "groups that a learner gave up, by reason", "reason", learner=None,
)  # fmt: skip
PUBLISHED_VERSION: Final = _gauge(
    "published_version", "", "Versions", "the newest version on offer, or heard of",
    StepDone="published_version", WorkDone="learner_version", LearnerReport="published",
)  # fmt: skip
BROADCAST_S: Final = _gauge(
    "broadcast_s", "s", "Broadcast", "seconds from a version's publication until it was here",
    VersionOutcome=lambda outcome: outcome.applied.fetch_s + outcome.applied.patch_s,
    learner=None, LearnerReport="pace.broadcast_s",
)  # fmt: skip
BROADCAST_BOUND_RATIO: Final = _gauge(
    "broadcast_bound_ratio", "times", "Broadcast over its bound",
    "time of a broadcast over the least that the links allow",
    VersionOutcome=lambda outcome: (
        outcome.applied.fetch_s / outcome.bound_s if outcome.bound_s else None
    ),
    learner=None,
)  # fmt: skip
PAUSED_S: Final = _gauge(
    "paused_s", "s", "Broadcast", "seconds that sampling paused for the last version",
    VersionOutcome="applied.paused_s",
)  # fmt: skip
SAVED_BYTES_TOTAL: Final = _counter(
    "saved_bytes_total", "bytes", "Saved by deltas", "bytes that deltas made unnecessary", node=None
)
COST_PER_H: Final = _gauge(
    "cost_per_h", "dollars/h", "Cost an hour", "dollars an hour for workers", coordinator=None
)
PREDICTED_IDLE_RATIO: Final = _gauge(
    "predicted_idle_ratio", "share", "Idle", "the learner's, by the capacity model, 0 to 1",
    Capacity=lambda capacity: 1.0 - capacity.utilisation,
)  # fmt: skip
PREDICTED_STALENESS_STEPS: Final = _gauge(
    "predicted_staleness_steps", "steps", "Staleness", "the worst, by the capacity model",
    Capacity="staleness_worst",
)  # fmt: skip
PREDICTED_BROADCAST_S: Final = _gauge(
    "predicted_broadcast_s", "s", "Broadcast",
    "seconds until a version is at all workers, by the capacity model", Capacity="broadcast_s",
)  # fmt: skip
REQUIRED_GROUPS_PER_S: Final = _gauge(
    "required_groups_per_s", "groups/s", "Groups a second",
    "groups a second that keep the learner busy, by the capacity model",
    Capacity="required_per_s",
)  # fmt: skip
OFFERED_GROUPS_PER_S: Final = _gauge(
    "offered_groups_per_s", "groups/s", "Groups a second",
    "groups a second that the workers make, by the capacity model", Capacity="offered_per_s",
)  # fmt: skip

# --- the machine, and what went wrong ----------------------------------------------------------

MEMORY_BYTES: Final = _gauge(
    "memory_bytes", "bytes", "Memory and disk", "resident memory of the node's processes",
    StatusSnapshot=lambda status: status.memory_bytes + status.trainer_memory_bytes,
)  # fmt: skip
MEMORY_AVAILABLE_BYTES: Final = _gauge(
    "memory_available_bytes", "bytes", "Memory and disk",
    "memory of the machine that is free, without swapping",
    MachineResources="memory_available_bytes",
)  # fmt: skip
DISK_FREE_BYTES: Final = _gauge(
    "disk_free_bytes", "bytes", "Memory and disk", "free disk where the data directory is",
    MachineResources="disk_free_bytes",
)  # fmt: skip
ERRORS_TOTAL: Final = _counter(
    "errors_total", "troubles", "Troubles, and telemetry lost",
    "troubles that the event log tells of", node=None,
)  # fmt: skip
TELEMETRY_DROPPED_TOTAL: Final = _counter(
    "telemetry_dropped_total", "reports", "Troubles, and telemetry lost",
    "reports that could not be sent and were dropped", node=None, coordinator=None,
)  # fmt: skip


# --- each peer, on the page for Prometheus alone ------------------------------------------------


def _of_peer(name: str, unit: str, text: str, reading: str) -> Metric:
    return Metric(name, "counter", unit, "Peers", text, {"PeerTraffic": reading}, "peer")


_PEER_METRICS: Final = (
    _of_peer("peer_bytes_in_total", "bytes", "bytes from a peer", "bytes_in"),
    _of_peer("peer_bytes_out_total", "bytes", "bytes to a peer", "bytes_out"),
    _of_peer(
        "peer_accepted_total", "groups", "groups of a peer that passed every check",
        "groups_accepted",
    ),
    _of_peer(
        "peer_trained_total", "groups", "groups of a peer that were trained on", "groups_trained"
    ),
    _of_peer("peer_rejected_total", "records", "what a peer sent and was refused", "rejected"),
)  # fmt: skip
PEER_METRICS: Final[Mapping[str, Metric]] = {metric.name: metric for metric in _PEER_METRICS}


def measured(record: object, part: str = "") -> dict[str, float]:
    """The metrics that a record sets, by name, its round's figures among them; those without a
    value are left out. `part`: another name in `set_by` than the record's class."""
    readings = _readings(part or type(record).__name__)
    found = {name: _read(record, reading) for name, reading in readings.items()}
    if not part:
        found |= {FIGURES[name][METRIC]: value for name, value in figures_of(record).items()}
    return finite({name: float(v) for name, v in found.items() if name and v is not None})


@cache
def _readings(source: str) -> Mapping[str, str | Callable[[Any], float | None]]:
    every = {**METRICS, **PEER_METRICS}
    set_by = {name: metric.set_by.get(source) for name, metric in every.items()}
    return {name: reading for name, reading in set_by.items() if reading is not None}


def _read(record: Any, reading: str | Callable[[Any], float | None]) -> float | None:
    """A path ends where a part is None, and so does the reading."""
    if not isinstance(reading, str):
        return reading(record)
    value: float | None = record
    for part in reading.split("."):
        value = getattr(value, part, None)
    return value


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Without what is no number, as the mean of nothing is."""
    return {name: value for name, value in values.items() if isfinite(value)}
