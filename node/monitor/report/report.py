"""`swarm-node report`: from the event logs of some nodes to one HTML page, the dashboard saved.

Only the logs are read, so a report can be made while nodes run, after they are gone, and on another
machine. The page opens offline: it asks no host for anything, and shows all text of logs as text.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Final

from node.monitor.report.charts import drawn_broadcasts, drawn_charts
from node.monitor.report.learner_report import (
    STEPS_COLUMNS,
    WORK_COLUMNS,
    StepsSummary,
    WorkSummary,
    grown,
    steps_summary,
    work_sentence,
    work_summary,
)
from node.monitor.report.replay import LoggedNode, replayed
from node.records.event_log import FILE_NAME, History, history, read_events
from node.records.format import amount, duration, percent, printable, short_id
from node.records.records import RoundDone, StepDone, WorkDone
from node.records.usefulness import advice, usefulness
from swarm.errors import ConfigError
from swarm.telemetry.dashboard.saved import saved_page

NODES_MAX: Final = 64
PRODUCERS_SHOWN_MAX: Final = 24
TROUBLES_SHOWN_MAX: Final = 20
_OTHERS: Final = "others"


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """One node's numbers. Pass rates and rewards are in [0, 1], and None where never measured."""

    name: str
    peer_id: str  # empty when the log does not tell
    model: str
    engine: str
    starts: int
    rounds: int
    generated_tokens: int
    seconds: float  # from the first to the last event
    evaluations: int
    held_out_first: float | None
    held_out_last: float | None
    reward_first: float | None  # mean over the first tenth of the rounds or steps
    reward_last: float | None  # mean over the last tenth
    local_groups_mean: float  # effective I; of a learner, groups of its workers
    external_groups_mean: float  # effective J
    foreign_groups: int  # groups of others trained on, in all
    groups_shared: int
    accepted: int
    rejected: dict[str, int]
    bytes_in: int
    bytes_out: int
    troubles: int
    groups_quantised: int = 0  # trained on, and sampled by engines with quantised weights
    steps: StepsSummary | None = None  # of a learner
    work: WorkSummary | None = None  # of a worker
    sharing: str = ""  # what it brought, in a sentence

    @property
    def extent(self) -> str:
        """The number of its rounds, steps or batches, in words."""
        if self.steps is not None and not self.rounds:
            return _count(self.steps.steps, "step")
        if self.work is not None and not self.rounds:
            return _count(self.work.batches, "batch", "es")
        return _count(self.rounds, "round")

    @property
    def learns(self) -> bool:
        """True for nodes and learners; workers have no pass rate and no reward."""
        return self.work is None or bool(self.rounds) or self.steps is not None

    @property
    def rise_points(self) -> float | None:
        """Percentage points by which the held-out pass rate rose; None without a second look."""
        if self.evaluations < 2 or self.held_out_first is None or self.held_out_last is None:
            return None
        return 100 * (self.held_out_last - self.held_out_first)


@dataclass(frozen=True, slots=True)
class ReportSummary:
    """Summaries of a report's nodes, and the path of its page."""

    nodes: tuple[NodeSummary, ...]
    html: Path

    @property
    def rise_points_mean(self) -> float | None:
        """Mean rise over the nodes that were evaluated at least twice."""
        return _mean([node.rise_points for node in self.nodes if node.rise_points is not None])

    def __str__(self) -> str:
        return "\n".join([*map(_line, self.nodes), f"report: {self.html}"])


def _line(node: NodeSummary) -> str:
    if node.work is not None and not node.learns:
        taken = f"{node.work.accepted:,} of {_count(node.work.handed_in, 'group')} accepted"
        return f"{node.name}: {taken} in {node.extent}"
    return (
        f"{node.name}: held-out {percent(node.held_out_first)} to {percent(node.held_out_last)}"
        f" ({_points(node.rise_points)} points) in {node.extent}"
        + (f"\n  {node.sharing}" if node.sharing else "")
    )


def write_report(run_dirs: Sequence[Path], out: Path) -> ReportSummary:
    """Write `report.html` into the directory `out`, from each node's data directory. Takes seconds:
    not for the event loop.

    Raises:
        ConfigError: there is no event log in one of the directories, or too many directories.
    """
    nodes = _read(run_dirs)
    summaries = tuple(summarise(node.name, node.life) for node in nodes)
    out.mkdir(parents=True, exist_ok=True)
    page = out / "report.html"
    page.write_text(saved_page(page_state(nodes, summaries)), encoding="utf-8")
    return ReportSummary(summaries, page)


