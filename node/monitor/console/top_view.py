"""The screen of `swarm-node top`: one node or a whole swarm, in 80 columns. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from node.records.figures import done_lines, now_line, pool_lines
from node.records.format import amount, bar_chart, duration, percent, printable, short_id
from node.records.records import StatusSnapshot

WIDTH_COLUMNS: Final = 80
SPARK_POINTS: Final = 24
ALARMS_SHOWN: Final = 4
ADVICE_LINES: Final = 2
VERSIONS_SHOWN: Final = 3
ROWS_PLAIN: Final = 32  # of the table, where there is no terminal whose height would say it


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table below the figures."""

    name: str
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class Screen:
    """All that is drawn. `trouble`: why what is shown may be old; empty: it is not. `alarms` are
    what is so and what to do, most urgent first. Texts may be strangers'."""

    title: str
    trouble: str
    alarms: tuple[tuple[str, str], ...]
    facts: tuple[tuple[str, str], ...]
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


def render(screen: Screen, height: int | None = None) -> RenderableType:
    """The screen, `WIDTH_COLUMNS` wide; its table leaves what does not fit into `height` lines."""
    parts: list[RenderableType] = [_cut(screen.title, "bold")]
    if screen.trouble:
        parts.append(_cut(f"! {screen.trouble}", "bold red"))
    for text, advice in screen.alarms[:ALARMS_SHOWN]:
        parts.append(_cut(f"! {text}", "bold yellow"))
        parts += [_cut(f"  {line}", "yellow") for line in _wrapped(advice)]
    if len(screen.alarms) > ALARMS_SHOWN:
        parts.append(_cut(f"  and {len(screen.alarms) - ALARMS_SHOWN} more alarms", "yellow"))
    parts += [Text(), _facts(screen.facts), Text()]
    used = len(parts) + len(screen.facts) + 1  # one of the parts is all facts, and a line for keys
    room = ROWS_PLAIN if height is None else max(0, height - used - 2)
    parts.append(_rows(screen, room))
    return Group(*parts)


def _wrapped(advice: str) -> list[str]:
    text = printable(advice, ADVICE_LINES * (WIDTH_COLUMNS - 4))
    return wrap(text, WIDTH_COLUMNS - 2, max_lines=ADVICE_LINES, placeholder="…")


def _cut(text: str, style: str) -> Text:
    return Text(printable(text, WIDTH_COLUMNS), style=style, no_wrap=True, overflow="ellipsis")


def _facts(facts: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, width=10)
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=WIDTH_COLUMNS - 12)
    for name, value in facts:
        table.add_row(name, Text(printable(value, WIDTH_COLUMNS)))
    return table


