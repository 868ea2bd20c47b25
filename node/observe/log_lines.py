"""The output of `swarm-node join --log json`: one JSON object a line, for log collectors."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TextIO

from rich.console import Console

from node.observe.event_log import Record, json_line, record_line
from node.observe.live import LiveView
from node.observe.progress_bars import Work

SAID: Final = "said"  # what is for people: addresses, what a start takes
NOTE: Final = "note"  # an alarm, or what a node says of its state
DETAIL: Final = "detail"  # with --verbose alone


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


# `swarm-node join --verbose`: what the network layers log, among a node's own lines.

LINES_PER_S_MAX: Final = 50
PACKAGES: Final = ("swarm", "node")

Tell = Callable[[str], None]


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
