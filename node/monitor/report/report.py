"""Reports: from the event logs of one or more nodes to one HTML page and a PNG for each curve.

Only the logs are read, so a report can be made while nodes run, after they are gone, and on another
machine. The page asks no host for anything and holds no script; whatever a log says is escaped.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Final

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
from node.monitor.report.waterfall import waterfall
from node.records.confidence import band_of
from node.records.event_log import FILE_NAME, History, history, read_events
from node.records.format import amount, duration, percent, printable, short_id
from node.records.records import RoundDone, StepDone, VersionCame, VersionComing, WorkDone
from node.records.usefulness import advice, usefulness
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from node.monitor.report.plots import Curve, Picture

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
        """How much it did, in words."""
        if self.steps is not None and not self.rounds:
            return _count(self.steps.steps, "step")
        if self.work is not None and not self.rounds:
            return _count(self.work.batches, "batch", "es")
        return _count(self.rounds, "round")

    @property
    def learns(self) -> bool:
        """Whether there can be a pass rate and a reward of it; workers have none."""
        return self.work is None or bool(self.rounds) or self.steps is not None

    @property
    def rise_points(self) -> float | None:
        """Percentage points by which the held-out pass rate rose; None without a second look."""
        if self.evaluations < 2 or self.held_out_first is None or self.held_out_last is None:
            return None
        return 100 * (self.held_out_last - self.held_out_first)


@dataclass(frozen=True, slots=True)
class ReportSummary:
    """What a report says and where it is."""

    nodes: tuple[NodeSummary, ...]
    html: Path
    pictures: tuple[Path, ...]

    @property
    def rise_points_mean(self) -> float | None:
        """Mean rise over the nodes that were evaluated at least twice."""
        rises = [node.rise_points for node in self.nodes if node.rise_points is not None]
        return sum(rises) / len(rises) if rises else None

    def __str__(self) -> str:
        lines = [_line(node) for node in self.nodes]
        return "\n".join([*lines, f"report: {self.html}", *(f"curve: {p}" for p in self.pictures)])


def _line(node: NodeSummary) -> str:
    if node.work is not None and not node.learns:
        taken = f"{node.work.accepted:,} of {_count(node.work.handed_in, 'group')} accepted"
        return f"{node.name}: {taken} in {node.extent}"
    return (
        f"{node.name}: held-out {percent(node.held_out_first)} to {percent(node.held_out_last)}"
        f" ({_points(node.rise_points)} points) in {node.extent}"
        + (f"\n  {node.sharing}" if node.sharing else "")
    )


@dataclass(frozen=True, slots=True)
class _Node:
    place: int
    name: str
    life: History


def write_report(run_dirs: Sequence[Path], out: Path) -> ReportSummary:
    """Write `report.html` and the PNG curves into the directory `out`, from each node's data
    directory. Takes seconds and imports matplotlib: not for the event loop.

    Raises:
        ConfigError: there is no event log in one of the directories, or too many directories.
    """
    nodes = _read(run_dirs)
    pictures = _draw(nodes)
    out.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for name, picture in pictures.items():
        path = out / f"{name}.png"
        path.write_bytes(picture.png)
        paths.append(path)
    page = out / "report.html"
    summaries = tuple(summarise(node.name, node.life) for node in nodes)
    page.write_text(_page(nodes, summaries, pictures), encoding="utf-8")
    return ReportSummary(summaries, page, tuple(paths))


def _read(run_dirs: Sequence[Path]) -> list[_Node]:
    if not 1 <= len(run_dirs) <= NODES_MAX:
        raise ConfigError(f"report: give from 1 to {NODES_MAX} data directories")
    nodes: list[_Node] = []
    for place, directory in enumerate(run_dirs):
        try:
            life = history(read_events(directory / FILE_NAME))
        except OSError as error:
            raise ConfigError(
                f"report: no event log in {directory} ({error.strerror}): name a node's --data-dir"
            ) from None
        peer = _peer_of(life)
        name = short_id(peer) if peer else printable(directory.name, 24)
        nodes.append(_Node(place, name, life))
    return nodes


def _peer_of(life: History) -> str:
    """Whose log it is; empty: it does not say."""
    if life.started:
        return life.started.peer_id
    told = (
        event.peer_id
        for _, event in life.versions
        if isinstance(event, VersionComing | VersionCame)
    )
    return next(told, "")


def summarise(name: str, life: History) -> NodeSummary:
    """A node's numbers from its history."""
    rounds = [record for _, record in life.rounds]
    steps = [record for _, record in life.steps]
    work = [record for _, record in life.work]
    counted: Sequence[RoundDone | StepDone | WorkDone] = rounds or steps or work
    last = rounds[-1] if rounds else None
    times = _times(life)
    done, made = steps_summary(steps), work_summary(work)
    own_groups = [r.local_groups for r in rounds] or [s.groups - s.shared_groups for s in steps]
    others_groups = [r.external_groups for r in rounds] or [s.shared_groups for s in steps]
    rewards = [r.own_reward for r in rounds] or [s.reward for s in steps if isfinite(s.reward)]
    tenth = max(1, len(rewards) // 10)
    return NodeSummary(
        name=name,
        peer_id=_peer_of(life),
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


def _draw(nodes: Sequence[_Node]) -> dict[str, "Picture"]:
    """Figures by file name; one without data is left out."""
    # matplotlib takes a second to import and serves reports alone
    from node.monitor.report import plots

    pictures: dict[str, Picture] = {}
    by_round = _held_out_curves(nodes, by_tokens=False)
    if by_round:
        pictures["held_out_rounds"] = plots.held_out_over_rounds(by_round)
        pictures["held_out_tokens"] = plots.held_out_over_tokens(
            _held_out_curves(nodes, by_tokens=True)
        )
    band = band_of([(curve.x, curve.y) for curve in by_round])
    if band is not None:
        pictures["held_out_band"] = plots.held_out_band(band)
    trained = [node for node in nodes if node.life.rounds]
    counted = [node for node in nodes if node.life.rounds or node.life.steps]
    if counted:
        pictures["own_reward"] = plots.own_reward(_reward_curves(counted))
    measured = [node for node in nodes if node in counted or _counts_bytes(node.life)]
    if measured:
        pictures["traffic"] = plots.traffic(*_traffic_curves(measured))
    if trained:
        producers, groups = sharing_matrix(trained)
        learners = [node.name for node in trained]
        pictures["sharing"] = plots.sharing(learners, producers, groups, range(len(trained)))
    if any(node.life.steps for node in nodes):
        pictures["staleness"] = plots.staleness(_staleness_curves(nodes))
    if any(node.life.work for node in nodes):
        pictures["behind"] = plots.versions_behind(_behind_curves(nodes))
    drawn = waterfall((node.name, node.life) for node in nodes)
    if drawn is not None:
        pictures["broadcasts"] = plots.broadcasts(drawn)
    reasons = _rejected_by_reason(nodes)
    if reasons:
        pictures["rejected"] = plots.rejected([node.name for node in nodes], reasons)
    return pictures


def _held_out_curves(nodes: Sequence[_Node], *, by_tokens: bool) -> list["Curve"]:
    from node.monitor.report.plots import Curve

    return [
        Curve(
            node.name,
            node.place,
            [e.generated_tokens_total if by_tokens else e.round for _, e in node.life.held_out],
            [100 * e.passed for _, e in node.life.held_out],
        )
        for node in nodes
        if node.life.held_out
    ]


def _reward_curves(nodes: Sequence[_Node]) -> list["Curve"]:
    from node.monitor.report.plots import Curve

    return [
        Curve(
            node.name,
            node.place,
            [r.round for _, r in node.life.rounds] + [r.step for _, r in node.life.steps],
            [r.own_reward for _, r in node.life.rounds] + [r.reward for _, r in node.life.steps],
        )
        for node in nodes
    ]


def _counts_bytes(life: History) -> bool:
    return any(record.bytes_in_total or record.bytes_out_total for _, record in life.work)


def _traffic_curves(nodes: Sequence[_Node]) -> tuple[list["Curve"], list["Curve"]]:
    """(received, sent): bytes over minutes since the first event of all."""
    from node.monitor.report.plots import Curve

    start_s = min(time_s for node in nodes for time_s in _times(node.life))

    def curve(node: _Node, total: str) -> Curve:
        records = node.life.rounds or node.life.steps or node.life.work
        minutes = [(time_s - start_s) / 60 for time_s, _ in records]
        values = [getattr(record, total) for _, record in records]
        return Curve(node.name, node.place, minutes, values)

    received = [curve(node, "bytes_in_total") for node in nodes]
    sent = [curve(node, "bytes_out_total") for node in nodes]
    return received, sent


def _staleness_curves(nodes: Sequence[_Node]) -> list["Curve"]:
    """The mean and the oldest of each step, of each learner."""
    from node.monitor.report.plots import Curve

    learners = [node for node in nodes if node.life.steps]
    curves: list[Curve] = []
    for place, node in enumerate(learners):
        steps = [record for _, record in node.life.steps]
        x = [record.step for record in steps]
        mean = [record.staleness_mean for record in steps]
        curves.append(Curve(f"{node.name} mean", 2 * place, x, mean))
        oldest = [record.staleness_max for record in steps]
        curves.append(Curve(f"{node.name} oldest", 2 * place + 1, x, oldest))
    return curves


def _behind_curves(nodes: Sequence[_Node]) -> list["Curve"]:
    from node.monitor.report.plots import Curve

    start_s = min(time_s for node in nodes for time_s in _times(node.life))
    return [
        Curve(
            node.name,
            node.place,
            [(time_s - start_s) / 60 for time_s, _ in node.life.work],
            [max(0, r.learner_version - r.policy_version) for _, r in node.life.work],
        )
        for node in nodes
        if node.life.work
    ]


def _times(life: History) -> list[float]:
    series = (
        life.rounds, life.held_out, life.troubles, life.steps, life.work, life.versions,
    )  # fmt: skip
    return [time_s for events in series for time_s, _ in events]


def sharing_matrix(nodes: Sequence[_Node]) -> tuple[list[str], list[list[int]]]:
    """(producers, groups trained on: a row for each node, a column for each producer).

    The nodes of the report come first among the producers, then peers without a log here by how
    much they gave; those beyond `PRODUCERS_SHOWN_MAX` share one column.
    """
    counts = [_trained_on(node.life.rounds) for node in nodes]
    known = [_peer_id(node) for node in nodes]
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


def _peer_id(node: _Node) -> str:
    return _peer_of(node.life) or node.name


def _trained_on(rounds: Sequence[tuple[float, RoundDone]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for _, record in rounds:
        total.update(record.foreign_by_producer)
    return total


def _rejected_by_reason(nodes: Sequence[_Node]) -> dict[str, list[int]]:
    """Counts for each node by reason, the most frequent reason first."""
    last = [node.life.rounds[-1][1].rejected_total if node.life.rounds else {} for node in nodes]
    totals: Counter[str] = Counter()
    for counts in last:
        totals.update(counts)
    return {
        printable(reason, 40): [counts.get(reason, 0) for counts in last]
        for reason, total in totals.most_common()
        if total
    }


_CAPTIONS: Final = {
    "held_out_rounds": "The run's fixed held-out tasks, which no node trains on.",
    "held_out_tokens": "The same pass rates against what each node generated itself: tokens of "
    "groups that came from others are not counted.",
    "held_out_band": "Student's t over the nodes of this report, at rounds after which all were "
    "evaluated. Nodes of one swarm train on each other's groups: another swarm may do otherwise.",
    "staleness": "Steps of the learner from the oldest version in a group to the step that trained "
    "on it: the mean over a step's groups, and the oldest of them.",
    "behind": "Versions between the policy that a worker generates with and the newest that it had "
    "heard of.",
    "broadcasts": "A row is one worker and version, the first row of a version its learner. Phases "
    "are those of the worker's own log, or, where that is not among these, what its learner heard. "
    "Each log has its machine's clock.",
    "own_reward": "Rewards of the node's own completions on its training tasks. Groups from others "
    "never enter it.",
    "traffic": "Payload bytes of all protocols, counted by each node itself.",
    "sharing": "A row is the node that trained, a column the peer that made the groups. Grey cells "
    "count a node's own groups.",
    "rejected": "What peers sent and a node did not accept.",
}

_CSS: Final = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --page: #fdfdfc;
  --line: #d9dde3; --card: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #9aa5b4; --page: #14181d;
  --line: #333b46; --card: #1b2027; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 62rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem;
  width: 100%; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
tfoot td { font-weight: 600; border-bottom: 0; }
td.text { text-align: left; white-space: normal; }
.dot { display: inline-block; width: .7em; height: .7em; border-radius: 50%;
  margin-right: .45em; }
figure { margin: 1.5rem 0; padding: 1rem; background: var(--card);
  border: 1px solid var(--line); border-radius: 6px; }
figure svg { display: block; max-width: 100%; height: auto; margin: 0 auto; }
figcaption { color: var(--soft); font-size: .9rem; margin-top: .5rem; }
"""

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


_TAKE_HOME: Final = (
    "<p class=soft><code>swarm-node samples</code> shows what a policy said, <code>swarm-node "
    "export DIR</code> writes it as a model directory, and <code>swarm-node chat DIR</code> talks "
    "to it; each takes the node's <code>--data-dir</code>, but for the last.</p>"
)


def _page(
    nodes: Sequence[_Node], summaries: Sequence[NodeSummary], pictures: dict[str, "Picture"]
) -> str:
    figures = "\n".join(
        f'<figure id="{name}">{picture.svg}<figcaption>{escape(_CAPTIONS[name])}</figcaption>'
        "</figure>"
        for name, picture in pictures.items()
    )
    run_ids = sorted({node.life.started.run_id for node in nodes if node.life.started})
    title = f"Swarm run {', '.join(run_ids) or 'of unknown id'}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_CSS}</style></head><body>
<h1>{escape(title)}</h1>
{_prose(summaries)}
{_TAKE_HOME}
{_nodes_tables(summaries)}
{_environments(nodes)}
<h2>Curves</h2>
{figures or "<p>Nothing was logged to draw yet.</p>"}
{_troubles(nodes)}
</body></html>
"""


def _prose(summaries: Sequence[NodeSummary]) -> str:
    tokens = sum(node.generated_tokens for node in summaries)
    foreign = sum(node.foreign_groups for node in summaries)
    longest = max(node.seconds for node in summaries)
    extent = f"{_count(len(summaries), 'node')} in {_extent(summaries)}"
    sentences = [
        f"{extent} over {duration(longest)}, {tokens:,} tokens generated.",
        f"Groups of others were trained on {_count(foreign, 'time')}.",
        _rise_sentence(summaries),
        _rejected_sentence(summaries),
        *work_sentence([node.work for node in summaries if node.work]),
        *_quantised_sentence(summaries),
        *(f"{node.name}: {node.sharing}" for node in summaries if node.sharing),
    ]
    return "\n".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


def _extent(summaries: Sequence[NodeSummary]) -> str:
    rounds = sum(node.rounds for node in summaries)
    steps = sum(node.steps.steps for node in summaries if node.steps)
    batches = sum(node.work.batches for node in summaries if node.work)
    parts = [_count(rounds, "round")] if rounds or not (steps or batches) else []
    parts += [_count(steps, "step")] if steps else []
    parts += [_count(batches, "batch", "es")] if batches else []
    return " and ".join(parts)


def _quantised_sentence(summaries: Sequence[NodeSummary]) -> list[str]:
    groups = sum(node.groups_quantised for node in summaries)
    if not groups:
        return []
    return [f"{_count(groups, 'group')} trained on came from engines with quantised weights."]


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
    totals: Counter[str] = Counter()
    for node in summaries:
        totals.update(node.rejected)
    accepted = _count(sum(node.accepted for node in summaries), "group")
    if not totals.total():
        return f"{accepted} from peers accepted, nothing rejected."
    reasons = ", ".join(f"{printable(r, 40)} {n:,}" for r, n in totals.most_common() if n)
    return f"{accepted} from peers accepted, {totals.total():,} records rejected: {reasons}."


def _count(number: int, noun: str, many: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else many}"


_LEARNING: Final = (
    "node", "held-out<br>start", "held-out<br>end", "rise<br>(points)",
    "own reward<br>start → end", "rounds<br>or steps", "generated<br>tokens",
    "own groups<br>a round (I)", "foreign groups<br>a round (J)",
)  # fmt: skip
_NETWORK: Final = (
    "node", "groups<br>shared", "groups<br>accepted", "records<br>rejected", "bytes<br>in",
    "bytes<br>out", "starts", "troubles",
)  # fmt: skip


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], foot: str = "") -> str:
    """`columns` and the first cell of each row are HTML already; the other cells are text."""
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = "\n".join(
        f"<tr><td>{row[0]}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>'
        f"<tfoot>{foot}</tfoot></table></div>"
    )


def _node_cell(place: int, node: NodeSummary) -> str:
    from node.monitor.report.plots import colour

    hint = escape(f"{node.peer_id} {node.model} {node.engine}", quote=True)
    dot = f'<span class="dot" style="background:{colour(place)}"></span>'
    return f'<span title="{hint}">{dot}{escape(node.name)}</span>'


def _nodes_tables(summaries: Sequence[NodeSummary]) -> str:
    learning = [
        (
            _node_cell(place, node),
            percent(node.held_out_first),
            percent(node.held_out_last),
            _points(node.rise_points),
            f"{_reward(node.reward_first)} → {_reward(node.reward_last)}",
            f"{node.steps.steps if node.steps and not node.rounds else node.rounds:,}",
            amount(node.generated_tokens),
            f"{node.local_groups_mean:.1f}",
            f"{node.external_groups_mean:.1f}",
        )
        for place, node in enumerate(summaries)
        if node.learns
    ]
    network = [
        (
            _node_cell(place, node),
            f"{node.groups_shared:,}",
            f"{node.accepted:,}",
            f"{sum(node.rejected.values()):,}",
            amount(node.bytes_in, "B"),
            amount(node.bytes_out, "B"),
            str(node.starts),
            str(node.troubles),
        )
        for place, node in enumerate(summaries)
    ]
    shown = (
        f"<h2>Learning</h2>{_table(_LEARNING, learning, _mean_row(summaries))}"
        '<p class="soft">Own reward is the mean over the first and over the last tenth of the'
        " rounds or steps; I and J are means over all of them of what was really trained on, and a"
        " learner's I are groups of its workers.</p>"
    )
    return (
        f"{shown if learning else ''}{_role_tables(summaries)}"
        f"<h2>Network</h2>{_table(_NETWORK, network)}"
    )


def _role_tables(summaries: Sequence[NodeSummary]) -> str:
    """The tables of a run with a learner; empty without one."""
    placed = list(enumerate(summaries))
    steps = [(_node_cell(at, node), *node.steps.cells()) for at, node in placed if node.steps]
    work = [(_node_cell(at, node), *node.work.cells()) for at, node in placed if node.work]
    tables = f"<h2>Steps</h2>{_table(STEPS_COLUMNS, steps)}" if steps else ""
    return tables + (f"<h2>Work</h2>{_table(WORK_COLUMNS, work)}" if work else "")


def _mean_row(summaries: Sequence[NodeSummary]) -> str:
    measured = [n for n in summaries if n.rise_points is not None]
    cells = [
        "mean",
        percent(_mean([n.held_out_first for n in measured if n.held_out_first is not None])),
        percent(_mean([n.held_out_last for n in measured if n.held_out_last is not None])),
        _points(_mean([n.rise_points for n in measured if n.rise_points is not None])),
    ]
    filler = "<td></td>" * (len(_LEARNING) - len(cells))
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}{filler}</tr>"


def _points(rise: float | None) -> str:
    return "–" if rise is None else f"{rise:+.1f}"


def _reward(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _environments(nodes: Sequence[_Node]) -> str:
    """Pass rates by environment, as means over the nodes that were evaluated."""
    first = [node.life.held_out[0][1].passed_by_environment for node in nodes if node.life.held_out]
    last = [node.life.held_out[-1][1].passed_by_environment for node in nodes if node.life.held_out]
    names = sorted({name for rates in (*first, *last) for name in rates})
    if not names:
        return ""
    rows = [
        (
            escape(name),
            percent(_mean([rates[name] for rates in first if name in rates])),
            percent(_mean([rates[name] for rates in last if name in rates])),
        )
        for name in names
    ]
    return (
        "<h2>Held-out pass rate by environment, mean over nodes</h2>"
        f"{_table(('environment', 'start', 'end'), rows)}"
    )


def _troubles(nodes: Sequence[_Node]) -> str:
    found = [(time_s, node.name, t.what) for node in nodes for time_s, t in node.life.troubles]
    if not found:
        return ""
    start_s = min(time_s for node in nodes for time_s in _times(node.life))
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(duration(time_s - start_s))}</td>"
        f'<td class="text">{escape(printable(what, 400))}</td></tr>'
        for time_s, name, what in sorted(found)[:TROUBLES_SHOWN_MAX]
    )
    more = len(found) - TROUBLES_SHOWN_MAX
    return (
        "<h2>Troubles</h2><table><thead><tr><th>node</th><th>after</th><th></th></tr></thead>"
        f"<tbody>{rows}</tbody></table>" + (f"<p>And {more} more.</p>" if more > 0 else "")
    )
