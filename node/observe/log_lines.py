"""The output of `swarm-node join --log json`, one JSON object a line, and `swarm-node logs`."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TextIO

import trio
from rich.console import Console

from node.observe.event_log import FILE_NAME, Record, followed, json_line, read_events, record_line
from node.observe.live import UNTOLD, LiveView, dated, event_line
from node.observe.progress_bars import Work
from node.observe.records import HeldOut
from swarm.errors import ConfigError

SAID: Final = "said"  # what is for people: addresses, what a start takes
NOTE: Final = "note"  # an alarm, or what a node says of its state
DETAIL: Final = "detail"  # with --verbose alone
Tell = Callable[[str], None]


class JsonView(LiveView):
    """As `LiveView` without a terminal; events are the lines of the event log."""

    def __init__(self, file: TextIO, **options: Any) -> None:
        super().__init__(Console(file=file), interactive=False, **options)
        self._file = file

    def say(self, line: str) -> None:
        self._write(json_line(SAID, self._unix_s(), {"text": line}))

    def works(self, works: Iterable[Work]) -> None:
        """No bars: what has begun and ended is told."""

    def event(self, record: Record) -> None:
        self._write(record_line(record, self._unix_s()))

    def note(self, text: str) -> None:
        self._write(json_line(NOTE, self._unix_s(), {"text": text}))

    def detail(self, text: str) -> None:
        self._write(json_line(DETAIL, self._unix_s(), {"text": text}))

    def _unix_s(self) -> float:
        return self._now().timestamp()

    def _write(self, line: bytes) -> None:
        self._file.write(line.decode())
        self._file.flush()


def view_of(log: str, file: TextIO) -> LiveView:
    if log == "json":
        return JsonView(file)
    console = Console(file=file)
    return LiveView(console, console.is_terminal)


# `swarm-node logs`: the event log of a data directory as lines, whether its node runs or not.

LOOK_S: Final = 0.5


def show_log(data_dir: Path, say: Tell, count: int, *, follows: bool) -> None:
    """Say the last `count` lines; `follows`: then each that comes, until cancelled."""
    path = data_dir / FILE_NAME
    if not (data_dir.is_dir() if follows else path.is_file()):
        raise ConfigError(f"--data-dir {data_dir}: no event log is here; name a node's directory")
    trio.run(_show, path, say, count, follows)


async def _show(path: Path, say: Tell, count: int, follows: bool) -> None:
    first: float | None = None
    for event in followed(path, count, UNTOLD):
        if event is None:
            if not follows:
                return
            await trio.sleep(LOOK_S)
            continue
        time_s, record = event
        if isinstance(record, HeldOut) and first is None:
            held_out = (each.passed for _, each in read_events(path) if isinstance(each, HeldOut))
            first = next(held_out, record.passed)
        when = datetime.fromtimestamp(time_s).astimezone()
        say(dated(event_line(record, first), when).plain)


# `swarm-node join --verbose`: what the network layers log, among a node's own lines.

LINES_PER_S_MAX: Final = 50
PACKAGES: Final = ("swarm", "node")


class Details(logging.Handler):
    """Tells each record as a line: level, logger and text. Records may come from any thread."""

    def __init__(self, tell: Tell) -> None:
        super().__init__(logging.DEBUG)
        self._tell = tell
        self._second = 0  # unix time
        self._lines = 0  # of that second
        self._left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`; its lock is held."""
        second = int(record.created)
        if second != self._second:
            if self._left_out:
                self._tell(f"left out: {self._left_out} lines of a second that had too many")
            self._second, self._lines, self._left_out = second, 0, 0
        if self._lines >= LINES_PER_S_MAX:
            self._left_out += 1
            return
        self._lines += 1
        self._tell(f"{record.levelname.lower()} {record.name}: {record.getMessage()}")


@contextmanager
def detailed(tell: Tell, verbose: bool) -> Iterator[None]:
    """While the block runs, all that this program's packages log is told, if `verbose`."""
    if not verbose:
        yield
        return
    handler, loggers = Details(tell), [logging.getLogger(name) for name in PACKAGES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False  # a library has given the root a handler, and each line came twice
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = True
