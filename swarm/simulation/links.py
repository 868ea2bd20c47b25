"""Delay and loss of messages between two hosts.

A message waits for and occupies its sender's uplink. Latency and exponential jitter follow, then
the receiver's downlink. It begins with TCP's slow start; paths are not remembered, except for
`warm_s`. Gossip is lost as whole messages; in TCP transfers lost packets are sent again.
"""

import ipaddress
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

from swarm.errors import ConfigError
from swarm.identity import PeerId
from swarm.limits.address_blocks import IPV4_BITS, IPV6_BITS
from swarm.transport.memory.memory_gossip import Flight

PACKET_BYTES = 1460
OVERHEAD_BYTES = 80  # headers per message
REORDER_S_MAX = 1.0  # longest delay of a reordered message
WINDOW_BYTES = 10 * PACKET_BYTES  # TCP's initial window
STARTUP_GAIN = 2.0 / math.log(2.0)  # BBR's: doubles the rate each round trip
RETRANSMIT_AFTER_S = 0.2  # minimum; else two round trips
PROBES_MAX = 4  # last packets, whose loss only a timeout shows


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """A host's access link. Latency, jitter and loss are one way, averaged between the ends."""

    latency_s: float = 0.0
    jitter_s: float = 0.0  # mean, added to the latency
    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf
    loss: float = 0.0  # of packets, and of gossip messages
    duplication: float = 0.0  # of gossip messages
    reordering: float = 0.0  # of gossip messages, delayed behind later ones

    def __post_init__(self) -> None:
        for name in ("latency_s", "jitter_s"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"link {name} is {getattr(self, name)}: must be 0 or more")
        for name in ("up_bytes_per_s", "down_bytes_per_s"):
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"link {name} is {getattr(self, name)}: must be over 0")
        for name in ("loss", "duplication", "reordering"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"link {name} is {getattr(self, name)}: must be in [0, 1)")


class SimulatedLinks:
    """Links of all hosts and their occupation, for one `MemoryNetwork`."""

    def __init__(
        self, profile: LinkProfile, hosts: Mapping[PeerId, LinkProfile] | None = None
    ) -> None:
        """`hosts`: the hosts with another profile."""
        self._profile = profile
        self._hosts = dict(hosts or {})
        self.warm_s = 0.0  # a used path skips slow start for so long
        self._grown: dict[tuple[PeerId, PeerId], tuple[float, int]] = {}  # (warm until, bytes sent)
        self._up_busy_until_s: dict[PeerId, float] = {}
        self._down_busy_until_s: dict[PeerId, float] = {}

    def profile_of(self, host: PeerId) -> LinkProfile:
        return self._hosts.get(host, self._profile)

    def change(self, host: PeerId, profile: LinkProfile) -> None:
        self._hosts[host] = profile

    def clog(self, host: PeerId, until_s: float) -> None:
        """Stall a host's link until then; messages in flight wait, too."""
        for busy in (self._up_busy_until_s, self._down_busy_until_s):
            busy[host] = max(busy.get(host, 0.0), until_s)

    def path(self, source: PeerId, target: PeerId) -> LinkProfile:
        """Profile of one direction: source's uplink and target's downlink."""
        one, other = self.profile_of(source), self.profile_of(target)
        if one is other:
            return one
        return LinkProfile(
            latency_s=(one.latency_s + other.latency_s) / 2,
            jitter_s=(one.jitter_s + other.jitter_s) / 2,
            up_bytes_per_s=one.up_bytes_per_s,
            down_bytes_per_s=other.down_bytes_per_s,
            loss=1.0 - math.sqrt((1.0 - one.loss) * (1.0 - other.loss)),
            duplication=(one.duplication + other.duplication) / 2,
            reordering=(one.reordering + other.reordering) / 2,
        )

    def send(
        self,
        source: PeerId,
        target: PeerId,
        payload_bytes: int,
        now_s: float,
        rng: Random,
        *,
        reliable: bool,
    ) -> Flight:
        path = self.path(source, target)
        size = payload_bytes + OVERHEAD_BYTES
        packets = math.ceil(size / PACKET_BYTES)
        losses, repairs = _losses(packets, path.loss, rng) if reliable else (0, 0)
        start_s = max(now_s, self._up_busy_until_s.get(source, 0.0))
        depart_s = start_s + (size + losses * PACKET_BYTES) / path.up_bytes_per_s
        self._up_busy_until_s[source] = depart_s
        latency_s = path.latency_s
        if path.jitter_s > 0.0:
            latency_s += rng.expovariate(1.0 / path.jitter_s)
        if not reliable and path.reordering > 0.0 and rng.random() < path.reordering:
            latency_s += REORDER_S_MAX * rng.random()
        slow_s = self._slow_start_s(source, target, size, path, now_s)
        repair_s = repairs * _retransmit_s(packets, path)
        return Flight(
            first_s=start_s + latency_s,
            last_s=depart_s + latency_s + slow_s + repair_s,
            wire_bytes=size,
            copies=1 if reliable else _copies(path, rng),
            left_s=depart_s,
            slow_s=slow_s,
        )

    def _slow_start_s(
        self, source: PeerId, target: PeerId, size: int, path: LinkProfile, now_s: float
    ) -> float:
        if not self.warm_s:
            return _slow_start_s(size, path)
        until_s, before = self._grown.get((source, target), (0.0, 0))
        if until_s < now_s:
            before = 0
        # a warm path continues its growth
        slow_s = _slow_start_s(before + size, path) - _slow_start_s(before, path)
        self._grown[source, target] = (now_s + slow_s + self.warm_s, before + size)
        return slow_s

    def receive(self, target: PeerId, flight: Flight, now_s: float) -> float:
        """Time at which a message is complete whose last byte reaches the downlink now."""
        rate = self.profile_of(target).down_bytes_per_s
        # retransmission does not occupy the downlink
        start_s = max(
            now_s - (flight.last_s - flight.first_s), self._down_busy_until_s.get(target, 0.0)
        )
        done_s = max(now_s, start_s + flight.wire_bytes / rate)
        self._down_busy_until_s[target] = done_s
        return done_s


