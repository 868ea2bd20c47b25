"""Limits on dialling addresses that other peers named. Pure.

Peers choose the addresses that they tell us, and peer ids cost nothing. Results are by address:

* An endpoint (IP and port) is dialled once in `DIAL_AGAIN_S`, and more rarely after failures. An
  answer with another key is a failure.
* Dials to one public IP, one public block and all addresses together are limited within `WINDOW_S`.
  Successful dials do not count. Private addresses count by endpoint only.
* A peer that answered has its own pause at that endpoint, so that others cannot block it.

Evicting an endpoint from the bounded tables takes longer than its longest pause.
"""

from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NewType

from swarm.identity import PeerId
from swarm.limits.address_blocks import block_of, is_public, plain_ip
from swarm.limits.backoff import Backoff
from swarm.limits.bounded_table import BoundedTable

Endpoint = NewType("Endpoint", str)

DIAL_AGAIN_S: Final = 10.0  # after any dial; doubles with each failure in a row
DIAL_AGAIN_MAX_S: Final = 900.0
DIAL_AGAIN: Final = Backoff(DIAL_AGAIN_S, DIAL_AGAIN_MAX_S)
WINDOW_S: Final = 60.0
DIALS_PER_IP_MAX: Final = 8  # each within `WINDOW_S`
DIALS_PER_BLOCK_MAX: Final = 16
DIALS_MAX: Final = 120
ENDPOINTS_MAX: Final = 4_096  # over twice the dials within `DIAL_AGAIN_MAX_S`
PROVEN_MAX: Final = 512  # peers that answered, with the endpoint
PROVEN_FAILURES_MAX: Final = 8  # in a row; then the peer counts as unknown
KEYS_MAX: Final = 1_024  # IP addresses and blocks in the windows
PRIVATE_SHARE: Final = 8
PARSED_MAX: Final = 4_096

CIRCUIT: Final = "/p2p-circuit/p2p/"
ALL: Final = "all"  # window of all dials


@dataclass(frozen=True, slots=True)
class Hop:
    """One connection that a dial opens. `shares`: (key, most dials) that it counts against."""

    endpoint: Endpoint
    peer: PeerId  # expected there
    shares: tuple[tuple[str, int], ...]


def hops_of(address: str, connected: Container[PeerId]) -> tuple[Hop, ...]:
    """Connections that a dial opens: two through a relay that is not connected."""
    relay, found, target = address.partition(CIRCUIT)
    if not found:
        return (_direct(address),)
    relay_peer = PeerId(relay.rpartition("/")[2])
    circuit = Hop(Endpoint(f"{relay_peer}{CIRCUIT}{target}"), PeerId(target), ((ALL, DIALS_MAX),))
    return (circuit,) if relay_peer in connected else (_direct(relay), circuit)


@lru_cache(maxsize=PARSED_MAX)
def _direct(address: str) -> Hop:
    where, _, peer = address.rpartition("/p2p/")
    _, kind, host, *rest = (*where.split("/"), "", "", "")
    port = rest[1]
    shares: tuple[tuple[str, int], ...] = ((ALL, DIALS_MAX),)
    ip = plain_ip(host) if kind in ("ip4", "ip6") else None
    if ip is not None and port.isdecimal():
        where = f"{ip}|{int(port)}"
        if is_public(str(ip)):
            block = f"{block_of(str(ip))}"
            shares += ((str(ip), DIALS_PER_IP_MAX), (block, DIALS_PER_BLOCK_MAX))
    elif kind == "memory" and host.isdecimal():
        where = f"/memory/{int(host)}"
    return Hop(Endpoint(where), PeerId(peer), shares)


@dataclass(slots=True)
class _Pause:
    """Next dial of an endpoint, and its failures in a row."""

    due_s: float = 0.0
    failures: int = 0


