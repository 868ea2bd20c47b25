"""Broadcasts of weights over simulated links: how long until the last peer has everything.

Production code decides, asks, paces and verifies. A chunk is a few real bytes that count on the
links with their nominal size (`Nominal`), so a broadcast of 16 GB to 128 peers fits a laptop.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import trio

from swarm.identity import PeerId
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import SimulatedWorld, deterministic_run, open_world
from swarm.transport.memory.network import MemoryTransport
from swarm.weights.broadcast import Broadcast, OfferedArtifact
from swarm.weights.broadcast_time import PeerLink, bound_s
from swarm.weights.chunk_server import CHUNK_HEAD, ArtifactKey, ChunkService
from swarm.weights.manifest import ChunkRef

PUBLISHER = 0
LATENCIES_BEFORE = 3.0  # of a path, to hear of the version and fetch its manifest
GIVE_UP_BOUNDS = 60.0  # times the bound, beyond `GIVE_UP_S`, after which a broadcast has failed
GIVE_UP_S = 60.0
WARM_S = 2.0  # in which a connection stays warm
PIECE_BYTES = 16_384  # of an answer, before the next connection has its turn


class Nominal(bytes):
    """A few bytes with a nominal length."""

    size: int

    def __new__(cls, content: bytes, size: int) -> "Nominal":
        made = super().__new__(cls, content)
        made.size = size
        return made

    def __len__(self) -> int:
        return self.size


class _Answer(Nominal):
    """Several chunks on their way, each behind its size."""

    chunks: Sequence[Nominal]

    def __new__(cls, chunks: Sequence[Nominal]) -> "_Answer":
        made = super().__new__(cls, b"", sum(CHUNK_HEAD.size + len(each) for each in chunks))
        made.chunks = chunks
        return made


@dataclass(frozen=True, slots=True)
class BroadcastCase:
    """One broadcast. `links` are of the publisher, first, and of its peers.

    `leave_share` of the peers leave at a random moment of the bound's middle half; `corrupt_share`
    send garbage for each chunk. `rates_known`: nodes know their own uplinks from earlier versions.
    """

    size_bytes: int
    chunk_bytes: int
    links: tuple[LinkProfile, ...]
    leave_share: float = 0.0
    corrupt_share: float = 0.0
    rates_known: bool = True
    publisher_leaves_s: float | None = None  # after publication
    late_s: float = 0.0  # after which the last peer comes
    shared_uplinks: bool = False  # answers to several peers leave together, as over TCP
    seed: int = 0


@dataclass(frozen=True, slots=True)
class BroadcastResult:
    """Times in virtual seconds since publication; `times_s` of the peers that stayed and had it."""

    bound_s: float
    times_s: tuple[float, ...]
    unfinished: int  # peers that stayed and never had everything
    publisher_copies: float  # bytes that the publisher sent, over the size
    duplicate_share: float  # bytes that came twice, over all
    corrupt_bytes: int
    distrusted: int

    @property
    def last_s(self) -> float:
        return math.inf if self.unfinished else max(self.times_s)

    @property
    def over_bound(self) -> float:
        return self.last_s / self.bound_s


class _Memory:
    """Chunks of one host; a corrupt one reads garbage of the same size."""

    def __init__(self, contents: Sequence[Nominal], rng: Random | None) -> None:
        self._contents = contents
        self._garbage = rng

    async def read(self, chunks: Sequence[int]) -> bytes:
        await trio.lowlevel.checkpoint()
        return _Answer([self._content(chunk) for chunk in chunks])

    def _content(self, chunk: int) -> Nominal:
        content = self._contents[chunk]
        if self._garbage is None:
            return content
        return Nominal(self._garbage.randbytes(32), len(content))

    def split(self, answer: bytes, most: int) -> list[bytes]:
        return list(answer.chunks) if isinstance(answer, _Answer) else []

    async def write(self, chunks: Mapping[int, bytes]) -> None:
        await trio.lowlevel.checkpoint()


@dataclass(slots=True)
class _Host:
    number: int
    transport: MemoryTransport
    broadcast: Broadcast | None = None
    done_s: float | None = None
    left: bool = False
    over: trio.Event = field(default_factory=trio.Event)  # it has everything, or has left
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


def simulate(case: BroadcastCase) -> BroadcastResult:
    """Run one broadcast; equal cases give equal results."""
    result: BroadcastResult = deterministic_run(_run, case, seed=case.seed)
    return result


def peer_links(world: SimulatedWorld, links: Sequence[LinkProfile]) -> list[PeerLink]:
    return [
        PeerLink(world.peer_id(host), link.up_bytes_per_s, link.down_bytes_per_s)
        for host, link in enumerate(links)
        if host != PUBLISHER
    ]


async def _run(case: BroadcastCase) -> BroadcastResult:
    rng = Random(f"{case.seed}/broadcast")
    own_links = {host: replace(link, jitter_s=0.0) for host, link in enumerate(case.links)}
    async with open_world(case.seed, len(case.links), case.links[0], own_links) as world:
        world.links.warm_s = WARM_S
        if case.shared_uplinks:
            world.network.piece_bytes = PIECE_BYTES
        hosts = [_Host(number, world.join(number)) for number in range(len(case.links))]
        await _connect(hosts)
        peers = peer_links(world, case.links)
        bound = bound_s(case.size_bytes, case.links[PUBLISHER].up_bytes_per_s, peers)
        others = hosts[1:]
        numbers = range(1, len(hosts))
        corrupt = set(rng.sample(numbers, round(case.corrupt_share * len(others))))
        leaving = set(rng.sample(numbers, round(case.leave_share * len(others))))
        contents = _contents(case)
        started_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for host in hosts:
                garbage = Random(f"{case.seed}/{host.number}") if host.number in corrupt else None
                source = _Memory(contents, garbage)
                _prepare(host, case, contents, source, world.peer_id(PUBLISHER))
                nursery.start_soon(_live, world, host, case, started_s)
                if host.number in leaving:
                    after_s = bound * rng.uniform(0.25, 0.75)
                    nursery.start_soon(_leave, world, host, after_s)
            if case.publisher_leaves_s is not None:
                nursery.start_soon(_leave, world, hosts[PUBLISHER], case.publisher_leaves_s)
            await _finish(others, corrupt, GIVE_UP_BOUNDS * bound + GIVE_UP_S)
            nursery.cancel_scope.cancel()
        return _result(case, bound, hosts, corrupt)


async def _connect(hosts: Sequence[_Host]) -> None:
    async with trio.open_nursery() as nursery:
        for one in hosts:
            for other in hosts[: one.number]:
                nursery.start_soon(one.transport.connect, other.transport.addresses()[0])


def _contents(case: BroadcastCase) -> list[Nominal]:
    count = math.ceil(case.size_bytes / case.chunk_bytes)
    sizes = [case.chunk_bytes] * (count - 1)
    sizes.append(case.size_bytes - sum(sizes))
    return [Nominal(f"chunk {at}".encode(), size) for at, size in enumerate(sizes)]


def _prepare(
    host: _Host,
    case: BroadcastCase,
    contents: Sequence[Nominal],
    source: _Memory,
    publisher: PeerId,
) -> None:
    link = case.links[host.number]
    service = ChunkService(host.transport, link.up_bytes_per_s if case.rates_known else 0.0)
    refs = [ChunkRef(hashlib.sha256(each).digest(), len(each)) for each in contents]
    host.broadcast = Broadcast(
        service,
        OfferedArtifact(ArtifactKey(b"r" * 32, 0), refs, publisher),
        source,
        have=(1 << len(contents)) - 1 if host.number == PUBLISHER else 0,
        rng=Random(f"{case.seed}/picker/{host.number}"),
        blame=lambda peer, reason: None,  # the broadcast counts distrusted peers
        down_bytes_per_s=link.down_bytes_per_s,
    )


async def _live(world: SimulatedWorld, host: _Host, case: BroadcastCase, started_s: float) -> None:
    assert host.broadcast is not None
    if case.late_s and host.number == len(case.links) - 1:
        await trio.sleep(case.late_s)
    if host.number != PUBLISHER:
        path = world.links.path(world.peer_id(PUBLISHER), world.peer_id(host.number))
        await trio.sleep(LATENCIES_BEFORE * path.latency_s)
    with host.scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(host.broadcast.run)
            await host.broadcast.complete.wait()
            host.done_s = trio.current_time() - started_s
            host.over.set()
            await trio.sleep_forever()


async def _leave(world: SimulatedWorld, host: _Host, after_s: float) -> None:
    await trio.sleep(after_s)
    host.left = True
    host.over.set()
    host.scope.cancel()
    world.crash(host.number)


async def _finish(others: Sequence[_Host], corrupt: set[int], limit_s: float) -> None:
    """Wait until all honest peers that stay have everything."""
    with trio.move_on_after(limit_s):
        for host in others:
            if host.number not in corrupt:
                await host.over.wait()


def _result(
    case: BroadcastCase, bound: float, hosts: Sequence[_Host], corrupt: set[int]
) -> BroadcastResult:
    stayed = [host for host in hosts[1:] if not host.left and host.number not in corrupt]
    counters = [host.broadcast.counters for host in hosts if host.broadcast]
    came = sum(each.bytes_in for each in counters) or 1
    return BroadcastResult(
        bound_s=bound,
        times_s=tuple(host.done_s for host in stayed if host.done_s is not None),
        unfinished=sum(1 for host in stayed if host.done_s is None),
        publisher_copies=counters[PUBLISHER].bytes_out / case.size_bytes,
        duplicate_share=sum(each.duplicate_bytes for each in counters) / came,
        corrupt_bytes=sum(each.corrupt_bytes for each in counters),
        distrusted=sum(each.distrusted for each in counters),
    )
