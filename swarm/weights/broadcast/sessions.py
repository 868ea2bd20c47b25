"""The broadcasts that one node takes part in: those that bring chunks, and those that give them on.

One broadcast for each artifact, from the first chunk that is missing until nobody is expected to
want it any more. Whatever it needs is pinned in the store. A full or broken disk ends it, and tells
whoever waits for it; what a peer does wrong is counted and ends nothing.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

import trio

from swarm.errors import Reject, RequestRefused, StorageFailed, StoreFull, first_of
from swarm.identity import PeerId
from swarm.peers.ledger import Ledger
from swarm.storage.files import RunSync, Runtime
from swarm.weights.broadcast.broadcast import Broadcast, OfferedArtifact
from swarm.weights.broadcast.chunk_server import ArtifactKey, ChunkService
from swarm.weights.format.manifest import ChunkRef
from swarm.weights.format.topology import PeerLink
from swarm.weights.store.chunks import ChunkStore

LINKS_KEPT_MAX: Final = 512
MEASURE_S: Final = 0.5  # over which the downlink is measured
VERSIONS_SHARED_MAX: Final = 12  # at a time, the ones on their way included: pins are bounded


def pin_name(version: int) -> str:
    """Under which the chunks of a version are pinned."""
    return f"version {version}"


class StoredChunks:
    """The chunks of one artifact, in the store."""

    def __init__(self, store: ChunkStore, refs: Sequence[ChunkRef], run_sync: RunSync) -> None:
        self._store = store
        self._refs = refs
        self._run_sync = run_sync

    async def read(self, chunk: int) -> bytes:
        """Raises `RequestRefused` where the file is gone, was found damaged or cannot be read: then
        peers have to get it elsewhere, and nothing else depends on it."""
        sha256 = self._refs[chunk].sha256
        if (cached := self._store.get_at_once(sha256)) is not None:
            return cached
        try:
            data: bytes | None = await self._run_sync(self._store.get, sha256)
        except StorageFailed as error:
            raise RequestRefused(f"that chunk cannot be read: {error}") from None
        if data is None:
            raise RequestRefused("that chunk is no longer here")
        return data

    async def write(self, chunk: int, data: bytes) -> None:
        """Raises `StoreFull` and `StorageFailed`."""
        await self._run_sync(self._put, self._refs[chunk].sha256, data)

    def _put(self, sha256: bytes, data: bytes) -> None:
        self._store.put(sha256, data, verified=True)  # by the broadcast, which found it by its hash


@dataclass(frozen=True, slots=True)
class Fetched:
    """The cost of having all chunks of an artifact; `missing_bytes` of it were not here."""

    missing_bytes: int
    fetched_bytes: int  # what came, that twice included


@dataclass(frozen=True, slots=True)
class Holding:
    """The part of an artifact that is here; of `have`, bit i is chunk i."""

    version: int  # that it leads to
    chunks: int
    have: int
    size_bytes: int
    complete: bool


@dataclass(eq=False, slots=True)
class _Running:
    version: int
    on_behalf: int  # of the version that it leads to
    broadcast: Broadcast
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    done: trio.Event = field(default_factory=trio.Event)  # complete, or ended before
    ended: trio.Event = field(default_factory=trio.Event)
    failure: StoreFull | StorageFailed | None = None


# Long: sessions of one node share its uplink.
class Sharing:
    """All broadcasts of one policy. `nursery` is set before any is opened."""

    nursery: trio.Nursery

    def __init__(
        self,
        chunks: ChunkService,
        store: ChunkStore,
        ledger: Ledger,
        runtime: Runtime,
    ) -> None:
        self._chunks = chunks
        self.store = store
        self._ledger = ledger
        self._rng = runtime.rng
        self._run_sync = runtime.run_sync
        self._running: dict[ArtifactKey, _Running] = {}
        self._pins: dict[int, dict[ArtifactKey, Sequence[ChunkRef]]] = {}  # by version
        self._links: OrderedDict[PeerId, tuple[int, int]] = OrderedDict()
        self.down_bytes_per_s = 0.0  # the most that was seen; 0: nothing yet

    # --- what there is ---------------------------------------------------------------------

    def versions(self) -> tuple[int, ...]:
        """Versions of which something is given on whole, oldest first."""
        whole = (each for each in self._running.values() if each.broadcast.complete.is_set())
        return tuple(sorted({each.version for each in whole}))

    def version_of(self, root: bytes) -> int | None:
        """The version with this root, if it is shared."""
        found = (each.version for key, each in self._running.items() if key.root == root)
        return next(found, None)

    def progress_of(self, version: int) -> tuple[int, int]:
        """Bytes that are here, and all bytes, of what is on its way for a version."""
        have = total = 0
        for running in self._running.values():
            broadcast = running.broadcast
            if running.on_behalf == version:
                total += sum(ref.size_bytes for ref in broadcast.refs)
                have += sum(
                    ref.size_bytes
                    for at, ref in enumerate(broadcast.refs)
                    if broadcast.picker.have >> at & 1
                )
        return have, total

    def holding(self) -> Holding | None:
        """The newest version that something is here of; of several artifacts the last begun."""
        if not self._running:
            return None
        newest = max(each.on_behalf for each in self._running.values())
        broadcast = [each for each in self._running.values() if each.on_behalf == newest][-1]
        picker, refs = broadcast.broadcast.picker, broadcast.broadcast.refs
        size_bytes = sum(ref.size_bytes for ref in refs)
        return Holding(newest, len(refs), picker.have, size_bytes, picker.have == picker.all)

    def unfinished(self, version: int) -> tuple[PeerId, ...]:
        """Connected peers that were heard to lack chunks of an artifact that is given on here, and
        have not said since that they have all of one."""
        lacking: set[PeerId] = set()
        done: set[PeerId] = set()
        there = set(self._chunks.transport.peers())
        for running in self._running.values():
            if running.version != version:
                continue
            picker = running.broadcast.picker
            for peer in running.broadcast.links.keys() & there:
                neighbour = picker.neighbours.get(peer)
                if neighbour is not None and not neighbour.distrusted:
                    (done if neighbour.have == picker.all else lacking).add(peer)
        return tuple(sorted(lacking - done))

    def finished(self, version: int) -> int:
        """The number of connected peers that reported all chunks of an artifact of a version."""
        done: set[PeerId] = set()
        for running in self._running.values():
            picker = running.broadcast.picker
            if running.version == version:
                done |= {
                    peer for peer, each in picker.neighbours.items() if each.have == picker.all
                }
        return len(done)

    def shares(self, version: int) -> dict[PeerId, float]:
        """The share of an artifact's chunks that each connected peer reported, 0 to 1; of
        several artifacts of a version the one that a peer has most of."""
        found: dict[PeerId, float] = {}
        for running in self._running.values():
            if running.version != version:
                continue
            picker = running.broadcast.picker
            for peer, neighbour in picker.neighbours.items():
                share = neighbour.have.bit_count() / len(running.broadcast.refs)
                found[peer] = max(found.get(peer, 0.0), share)
        return found

    @property
    def links(self) -> dict[PeerId, tuple[int, int]]:
        """The links that peers report, up and down, in bytes a second; 0: unknown to them."""
        for running in self._running.values():
            for peer, (up, down) in running.broadcast.links.items():
                before = self._links.pop(peer, (0, 0))
                self._links[peer] = (up or before[0], down or before[1])
        while len(self._links) > LINKS_KEPT_MAX:
            self._links.popitem(last=False)
        return dict(self._links)

    @property
    def up_bytes_per_s(self) -> float:
        """The measured rate of our uplink; 0: not measured yet."""
        return self._chunks.pacer.rate()

    def peer_links(self, without: PeerId) -> list[PeerLink]:
        """The links of all connected peers that took part, and our own, but for the publisher's."""
        transport = self._chunks.transport
        links = self.links
        found = [
            PeerLink(peer, float(links[peer][0]), float(links[peer][1]))
            for peer in transport.peers()
            if peer in links and peer != without
        ]
        if transport.peer_id != without:
            own = PeerLink(transport.peer_id, self.up_bytes_per_s, self.down_bytes_per_s)
            found.append(own)
        return found

    # --- fetching and giving ---------------------------------------------------------------

    async def fetch(
        self,
        version: int,
        root: bytes,
        artifact: int,
        refs: Sequence[ChunkRef],
        publisher: PeerId,
        *,
        on_behalf: int,
    ) -> Fetched:
        """Have all chunks of an artifact in the store; they are given on from then on, and while
        they come.

        Raises:
            StoreFull, StorageFailed: the store. What came stays in it.
        """
        if not refs:
            return Fetched(0, 0)
        key = ArtifactKey(root, artifact)
        await self._pin(version, key, refs)
        first_bytes: int | None = None
        fetched_bytes = 0
        while True:
            missing = {ref.sha256 for ref in await self._run_sync(self.store.missing, refs)}
            missing_bytes = sum(ref.size_bytes for ref in refs if ref.sha256 in missing)
            first_bytes = missing_bytes if first_bytes is None else first_bytes
            have = sum(1 << at for at, ref in enumerate(refs) if ref.sha256 not in missing)
            running = await self._open(key, version, on_behalf, refs, publisher, have)
            await self._measure_until_done(running)
            fetched_bytes += running.broadcast.counters.bytes_in
            if running.broadcast.complete.is_set():
                return Fetched(first_bytes, fetched_bytes)
            await running.ended.wait()
            if running.failure is not None:
                raise running.failure
            # else it was ended for want of room: what is missing is asked for again

    async def _measure_until_done(self, running: _Running) -> None:
        counters = running.broadcast.counters
        while not running.done.is_set():
            before_bytes, before_s = counters.bytes_in, trio.current_time()
            with trio.move_on_after(MEASURE_S):
                await running.done.wait()
            elapsed_s = trio.current_time() - before_s
            if elapsed_s >= MEASURE_S / 2 or not self.down_bytes_per_s:
                rate = (counters.bytes_in - before_bytes) / max(elapsed_s, 1e-3)
                self.down_bytes_per_s = max(self.down_bytes_per_s, rate)
                running.broadcast.down_measured = self.down_bytes_per_s

    async def give(
        self,
        version: int,
        root: bytes,
        artifact: int,
        refs: Sequence[ChunkRef],
        publisher: PeerId,
    ) -> None:
        """Give on an artifact of which all chunks are in the store."""
        key = ArtifactKey(root, artifact)
        if key in self._running or not refs:
            return
        await self._pin(version, key, refs)
        await self._open(key, version, version, refs, publisher, (1 << len(refs)) - 1)

    async def _open(
        self,
        key: ArtifactKey,
        version: int,
        on_behalf: int,
        refs: Sequence[ChunkRef],
        publisher: PeerId,
        have: int,
    ) -> _Running:
        before = self._running.get(key)
        if before is not None:  # given up a moment ago
            before.scope.cancel()
            await before.ended.wait()
        broadcast = Broadcast(
            self._chunks,
            OfferedArtifact(key, refs, publisher),
            StoredChunks(self.store, refs, self._run_sync),
            have,
            Random(self._rng.random()),
            self._blame,
            self.down_bytes_per_s,
        )
        running = self._running[key] = _Running(version, on_behalf, broadcast)
        self.nursery.start_soon(self._run, key, running)
        return running

    async def _run(self, key: ArtifactKey, running: _Running) -> None:
        try:
            with running.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(running.broadcast.run)
                    await running.broadcast.complete.wait()
                    running.done.set()
                    await self._tell_publisher(running.broadcast)
        except* (StoreFull, StorageFailed) as group:
            running.failure = _first(group)
        finally:
            del self._running[key]
            running.done.set()
            running.ended.set()

    async def _tell_publisher(self, broadcast: Broadcast) -> None:
        """Tell the publisher that all is here, so that it knows who has it. It is told no more."""
        if broadcast.publisher != self._chunks.transport.peer_id:
            await broadcast.tell(broadcast.publisher)

    def _blame(self, peer: PeerId, reason: Reject, detail: str) -> None:
        self._ledger.reject(peer, reason)

    # --- ends ------------------------------------------------------------------------------

    def drop(self, version: int) -> None:
        """End what was begun on behalf of a version."""
        self._end(each for each in self._running.values() if each.on_behalf == version)
        self._unpin_all_but({each.version for each in self._kept()})

    def keep_newest(self, versions: int) -> None:
        """Go on giving the newest so many versions, and end the rest."""
        newest = set(self.versions()[-versions:])
        self._end(each for each in self._running.values() if each.version not in newest)
        self._unpin_all_but({each.version for each in self._kept()})

    def end(self, root: bytes, artifact: int) -> None:
        """Stop giving one artifact, and let its chunks go where room is needed."""
        running = self._running.get(ArtifactKey(root, artifact))
        if running is None:
            return
        running.scope.cancel()
        refs = self._pins.get(running.version, {})
        refs.pop(running.broadcast.key, None)
        self.store.pin(pin_name(running.version), [ref for each in refs.values() for ref in each])

    def _kept(self) -> list[_Running]:
        return [each for each in self._running.values() if not each.scope.cancel_called]

    def _end(self, leaving: Iterable[_Running]) -> None:
        for running in list(leaving):
            running.scope.cancel()

    async def _pin(self, version: int, key: ArtifactKey, refs: Sequence[ChunkRef]) -> None:
        """Keep chunks in the store. Where there is no room, older versions are no longer given."""
        self._pins.setdefault(version, {})[key] = refs
        while True:
            union = [ref for each in self._pins[version].values() for ref in each]
            older = sorted(each for each in self._pins if each < version)
            try:
                if len(self._pins) > VERSIONS_SHARED_MAX and older:
                    raise StoreFull("too many versions")  # noqa: TRY301  as if they were too large
                await self._run_sync(self.store.pin, pin_name(version), union)
            except StoreFull:
                if not older:
                    del self._pins[version][key]
                    raise
                self._end(each for each in self._running.values() if each.version == older[0])
                self._unpin(older[0])
                continue
            return

    def _unpin_all_but(self, versions: set[int]) -> None:
        for version in [each for each in self._pins if each not in versions]:
            self._unpin(version)

    def _unpin(self, version: int) -> None:
        self._pins.pop(version, None)
        self.store.unpin(pin_name(version))


def _first(group: BaseExceptionGroup[StoreFull | StorageFailed]) -> StoreFull | StorageFailed:
    error = first_of(group)
    assert isinstance(error, StoreFull | StorageFailed)
    return error