def _read(run_dirs: Sequence[Path]) -> list[LoggedNode]:
    if not 1 <= len(run_dirs) <= NODES_MAX:
        raise ConfigError(f"report: give from 1 to {NODES_MAX} data directories")
    nodes: list[LoggedNode] = []
    for directory in run_dirs:
        try:
            life = history(read_events(directory / FILE_NAME))
        except OSError as error:
            raise ConfigError(
                f"report: no event log in {directory} ({error.strerror}): name a node's --data-dir"
            ) from None
        peer = LoggedNode("", life).peer_id
        nodes.append(LoggedNode(short_id(peer) if peer else printable(directory.name, 24), life))
    return nodes


def summarise(name: str, life: History) -> NodeSummary:
    """A node's numbers from its history."""
    rounds = [record for _, record in life.rounds]
    steps = [record for _, record in life.steps]
    work = [record for _, record in life.work]
    counted: Sequence[RoundDone | StepDone | WorkDone] = rounds or steps or work
    last = rounds[-1] if rounds else None
    node = LoggedNode(name, life)
    times = node.times
    done, made = steps_summary(steps), work_summary(work)
    own_groups = [r.local_groups for r in rounds] or [s.groups - s.shared_groups for s in steps]
    others_groups = [r.external_groups for r in rounds] or [s.shared_groups for s in steps]
    rewards = [r.own_reward for r in rounds] or [s.reward for s in steps if isfinite(s.reward)]
    tenth = max(1, len(rewards) // 10)
    return NodeSummary(
        name=name,
        peer_id=node.peer_id,
        model=life.started.model if life.started else "",
        engine=life.started.engine if life.started else "",
        starts=life.starts,
        rounds=len(rounds),
        generated_tokens=(last.generated_tokens_total if last else 0)
        + (made.generated_tokens if made else 0),
        seconds=max(times) - min(times) if times else 0.0,
        evaluations=len(life.held_out),
        held_out_first=life.held_out_first,
        held_out_last=life.held_out_last,
        reward_first=_mean(rewards[:tenth]),
        reward_last=_mean(rewards[-tenth:]),
        local_groups_mean=_mean(own_groups) or 0.0,
        external_groups_mean=_mean(others_groups) or 0.0,
        foreign_groups=sum(r.external_groups for r in rounds) + (done.groups if done else 0),
        groups_shared=sum(r.groups_shared for r in rounds) + (made.handed_in if made else 0),
        accepted=last.accepted_total if last else done.groups if done else 0,
        rejected=dict(last.rejected_total) if last else {},
        bytes_in=grown(each.bytes_in_total for each in counted),
        bytes_out=grown(each.bytes_out_total for each in counted),
        troubles=len(life.troubles),
        groups_quantised=sum(r.groups_quantised for r in rounds)
        + sum(step.groups_quantised for step in steps),
        steps=done,
        work=made,
        sharing=_sharing(life, rounds),
    )


def _sharing(life: History, rounds: Sequence[RoundDone]) -> str:
    if life.started is None:
        return ""
    found = usefulness(rounds, life.started.external_groups)
    return "" if found is None else advice(found)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# --- the page ----------------------------------------------------------------------------------


def page_state(nodes: Sequence[LoggedNode], summaries: Sequence[NodeSummary]) -> dict[str, Any]:
    """The dashboard's state at the end of the logs, and under `saved` what a report has beside."""
    times = [time_s for node in nodes for time_s in node.times]
    begin_s, end_s = min(times, default=0.0), max(times, default=0.0)
    run_ids = sorted({node.life.started.run_id for node in nodes if node.life.started})
    saved = {
        "title": f"Swarm run {', '.join(run_ids) or 'of unknown id'}",
        "sentences": _sentences(summaries),
        "tables": [
            *_nodes_tables(summaries),
            *_sharing_table(nodes),
            *_rejected_table(summaries),
            *_environments(nodes),
            *_troubles(nodes, begin_s),
        ],
        "charts": drawn_charts(nodes, begin_s),
        "waterfall": drawn_broadcasts(nodes),
    }
    return {**replayed(nodes, begin_s, end_s), "saved": saved}


# --- sentences and tables ----------------------------------------------------------------------


def _sentences(summaries: Sequence[NodeSummary]) -> list[str]:
    tokens = sum(node.generated_tokens for node in summaries)
    foreign = sum(node.foreign_groups for node in summaries)
    longest = max(node.seconds for node in summaries)
    quantised = sum(node.groups_quantised for node in summaries)
    extent = f"{_count(len(summaries), 'node')} in {_extent(summaries)}"
    return [
        f"{extent} over {duration(longest)}, {tokens:,} tokens generated.",
        f"Groups of others were trained on {_count(foreign, 'time')}.",
        _rise_sentence(summaries),
        _rejected_sentence(summaries),
        *work_sentence([node.work for node in summaries if node.work]),
        *(
            [f"{_count(quantised, 'group')} trained on came from engines with quantised weights."]
            if quantised
            else []
        ),
        *(f"{node.name}: {node.sharing}" for node in summaries if node.sharing),
    ]


def _extent(summaries: Sequence[NodeSummary]) -> str:
    rounds = sum(node.rounds for node in summaries)
    steps = sum(node.steps.steps for node in summaries if node.steps)
    batches = sum(node.work.batches for node in summaries if node.work)
    parts = [_count(rounds, "round")] if rounds or not (steps or batches) else []
    parts += [_count(steps, "step")] if steps else []
    parts += [_count(batches, "batch", "es")] if batches else []
    return " and ".join(parts)


def _rise_sentence(summaries: Sequence[NodeSummary]) -> str:
    rises = [node.rise_points for node in summaries if node.rise_points is not None]
    if not rises:
        return "No node was evaluated twice on the held-out tasks, so nothing is said of a rise."
    mean = sum(rises) / len(rises)
    return (
        f"From the first to the last evaluation the held-out pass rate changed by {mean:+.1f}"
        f" points in the mean over {_count(len(rises), 'node')}"
        f" (from {min(rises):+.1f} to {max(rises):+.1f})."
    )


def _rejected_sentence(summaries: Sequence[NodeSummary]) -> str:
    totals = _rejected_in_all(summaries)
    accepted = _count(sum(node.accepted for node in summaries), "group")
    if not totals.total():
        return f"{accepted} from peers accepted, nothing rejected."
    reasons = ", ".join(f"{printable(r, 40)} {n:,}" for r, n in totals.most_common() if n)
    return f"{accepted} from peers accepted, {totals.total():,} records rejected: {reasons}."


def _rejected_in_all(summaries: Sequence[NodeSummary]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for node in summaries:
        totals.update(node.rejected)
    return totals


def _count(number: int, noun: str, many: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else many}"


_LEARNING: Final = (
    "node", "held-out start", "held-out end", "rise (points)", "own reward start → end",
    "rounds or steps", "generated tokens", "own groups a round (I)", "foreign groups a round (J)",
    "model",
)  # fmt: skip
_NETWORK: Final = (
    "node", "groups shared", "groups accepted", "records rejected", "bytes in", "bytes out",
    "starts", "troubles",
)  # fmt: skip
_LEARNING_NOTE: Final = (
    "Own reward is the mean over the first and over the last tenth of the rounds or steps; I and J "
    "are means over all of them of what was really trained on, and a learner's I are groups of its "
    "workers."
)


def _table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = ""
) -> list[Any]:
    """A table for the page; none without rows."""
    return [{"title": title, "columns": columns, "rows": rows, "note": note}] if rows else []


def _nodes_tables(summaries: Sequence[NodeSummary]) -> list[Any]:
    learning = [_learning_row(node) for node in summaries if node.learns]
    network = [
        (
            node.name,
            f"{node.groups_shared:,}",
            f"{node.accepted:,}",
            f"{sum(node.rejected.values()):,}",
            amount(node.bytes_in, "B"),
            amount(node.bytes_out, "B"),
            str(node.starts),
            str(node.troubles),
        )
        for node in summaries
    ]
    steps = [(node.name, *node.steps.cells()) for node in summaries if node.steps]
    work = [(node.name, *node.work.cells()) for node in summaries if node.work]
    mean = [_mean_row(summaries)] if learning else []
    return [
        *_table("Learning", _LEARNING, [*learning, *mean], _LEARNING_NOTE),
        *_table("Steps", STEPS_COLUMNS, steps),
        *_table("Work", WORK_COLUMNS, work),
        *_table("Network", _NETWORK, network),
    ]


def _learning_row(node: NodeSummary) -> tuple[str, ...]:
    return (
        node.name,
        percent(node.held_out_first),
        percent(node.held_out_last),
        _points(node.rise_points),
        f"{_reward(node.reward_first)} → {_reward(node.reward_last)}",
        f"{node.steps.steps if node.steps and not node.rounds else node.rounds:,}",
        amount(node.generated_tokens),
        f"{node.local_groups_mean:.1f}",
        f"{node.external_groups_mean:.1f}",
        f"{node.model}, {node.engine}",
    )


def _mean_row(summaries: Sequence[NodeSummary]) -> tuple[str, ...]:
    measured = [n for n in summaries if n.rise_points is not None]
    return (
        "mean",
        percent(_mean([n.held_out_first for n in measured if n.held_out_first is not None])),
        percent(_mean([n.held_out_last for n in measured if n.held_out_last is not None])),
        _points(_mean([n.rise_points for n in measured if n.rise_points is not None])),
        *[""] * (len(_LEARNING) - 4),
    )


def _points(rise: float | None) -> str:
    return "–" if rise is None else f"{rise:+.1f}"


def _reward(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _sharing_table(nodes: Sequence[LoggedNode]) -> list[Any]:
    trained = [node for node in nodes if node.life.rounds]
    producers, groups = sharing_matrix(trained)
    rows = [
        (node.name, *(f"{count:,}" for count in row))
        for node, row in zip(trained, groups, strict=True)
    ]
    note = (
        "A row is the node that trained, a column the peer that made the groups. The diagonal "
        "counts a node's own groups."
    )
    return _table("Groups trained on", ("trained on by", *producers), rows, note)


def sharing_matrix(nodes: Sequence[LoggedNode]) -> tuple[list[str], list[list[int]]]:
    """(producers, groups trained on: a row for each node, a column for each producer).

    The nodes of the report come first among the producers, then peers without a log here by how
    much they gave; those beyond `PRODUCERS_SHOWN_MAX` share one column.
    """
    counts: list[Counter[str]] = []
    for node in nodes:
        counts.append(Counter())
        for _, record in node.life.rounds:
            counts[-1].update(record.foreign_by_producer)
    known = [node.peer_id or node.name for node in nodes]
    totals = sum(counts, Counter())
    strangers = sorted(set(totals) - set(known), key=lambda peer: (-totals[peer], peer))
    shown = [*known, *strangers][: max(PRODUCERS_SHOWN_MAX, len(known))]
    rest = set(totals) - set(shown)
    groups = [[of[peer] for peer in shown] for of in counts]
    names = [short_id(peer) for peer in shown]
    if rest:
        names.append(_OTHERS)
        groups = [
            [*row, sum(of[peer] for peer in rest)] for row, of in zip(groups, counts, strict=True)
        ]
    for position, node in enumerate(nodes):
        groups[position][position] += sum(record.local_groups for _, record in node.life.rounds)
    return names, groups


def _rejected_table(summaries: Sequence[NodeSummary]) -> list[Any]:
    """Counts for each node by reason, the most frequent reason first."""
    reasons = [reason for reason, total in _rejected_in_all(summaries).most_common() if total]
    rows = [
        (node.name, *(f"{node.rejected.get(reason, 0):,}" for reason in reasons))
        for node in summaries
        if reasons
    ]
    note = "What peers sent and a node did not accept."
    return _table("Rejected records by reason", ("node", *reasons), rows, note)


def _environments(nodes: Sequence[LoggedNode]) -> list[Any]:
    """Pass rates by environment, as means over the nodes that were evaluated."""
    first = [node.life.held_out[0][1].passed_by_environment for node in nodes if node.life.held_out]
    last = [node.life.held_out[-1][1].passed_by_environment for node in nodes if node.life.held_out]
    rows = [
        (
            name,
            percent(_mean([rates[name] for rates in first if name in rates])),
            percent(_mean([rates[name] for rates in last if name in rates])),
        )
        for name in sorted({name for rates in (*first, *last) for name in rates})
    ]
    title = "Held-out pass rate by environment, mean over nodes"
    return _table(title, ("environment", "start", "end"), rows)


def _troubles(nodes: Sequence[LoggedNode], begin_s: float) -> list[Any]:
    found = sorted((time_s, n.name, t.what) for n in nodes for time_s, t in n.life.troubles)
    rows = [
        (name, duration(time_s - begin_s), printable(what, 400))
        for time_s, name, what in found[:TROUBLES_SHOWN_MAX]
    ]
    more = len(found) - TROUBLES_SHOWN_MAX
    return _table("Troubles", ("node", "after", ""), rows, f"And {more} more." if more > 0 else "")
