"""How long a message takes between two hosts, and whether it comes through.

One formula for each message. It waits for its sender's uplink, which all that host's messages
share, and occupies it for `bytes / up`; then come latency and an exponential jitter; then it
occupies the receiver's downlink for `bytes / down`, which overlaps with its own arrival, as bytes
are passed on while others still come.

A message starts slowly, as TCP does when it does not know the path: with ten packets' worth in a
round trip, twice as fast in each that follows, until the link is full. Nothing is remembered from
one message to the next, unless `warm_s` says for how long a path is.

Gossip is lost as whole messages. A request or response is one transfer over TCP: nothing in it is
lost, but lost packets are sent again, all that are missing at a time: after a round trip if enough
packets follow to show that one is missing, else after a timeout. The rest goes on meanwhile.

A clogged host's link stands still in both directions for a while and then goes on where it was.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from swarm.errors import ConfigError
from swarm.identity import PeerId
from swarm.transport.memory.gossip import Flight

PACKET_BYTES = 1460
OVERHEAD_BYTES = 80  # headers of a message, whatever its size
REORDER_S_MAX = 1.0  # how long a reordered message is held back, at most
WINDOW_BYTES = 10 * PACKET_BYTES  # what TCP sends in the first round trip
STARTUP_GAIN = 2.0 / math.log(2.0)  # BBR's: paced so, the rate doubles in each round trip
RETRANSMIT_AFTER_S = 0.2  # at least; otherwise two round trips
PROBES_MAX = 4  # packets of a message too short to show by those that follow that one is missing


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """A host's access to the network. Latency, jitter and loss are of a whole path between two
    such hosts, one way; between unlike hosts they are in the middle."""

    latency_s: float = 0.0
    jitter_s: float = 0.0  # mean of what is added to the latency
    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf
    loss: float = 0.0  # of packets, and of gossip messages
    duplication: float = 0.0  # of gossip messages
    reordering: float = 0.0  # of gossip messages: held back, so that later ones overtake them

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
    """The links of all hosts and how long each is busy. Serves one `MemoryNetwork`."""

    def __init__(
        self, profile: LinkProfile, hosts: Mapping[PeerId, LinkProfile] | None = None
    ) -> None:
        """`hosts` names those whose profile differs."""
        self._profile = profile
        self._hosts = dict(hosts or {})
        self.warm_s = 0.0  # how long a path that carried something need not start slowly again
        self._grown: dict[tuple[PeerId, PeerId], tuple[float, int]] = {}  # until when, bytes sent
        self._up_busy_until_s: dict[PeerId, float] = {}
        self._down_busy_until_s: dict[PeerId, float] = {}

    def of(self, host: PeerId) -> LinkProfile:
        """The host's access to the network."""
        return self._hosts.get(host, self._profile)

    def change(self, host: PeerId, profile: LinkProfile) -> None:
        """Give a host another link, for messages from now on."""
        self._hosts[host] = profile

    def clog(self, host: PeerId, until_s: float) -> None:
        """Let a host's link stand still until then. What is in flight behind it waits too."""
        for busy in (self._up_busy_until_s, self._down_busy_until_s):
            busy[host] = max(busy.get(host, 0.0), until_s)

    def path(self, source: PeerId, target: PeerId) -> LinkProfile:
        """One direction between two hosts: the source's uplink and the target's downlink."""
        one, other = self.of(source), self.of(target)
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
        """Put a message on its way."""
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
        # what is sent while the path is warm goes on growing where the last message left off
        slow_s = _slow_start_s(before + size, path) - _slow_start_s(before, path)
        self._grown[source, target] = (now_s + slow_s + self.warm_s, before + size)
        return slow_s

    def receive(self, target: PeerId, flight: Flight, now_s: float) -> float:
        """When a message whose last byte reaches the target's downlink now is there in full."""
        rate = self.of(target).down_bytes_per_s
        # a retransmission pauses the transfer: it does not occupy the downlink
        start_s = max(
            now_s - (flight.last_s - flight.first_s), self._down_busy_until_s.get(target, 0.0)
        )
        done_s = max(now_s, start_s + flight.wire_bytes / rate)
        self._down_busy_until_s[target] = done_s
        return done_s


def _slow_start_s(size: int, path: LinkProfile) -> float:
    """How much longer a message takes than at the full rate of its path. Its first packet does not.

    From `STARTUP_GAIN * WINDOW_BYTES` in a round trip the rate doubles in each: an exponential
    whose integral is what has been sent.
    """
    round_trip_s = 2.0 * path.latency_s
    rate = min(path.up_bytes_per_s, path.down_bytes_per_s)
    first_bytes = STARTUP_GAIN * WINDOW_BYTES  # in the first round trip, if the rate stayed so
    if round_trip_s == 0.0 or rate * round_trip_s <= first_bytes:
        return 0.0
    full_bytes = (rate * round_trip_s - first_bytes) / math.log(2.0)  # sent until the link is full
    sent_bytes = min(max(0.0, size - PACKET_BYTES), full_bytes)
    grown_s = round_trip_s * math.log2(1.0 + sent_bytes * math.log(2.0) / first_bytes)
    return grown_s - sent_bytes / rate


def _retransmit_s(packets: int, path: LinkProfile) -> float:
    """How long it takes until what is missing of a message has come."""
    round_trip_s = 2.0 * path.latency_s
    if packets > PROBES_MAX:
        return round_trip_s
    return max(RETRANSMIT_AFTER_S, 2.0 * round_trip_s)


def _losses(packets: int, loss: float, rng: Random) -> tuple[int, int]:
    """How many transmissions fail until each packet came through, and how often what is missing is
    sent again. One draw for each failure."""
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
