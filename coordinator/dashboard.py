"""`swarm-coordinator dashboard`: the page, fed by a broker, with guarded actions."""

import functools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import trio

from coordinator.overrides import order_drain, set_depth
from swarm.errors import ConfigError, first_of
from swarm.leaving import leave_when_asked
from swarm.telemetry.broker_address import Broker
from swarm.telemetry.dashboard.listening import Listening
from swarm.telemetry.dashboard.page_server import Guarded, serve
from swarm.telemetry.fleet_view import Watch
from swarm.telemetry.reports import NAME_CHARS_MAX


def guarded_by(token: str, data_dir: Path) -> Guarded:
    """Actions on the coordinator of a data directory, for users with the token.

    Raises:
        ConfigError: the token is too short.
    """

    def written(wish: Callable[[], str]) -> str:
        try:
            return wish()
        except OSError as error:
            raise ConfigError(
                f"it could not be written down: {error}; nothing has changed"
            ) from None

    def drained(wanted: Mapping[str, Any], *, undo: bool) -> str:
        name = wanted.get("worker")
        if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
            raise ConfigError("worker: must be its name or peer id")
        return written(lambda: order_drain(data_dir, name, undo=undo))

    def paced(wanted: Mapping[str, Any]) -> str:
        return written(lambda: set_depth(data_dir, wanted.get("depth")))

    return Guarded(
        token,
        {
            "drain": functools.partial(drained, undo=False),
            "activate": functools.partial(drained, undo=True),
            "depth": paced,
        },
    )


def dashboard(
    broker: Broker,
    listen: str,
    guarded: Guarded | None,
    say: Callable[[str], None],
    names: Sequence[str],
) -> None:
    """Show what nodes report to a broker until asked to leave. `names`: as of `WebHosts`.

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
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave_when_asked, nursery.cancel_scope)
            nursery.start_soon(listening.run)
            url = await nursery.start(page)
            say(f"the page is at {url}; nodes report with --telemetry {broker}")

    try:
        trio.run(show)
    except* ConfigError as group:
        raise first_of(group) from None
