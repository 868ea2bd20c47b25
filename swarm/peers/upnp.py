"""Port forwarding at the home router (UPnP). miniupnpc blocks, so one thread calls it with a
time limit."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import miniupnpc
import trio

from swarm.limits.address_blocks import GLOBAL, reach_of_ip

SEARCH_MS: Final = 2_000  # wait for routers
CALL_TIMEOUT_S: Final = 15.0  # for one whole conversation
LEASE_S: Final = 3_600
AGAIN_S: Final = 600.0  # retry without a router or after a refusal
NAME: Final = "swarm-node"

_limiter: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("port_mapping")


class NoRouter(Exception):
    """No router forwards ports; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """A forwarded port, the same on both sides. Not `is_public`: another router is in front."""

    external_ip: str
    port: int

    @property
    def is_public(self) -> bool:
        return reach_of_ip(self.external_ip) == GLOBAL


def _router(interface: str | None) -> Any:
    """The router on the local network. `interface` is an IP address of ours; None: any."""
    upnp = miniupnpc.UPnP(multicastif=interface, discoverdelay=SEARCH_MS)
    try:
        upnp.discover()
        upnp.selectigd()
    except Exception as error:  # noqa: BLE001  what miniupnpc raises is Exception itself
        # Without a router it names the last system error, which may be none.
        why = str(error)
        raise NoRouter("none answers" if why in ("", "Success") else why) from None
    return upnp


def _map(port: int, interface: str | None) -> Mapping:
    upnp = _router(interface)
    external_ip = upnp.externalipaddress()
    upnp.addportmapping(port, "TCP", upnp.lanaddr, port, NAME, "", LEASE_S)
    return Mapping(str(external_ip), port)


def _unmap(port: int, interface: str | None) -> None:
    _router(interface).deleteportmapping(port, "TCP")


async def _in_thread(
    call: Callable[[int, str | None], Any], port: int, interface: str | None
) -> Any:
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(1)
        _limiter.set(limiter)
    try:
        with trio.fail_after(CALL_TIMEOUT_S):
            return await trio.to_thread.run_sync(
                call, port, interface, abandon_on_cancel=True, limiter=limiter
            )
    except trio.TooSlowError:
        raise NoRouter(f"no answer within {CALL_TIMEOUT_S:.0f} s") from None
    except Exception as error:
        if type(error) is not Exception:  # `NoRouter`, or a fault of ours
            raise
        raise NoRouter(f"the router refuses: {error}") from None


async def map_port(port: int, interface: str | None = None) -> Mapping:
    mapping: Mapping = await _in_thread(_map, port, interface)
    return mapping


async def keep_mapped(
    port: int, report: Callable[[Mapping | None], None], interface: str | None = None
) -> None:
    """Keep a port forwarded until cancelled, then remove it. `report` is called on each change."""
    before: Mapping | None = None
    try:
        while True:
            mapping = None
            with suppress(NoRouter):
                mapping = await map_port(port, interface)
            if mapping != before:
                report(mapping)
            before = mapping
            await trio.sleep(AGAIN_S if mapping is None else LEASE_S / 2)
    finally:
        if before is not None:
            with trio.move_on_after(CALL_TIMEOUT_S / 5, shield=True):
                with suppress(NoRouter):  # the lease expires anyway
                    await _in_thread(_unmap, port, interface)
