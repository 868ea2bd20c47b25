"""Hosts of a simulated network that publish and fetch versions of a small model, on real files.

All that is in a node's place is the production code: service, publisher, store, patcher. A host can
be taken off the network and come back on the same files, as a process that was killed does.
"""

import json
import resource
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import trio

from swarm.errors import Reject
from swarm.identity import PeerId
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.reputation import Ledger
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import SimulatedWorld, deterministic_run, open_world
from swarm.storage import Runtime
from swarm.transport.memory.network import MemoryTransport
from swarm.weights.chunk_store import ChunkStore
from swarm.weights.hot_swap import HeadRules
from swarm.weights.publisher import Published, Publisher, Spread
from swarm.weights.version_store import Versions
from swarm.weights.weights_service import Follower, VersionOutcome, WeightsRules, WeightsService

RUN_ID = "run"
POLICY = "actor"
EPOCH_S = 1_800_000_000.0
LINK = LinkProfile(latency_s=0.02, up_bytes_per_s=200_000.0, down_bytes_per_s=2_000_000.0)
FAST = LinkProfile(latency_s=0.02, up_bytes_per_s=2e6, down_bytes_per_s=2e6)
SETTLED_S = 30.0  # in which whatever should not happen would have happened
STORE_BYTES = 50_000_000
WEIGHTS = 300_000  # bfloat16, in one tensor; there is another of a tenth that never changes
CHANGED = 0.02  # of them, from one version to the next
LOOK_S = 0.05
PATIENCE_S = 600.0  # of virtual time
PUBLISHER = 0


async def run_inline(function: Callable[..., object], *args: object) -> object:
    """Call a blocking function where it is: a simulation has no threads."""
    await trio.lowlevel.checkpoint()
    return function(*args)


