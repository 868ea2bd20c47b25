"""The screen of `swarm-node top`: one node or a whole swarm, in 80 columns. Pure."""

import math
import os
import secrets
import sys
import termios
import time
import tty
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from textwrap import wrap
from typing import Any, Final

import trio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from node.observe import figures
from node.observe.records import StatusSnapshot
from node.observe.status import fetch_status
from node.observe.text_format import (
    WIDTH_COLUMNS,
    amount,
    bar_chart,
    counted,
    duration,
    percent,
    printable,
    said,
    short_id,
    terminal_width,
)
from swarm.errors import SwarmError, TransportError, first_of
from swarm.leaving import leave_signals
from swarm.telemetry.broker_address import Broker
from swarm.telemetry.dashboard.listening import Listening
from swarm.telemetry.dashboard.page_state import DashboardState
from swarm.telemetry.fleet_view import Watch

SPARK_POINTS: Final = 24
ALARMS_SHOWN: Final = 4
ALARM_CHARS_MAX: Final = 400
VERSIONS_SHOWN: Final = 3
ROWS_PLAIN: Final = 32  # of the table, where there is no terminal whose height would say it


@dataclass(frozen=True, slots=True)
class Screen:
    """All that is drawn. `trouble`: why what is shown may be old; empty: it is not. `alarms` are
    what is so and what to do, most urgent first. Texts may be strangers'."""

    title: str
    trouble: str
    alarms: tuple[tuple[str, str], ...]
    facts: tuple[tuple[str, str], ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def render(screen: Screen, height: int | None = None) -> RenderableType:
    """The screen, `WIDTH_COLUMNS` wide; its table leaves what does not fit into `height` lines."""
    parts: list[RenderableType] = [_cut(screen.title, "bold")]
    if screen.trouble:
        parts.append(_cut(f"! {screen.trouble}", "bold red"))
    room = math.inf if height is None else height - len(screen.facts) - ALARMS_SHOWN - 6
    for text, advice in screen.alarms[:ALARMS_SHOWN]:
        told, advised = _wrapped(f"! {text}"), _wrapped(advice)
        room -= len(told) + len(advised) - 1
        whole = room >= 0
        parts += [_cut(line, "bold yellow") for line in (told if whole else [f"! {text}"])]
        parts += [_cut(f"  {line}", "yellow") for line in advised if whole]
    if len(screen.alarms) > ALARMS_SHOWN:
        parts.append(_cut(f"  and {len(screen.alarms) - ALARMS_SHOWN} more alarms", "yellow"))
    parts += [Text(), figures.facts_table(screen.facts), Text()]
    used = len(parts) + len(screen.facts) + 1  # one of the parts is all facts, and a line for keys
    rows = ROWS_PLAIN if height is None else max(0, height - used - 2)
    parts.append(_rows(screen, rows))
    return Group(*parts)


def _wrapped(text: str) -> list[str]:
    return wrap(printable(text, ALARM_CHARS_MAX), WIDTH_COLUMNS - 2)


def _cut(text: str, style: str) -> Text:
    return Text(printable(text, WIDTH_COLUMNS), style=style, no_wrap=True, overflow="ellipsis")


def _rows(screen: Screen, room: int) -> RenderableType:
    if not screen.rows:
        return Text("nobody yet", style="dim")
    shown = screen.rows if len(screen.rows) <= room else screen.rows[: max(0, room - 1)]
    return figures.rows_table(screen.columns, shown, len(screen.rows) - len(shown))


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
    others = len(counted) - VERSIONS_SHOWN
    return ", ".join(shown) + (f" and {others} others" if others > 0 else "")


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
        ("now", figures.now_line(s)),
        *figures.done_lines(s, rewards[-SPARK_POINTS:]),
        ("traffic", traffic(taken, given)),
        *figures.pool_lines(s),
        *figures.credit_lines(s),
        ("peers", f"{len(s.peers)}, {len(s.bans)} banned"),
        ("versions", versions([s.agent, *(peer.agent for peer in s.peers)])),
    )
    peers = sorted(s.peers, key=lambda peer: (-peer.groups_trained, peer.peer_id))
    return Screen(
        title=f"swarm-node {short_id(s.peer_id)}  {s.run_id}, up {duration(s.uptime_s)}",
        trouble=trouble,
        alarms=tuple((note, "") for note in s.notes),
        facts=facts,
        columns=("peer", *figures.PEER_COLUMNS, "runs"),
        rows=tuple((*figures.peer_cells(peer), peer.agent) for peer in peers),
    )


