"""A network of simulated hosts with a recorded trace, replayed by its seed.

async def main() -> str:
    async with open_world(seed=7, hosts=16, profile=LinkProfile(latency_s=0.1)) as world:
        ...
        return world.trace_hash

deterministic_run(main, seed=7)
"""

import hashlib
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from random import Random

import trio

from swarm.identity import Identity, PeerId
from swarm.simulation.addresses import separate_ips
from swarm.simulation.determinism import Freezer
from swarm.simulation.links import LinkProfile, SimulatedLinks
from swarm.transport.memory.network import RUNS_ON, Cut, MemoryNetwork, MemoryTransport

TRACE_LINES_MAX = 10_000


class SimulatedWorld:
    """`hosts` identities and their network, drawn from one seed. `trace` holds the newest events;
    `trace_hash` covers all."""

    def __init__(
        self,
        seed: int | str,
        hosts: int,
        profile: LinkProfile,
        nursery: trio.Nursery,
        profiles: Mapping[int, LinkProfile] | None = None,
        ips: Sequence[str] | None = None,
    ) -> None:
        """`profiles`: links of single hosts by index. `ips`: address of each host; None: public
        ones, each in its own block."""
        self.seed = seed
        self.ips = separate_ips(hosts) if ips is None else tuple(ips)
        self.identities = tuple(
            Identity(self.rng(f"identity/{index}").randbytes(32)) for index in range(hosts)
        )
        self._names = {each.peer_id: str(index) for index, each in enumerate(self.identities)}
        by_host = {self.peer_id(index): each for index, each in (profiles or {}).items()}
        self.links = SimulatedLinks(profile, by_host)
        self.network = MemoryNetwork(self.rng("links"), self.links, nursery, self._observe)
        self._freezer = Freezer()
        self._last_pause = 0
        self._pauses: dict[int, int] = {}  # host -> number of its current pause
        self._stillborn_until_s: dict[PeerId, float] = {}
        self.trace: deque[str] = deque(maxlen=TRACE_LINES_MAX)
        self.events = 0
        self._hash = hashlib.sha256()

    def rng(self, name: str) -> Random:
        """A random generator for this name."""
        return Random(f"{self.seed}/{name}")

    def peer_id(self, host: int) -> PeerId:
        return self.identities[host].peer_id

    def join(self, host: int) -> MemoryTransport:
        """Put a host on the network, the first time or after it left."""
        return self.network.join(self.peer_id(host), self.ips[host])

    def crash(self, host: int) -> None:
        """Take a host off the network at once; the caller cancels its tasks."""
        self.resume(host)
        self.network.crash(self.peer_id(host))

    @contextmanager
    def on(self, host: int) -> Iterator[None]:
        """Tasks started in this context run on the host, so that `pause` suspends them."""
        token = RUNS_ON.set(self.peer_id(host))
        try:
            yield
        finally:
            RUNS_ON.reset(token)

    def pause(self, host: int, for_s: float) -> None:
        """Suspend a host like a closed laptop: its tasks (see `on`) stop, messages to it wait, and
        on waking time has jumped."""
        self._last_pause += 1
        number = self._pauses[host] = self._last_pause
        self.record(f"pause {host}")
        self._freezer.freeze(self.peer_id(host))
        self.network.pause(self.peer_id(host))

        def wake() -> None:
            if self._pauses.get(host) == number:
                self.resume(host)

        self.network.at(trio.current_time() + for_s, wake)

    def resume(self, host: int) -> None:
        """End a host's pause early, if any."""
        if self._pauses.pop(host, None) is not None:
            self.record(f"resume {host}")
            self._freezer.thaw(self.peer_id(host))
            self.network.resume(self.peer_id(host))

    def clog(self, host: int, for_s: float) -> None:
        """Stall a host's link in both directions."""
        self.record(f"clog {host}")
        self.links.clog(self.peer_id(host), trio.current_time() + for_s)

    def kill_newborn(self, host: int, for_s: float) -> None:
        """Close a host's connections, and for a while each new one as soon as it is admitted."""
        self.record(f"stillborn {host}")
        peer = self.peer_id(host)
        self._stillborn_until_s[peer] = trio.current_time() + for_s
        for other in self.identities:
            self.network.part(peer, other.peer_id)

    def cut(
        self,
        hosts: Collection[int],
        others: Collection[int] | None = None,
        *,
        one_way: bool = False,
    ) -> Cut:
        """Cut hosts off from others, or from all."""
        if others is None:
            others = [host for host in range(len(self.identities)) if host not in hosts]
        self.record(f"cut {sorted(hosts)} {sorted(others)} {one_way}")
        ends = ([self.peer_id(host) for host in side] for side in (hosts, others))
        return self.network.partition(*ends, one_way=one_way)

    def heal(self, cut: Cut | None = None) -> None:
        """End one partition, or all."""
        self.record("heal")
        self.network.heal(cut)

    @property
    def trace_hash(self) -> str:
        """SHA-256 of all events so far, in hexadecimal."""
        return self._hash.hexdigest()

    def record(self, event: str) -> None:
        """Add an event of a higher layer to the trace."""
        line = f"{trio.current_time():.9f} {event}"
        self.trace.append(line)
        self.events += 1
        self._hash.update(line.encode() + b"\n")

    def _observe(
        self, what: str, source: PeerId, target: PeerId, about: str, payload: bytes
    ) -> None:
        digest = hashlib.sha256(payload).hexdigest()[:16] if payload else "-"
        ends = f"{self._names.get(source, source)}>{self._names.get(target, target)}"
        self.record(f"{what} {ends} {about or '-'} {len(payload)} {digest}")
        now_s = trio.current_time()
        if what == "connect" and any(
            self._stillborn_until_s.get(peer, 0.0) > now_s for peer in (source, target)
        ):
            self.network.at(now_s, partial(self.network.part, source, target))


@asynccontextmanager
async def open_world(
    seed: int | str,
    hosts: int,
    profile: LinkProfile,
    profiles: Mapping[int, LinkProfile] | None = None,
    ips: Sequence[str] | None = None,
) -> AsyncIterator[SimulatedWorld]:
    """A world whose network runs until the context ends."""
    async with trio.open_nursery() as nursery:
        yield SimulatedWorld(seed, hosts, profile, nursery, profiles, ips)
        nursery.cancel_scope.cancel()
