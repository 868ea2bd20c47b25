"""The output of `swarm-node join --log json`: one JSON object a line, for log collectors."""

from collections.abc import Iterable
from typing import Any, Final, TextIO

from rich.console import Console

from node.monitor.console.live import LiveView
from node.monitor.console.progress import Work
from node.records.event_log import Record, json_line, record_line

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
        """Print the record, of whatever kind."""
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
    """The view of a node for its setting `log`."""
    if log == "json":
        return JsonView(file)
    console = Console(file=file)
    return LiveView(console, console.is_terminal)