class EventWindow:
    """Event counts within `window_s` by key, at most `KEYS_MAX` keys."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._times: BoundedTable[str, deque[float]] = BoundedTable(KEYS_MAX)

    def has_room(self, key: str, at_most: int, now_s: float) -> bool:
        times = self._times.get(key)
        if times is None:
            return True
        while times and now_s - times[0] >= self._window_s:
            times.popleft()
        return len(times) < at_most

    def record(self, key: str, now_s: float) -> None:
        self._times.obtain(key, deque[float]).append(now_s)

    def undo(self, key: str) -> None:
        times = self._times.get(key)
        if times:
            times.pop()


class DialBackoff:
    def __init__(self) -> None:
        self._pauses: BoundedTable[Endpoint, _Pause] = BoundedTable(ENDPOINTS_MAX)
        self._proven: BoundedTable[tuple[Endpoint, PeerId], _Pause] = BoundedTable(PROVEN_MAX)
        self._recent = EventWindow(WINDOW_S)
        self.held_back = 0  # refused dials

    def allows(self, hops: Iterable[Hop], now_s: float) -> bool:
        return all(self._allows(hop, now_s) for hop in hops)

    def _allows(self, hop: Hop, now_s: float) -> bool:
        own = self._proven.get((hop.endpoint, hop.peer))
        if own is not None:
            return own.due_s <= now_s
        pause = self._pauses.get(hop.endpoint)
        if pause is not None and pause.due_s > now_s:
            return False
        return all(self._recent.has_room(key, at_most, now_s) for key, at_most in hop.shares)

    def begin(self, hops: Iterable[Hop], now_s: float) -> bool:
        """As `allows`, and count them as dialled."""
        hops = tuple(hops)
        if not self.allows(hops, now_s):
            self.held_back += 1
            return False
        for hop in hops:
            self._pause_of(hop).due_s = now_s + DIAL_AGAIN_S
            if (hop.endpoint, hop.peer) not in self._proven:
                for key, _ in hop.shares:
                    self._recent.record(key, now_s)
        return True

    def _pause_of(self, hop: Hop) -> _Pause:
        own = self._proven.use((hop.endpoint, hop.peer))
        return own or self._pauses.obtain(hop.endpoint, _Pause)

    def succeeded(self, hop: Hop) -> None:
        key = (hop.endpoint, hop.peer)
        own = self._proven.use(key)
        if own is None:
            pause = self._pause_of(hop)
            pause.failures = 0
            own = _Pause(pause.due_s)
            self._proven.put(key, own)
            for share, _ in hop.shares:
                self._recent.undo(share)
        own.failures = 0

    def failed(self, hop: Hop, now_s: float, *, counts: bool = True) -> None:
        """Record a failed dial. `counts` False: our own link may be down, so the pause stays."""
        pause = self._pause_of(hop)
        pause.due_s = now_s + (DIAL_AGAIN.after(pause.failures) if counts else DIAL_AGAIN_S)
        pause.failures += counts
        key = (hop.endpoint, hop.peer)
        if key in self._proven and pause.failures >= PROVEN_FAILURES_MAX:
            self._proven.pop(key)
            common = self._pause_of(hop)
            common.due_s = max(common.due_s, pause.due_s)
            common.failures = max(common.failures, pause.failures)


class DialAttempts:
    """Limit on dials to an IP on request of others, for hole punching and dialling back. Private
    addresses, which may be a whole swarm, get `PRIVATE_SHARE` times as many."""

    def __init__(self, per_ip_max: int, window_s: float) -> None:
        self._per_ip_max = per_ip_max
        self._recent = EventWindow(window_s)
        self._turns: BoundedTable[str, float] = BoundedTable(KEYS_MAX)  # time of the next dial

    def allow(self, ip: str, now_s: float) -> bool:
        """Count one more dial. False: too many."""
        most = {ip: self._per_ip_max * PRIVATE_SHARE}
        if is_public(ip):
            most = {ip: self._per_ip_max, f"{block_of(ip)}": 2 * self._per_ip_max}
        if not all(self._recent.has_room(key, at_most, now_s) for key, at_most in most.items()):
            return False
        for key in most:
            self._recent.record(key, now_s)
        return True

    def next_turn_s(self, ip: str, now_s: float, every_s: float) -> float:
        """Time at which the next dial to an IP may begin; counts it as begun."""
        at_s = max(now_s, self._turns.get(ip, 0.0))
        self._turns.put(ip, at_s + every_s)
        return at_s