def _rows(screen: Screen, room: int) -> RenderableType:
    if not screen.rows:
        return Text("nobody yet", style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in screen.columns:
        justify: Any = "left" if column.is_text else "right"
        table.add_column(column.name, justify=justify, no_wrap=True, overflow="ellipsis")
    shown = screen.rows if len(screen.rows) <= room else screen.rows[: max(0, room - 1)]
    for row in shown:
        table.add_row(*(Text(printable(cell, 24)) for cell in row))
    left_out = len(screen.rows) - len(shown)
    return Group(table, _cut(f"and {left_out} more", "dim")) if left_out else table


def spark(values: Sequence[float]) -> str:
    """The last values as bars, the highest of them full; none is a dash."""
    last = values[-SPARK_POINTS:]
    top = max(last, default=0.0)
    return bar_chart(tuple(value / top for value in last)) if top > 0 else "–"


def traffic(taken: Sequence[float], given: Sequence[float]) -> str:
    """Bytes a second of late: received, as bars, and sent."""
    if not taken or not given:
        return "–"
    into, out = amount(taken[-1], "B/s"), amount(given[-1], "B/s")
    return f"{spark(taken)}  {into} in, {out} out"


def versions(agents: Iterable[str]) -> str:
    """Programs and the number of nodes that run each, the most frequent first."""
    counted = Counter(agent or "unknown" for agent in agents).most_common()
    shown = [f"{printable(agent, 32)} × {count}" for agent, count in counted[:VERSIONS_SHOWN]]
    return ", ".join(shown) + (f" and {len(counted) - VERSIONS_SHOWN} others" if
                               len(counted) > VERSIONS_SHOWN else "")  # fmt: skip


# --- one node ----------------------------------------------------------------------------------


def node_screen(
    s: StatusSnapshot,
    taken: Sequence[float],
    given: Sequence[float],
    rewards: Sequence[float],
    trouble: str = "",
) -> Screen:
    """A node and its peers. `taken` and `given`: bytes a second of late; `rewards`: of the last
    rounds."""
    facts = (
        ("now", now_line(s)),
        *done_lines(s, rewards[-SPARK_POINTS:]),
        ("traffic", traffic(taken, given)),
        *pool_lines(s),
        ("peers", f"{len(s.peers)}, {len(s.bans)} banned"),
        ("versions", versions([s.agent, *(peer.agent for peer in s.peers)])),
    )
    rows = tuple(
        (
            short_id(peer.peer_id),
            str(peer.groups_accepted),
            str(peer.groups_trained),
            str(sum(peer.rejected.values())),
            peer.agent,
        )
        for peer in sorted(s.peers, key=lambda peer: (-peer.groups_trained, peer.peer_id))
    )
    return Screen(
        title=f"swarm-node {short_id(s.peer_id)}  {s.run_id}, up {duration(s.uptime_s)}",
        trouble=trouble,
        alarms=tuple((note, "") for note in s.notes),
        facts=facts,
        columns=(
            Column("peer", is_text=True),
            Column("accepted"),
            Column("trained on"),
            Column("refused"),
            Column("runs", is_text=True),
        ),
        rows=rows,
    )


def _bars(rewards: Sequence[float]) -> str:
    return bar_chart(tuple(rewards[-SPARK_POINTS:]))


# --- a swarm -----------------------------------------------------------------------------------


def swarm_screen(state: Mapping[str, Any]) -> Screen:
    """All nodes that report, from what the web page shows (`swarm.telemetry.dashboard.state`)."""
    head, source = state["headline"], state["source"]
    rows = [
        dict(zip(state["nodes"]["columns"], row, strict=True)) for row in state["nodes"]["rows"]
    ]
    recent = state["history"]["recent"]
    runs = ", ".join(state["runs"]) or "no run yet"
    gone = f", {head['gone']} gone" if head["gone"] else ""
    facts = (
        ("nodes", f"{head['present']} report{gone}; {_counted(head['roles'])}"),
        ("round", f"{_number(head['round'])}{_spread(head)}"),
        ("reward", f"{_number(head['reward'], 3)}  {_bars(_values(recent['reward']))}"),
        ("held-out", percent(head["held_out"])),
        ("trained on", _foreign(head)),
        ("traffic", traffic(_values(recent["in_bytes_per_s"]), _values(recent["out_bytes_per_s"]))),
        ("pool", f"{head['pool_groups']:,.0f} groups, {amount(head['pool_bytes'], 'B')}"),
        ("refused", f"{head['rejected']:,.0f}, and {head['accepted']:,.0f} groups accepted"),
        ("versions", versions(row["agent"] for row in rows if not row["gone"])),
    )  # fmt: skip
    return Screen(
        title=f"swarm {printable(runs, 40)}  at {source['name']}",
        trouble=_away(source),
        alarms=tuple(
            (f"{each['text']} ({_count(each['count'], 'node')})", each["advice"])
            for each in state["alarms"]["shown"]
        ),
        facts=facts,
        columns=(
            Column("node", is_text=True),
            Column("role", is_text=True),
            Column("round"),
            Column("reward"),
            Column("J"),
            Column("in"),
            Column("out"),
            Column("heard"),
        ),
        rows=tuple(_node_row(row) for row in rows),
    )


def _foreign(head: Mapping[str, Any]) -> str:
    if head["foreign_wanted"] is None:
        return "–"
    taken = _number(head["foreign_groups"], 1)
    return f"{taken} of {_number(head['foreign_wanted'], 1)} foreign groups a round"


def _away(source: Mapping[str, Any]) -> str:
    if source["connected"]:
        return ""
    since = "" if source["away_s"] is None else f" for {duration(source['away_s'])}"
    return f"the broker does not answer{since}; what is shown was heard before"


def _node_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    heard = f"{duration(row['heard_s'])} ago"
    return (
        ("! " if row["alarms"] else "") + short_id(row["id"]),
        str(row["role"]),
        _number(row["round"]),
        _number(row["reward"], 3),
        _number(row["foreign_groups"]),
        _rate(row["in_bytes_per_s"]),
        _rate(row["out_bytes_per_s"]),
        f"gone, {heard}" if row["gone"] else heard,
    )


def _rate(value: float | None) -> str:
    return "–" if value is None else amount(value, "B/s")


def _number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _spread(head: Mapping[str, Any]) -> str:
    low, high = head["round_low"], head["round_high"]
    return "" if low == high else f" ({_number(low)} to {_number(high)})"


def _counted(roles: Mapping[str, int]) -> str:
    return ", ".join(_count(count, role) for role, count in sorted(roles.items())) or "none"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _values(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