# --- a swarm -----------------------------------------------------------------------------------


def swarm_screen(state: Mapping[str, Any]) -> Screen:
    """All nodes that report, from the state of the web page (`dashboard.page_state`)."""
    head, source = state["headline"], state["source"]
    rows = [
        dict(zip(state["nodes"]["columns"], row, strict=True)) for row in state["nodes"]["rows"]
    ]
    recent = state["history"]["recent"]
    rewards = bar_chart(_values(recent["reward"])[-SPARK_POINTS:])
    runs = ", ".join(state["runs"]) or "no run yet"
    gone = f", {head['gone']} gone" if head["gone"] else ""
    roles = [counted(count, f"{role}s") for role, count in sorted(head["roles"].items())]
    facts = (
        ("nodes", f"{head['present']} report{gone}; {', '.join(roles) or 'none'}"),
        ("round", f"{said(head['round'], ',.0f')}{_spread(head)}"),
        ("reward", f"{said(head['reward'], ',.3f')}  {rewards}"),
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
            (f"{each['text']} ({counted(each['count'], 'nodes')})", each["advice"])
            for each in state["alarms"]["shown"]
        ),
        facts=facts,
        columns=("node", "role", "round", "reward", "J", "in", "out", "heard"),
        rows=tuple(_node_row(row) for row in rows),
    )


def _foreign(head: Mapping[str, Any]) -> str:
    if head["foreign_wanted"] is None:
        return "–"
    taken, wanted = (said(head[name], ",.1f") for name in ("foreign_groups", "foreign_wanted"))
    return f"{taken} of {wanted} foreign groups a round"


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
        said(row["round"], ",.0f"),
        said(row["reward"], ",.3f"),
        said(row["foreign_groups"], ",.0f"),
        amount(row["in_bytes_per_s"], "B/s"),
        amount(row["out_bytes_per_s"], "B/s"),
        f"gone, {heard}" if row["gone"] else heard,
    )


def _spread(head: Mapping[str, Any]) -> str:
    low, high = head["round_low"], head["round_high"]
    return "" if low == high else f" ({said(low, ',.0f')} to {said(high, ',.0f')})"


