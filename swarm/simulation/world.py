"""A network of simulated hosts whose every event is on record, so that a seed replays it.

async def main() -> str:
    async with open_world(seed=7, hosts=16, profile=LinkProfile(latency_s=0.1)) as world:
        ...
        return world.trace_hash

deterministic_run(main, seed=7)
"""

import hashlib
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from random import Random

import trio

from swarm.identity import Identity, PeerId
from swarm.simulation.links import LinkProfile, SimulatedLinks
from swarm.transport.memory import MemoryNetwork, MemoryTransport

TRACE_LINES_MAX = 10_000


class World:
    """`hosts` identities and the network between them, all of it drawn from one seed.

    `trace` holds the newest events as text; `trace_hash` covers all of them.
    """

    def __init__(
        self,
        seed: int | str,
        hosts: int,
        profile: LinkProfile,
        nursery: trio.Nursery,
        profiles: Mapping[int, LinkProfile] | None = None,
    ) -> None:
        """`profiles` names hosts, by index, whose links differ from `profile`."""
        self.seed = seed
        self.identities = tuple(
            Identity(self.rng(f"identity/{index}").randbytes(32)) for index in range(hosts)
        )
        self._names = {each.peer_id: str(index) for index, each in enumerate(self.identities)}
        by_host = {self.peer_id(index): each for index, each in (profiles or {}).items()}
        links = SimulatedLinks(profile, by_host)
        self.network = MemoryNetwork(self.rng("links"), links, nursery, self._observe)
        self.trace: deque[str] = deque(maxlen=TRACE_LINES_MAX)
        self.events = 0
        self._hash = hashlib.sha256()

    def rng(self, name: str) -> Random:
        """A random generator of its own for whatever has this name."""
        return Random(f"{self.seed}/{name}")

    def peer_id(self, host: int) -> PeerId:
        """The peer id of the host with this index."""
        return self.identities[host].peer_id

    def join(self, host: int) -> MemoryTransport:
        """Put a host on the network, for the first time or after it crashed or left."""
        return self.network.join(self.peer_id(host))

    def crash(self, host: int) -> None:
        """Take a host off the network at once; its tasks above are the caller's to cancel."""
        self.network.crash(self.peer_id(host))

    @property
    def trace_hash(self) -> str:
        """SHA-256 over all events so far, in hexadecimal."""
        return self._hash.hexdigest()

    def record(self, event: str) -> None:
        """Put an event of a layer above on the trace."""
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


@asynccontextmanager
async def open_world(
    seed: int | str,
    hosts: int,
    profile: LinkProfile,
    profiles: Mapping[int, LinkProfile] | None = None,
) -> AsyncIterator[World]:
    """A world whose network runs until the context ends."""
    async with trio.open_nursery() as nursery:
        yield World(seed, hosts, profile, nursery, profiles)
        nursery.cancel_scope.cancel()
