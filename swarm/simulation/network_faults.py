"""Fault plans for a simulated network, drawn from a seed. Each family of faults is absent from
half of all runs, so that faults hidden by others show."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from random import Random
from typing import Annotated, Any, Literal, get_args

import trio
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from swarm.simulation.links import LinkProfile
from swarm.simulation.world import SimulatedWorld

Kind = Literal["crash", "pause", "partition", "clog", "bad_link", "stillborn"]
KINDS: tuple[Kind, ...] = get_args(Kind)
EVENTS_MAX = 10_000  # per plan


def _range(value: Any) -> Any:
    """A range of seconds; one number is a range of that alone."""
    if isinstance(value, list):
        return tuple(value)
    return (value, value) if isinstance(value, int | float) else value


def _ordered(value: tuple[float, float]) -> tuple[float, float]:
    if value[0] > value[1]:
        raise ValueError("must be the shorter time first")
    return value


Seconds = Annotated[float, Field(ge=0, le=86_400)]
Duration = Annotated[tuple[Seconds, Seconds], BeforeValidator(_range), AfterValidator(_ordered)]
Chance = Annotated[float, Field(ge=0, lt=1)]


class Fault(BaseModel):
    """One kind of fault; `[[faults]]` in the file of a scenario.

    crash      hosts die and come back with their disks
    pause      their processors stop
    partition  they are cut off from all others; one-way: in what they send
    clog       their links stall
    bad_link   their links lose, duplicate, reorder and delay
    stillborn  their connections die, new ones while being admitted
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: Kind
    at_s: Seconds = 0.0  # the first time
    every_s: Annotated[float, Field(ge=1, le=86_400)] | None = None  # period; None: once
    for_s: Duration = (10.0, 10.0)  # uniform in this range
    share: Annotated[float, Field(gt=0, le=1)] = 0.3  # of hosts, at least one
    spread_s: Seconds = 0.0  # random delay per host, up to this
    one_way: bool = False  # partition only
    loss: Chance = 0.1  # this and the next four: bad_link
    duplication: Chance = 0.1
    reordering: Chance = 0.2
    latency_s: Seconds = 0.2  # added
    jitter_s: Seconds = 0.1  # added


@dataclass(frozen=True, slots=True)
class FaultEvent:
    at_s: float
    until_s: float
    hosts: tuple[int, ...]
    fault: Fault

    @property
    def kind(self) -> Kind:
        return self.fault.kind


def plan(
    faults: Sequence[Fault], hosts: Collection[int], until_s: float, rng: Random
) -> list[FaultEvent]:
    """Fault events in order of time, up to `until_s`. Only a partition hits its hosts together."""
    events: list[FaultEvent] = []
    for fault in faults:
        at_s = fault.at_s
        while at_s < until_s and len(events) < EVENTS_MAX:
            number = min(len(hosts), max(1, ceil(fault.share * len(hosts) - 1e-9)))
            hit = sorted(rng.sample(sorted(hosts), number))
            together = fault.kind == "partition"
            for each in [tuple(hit)] if together else [(host,) for host in hit]:
                start_s = at_s + fault.spread_s * rng.random()
                end_s = start_s + fault.for_s[0] + (fault.for_s[1] - fault.for_s[0]) * rng.random()
                if start_s < until_s:
                    events.append(FaultEvent(start_s, min(end_s, until_s), each, fault))
            if fault.every_s is None:
                break
            at_s += fault.every_s
    return sorted(events, key=lambda event: (event.at_s, event.hosts))


def draw_faults(rng: Random, until_s: float) -> tuple[Fault, ...]:
    faults: list[Fault] = []
    for kind in KINDS:
        # Drawn from its own generator: older seeds keep their other faults.
        source = _aside(rng) if kind == "stillborn" else rng
        wanted, number = source.random() < 0.5, source.randrange(1, 3)
        for _ in range(number):
            fault = _draw_fault(kind, source, until_s)
            if wanted:
                faults.append(fault)
    return tuple(faults)


def _aside(rng: Random) -> Random:
    """A derived generator; leaves the original unchanged."""
    copied = Random()
    copied.setstate(rng.getstate())
    return Random(copied.random())


def _draw_fault(kind: Kind, rng: Random, until_s: float) -> Fault:
    shortest = 0.5 + 5.0 * rng.random()
    fault = Fault(
        kind=kind,
        at_s=0.6 * until_s * rng.random(),
        every_s=None if rng.random() < 0.4 else 10.0 + 0.5 * until_s * rng.random(),
        for_s=(shortest, shortest + 0.3 * until_s * rng.random()),
        share=0.05 + 0.5 * rng.random(),
        spread_s=0.0 if rng.random() < 0.5 else 20.0 * rng.random(),
        one_way=rng.random() < 0.3,
    )
    if kind == "bad_link":
        loss, duplication, reordering = (0.3 * rng.random() for _ in range(3))
        drawn = {"loss": loss, "duplication": duplication, "reordering": reordering}
        return fault.model_copy(update=drawn)
    return fault


class FaultRunner:
    """Carries out a plan. `crash` and `restart` are the caller's functions for a host."""

    def __init__(
        self,
        world: SimulatedWorld,
        events: Sequence[FaultEvent],
        crash: Callable[[int], Awaitable[None]],
        restart: Callable[[int], Awaitable[None]],
    ) -> None:
        self._world = world
        self._events = events
        self._crash = crash
        self._restart = restart
        self._down: set[int] = set()
        self._healthy: dict[int, LinkProfile] = {}

    async def run(self) -> None:
        """Return when all faults are over and every host is up."""
        start_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for event in self._events:
                await trio.sleep_until(start_s + event.at_s)
                until_s = start_s + event.until_s
                if event.kind == "crash":
                    nursery.start_soon(self._take_down, event.hosts[0], until_s)
                else:
                    self._begin(event, until_s)

    async def _take_down(self, host: int, until_s: float) -> None:
        if host in self._down:  # down already
            return
        self._down.add(host)
        await self._crash(host)
        await trio.sleep_until(until_s)
        await self._restart(host)
        self._down.discard(host)

    def _begin(self, event: FaultEvent, until_s: float) -> None:
        world, for_s = self._world, until_s - trio.current_time()
        if event.kind == "partition":
            cut = world.cut(event.hosts, one_way=event.fault.one_way)
            world.network.at(until_s, partial(world.heal, cut))
            return
        (host,) = event.hosts
        if event.kind == "pause" and host not in self._down:
            world.pause(host, for_s)
        elif event.kind == "clog":
            world.clog(host, for_s)
        elif event.kind == "stillborn":
            world.kill_newborn(host, for_s)
        elif event.kind == "bad_link":
            self._spoil(host, event.fault, until_s)

    def _spoil(self, host: int, fault: Fault, until_s: float) -> None:
        peer = self._world.peer_id(host)
        healthy = self._healthy.setdefault(host, self._world.links.profile_of(peer))
        spoilt = replace(
            healthy,
            latency_s=healthy.latency_s + fault.latency_s,
            jitter_s=healthy.jitter_s + fault.jitter_s,
            loss=max(healthy.loss, fault.loss),
            duplication=max(healthy.duplication, fault.duplication),
            reordering=max(healthy.reordering, fault.reordering),
        )
        self._world.record(f"bad link {host}")
        self._world.links.change(peer, spoilt)

        def mend() -> None:
            if self._world.links.profile_of(peer) is spoilt:
                self._world.links.change(peer, healthy)

        self._world.network.at(until_s, mend)
