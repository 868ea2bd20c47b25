"""Carries IP packets between hosts by the model of `swarm.simulation.links`. Queues before both
links are bounded. `duplication` has no effect."""

import heapq
import os
import select
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from swarm.identity import PeerId
from swarm.simulation.links import LinkProfile, SimulatedLinks

QUEUE_S = 0.2  # router queue, in time at the link's rate
QUEUE_BYTES_MIN = 65_536  # and at least so many bytes
IN_FLIGHT_PACKETS_MAX = 65_536  # of all links; more are dropped
JITTER_HOLD_S = 0.02  # closely following packets share a jitter
READ_PACKETS_MAX = 64  # per host before the others are served
PACKET_BYTES_MAX = 65_536
IDLE_S = 1.0
DESTINATION = slice(16, 20)  # of an IPv4 header
IPV4 = 4


@dataclass(slots=True)
class LinkCounters:
    packets: int = 0
    bytes: int = 0
    lost: int = 0  # by chance
    overflowed: int = 0  # queue was full
    cut: int = 0  # by a partition
    astray: int = 0  # unknown destination, or not IPv4


class PacketLinks:
    """Arrival time of each packet. Stateful: packets queue behind each other."""

    def __init__(self, hosts: Mapping[str, LinkProfile], rng: Random) -> None:
        self._profiles = dict(hosts)
        self._rng = rng
        links = SimulatedLinks(LinkProfile(), {PeerId(h): p for h, p in hosts.items()})
        self._paths = {
            (a, b): links.path(PeerId(a), PeerId(b)) for a in hosts for b in hosts if a != b
        }
        self._up_busy_until_s = dict.fromkeys(hosts, 0.0)
        self._down_busy_until_s = dict.fromkeys(hosts, 0.0)
        self._last_arrival_s = dict.fromkeys(self._paths, 0.0)
        self._jitter = dict.fromkeys(self._paths, (-1.0, 0.0))  # (time of the draw, seconds)
        self._cuts: set[tuple[str, str]] = set()
        self.counters = {host: LinkCounters() for host in hosts}

    def cut(self, sources: Collection[str], targets: Collection[str]) -> None:
        self._cuts.update((a, b) for a in sources for b in targets)

    def heal(self) -> None:
        self._cuts.clear()

    def send(self, source: str, target: str, size: int, now_s: float) -> float | None:
        """Time at which a packet's last byte reaches the target's downlink. None: lost."""
        path, counters = self._paths[source, target], self.counters[source]
        counters.packets += 1
        counters.bytes += size
        if (source, target) in self._cuts:
            counters.cut += 1
            return None
        depart_s = _pass(self._up_busy_until_s, source, size, path.up_bytes_per_s, now_s)
        if depart_s is None:
            counters.overflowed += 1
            return None
        if path.loss > 0.0 and self._rng.random() < path.loss:
            counters.lost += 1
            return None
        late_s = self._late(source, target, path.jitter_s, now_s) if path.jitter_s > 0.0 else 0.0
        # routers keep the order of a flow
        arrival_s = max(depart_s + path.latency_s + late_s, self._last_arrival_s[source, target])
        self._last_arrival_s[source, target] = arrival_s
        return arrival_s

    def receive(self, source: str, target: str, size: int, now_s: float) -> float | None:
        """Time at which a packet at the downlink now has passed it. None: lost."""
        rate = self._profiles[target].down_bytes_per_s
        done_s = _pass(self._down_busy_until_s, target, size, rate, now_s)
        if done_s is None:
            self.counters[source].overflowed += 1
        return done_s

    def _late(self, source: str, target: str, mean_s: float, now_s: float) -> float:
        drawn_s, late_s = self._jitter[source, target]
        if now_s - drawn_s > JITTER_HOLD_S:
            drawn_s, late_s = now_s, self._rng.expovariate(1.0 / mean_s)
        self._jitter[source, target] = (drawn_s, late_s)
        return late_s


def _pass(busy: dict[str, float], host: str, size: int, rate: float, now_s: float) -> float | None:
    """Queue a packet for a link. None: the queue is full."""
    start_s = max(now_s, busy[host])
    if (start_s - now_s) * rate + size > max(QUEUE_BYTES_MIN, QUEUE_S * rate):
        return None
    busy[host] = start_s + size / rate
    return busy[host]


class _Packet(NamedTuple):
    """Compared as a tuple for speed; `number` decides ties."""

    at_s: float
    number: int  # keeps the order of simultaneous packets
    source: str
    target: str
    content: bytes
    received: bool  # has passed the downlink


class Shaper:
    """Moves packets between the hosts' non-blocking TUN devices."""

    def __init__(
        self,
        links: PacketLinks,
        tuns: Mapping[str, int],
        addresses: Mapping[str, bytes],
        now: Callable[[], float],
    ) -> None:
        """`addresses`: four bytes per host. `now`: a monotonic clock in seconds."""
        self._links = links
        self._tuns = dict(tuns)
        self._names = {tun: host for host, tun in tuns.items()}
        self._owners = {address: host for host, address in addresses.items()}
        self._now = now
        self._waiting: list[_Packet] = []
        self._packets = 0

    def run(self, others: Sequence[int], on_other: Callable[[int], bool]) -> None:
        """Carry packets until `on_other` returns True for a readable one of `others`."""
        watched = [*self._names, *others]
        while True:
            due_s = self._waiting[0].at_s if self._waiting else self._now() + IDLE_S
            ready, _, _ = select.select(watched, [], [], max(0.0, due_s - self._now()))
            for descriptor in ready:
                if descriptor in self._names:
                    self._read_packets(descriptor)
                elif on_other(descriptor):
                    return
            self._release()

    def _read_packets(self, tun: int) -> None:
        source = self._names[tun]
        for _ in range(READ_PACKETS_MAX):
            try:
                content = os.read(tun, PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            target = self._owners.get(content[DESTINATION])
            counters = self._links.counters[source]
            if target is None or target == source or content[0] >> 4 != IPV4:
                counters.astray += 1
            elif len(self._waiting) >= IN_FLIGHT_PACKETS_MAX:
                counters.overflowed += 1
            else:
                arrival_s = self._links.send(source, target, len(content), self._now())
                if arrival_s is not None:
                    self._wait(arrival_s, source, target, content, received=False)

    def _wait(
        self, at_s: float, source: str, target: str, content: bytes, *, received: bool
    ) -> None:
        self._packets += 1
        packet = _Packet(at_s, self._packets, source, target, content, received)
        heapq.heappush(self._waiting, packet)

    def _release(self) -> None:
        now_s = self._now()
        while self._waiting and self._waiting[0].at_s <= now_s:
            packet = heapq.heappop(self._waiting)
            if packet.received:
                self._hand_over(packet)
                continue
            # by its due time, so that delay here does not slow the link
            done_s = self._links.receive(
                packet.source, packet.target, len(packet.content), packet.at_s
            )
            if done_s is not None and done_s <= now_s:
                self._hand_over(packet)
            elif done_s is not None:
                self._wait(done_s, packet.source, packet.target, packet.content, received=True)

    def _hand_over(self, packet: _Packet) -> None:
        try:
            os.write(self._tuns[packet.target], packet.content)
        except BlockingIOError:  # the host's own queue is full
            self._links.counters[packet.source].overflowed += 1
