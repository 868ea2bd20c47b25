"""What goes wrong in a simulated network: plans of faults, drawn from a seed, and carried out.

A `Fault` says what kind of thing happens, how often, for how long and to how many hosts. `plan`
draws from a seed when exactly and to whom. `draw_faults` draws faults themselves, with each family
left out of half of all runs: a fault that only shows while others are silent is found as well.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from random import Random
from typing import Literal, get_args

import trio

from swarm.simulation.links import LinkProfile
from swarm.simulation.world import SimulatedWorld

Kind = Literal["crash", "pause", "partition", "clog", "bad_link", "stillborn"]
KINDS: tuple[Kind, ...] = get_args(Kind)
EVENTS_MAX = 10_000  # of one plan


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of trouble.

    crash: the hosts die and come back with their disks. pause: their processors stand still.
    partition: they are cut off from all others, one-way in what they send. clog: their links stand
    still. bad_link: their links lose, double, reorder and delay what they carry. stillborn: their
    connections die, and each new one while it is being admitted.
    """

    kind: Kind
    at_s: float = 0.0  # the first time
    every_s: float | None = None  # and then again; None: once
    for_s: tuple[float, float] = (10.0, 10.0)  # drawn evenly from this range
    share: float = 0.3  # of the hosts, at least one
    spread_s: float = 0.0  # each host's own begins up to this much later
    one_way: bool = False  # of a partition
    loss: float = 0.1  # this and the next four of a bad link
    duplication: float = 0.1
    reordering: float = 0.2
    latency_s: float = 0.2  # added
    jitter_s: float = 0.1  # added


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """One fault befalling some hosts, from `at_s` until `until_s` of the plan's time."""

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
    """When which hosts are hit, in order of time. All is over by `until_s`.

    A partition hits its hosts together; everything else hits each by itself.
    """
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
    """Faults for a run of that length; each kind is in every second run, so some runs are calm."""
    faults: list[Fault] = []
    for kind in KINDS:
        # The youngest kind is drawn aside: what a seed drew before it was there stays what it was.
        source = _aside(rng) if kind == "stillborn" else rng
        wanted, number = source.random() < 0.5, source.randrange(1, 3)
        for _ in range(number):
            fault = _draw_fault(kind, source, until_s)
            if wanted:
                faults.append(fault)
    return tuple(faults)


def _aside(rng: Random) -> Random:
    """A generator that follows from another and leaves it as it is."""
    copied = Random()
    copied.setstate(rng.getstate())
    return Random(copied.random())


def _draw_fault(kind: Kind, rng: Random, until_s: float) -> Fault:
    shortest = 0.5 + 5.0 * rng.random()
    fault = Fault(
        kind,
        at_s=0.6 * until_s * rng.random(),
        every_s=None if rng.random() < 0.4 else 10.0 + 0.5 * until_s * rng.random(),
        for_s=(shortest, shortest + 0.3 * until_s * rng.random()),
        share=0.05 + 0.5 * rng.random(),
        spread_s=0.0 if rng.random() < 0.5 else 20.0 * rng.random(),
        one_way=rng.random() < 0.3,
    )
    if kind == "bad_link":
        loss, duplication, reordering = (0.3 * rng.random() for _ in range(3))
        fault = replace(fault, loss=loss, duplication=duplication, reordering=reordering)
    return fault


class FaultRunner:
    """Carries out a plan in a world. Time counts from when `run` is called.

    `crash` ends a host's tasks and takes it off the network, `restart` brings it back; they belong
    to whoever knows what runs on the hosts.
    """

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
        if host in self._down:  # it lies there already
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
        healthy = self._healthy.setdefault(host, self._world.links.of(peer))
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
            if self._world.links.of(peer) is spoilt:
                self._world.links.change(peer, healthy)

        self._world.network.at(until_s, mend)
