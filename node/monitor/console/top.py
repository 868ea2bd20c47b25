"""`swarm-node top`: a node, or the swarm that a broker knows of, drawn anew each second."""

import math
import os
import secrets
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Final, Protocol

import trio
from rich.console import Console
from rich.live import Live

from node.monitor.console.top_view import (
    SPARK_POINTS,
    WIDTH_COLUMNS,
    Screen,
    node_screen,
    render,
    swarm_screen,
)
from node.monitor.status import fetch_status
from node.records.records import StatusSnapshot
from swarm.errors import SwarmError, TransportError, first_of
from swarm.telemetry.broker_address import Broker
from swarm.telemetry.dashboard.listening import Listening
from swarm.telemetry.dashboard.state import DashboardState
from swarm.telemetry.fleet_view import Watch

INTERVAL_S: Final = 1.0
GATHER_S: Final = 3.0  # to hear of all nodes once, where there is no terminal
STATUS_TIMEOUT_S: Final = 2.0
KEY_BYTES: Final = 64
LEAVE_KEYS: Final = b"qQ\x03"
REWARDS_MAX: Final = SPARK_POINTS


class Looks(Protocol):
    """A source of screens for `top`."""

    async def run(self) -> None:
        """Background work, until cancelled."""

    async def look(self) -> Screen:
        """The screen at this moment."""


class LocalNode:
    """The node on a data directory, by its status socket."""

    def __init__(self, data_dir: Path, now_s: Callable[[], float] = trio.current_time) -> None:
        self._data_dir = data_dir
        self._now_s = now_s
        self._last: StatusSnapshot | None = None
        self._asked_s = -math.inf
        self._taken: deque[float] = deque(maxlen=SPARK_POINTS)
        self._given: deque[float] = deque(maxlen=SPARK_POINTS)
        self._rewards: deque[float] = deque(maxlen=REWARDS_MAX)

    async def run(self) -> None:
        await trio.sleep_forever()

    async def look(self) -> Screen:
        """
        Raises:
            SwarmError: no node answers, and none did before.
        """
        trouble = ""
        try:
            self._note(await trio.to_thread.run_sync(self._fetch))
        except SwarmError as error:
            if self._last is None:
                raise
            trouble = str(error)
        assert self._last is not None
        return node_screen(
            self._last, tuple(self._taken), tuple(self._given), tuple(self._rewards), trouble
        )

    def _fetch(self) -> StatusSnapshot:
        return fetch_status(self._data_dir, timeout_s=STATUS_TIMEOUT_S)

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

    async def run(self) -> None:
        await self._listening.run()

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


def top(what: Looks, console: Console) -> int:
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


def look_at(data_dir: Path, broker: Broker | None) -> Looks:
    """The swarm that a broker knows of, if one is named; else the node of a data directory."""
    if broker is None:
        return LocalNode(data_dir)
    return WholeSwarm(broker, unix_s=time.time, rng=Random(secrets.randbits(64)))


async def _print_once(what: Looks, console: Console) -> None:
    plain = Console(width=WIDTH_COLUMNS, color_system=None, file=console.file)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(what.run)
        if isinstance(what, WholeSwarm):
            await trio.sleep(GATHER_S)
            what.check()
        plain.print(render(await what.look()))
        nursery.cancel_scope.cancel()


async def _show(what: Looks, console: Console) -> None:
    first = await what.look()  # before the screen is taken: what is wrong is said where it stays
    live = Live(console=console, screen=True, auto_refresh=False)
    with (
        # Caught before the terminal is changed: who leaves gives it back as it was.
        trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals,
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