def _slow_start_s(size: int, path: LinkProfile) -> float:
    """Delay by slow start. The rate doubles each round trip from `STARTUP_GAIN * WINDOW_BYTES`:
    an exponential whose integral is the bytes sent."""
    round_trip_s = 2.0 * path.latency_s
    rate = min(path.up_bytes_per_s, path.down_bytes_per_s)
    first_bytes = STARTUP_GAIN * WINDOW_BYTES  # per round trip at the initial rate
    if round_trip_s == 0.0 or rate * round_trip_s <= first_bytes:
        return 0.0
    full_bytes = (rate * round_trip_s - first_bytes) / math.log(2.0)  # sent until the link is full
    sent_bytes = min(max(0.0, size - PACKET_BYTES), full_bytes)
    grown_s = round_trip_s * math.log2(1.0 + sent_bytes * math.log(2.0) / first_bytes)
    return grown_s - sent_bytes / rate


def _retransmit_s(packets: int, path: LinkProfile) -> float:
    """Delay until all lost packets have arrived."""
    round_trip_s = 2.0 * path.latency_s
    if packets > PROBES_MAX:
        return round_trip_s
    return max(RETRANSMIT_AFTER_S, 2.0 * round_trip_s)


def _losses(packets: int, loss: float, rng: Random) -> tuple[int, int]:
    """(Failed transmissions, rounds of retransmission), one draw per failure."""
    losses = repairs = 0
    if loss == 0.0:
        return losses, repairs
    missing = packets
    while True:
        through, failed = 0, -1
        while through + failed < missing:
            through += math.floor(math.log(1.0 - rng.random()) / math.log(1.0 - loss))
            failed += 1
        if not failed:
            return losses, repairs
        losses, repairs, missing = losses + failed, repairs + 1, failed


def _copies(path: LinkProfile, rng: Random) -> int:
    if path.loss > 0.0 and rng.random() < path.loss:
        return 0
    if path.duplication > 0.0 and rng.random() < path.duplication:
        return 2
    return 1


# Named links: Mbit/s up / down, latency one way between two such hosts.

_MBIT = 1_000_000 / 8  # bytes per second


