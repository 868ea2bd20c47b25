"""The result of a simulated run: figures, a table for people, and the command that replays it."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path

from node.observe.event_log import plain_json
from node.simulation.scenario import CHAOS, Scenario
from swarm.errors import ConfigError, Reject
from swarm.simulation.delivery import Deliveries
from swarm.simulation.invariants import Violation


@dataclass(frozen=True, slots=True)
class Replay:
    """Everything that determines a run."""

    name: str  # of a scenario, or a file
    scenario: Scenario
    nodes: int
    seed: int
    profile: str

    @property
    def line(self) -> str:
        """The command that runs it again."""
        given = f"swarm-node simulate --scenario {self.name} --seed {self.seed}"
        if self.name == CHAOS:
            return given
        return f"{given} --nodes {self.nodes} --profile {self.profile}"


@dataclass(slots=True)
class Report:
    """Figures of a run."""

    replay: Replay
    deliveries: Deliveries = field(default_factory=Deliveries)
    shortfalls: list[str] = field(default_factory=list)  # of these, against the floor
    reach_pairs: int = 0  # of a group and a host that were judged after healing
    comebacks_s: list[float] = field(default_factory=list)  # from coming up to first foreign group
    groups: int = 0
    rounds: int = 0
    drawn: int = 0  # foreign groups that these rounds trained on
    steps: int = 0  # of a learner, and what it trained on in these
    step_groups: int = 0
    step_shared: int = 0  # of these groups, drawn from the pool
    bytes_by_kind: Counter[str] = field(default_factory=Counter)
    gossip_duplicates: int = 0
    fetched_again: int = 0
    bans: Counter[str] = field(default_factory=Counter)  # by honest hosts: of peers, of blocks
    rejected: Counter[Reject] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    lies: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    violation_count: int = 0
    checks: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    real_s: float = 0.0
    events: int = 0
    trace_hash: str = ""

    def latency_s(self, share: float) -> float:
        """The time within which this share of due deliveries came; inf if too many never did."""
        return percentile(self.deliveries.latencies_s, share)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def report_json(report: Report) -> str:
    """The figures of a report as one JSON object. What never came is "inf"."""
    figures = {each.name: getattr(report, each.name) for each in fields(report)}
    deliveries = report.deliveries
    figures |= {
        "scenario": report.replay.name,
        "nodes": report.replay.nodes,
        "replay": report.replay.line,
        "violations": [str(each) for each in report.violations],
        "deliveries": {
            name: getattr(deliveries, name)
            for name in ("due", "delivered", "orphans_due", "orphans_delivered")
        },
        "latency_p50_s": report.latency_s(0.5),
        "latency_p99_s": report.latency_s(0.99),
    }
    return json.dumps(plain_json(figures), allow_nan=False)


# Long: one text, line by line.
def render(report: Report) -> str:
    """The report as a table, the broken rules, and the line that replays the run."""
    replay, nodes, deliveries = report.replay, report.replay.nodes, report.deliveries
    total = report.bytes_by_kind.total()
    kinds = ", ".join(
        f"{kind} {_size(count / nodes)}" for kind, count in report.bytes_by_kind.most_common()
    )
    rows = [
        ("scenario", f"{replay.name}: {replay.scenario.title}"),
        ("nodes, profile", f"{nodes}, {replay.profile}; {replay.scenario.liars} liars"),
        ("faults", _counts(report.faults)),
        ("lies told", str(report.lies.total()) if replay.scenario.liars else ""),
        ("rounds, groups", f"{report.rounds}, {report.groups}"),
        (
            "learner's steps, groups",
            f"{report.steps}, {report.step_groups}; {report.step_shared} of them shared"
            if replay.scenario.learner
            else "",
        ),
        ("delivered to live peers", _share(deliveries.delivered, deliveries.due)),
        (
            "  after their producer died",
            _share(deliveries.orphans_delivered, deliveries.orphans_due),
        ),
        (
            "  while a link stood still",
            _share(deliveries.stalled_delivered, deliveries.stalled_due),
        ),
        ("short of the floor", "; ".join(report.shortfalls)),
        ("judged after healing", f"{report.reach_pairs} pairs of a group and a host"),
        ("latency p50, p99", _seconds([report.latency_s(0.5), report.latency_s(0.99)])),
        ("  from share() to verified and stored, at each live peer", ""),
        (
            "first foreign group p50, max",
            _seconds([percentile(report.comebacks_s, 0.5), percentile(report.comebacks_s, 1.0)]),
        ),
        ("  from coming up, at each start and return", ""),
        ("bytes per node", f"{_size(total / nodes)}"),
        ("  of it", kinds),
        ("bytes per node and round", _size(total / max(1, report.rounds))),
        ("duplicates", f"{report.gossip_duplicates} gossip, {report.fetched_again} fetches"),
        ("rejected", _counts(report.rejected)),
        ("bans", _counts(report.bans)),
        ("checks", _counts(report.checks)),
        ("virtual, real seconds", f"{report.virtual_s:.0f}, {report.real_s:.1f}"),
        ("events, trace", f"{report.events}, {report.trace_hash[:16]}"),
    ]
    width = max(len(name) for name, value in rows if value)
    lines = [
        f"{name:<{width}}  {value}".rstrip()
        for name, value in rows
        if value or name.startswith(" ")
    ]
    if report.violation_count:
        lines += ["", f"{report.violation_count} broken rules:"]
        lines += [f"  {violation}" for violation in report.violations]
    return "\n".join([*lines, "", f"replay: {replay.line}"])


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} % of {whole}" if whole else "none was due"


def _seconds(values: Sequence[float]) -> str:
    return ", ".join("never" if value == inf else f"{value:.2f} s" for value in values)


def _size(size_bytes: float) -> str:
    for unit, factor in (("MB", 1e6), ("KB", 1e3)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def _counts(counted: Counter[str] | Counter[Reject]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counted.items())) or "none"


def plot(report: Report, path: Path) -> None:
    """Draw how late groups came and what the bytes were for."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (late, sent) = plt.subplots(1, 2, figsize=(11, 4))
    latencies_s = report.deliveries.latencies_s
    finite = [each for each in latencies_s if each != inf]
    shares = [(number + 1) / len(latencies_s) for number in range(len(finite))]
    late.step(finite, shares, where="post")
    late.set(xlabel="seconds from share() to stored", ylabel="share of what was due", ylim=(0, 1))
    late.grid(alpha=0.3)
    kinds = [kind for kind, _ in report.bytes_by_kind.most_common()][::-1]
    sent.barh(kinds, [report.bytes_by_kind[kind] / report.replay.nodes / 1e6 for kind in kinds])
    sent.set(xlabel="megabytes that a node sent")
    figure.suptitle(report.replay.line)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror}; name another file") from None
    finally:
        plt.close(figure)
