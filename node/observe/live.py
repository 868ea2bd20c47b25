"""The output of `swarm-node join` while it runs.

In a terminal: a few lines that redraw in place, with evaluations and troubles above them. Elsewhere
one line for each event, with its time and level; bars go to standard error if it is a terminal.
"""

import math
import re
from collections import deque
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Final, Self

import trio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from node.observe import records as r
from node.observe.event_log import Record
from node.observe.figures import done_lines, facts_table, now_line, step_lines, work_lines
from node.observe.progress_bars import Bars, Work, on_stderr
from node.observe.text_format import amount, counted, duration, percent, printable, short_id

REDRAW_INTERVAL_S: Final = 0.25
REWARDS_SHOWN: Final = 32  # rounds in the small bar chart
TROUBLE_CHARS_MAX: Final = 400
DETAIL_CHARS_MAX: Final = 1000
NOTES_SHOWN_MAX: Final = 3
NOTED_AGAIN_S: Final = 600.0  # what goes on for hours is found at the end of a log, too
WARNS: Final = "! "  # how a line begins that wants attention; in a log file it has a level
UNTOLD: Final = (r.VersionComing, r.VersionSpreading)  # there are many, for the log alone
_FIGURES: Final = re.compile(r"\d+(?:[.,]\d+)*")


class LiveView:
    """A context manager; `update` and `event` are cheap and may be called as often as one likes.

    Redraws at most every `REDRAW_INTERVAL_S` of `clock`, and once more at the end. It writes to
    the console in the caller's thread and starts none.
    """

    def __init__(
        self,
        console: Console,
        interactive: bool,
        *,
        clock: Callable[[], float] = trio.current_time,
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
    ) -> None:
        """`now`: for the times of plain lines."""
        self._now = now
        self._console = console
        self._clock = clock
        self._live = Live(console=console, auto_refresh=False) if interactive else None
        self._bars = Bars(console, drawn_by_caller=True) if interactive else on_stderr()
        self._snapshot: r.StatusSnapshot | None = None
        self._drawn_at: float | None = None
        self._rewards: deque[float] = deque(maxlen=REWARDS_SHOWN)
        self._first_held_out: float | None = None
        self._noted: dict[str, float] = {}  # when it was told

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.set(())
        if self._live is not None:
            self._draw()
            self._live.stop()

    def say(self, line: str) -> None:
        """Print it above what is redrawn; one line, however narrow the terminal."""
        self._console.print(line, soft_wrap=True)

    def update(self, snapshot: r.StatusSnapshot) -> None:
        self._snapshot = snapshot
        if self._live is None:
            self._tell_notes(snapshot.notes)
        self._redraw()

    def note(self, text: str) -> None:
        """Tell what a node says of its state, such as an alarm, where nothing is redrawn."""
        self._print(Text(f"{WARNS}{printable(text, TROUBLE_CHARS_MAX)}"))

    def detail(self, text: str) -> None:
        """Tell what is of use to whoever looks for a fault. Any thread may."""
        self._print(Text(printable(text, DETAIL_CHARS_MAX), style="dim"), "DEBUG")

    def _tell_notes(self, notes: Iterable[str]) -> None:
        """Tell each note when it comes, and again if it comes back or stands for long, whatever its
        figures."""
        now = self._clock()
        standing = {_FIGURES.sub("#", text): text for text in notes}
        told = {name: self._noted.get(name, -math.inf) for name in standing}
        for name, text in standing.items():
            if now - told[name] >= NOTED_AGAIN_S:
                told[name] = now
                self.note(text)
        self._noted = told

    def _print(self, line: Text, level: str | None = None) -> None:
        """`level`: of what is a detail; of all else its first letters say it."""
        if self._live is None:
            line = dated(line, self._now(), level)
        # soft_wrap: one event stays one line wherever the output goes
        self._console.print(line, soft_wrap=True, highlight=False)

    def works(self, works: Iterable[Work]) -> None:
        self._bars.set(works)
        self._redraw()

    def _redraw(self) -> None:
        if self._live is None:
            return
        now = self._clock()
        if self._drawn_at is None or now - self._drawn_at >= REDRAW_INTERVAL_S:
            self._drawn_at = now
            self._draw()

    def event(self, record: Record) -> None:
        """Tell of something that happened. In a terminal, rounds, steps and batches show in the
        redrawn lines only."""
        if isinstance(record, r.RoundDone):
            self._rewards.append(record.own_reward)
        if isinstance(record, r.StepDone):
            self._rewards.append(record.reward)
        if isinstance(record, r.HeldOut) and self._first_held_out is None:
            self._first_held_out = record.passed
        if isinstance(record, UNTOLD):
            return
        if self._live is None or not isinstance(record, r.RoundDone | r.StepDone | r.WorkDone):
            known = None if self._snapshot is None else self._snapshot.held_out_first
            self._print(event_line(record, self._first_held_out if known is None else known))

    def _draw(self) -> None:
        if self._live is None:
            return
        shown: list[RenderableType] = []
        if self._snapshot is not None:
            shown.append(_panel(self._snapshot, tuple(self._rewards)))
        if (bars := self._bars.renderable) is not None:
            shown.append(bars)
        if shown:
            self._live.update(Group(*shown), refresh=True)


def dated(line: Text, when: datetime, level: str | None = None) -> Text:
    """A line of a log file."""
    if level is None:
        warns = line.plain.startswith(WARNS)
        level, line = ("WARNING", line[len(WARNS) :]) if warns else ("INFO", line)
    return Text.assemble(f"{when.isoformat(' ', 'seconds')} {level:<7} ", line)