def _profile(
    up: float, down: float, latency_ms: float, jitter_ms: float, loss: float = 0.0
) -> LinkProfile:
    return LinkProfile(latency_ms / 1e3, jitter_ms / 1e3, up * _MBIT, down * _MBIT, loss)


_GIGABIT_FIBRE = _profile(1000, 1000, 12, 1, 0.0005)
_FAST_CABLE = _profile(100, 500, 28, 3, 0.001)
_CABLE = _profile(20, 200, 28, 3, 0.001)

# name -> links of hosts 0, 1, 2 ..., repeated
PROFILES: Mapping[str, tuple[LinkProfile, ...]] = {
    "lan": (_profile(1000, 1000, 0.3, 0.05),),
    "fibre": (_profile(300, 300, 12, 1, 0.0005),),
    "cable": (_CABLE,),
    "adsl": (_profile(1, 10, 38, 5, 0.002),),
    "4g": (_profile(12, 12, 70, 20, 0.005),),
    "transatlantic": (_profile(300, 300, 57, 2, 0.005),),
    # mixed, so that smaller swarms get each kind
    "volunteer": (_GIGABIT_FIBRE, _FAST_CABLE, _CABLE, _FAST_CABLE),
}


def links_of(name: str, hosts: int) -> tuple[LinkProfile, ...]:
    """Link of each host by index; ConfigError: there is no such profile."""
    if name not in PROFILES:
        raise ConfigError(f"profile {name}: no such profile; known: {', '.join(sorted(PROFILES))}")
    mix = PROFILES[name]
    return tuple(mix[host % len(mix)] for host in range(hosts))


IPV4_RANGE: Final = ipaddress.IPv4Network("198.18.0.0/15")
IPV6_RANGE: Final = ipaddress.IPv6Network("2001:db8::/32")
IPV4_SHARE: Final = 0.5  # share of IPv4 blocks while there are any
IPV4_BLOCKS_MAX: Final = 1 << (IPV4_BITS - IPV4_RANGE.prefixlen)
IPV6_BLOCKS_MAX: Final = 1 << (IPV6_BITS - IPV6_RANGE.prefixlen)
NEIGHBOUR_SHARE: Final = 6  # one host in so many shares another's block
HOUSEHOLD_MAX: Final = 4  # hosts in a shared block: as many as its quota serves


def draw_ips(hosts: int, rng: Random, together: Collection[int] = ()) -> tuple[str, ...]:
    """A distinct address for each host. Most have a block of their own. One in
    `NEIGHBOUR_SHARE`, at least one of three or more, shares another's. Hosts in `together` share
    one."""
    apart = [host for host in range(hosts) if host not in together]
    number = min(len(apart) // 2, max(1, len(apart) // NEIGHBOUR_SHARE)) if len(apart) > 2 else 0
    neighbours = set(rng.sample(apart, number))
    households = [[host] for host in apart if host not in neighbours]
    for host in sorted(neighbours):
        rng.choice([each for each in households if len(each) < HOUSEHOLD_MAX]).append(host)
    if together:
        households.append(sorted(together))
    ips = [""] * hosts
    for block, household in zip(_blocks(len(households), rng), households, strict=True):
        lowest = 1 + rng.randrange(100)
        for place, host in enumerate(household):
            ips[host] = str(block[lowest + place])
    return tuple(ips)


def separate_ips(hosts: int) -> tuple[str, ...]:
    return tuple(str(_ipv6_block(number)[1]) for number in range(hosts))


def _blocks(number: int, rng: Random) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    old = min(IPV4_BLOCKS_MAX, round(IPV4_SHARE * number))
    base = int(IPV4_RANGE.network_address)
    blocks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = [
        ipaddress.IPv4Network((base + (each << (32 - IPV4_BITS)), IPV4_BITS))
        for each in rng.sample(range(IPV4_BLOCKS_MAX), old)
    ]
    blocks += [_ipv6_block(each) for each in rng.sample(range(IPV6_BLOCKS_MAX), number - old)]
    rng.shuffle(blocks)
    return blocks


def _ipv6_block(number: int) -> ipaddress.IPv6Network:
    base = int(IPV6_RANGE.network_address)
    return ipaddress.IPv6Network((base + (number << (128 - IPV6_BITS)), IPV6_BITS))