def _values(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


# `swarm-node top`: a node, or the swarm that a broker knows of, drawn anew each second.

INTERVAL_S: Final = 1.0
GATHER_S: Final = 3.0  # to hear of all nodes once, where there is no terminal
STATUS_TIMEOUT_S: Final = 2.0
KEY_BYTES: Final = 64
LEAVE_KEYS: Final = b"qQ\x03"


class LocalNode:
    def __init__(self, data_dir: Path, now_s: Callable[[], float] = trio.current_time) -> None:
        self._data_dir = data_dir
        self._now_s = now_s
        self._last: StatusSnapshot | None = None
        self._asked_s = -math.inf
        self._taken: deque[float] = deque(maxlen=SPARK_POINTS)
        self._given: deque[float] = deque(maxlen=SPARK_POINTS)
        self._rewards: deque[float] = deque(maxlen=SPARK_POINTS)

    async def run(self) -> None:
        await trio.sleep_forever()

    async def look(self) -> Screen:
        """
        Raises:
            SwarmError: no node answers, and none did before.
        """
        trouble = ""
        try:
            fetch = partial(fetch_status, self._data_dir, timeout_s=STATUS_TIMEOUT_S)
            self._note(await trio.to_thread.run_sync(fetch))
        except SwarmError as error:
            if self._last is None:
                raise
            trouble = str(error)
        assert self._last is not None
        return node_screen(
            self._last, tuple(self._taken), tuple(self._given), tuple(self._rewards), trouble
        )

    def _note(self, snapshot: StatusSnapshot) -> None:
        last, now_s = self._last, self._now_s()
        elapsed_s = now_s - self._asked_s
        if last is not None and snapshot.uptime_s >= last.uptime_s and elapsed_s > 0:
            self._taken.append(max(0, snapshot.bytes_in - last.bytes_in) / elapsed_s)
            self._given.append(max(0, snapshot.bytes_out - last.bytes_out) / elapsed_s)
        if snapshot.own_reward is not None and (last is None or snapshot.round != last.round):
            self._rewards.append(snapshot.own_reward)
        self._last, self._asked_s = snapshot, now_s


class WholeSwarm:
    """All nodes that report to a broker."""

    def __init__(self, broker: Broker, *, unix_s: Callable[[], float], rng: Random) -> None:
        self._watch = Watch()
        self._state = DashboardState()
        self._unix_s = unix_s
        self._listening = Listening(broker, self._watch, unix_s=unix_s, rng=rng)
        self.run = self._listening.run

    async def look(self) -> Screen:
        now_s = self._unix_s()
        source = self._listening.source()
        return swarm_screen(self._state.look(self._watch.nodes(now_s), {}, source, now_s))

    def check(self) -> None:
        """
        Raises:
            SwarmError: the broker did not answer by now.
        """
        source = self._listening.source()
        if not source.connected:
            why = self._listening.failure or f"no answer within {GATHER_S:.0f} s"
            raise TransportError(f"{source.name}: {why}; start it, or name another with --broker")


def top(what: LocalNode | WholeSwarm, console: Console) -> int:
    """Show it until `q` or Ctrl-C; without a terminal print it once, plainly. The exit status.

    Raises:
        SwarmError: there is nothing to show.
    """
    drawn = console.is_terminal and sys.stdin.isatty()
    try:
        trio.run(_show if drawn else _print_once, what, console)
    except* SwarmError as group:
        raise first_of(group) from None
    return 0


def look_at(data_dir: Path, broker: Broker | None) -> LocalNode | WholeSwarm:
    """The swarm that a broker knows of, if one is named; else the node of a data directory."""
    if broker is None:
        return LocalNode(data_dir)
    return WholeSwarm(broker, unix_s=time.time, rng=Random(secrets.randbits(64)))


async def _print_once(what: LocalNode | WholeSwarm, console: Console) -> None:
    plain = Console(width=terminal_width(), color_system=None, file=console.file)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(what.run)
        if isinstance(what, WholeSwarm):
            await trio.sleep(GATHER_S)
            what.check()
        plain.print(render(await what.look()))
        nursery.cancel_scope.cancel()


async def _show(what: LocalNode | WholeSwarm, console: Console) -> None:
    first = await what.look()  # before the screen is taken: what is wrong is said where it stays
    live = Live(console=console, screen=True, auto_refresh=False)
    with (
        # Caught before the terminal changes, so that leaving restores it.
        leave_signals() as signals,
        _single_keys(sys.stdin.fileno()),
        live,
    ):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(what.run)
            nursery.start_soon(_leave_on_key, sys.stdin.fileno(), nursery.cancel_scope)
            nursery.start_soon(_leave_on_signal, signals, nursery.cancel_scope)
            screen = first
            while True:
                live.update(render(screen, console.height), refresh=True)
                await trio.sleep(INTERVAL_S)
                screen = await what.look()


@contextmanager
def _single_keys(terminal: int) -> Iterator[None]:
    """Keys come one by one and are not shown; afterwards all is as it was."""
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


async def _leave_on_key(terminal: int, scope: trio.CancelScope) -> None:
    while True:
        await trio.lowlevel.wait_readable(terminal)
        keys = os.read(terminal, KEY_BYTES)
        if not keys or any(key in LEAVE_KEYS for key in keys):
            scope.cancel()
            return


async def _leave_on_signal(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    async for _ in signals:
        scope.cancel()
