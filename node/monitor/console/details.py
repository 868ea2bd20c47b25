"""`swarm-node join --verbose`: what the network layers log, among a node's own lines.

Much of it is of strangers' doing, so that there is a bound to the lines of a second.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

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
            self._tell_left_out()
            self._second, self._lines = second, 0
        if self._lines >= LINES_PER_S_MAX:
            self._left_out += 1
            return
        self._lines += 1
        self._tell(f"{record.levelname.lower()} {record.name}: {record.getMessage()}")

    def _tell_left_out(self) -> None:
        if self._left_out:
            self._tell(f"left out: {self._left_out} lines of a second that had too many")
        self._left_out = 0


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
