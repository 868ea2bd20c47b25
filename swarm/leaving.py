"""Signals by which a long-running command is asked to leave."""

import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import trio

from swarm.command import EXIT_INTERRUPTED


@contextmanager
def leave_signals() -> Iterator[AsyncIterator[int]]:
    """Ctrl-C, `kill`, and a terminal that was closed, unless `nohup` ignores that."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    with trio.open_signal_receiver(*numbers) as signals:
        yield signals


async def leave_when_asked(scope: trio.CancelScope) -> None:
    """Cancel the scope at the first signal."""
    with leave_signals() as signals:
        async for _ in signals:
            scope.cancel()


async def set_when_asked(
    leaving: trio.Event, on_asked: Callable[[], object] = lambda: None
) -> None:
    """Set the event at the first signal, and exit at once at the second. A closing terminal may
    tell of it several times, which is once."""
    with leave_signals() as signals:
        async for number in signals:
            if not leaving.is_set():
                leaving.set()
                on_asked()
            elif number != signal.SIGHUP:
                os._exit(EXIT_INTERRUPTED)  # the children end with their pipes
