"""`swarm-coordinator dashboard`: the page, fed by a broker, with guarded actions."""

import functools
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import trio

from coordinator.overrides import drain, set_depth
from coordinator.view import is_known, known_names
from swarm.errors import ConfigError, first_of
from swarm.telemetry.broker_address import Broker
from swarm.telemetry.dashboard.listening import Listening
from swarm.telemetry.dashboard.page_server import Guarded, serve
from swarm.telemetry.fleet_view import Watch
from swarm.telemetry.reports import NAME_CHARS_MAX

NAMES_TOLD_MAX: Final = 8


def guarded_by(token: str, data_dir: Path) -> Guarded:
    """Actions on the coordinator of a data directory, for users with the token.

    Raises:
        ConfigError: the token is too short.
    """

    def write(wish: Callable[[], None]) -> None:
        try:
            wish()
        except OSError as error:
            raise ConfigError(
                f"it could not be written down: {error}; nothing has changed"
            ) from None

    def drained(wanted: Mapping[str, Any], *, undo: bool) -> str:
        name = wanted.get("worker")
        if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
            raise ConfigError("worker: must be its name or peer id")
        if not undo:
            _check_known(data_dir, name)
        write(lambda: drain(data_dir, name, undo=undo))
        return f"{name} {'may work again' if undo else 'gets no more work'}"

    def paced(wanted: Mapping[str, Any]) -> str:
        depth = wanted.get("depth")
        write(lambda: set_depth(data_dir, depth))
        return "the depth is found again" if depth is None else f"planned for {depth} steps"

    return Guarded(
        token,
        {
            "drain": functools.partial(drained, undo=False),
            "activate": functools.partial(drained, undo=True),
            "depth": paced,
        },
    )


def _check_known(data_dir: Path, name: str) -> None:
    """
    Raises:
        ConfigError: the coordinator has seen no such worker.
    """
    if is_known(data_dir, name):
        return
    known = known_names(data_dir)
    more = f" and {len(known) - NAMES_TOLD_MAX} more" if len(known) > NAMES_TOLD_MAX else ""
    names = ", ".join(known[:NAMES_TOLD_MAX]) + more if known else "none yet"
    raise ConfigError(f"{name}: the coordinator here has seen no such worker; known: {names}")


def dashboard(
    broker: Broker,
    listen: str,
    guarded: Guarded | None,
    say: Callable[[str], None],
    names: Sequence[str],
) -> None:
    """Show what nodes report to a broker until SIGINT or SIGTERM. `names`: as of `WebHosts`.

    Raises:
        ConfigError: it cannot listen there, or the broker's certificates cannot be read.
    """
    watch, rng = Watch(), Random(secrets.randbits(64))
    listening = Listening(broker, watch, unix_s=time.time, rng=rng)
    page = functools.partial(
        serve,
        watch,
        listen,
        listening.source,
        unix_s=time.time,
        counters=listening.counters,
        guarded=guarded,
        names=names,
    )

    async def show() -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(listening.run)
                url = await nursery.start(page)
                say(f"the page is at {url}; nodes report with --telemetry {broker}")
                async for _ in signals:
                    nursery.cancel_scope.cancel()

    try:
        trio.run(show)
    except* ConfigError as group:
        raise first_of(group) from None
