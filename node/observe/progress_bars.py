"""Progress bars in a terminal, drawn by rich: as part of `LiveView`, or on standard error."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Timer
from typing import Final

from rich import progress as rich_progress
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from node.observe.text_format import amount
from swarm.weights.broadcast import Sharing
from swarm.weights.weights_service import VersionProgress

SHOWN_AFTER_S: Final = 1.0  # what is over sooner shows no bar
WORKS_MAX: Final = 8  # bars at a time
NAME_CHARS_MAX: Final = 60
NOTE_CHARS_MAX: Final = 60


@dataclass(frozen=True, slots=True)
class Work:
    """A long operation with its own name. `total` None: unknown. `note`: text beside the bar."""

    name: str
    done: float = 0.0
    total: float | None = None
    note: str = ""


class _Time(rich_progress.TimeElapsedColumn):
    """The time left, or, if it is unknown, the time elapsed."""

    def render(self, task: rich_progress.Task) -> Text:
        if task.finished or task.time_remaining is None:
            return super().render(task)
        left = timedelta(seconds=int(task.time_remaining))
        return Text(f"{left} left", style="progress.remaining", no_wrap=True)


class _Bars(rich_progress.Progress):
    """Rich's, without operations that have just begun."""

    def make_tasks_table(self, tasks: Iterable[rich_progress.Task]) -> Table:
        return super().make_tasks_table(
            [task for task in tasks if (task.elapsed or 0.0) >= SHOWN_AFTER_S]
        )


class Bars:
    """Progress bars. One thread at a time may call; a thread of rich's own redraws."""

    def __init__(self, console: Console, *, drawn_by_caller: bool = False) -> None:
        """`console`: where bars are drawn if it is a terminal; see `on_stderr`. With
        `drawn_by_caller` whoever has a live display there draws `renderable`."""
        self._drawn_by_caller = drawn_by_caller
        self._console = console
        self._enabled = console.is_terminal
        self._tasks: dict[str, rich_progress.TaskID] = {}
        self._progress = _Bars(
            rich_progress.TextColumn("{task.description}", markup=False),
            rich_progress.BarColumn(),
            rich_progress.TaskProgressColumn(),
            rich_progress.TextColumn("{task.fields[note]}", markup=False),
            _Time(),
            console=console,
            transient=True,
            auto_refresh=not drawn_by_caller,
            redirect_stdout=sys.stdout.isatty(),  # else its lines would go where bars are drawn
            disable=not self._enabled,
        )

    @property
    def renderable(self) -> RenderableType | None:
        """The bars to draw; None: nothing takes long."""
        late = [task for task in self._progress.tasks if (task.elapsed or 0.0) >= SHOWN_AFTER_S]
        return self._progress.get_renderable() if late else None

    def set(self, works: Iterable[Work]) -> None:
        """Show these works, and remove the bars of all others."""
        if not self._enabled:
            return
        now = {work.name: work for work in list(works)[:WORKS_MAX]}
        for name in [name for name in self._tasks if name not in now]:
            self._progress.remove_task(self._tasks.pop(name))
        if now and not self._tasks and not self._drawn_by_caller:
            self._progress.start()
        for name, work in now.items():
            note = work.note[:NOTE_CHARS_MAX]
            if name not in self._tasks:
                title = name[:NAME_CHARS_MAX]
                self._tasks[name] = self._progress.add_task(title, total=work.total, note=note)
            self._progress.update(
                self._tasks[name], completed=work.done, total=work.total, note=note
            )
        if not now and not self._drawn_by_caller:
            self._progress.stop()

    @contextmanager
    def showing(self, name: str, *, always: bool = False) -> Iterator[Callable[[Work], None]]:
        """A bar for as long as the block lasts; `always`: one line where no bars are drawn. It
        yields a function that takes the work as it goes on."""
        say = partial(self._console.print, markup=False, highlight=False, soft_wrap=True)
        line = Timer(SHOWN_AFTER_S, say, [f"{name} …"])
        line.daemon = True
        if always and not self._enabled:
            line.start()
        self.set([Work(name)])
        try:
            yield lambda work: self.set([work])
        finally:
            line.cancel()
            self.set([])


def version_work(progress: VersionProgress) -> Work:
    note = progress.phase
    if progress.total_bytes:
        have, total = amount(progress.fetched_bytes, "B"), amount(progress.total_bytes, "B")
        note = f"{progress.phase} {have} of {total}"
    total_bytes = float(progress.total_bytes) or None
    return Work(f"version {progress.version}", float(progress.fetched_bytes), total_bytes, note)


def spread_work(sharing: Sharing, version: int) -> Work | None:
    """A version that is given on; None: nobody is known to lack it."""
    lacking = sharing.unfinished(version)
    if not lacking:
        return None
    shares, there = sharing.shares(version), sharing.finished(version)
    total = there + len(lacking)
    done = there + sum(shares.get(peer, 0.0) for peer in lacking)
    return Work(f"version {version} to peers", done, total, f"{there} of {total} have it")


def on_stderr() -> Bars:
    return Bars(Console(stderr=True))
