"""`swarm-node monitor`: a web page of the swarm, and a broker for it if there is none."""

import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from random import Random
from typing import Final

import trio

from node.system.caches import cache_directory
from node.system.child_process import end_with_input, start_child
from swarm.errors import ChildFailed, ConfigError, first_of
from swarm.leaving import leave_when_asked
from swarm.telemetry.broker_address import PORT, Broker
from swarm.telemetry.dashboard.listening import Listening
from swarm.telemetry.dashboard.page_server import PORT_DEFAULT, serve
from swarm.telemetry.fleet_view import Watch
from swarm.telemetry.web_hosts import checked_name

EMBEDDED: Final = "embedded"
BROKER_LISTEN: Final = f"127.0.0.1:{PORT}"
PAGE_LISTEN: Final = f"127.0.0.1:{PORT_DEFAULT}"
STARTS_TIMEOUT_S: Final = 30.0
ENDS_TIMEOUT_S: Final = 3.0
READ_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class MonitorOptions:
    """Options of `swarm-node monitor`. `broker`: a URL, or `embedded` for one of its own at
    `broker_listen`. `run_id` None: all runs on the broker."""

    broker: str = EMBEDDED
    broker_listen: str = BROKER_LISTEN
    broker_ca: Path | None = None
    password: str | None = None
    listen: str = PAGE_LISTEN
    run_id: str | None = None
    names: Sequence[str] = ()  # further ones of the page


def monitor(options: MonitorOptions, say: Callable[[str], None]) -> int:
    """Watch until interrupted. Returns the exit status.

    Raises:
        ConfigError: bad input, or an address that cannot be listened on.
        ChildFailed: the embedded broker has ended.
    """
    if options.broker != EMBEDDED and options.broker_listen != BROKER_LISTEN:
        raise ConfigError("--broker-listen: of use with --broker embedded alone")
    if options.broker == EMBEDDED and not _is_loopback(options.broker_listen):
        raise ConfigError(
            f"--broker-listen {options.broker_listen}: the embedded broker listens on loopback "
            "alone; for other machines run mosquitto, and name it with --broker mqtt://HOST"
        )
    try:
        trio.run(_monitor, options, say)
    except* (ConfigError, ChildFailed) as group:
        raise first_of(group) from None
    return 0


def _is_loopback(listen: str) -> bool:
    host = Broker.parse(f"mqtt://{listen}").host
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _monitor(options: MonitorOptions, say: Callable[[str], None]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave_when_asked, nursery.cancel_scope)
        async with _broker(options) as broker:
            watch, rng = Watch(options.run_id), Random(secrets.randbits(64))
            listening = Listening(broker, watch, unix_s=time.time, rng=rng)
            page = partial(
                serve,
                watch,
                options.listen,
                listening.source,
                unix_s=time.time,
                counters=listening.counters,
                names=[checked_name(name) for name in options.names],
                keep=_kept_file(broker, options.run_id),
            )
            async with trio.open_nursery() as services:
                services.start_soon(listening.run)
                url = await services.start(page)
                say(f"nodes report here when they are started with --telemetry {broker}")
                say(f"the page is at {url}")


def _kept_file(broker: Broker, run_id: str | None) -> Path:
    """The file in the user's cache for the page of a broker and a run."""
    name = hashlib.sha256(f"{broker} {run_id or ''}".encode()).hexdigest()[:16]
    return cache_directory(None) / "monitor" / f"{name}.json"


def _broker(options: MonitorOptions) -> AbstractAsyncContextManager[Broker]:
    if options.broker == EMBEDDED:
        return embedded_broker(options.broker_listen)
    named = Broker.parse(options.broker, password=options.password, ca_file=options.broker_ca)
    return nullcontext(named)


async def _end_with(process: trio.Process) -> None:
    status = await process.wait()
    raise ChildFailed(
        f"the embedded broker has ended (status {status}): start this again, or take a broker of "
        "its own, such as mosquitto, with --broker"
    )


@asynccontextmanager
async def embedded_broker(listen: str) -> AsyncIterator[Broker]:
    """A broker in a child process, listening at `host:port`, for the block.

    Raises:
        ConfigError: it is no address, or it is taken.
        ChildFailed: in a group: it ended within the block. Not within `STARTS_TIMEOUT_S` up: alone.
    """
    broker = Broker.parse(f"mqtt://{listen}")
    module = "node.observe.embedded_broker"
    process = await start_child(["-m", module, broker.host, str(broker.port)])
    assert process.stdout is not None
    try:
        said: bytes | bytearray = b""
        with trio.move_on_after(STARTS_TIMEOUT_S) as starting:
            said = await process.stdout.receive_some(READ_BYTES)
        if starting.cancelled_caught:
            raise ChildFailed(f"the embedded broker did not start within {STARTS_TIMEOUT_S:g} s")
        if not said:
            raise ConfigError(
                f"--broker-listen {listen}: cannot be listened on; choose another port"
            )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_end_with, process)
            yield broker
            nursery.cancel_scope.cancel()
    finally:
        await end_with_input(process, ENDS_TIMEOUT_S)