def write_version(directory: Path, version: int, weights: int = WEIGHTS) -> Path:
    """The model after so many steps; the same files for the same numbers. Returns `directory`."""
    rng = Random(f"{weights}/weights")
    bits = [0x3C00 | rng.getrandbits(9) | rng.getrandbits(1) << 15 for _ in range(weights)]
    frozen = [rng.getrandbits(14) for _ in range(weights // 10)]
    for step in range(2, version + 1):
        moves = Random(f"{step}/step")
        for at in moves.sample(range(weights), int(CHANGED * weights)):
            bits[at] ^= 1 << moves.randrange(2)
    table: dict[str, Any] = {}
    content = b""
    for name, values in (("frozen", frozen), ("layer.weight", bits)):
        data = struct.pack(f"<{len(values)}H", *values)
        ends = [len(content), len(content) + len(data)]
        table[name] = {"dtype": "BF16", "shape": [len(values)], "data_offsets": ends}
        content += data
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    directory.mkdir(parents=True)
    path = directory / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + content)
    (directory / "config.json").write_text(json.dumps({"step": version}))
    return directory


def files_of(directory: Path) -> dict[str, bytes]:
    """All files under a directory, with their content."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@contextmanager
def files_up_to(size_bytes: int) -> Iterator[None]:
    """The disk takes no file larger than this: the kernel refuses, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@dataclass
class SimulatedHost:
    """One host, while it is on the network."""

    number: int
    directory: Path
    transport: MemoryTransport
    ledger: Ledger
    store: ChunkStore
    service: WeightsService
    publisher: Publisher | None
    scope: trio.CancelScope
    gone: trio.Event = field(default_factory=trio.Event)
    outcomes: list[VersionOutcome] = field(default_factory=list)
    spreads: list[Spread] = field(default_factory=list)
    clock_s: float = 0.0  # how far its clock is ahead

    @property
    def peer_id(self) -> PeerId:
        return self.transport.peer_id

    @property
    def serving(self) -> int | None:
        """The version that serves."""
        current = self.service.versions.current()
        return None if current is None else current.version

    def has_exactly(self, source: Path) -> bool:
        """Whether the version that serves is bit for bit what is in a directory."""
        current = self.service.versions.current()
        return current is not None and files_of(current.directory) == files_of(source)

    def chunks(self) -> set[str]:
        """Hashes of the chunks on its disk."""
        return {path.name for path in (self.directory / "store").glob("chunks/*/*")}

    def failures(self) -> list[str]:
        """Why versions were not made."""
        return [each.applied.failure for each in self.outcomes if each.applied.failure]

    def blamed(self, other: PeerId) -> dict[Reject, int]:
        """What is held against a peer here."""
        return dict(self.ledger.account(other).rejected)


class Hosts:
    """The hosts of one world, by number. Number 0 publishes; all are connected to all."""

    def __init__(self, world: SimulatedWorld, directory: Path, nursery: trio.Nursery) -> None:
        self.world = world
        self.directory = directory
        self._nursery = nursery
        self._hosts: dict[int, SimulatedHost] = {}

    def __getitem__(self, number: int) -> SimulatedHost:
        return self._hosts[number]

    def source(self, version: int) -> Path:
        """The directory from which a version is published."""
        directory = self.directory / "sources" / str(version)
        return directory if directory.exists() else write_version(directory, version)

    async def publish(self, version: int) -> Published:
        """Have the publisher publish what `source` gives."""
        publisher = self[PUBLISHER].publisher
        assert publisher is not None
        published = await publisher.publish(self.source(version), version)
        assert published is not None
        return published

    async def start(
        self, number: int, *, store_bytes: int = STORE_BYTES, connect: bool = True
    ) -> SimulatedHost:
        """Put a host on the network, for the first time or again on the files that it left."""
        transport = self.world.join(number)
        identity = self.world.identities[number]
        directory = self.directory / f"host{number}"
        versions_directory = directory / "policy"
        publishes = number == PUBLISHER
        ledger = Ledger()
        outcomes: list[VersionOutcome] = []
        store = ChunkStore(directory / "store", store_bytes)
        service = WeightsService(
            WeightsRules(
                HeadRules(RUN_ID, frozenset({self.world.peer_id(PUBLISHER)})),
                POLICY,
                follows=not publishes,
                shared_versions=9 if publishes else 2,
            ),
            transport,
            ConnectionGater(transport, ledger),
            Versions(versions_directory, keep=9 if publishes else 2),
            store,
            Runtime(
                lambda: EPOCH_S + trio.current_time() + host.clock_s,
                self.world.rng(f"host/{number}/{trio.current_time()}"),
                run_inline,
            ),
            Follower(tell=outcomes.append),
        )
        spreads: list[Spread] = []
        publisher = Publisher(service, identity, spreads.append) if publishes else None
        host = SimulatedHost(
            number,
            directory,
            transport,
            ledger,
            store,
            service,
            publisher,
            trio.CancelScope(),
            outcomes=outcomes,
            spreads=spreads,
        )
        self._hosts[number] = host
        await self._nursery.start(self._live, host)
        if connect:
            await self.connect(number)
        return host

    async def connect(self, number: int) -> None:
        """To all hosts that are there."""
        own = self[number]
        for other in list(self._hosts.values()):
            if other is not own and not other.gone.is_set():
                await own.transport.connect(other.transport.addresses()[0])

    async def _live(
        self, host: SimulatedHost, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        try:
            with host.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(host.service.gater.run)
                    await nursery.start(host.service.run)
                    if host.publisher is not None:
                        nursery.start_soon(host.publisher.run)
                    task_status.started()
        finally:
            host.store.close()
            host.gone.set()

    async def kill(self, number: int) -> None:
        """Take a host off the network at once. Its files stay."""
        host = self[number]
        self.world.crash(number)
        host.scope.cancel()
        await host.gone.wait()

    async def until(self, is_so: Callable[[], bool], look_s: float = LOOK_S) -> bool:
        """Wait for something. Whether it came within `PATIENCE_S`."""
        with trio.move_on_after(PATIENCE_S):
            while not is_so():  # noqa: ASYNC110 - of several hosts, which no one event tells of
                await trio.sleep(look_s)
        return is_so()

    async def until_all_have(self, version: int, numbers: range) -> bool:
        """Wait until a version serves on these hosts."""
        return await self.until(lambda: all(self[each].serving == version for each in numbers))

    async def all_at(self, version: int, numbers: range) -> None:
        """Start the publisher, publish a version, start these hosts, and wait for it there."""
        await self.start(PUBLISHER)
        await self.publish(version)
        for number in numbers:
            await self.start(number)
        assert await self.until_all_have(version, numbers)


@asynccontextmanager
async def open_hosts(
    seed: int, directory: Path, hosts: int, profile: LinkProfile = LINK
) -> AsyncIterator[Hosts]:
    """Hosts of a world of their own; none is on the network yet."""
    async with open_world(seed, hosts, profile) as world, trio.open_nursery() as nursery:
        yield Hosts(world, directory, nursery)
        nursery.cancel_scope.cancel()


def play(
    scene: Callable[[Hosts], Awaitable[None]],
    directory: Path,
    hosts: int = 4,
    link: LinkProfile = FAST,
) -> None:
    """Run one scene among hosts of a world of their own, in an empty directory."""

    async def main() -> None:
        async with open_hosts(0, directory, hosts, link) as there:
            await scene(there)

    deterministic_run(main, seed=0)