def event_line(record: Record, first_held_out: float | None = None) -> Text:
    """One line for one record. `first_held_out` is the pass rate to compare evaluations with."""
    match record:
        case r.HeldOut():
            return Text(_held_out_line(record, first_held_out), style="bold")
        case r.WentBack():
            return Text(WARNS + _went_back_line(record), style="bold yellow")
        case r.Trouble(what=what) | r.StartEnded(failure=str(what)):
            return Text(f"{WARNS}{printable(what, TROUBLE_CHARS_MAX)}", style="yellow")
        case r.VersionCame(failure=str(why)):
            why = printable(why, TROUBLE_CHARS_MAX)
            return Text(f"version {record.version} did not come: {why}", style="yellow")
        case r.VersionPublished() | r.VersionSpread() | r.VersionCame():
            return Text(_version_line(record))
        case r.Started() | r.Banned() | r.StartEnded():
            return Text(_node_line(record))
        case r.RoundDone():
            return Text(_round_line(record))
        case r.StepDone():
            told = _joined(step_lines(record))
            peers = counted(record.peers, "peers")
            return Text(f"step {record.step}: reward {record.reward:.3f}; {told}; {peers}")
        case r.WorkDone():
            rate = record.generated_tokens / record.generate_s if record.generate_s > 0 else 0.0
            return Text(
                f"batch {record.batch}: version {record.policy_version} (the learner is at"
                f" {record.learner_version}); {_joined(work_lines(record, rate))}"
            )
        case _:  # there are many, for the log alone
            return Text(f"version {record.version}")


def _joined(lines: Iterable[tuple[str, str]]) -> str:
    return "; ".join(f"{name} {value}" for name, value in lines)


def _node_line(record: r.Started | r.Banned | r.StartEnded) -> str:
    if isinstance(record, r.StartEnded):
        return "the node left"
    if isinstance(record, r.Banned):
        who = record.subject if record.is_block else short_id(record.subject)
        return f"banned {printable(who, 80)}: {printable(record.why, TROUBLE_CHARS_MAX)}"
    size = f" ({amount(record.parameters)} parameters)" if record.parameters else ""
    start = f"round {record.round}" if record.round else "the beginning"
    return (
        f"{short_id(record.peer_id)} starts from {start}: run {printable(record.run_id, 80)}, "
        f"{printable(record.model, 80)}{size}, {record.engine} engine"
    )


def _held_out_line(record: r.HeldOut, first_held_out: float | None) -> str:
    first = record.passed if first_held_out is None else first_held_out
    validation = "" if record.validation is None else f", validation {percent(record.validation)}"
    return (
        f"held-out after round {record.round}: {percent(record.passed)} passed"
        f" ({100 * (record.passed - first):+.1f} points since the start, {record.tasks} tasks)"
        f"{validation}"
    )


def _went_back_line(record: r.WentBack) -> str:
    return (
        f"the policy fell to {percent(record.passed)} on the validation tasks and went back "
        f"to that of round {record.best_round} ({percent(record.best)}); it learns at "
        f"{percent(record.rate_share)} of its rate"
    )


def _version_line(record: r.VersionPublished | r.VersionSpread | r.VersionCame) -> str:
    match record:
        case r.VersionPublished():
            delta = "" if record.delta_bytes is None else f", or {amount(record.delta_bytes, 'B')}"
            return (
                f"version {record.version} is on offer: {amount(record.full_bytes, 'B')}{delta},"
                f" made in {record.made_s:.1f} s"
            )
        case r.VersionSpread():
            peers = counted(record.peers, "peers")
            return f"version {record.version} is at {peers} after {record.spread_s:.1f} s"
        case r.VersionCame():
            return (
                f"version {record.version} serves: {amount(record.fetched_bytes, 'B')} fetched in"
                f" {record.fetch_s:.1f} s, patched in {record.patch_s:.1f} s,"
                f" paused {record.paused_s:.2f} s"
            )


def _round_line(record: r.RoundDone) -> str:
    own = f"{record.own_taught} of " if record.own_taught != record.local_groups else ""
    rescued = f" ({record.rescued_groups} rescued)" if record.rescued_groups else ""
    kept = f" and {record.kept_tokens:,} of drafts" if record.drafted_tokens else ""
    what = f"made {record.local_groups}"
    if record.trained_tokens_total:
        foreign = f"{record.external_groups} foreign"
        what = f"trained on {own}{record.local_groups} own{rescued} and {foreign}"
    return (
        f"round {record.round}: own reward {record.own_reward:.3f},"
        f" {what} groups, shared {record.groups_shared}, {record.generated_tokens:,} tokens{kept},"
        f" {record.generate_s:.1f}+{record.score_s:.1f}+{record.train_s:.1f} s"
        f" (generate+score+train), {counted(record.peers, 'peers')}"
    )


def _panel(s: r.StatusSnapshot, rewards: tuple[float, ...]) -> RenderableType:
    pool = f"{s.accepted} groups in, {sum(s.rejected.values())} rejected, "
    swarm = (
        f"{counted(len(s.peers), 'peers')}, {pool if s.role == 'node' else ''}"
        f"{amount(s.bytes_in, 'B')} in, {amount(s.bytes_out, 'B')} out"
    )
    now = f"{now_line(s)}, up {duration(s.uptime_s)}"
    table = facts_table([("now", now), *done_lines(s, rewards), ("swarm", swarm)])
    shown = [printable(note, TROUBLE_CHARS_MAX) for note in s.notes[:NOTES_SHOWN_MAX]]
    notes = [Text(f"{WARNS}{note}", style="yellow") for note in shown]
    title = Text(f"swarm-node {short_id(s.peer_id)}", style="bold")
    return Group(title, table, *notes)
