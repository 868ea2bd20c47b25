"""When an address that others named may be dialled. Pure: the time is passed in.

Whoever names addresses chooses at whose door we knock, and peer ids and tellers cost nothing. So
what came of a dial is remembered by where it went, apart from whom it was meant for and from who
told of it:

* one endpoint (IP address and port) is dialled once in `DIAL_AGAIN_S`, and after failures in a row
  ever more rarely, down to once in `DIAL_AGAIN_MAX_S`. An endpoint at which another key answers has
  failed, too;
* one public IP address, one public block and all addresses together are dialled so often within
  `WINDOW_S`. A dial that succeeds is given back, so that many honest peers behind one address cost
  nothing. Private and loopback addresses count by endpoint alone: a whole swarm may be behind one;
* a peer that was dialled with success has a pause of its own at that endpoint, so that nobody keeps
  us from it by naming others there.

What is remembered is bounded. To have an endpoint forgotten by naming others takes longer than its
longest pause, because all of them share one window.
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

DIAL_AGAIN_S: Final = 10.0  # after any dial; after a failed one doubled with each in a row
DIAL_AGAIN_MAX_S: Final = 900.0
DIAL_AGAIN: Final = Backoff(DIAL_AGAIN_S, DIAL_AGAIN_MAX_S)
WINDOW_S: Final = 60.0
DIALS_PER_IP_MAX: Final = 8  # within `WINDOW_S`, as below
DIALS_PER_BLOCK_MAX: Final = 16
DIALS_MAX: Final = 120
ENDPOINTS_MAX: Final = 4_096  # twice what `DIALS_MAX` allows within `DIAL_AGAIN_MAX_S`, and more
PROVEN_MAX: Final = 512  # peers with the endpoint at which they answered
PROVEN_FAILURES_MAX: Final = 8  # in a row, after which such a peer is as good as never met
KEYS_MAX: Final = 1_024  # IP addresses and blocks in the windows; `DIALS_MAX` needs fewer
PRIVATE_SHARE: Final = 8
PARSED_MAX: Final = 4_096

CIRCUIT: Final = "/p2p-circuit/p2p/"
ALL: Final = "all"  # the key of the window that all dials share


@dataclass(frozen=True, slots=True)
class Hop:
    """One connection that a dial opens. `shares`: what it counts against, with how many there may
    be."""

    endpoint: Endpoint
    peer: PeerId  # who is to answer there
    shares: tuple[tuple[str, int], ...]


def hops_of(address: str, connected: Container[PeerId]) -> tuple[Hop, ...]:
    """What dialling an address would open: through a relay that we are not connected to, two."""
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
    """When an endpoint may be dialled again, and how often in a row it failed."""

    due_s: float = 0.0
    failures: int = 0

    def fail(self, now_s: float, *, counts: bool) -> None:
        self.due_s = now_s + (DIAL_AGAIN.after(self.failures) if counts else DIAL_AGAIN_S)
        self.failures += counts


class Recent:
    """How often something happened within `window_s`, by key. Those keys that nothing happened to
    for longest are forgotten over `keys_max`."""

    def __init__(self, window_s: float = WINDOW_S, keys_max: int = KEYS_MAX) -> None:
        self._window_s = window_s
        self._times: BoundedTable[str, deque[float]] = BoundedTable(keys_max)

    def has_room(self, key: str, at_most: int, now_s: float) -> bool:
        """Whether it happened fewer than `at_most` times."""
        times = self._times.get(key)
        if times is None:
            return True
        while times and now_s - times[0] >= self._window_s:
            times.popleft()
        return len(times) < at_most

    def note(self, key: str, now_s: float) -> None:
        """It happens now."""
        self._times.obtain(key, deque[float]).append(now_s)

    def take_back(self, key: str) -> None:
        """It happened, and shall not count."""
        times = self._times.get(key)
        if times:
            times.pop()


class DialBackoff:
    """Which addresses may be dialled now, by what came of earlier dials."""

    def __init__(self) -> None:
        self._pauses: BoundedTable[Endpoint, _Pause] = BoundedTable(ENDPOINTS_MAX)
        self._proven: BoundedTable[tuple[Endpoint, PeerId], _Pause] = BoundedTable(PROVEN_MAX)
        self._recent = Recent()
        self.held_back = 0  # dials that were not made

    def allows(self, hops: Iterable[Hop], now_s: float) -> bool:
        """Whether all of them may be opened now."""
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
        """As `allows`; if so, they count as being dialled from now on."""
        hops = tuple(hops)
        if not self.allows(hops, now_s):
            self.held_back += 1
            return False
        for hop in hops:
            self._pause_of(hop).due_s = now_s + DIAL_AGAIN_S
            if (hop.endpoint, hop.peer) not in self._proven:
                for key, _ in hop.shares:
                    self._recent.note(key, now_s)
        return True

    def _pause_of(self, hop: Hop) -> _Pause:
        own = self._proven.use((hop.endpoint, hop.peer))
        return own or self._pauses.obtain(hop.endpoint, _Pause)

    def succeeded(self, hop: Hop) -> None:
        """The peer answered there, by its key."""
        key = (hop.endpoint, hop.peer)
        own = self._proven.use(key)
        if own is None:
            pause = self._pause_of(hop)
            pause.failures = 0
            own = _Pause(pause.due_s)
            self._proven.put(key, own)
            for share, _ in hop.shares:
                self._recent.take_back(share)
        own.failures = 0

    def failed(self, hop: Hop, now_s: float, *, counts: bool = True) -> None:
        """Nobody answered there, or somebody else did. `counts` False: our own link may be at
        fault, so that the pause does not grow."""
        pause = self._pause_of(hop)
        pause.fail(now_s, counts=counts)
        key = (hop.endpoint, hop.peer)
        if key in self._proven and pause.failures >= PROVEN_FAILURES_MAX:
            self._proven.pop(key)
            common = self._pause_of(hop)
            common.due_s = max(common.due_s, pause.due_s)
            common.failures = max(common.failures, pause.failures)


class Knocks:
    """How often we dial an IP address because somebody asks us to: for hole punching at
    addresses that it names, and to dial back to where it is. Bounded; keys cost nothing here, too.

    A private address may have `PRIVATE_SHARE` times as many: behind it there may be a swarm.
    """

    def __init__(self, per_ip_max: int, window_s: float) -> None:
        self._per_ip_max = per_ip_max
        self._recent = Recent(window_s)
        self._turns: BoundedTable[str, float] = BoundedTable(KEYS_MAX)  # when the next may begin

    def take(self, ip: str, now_s: float) -> bool:
        """Whether we do it once more."""
        most = {ip: self._per_ip_max * PRIVATE_SHARE}
        if is_public(ip):
            most = {ip: self._per_ip_max, f"{block_of(ip)}": 2 * self._per_ip_max}
        if not all(self._recent.has_room(key, at_most, now_s) for key, at_most in most.items()):
            return False
        for key in most:
            self._recent.note(key, now_s)
        return True

    def turn(self, ip: str, now_s: float, every_s: float) -> float:
        """When the next dial at an IP address may begin, which then counts as begun."""
        at_s = max(now_s, self._turns.get(ip, 0.0))
        self._turns.put(ip, at_s + every_s)
        return at_s
