"""The exchange of an artifact's chunks, and all broadcasts of one policy (`Sharing`).

A `Broadcast` asks for chunks and verifies each before it is stored, served or counted.
`chunk_server` answers others, `piece_selection` decides. A peer that sends a chunk which the
artifact does not have is blamed and asked no more: it costs one answer of traffic.
"""

import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, Protocol

import trio

from swarm.errors import (
    LocalProtocolError,
    Reject,
    RemoteProtocolError,
    RequestRefused,
    StorageFailed,
    StoreFull,
    TransportError,
    first_of,
)
from swarm.identity import PeerId
from swarm.limits.backoff import Backoff
from swarm.peers.reputation import Ledger
from swarm.storage import RunSync, Runtime
from swarm.weights.broadcast_time import PeerLink
from swarm.weights.chunk_server import (
    ANSWER_S,
    BATCH_BYTES_MAX,
    BYTES_PER_S_MIN,
    PARK_S,
    ArtifactKey,
    ChunkService,
    Kind,
    answer_bytes_max,
    join,
    split,
)
from swarm.weights.chunk_store import ChunkStore
from swarm.weights.manifest import ChunkRef
from swarm.weights.piece_selection import Picker, from_bytes, members, to_bytes
from swarm.wire import codec
from swarm.wire.messages import (
    BATCH_CHUNKS_MAX,
    CHUNK_WAIT_MS_MAX,
    CHUNKS_MAX,
    CHUNKS_PENDING_MAX,
    CHUNKS_PROTOCOL,
    ChunkRequest,
)

NEIGHBOURS_MAX = 128  # that are asked; the publisher always is
RELAYED_AT_ONCE = 2  # fewest requests that wait at a neighbour for chunks that it relays
PUBLISHER_AT_ONCE = 4  # fewest such requests at the publisher
PUBLISHER_AHEAD_BYTES = 4_194_304  # in such requests while our own rate is unknown
RELAYED_AT_ONCE_MAX = 16  # such requests at one neighbour
RELAYED_AHEAD_S = 0.5  # seconds of downlink asked for ahead, at all neighbours together
RELAYED_BYTES_MIN = 8_388_608  # bytes asked for ahead where the downlink is slow or unknown
FRESH_AT_ONCE = 8  # requests that wait at the publisher for fresh chunks, at most
NO_MORE_FRESH = -2  # result of `_fresh_wanted`: ask for none after those on their way
NAMED_AT_ONCE = 2  # chunks asked of one neighbour by number, at most
NAMED_IN_ALL = 16  # of all neighbours together
NAMED_PARK_S = 0.5  # wait at a neighbour for a named chunk: another may have it sooner
RELAY_AHEAD_S = 0.4  # seconds of uplink that a relay takes on ahead, at most
RELAY_AHEAD_S_MIN = 0.2  # and at least
RELAY_AHEAD_SHARE = 0.15  # of the whole transfer's time, between these two
RELAY_AHEAD_COPIES = 2  # chunks to all neighbours taken on ahead, if that is more
SLOW_UP_SHARE = 0.25  # of the others' mean uplink; a node with less does not relay
SLOW_UP_SHARE_LONG = 0.5  # the same where one chunk to all takes longer than `SLOW_UP_S`
SLOW_UP_S = 1.5  # seconds
SLOW_CYCLE_SHARE = 0.05  # of the transfer's time for one chunk to all; below it a node relays
UNSURE_CYCLE_SHARE = 0.25  # of the same; above it no relaying while others' uplinks are unknown
NEWS_S = 0.5  # between two progress reports to one neighbour, at least
NEWS_TIMEOUT_S = 10.0  # of such a report
GATHERED_BYTES = 1_048_576  # of chunks, that are stored at once
GATHER_S = 0.01  # wait for more, where fewer have come
BATCH_S = 0.02  # of the slower link, in the chunks of one answer
WRITING_BYTES_MAX = 8_388_608  # of chunks that wait to be stored; one chunk may be larger
TICK_S = 0.1  # between two looks at what to ask for, at most
TICK_S_MIN = 0.004  # and at least: chunks that come faster are looked at together
AVOID = Backoff(0.4, 12.8)  # seconds, for a neighbour that had nothing to give
RETRY = Backoff(1.0, 15.0, 1.5)  # seconds, for one that does not take part yet
IDLE_S = 0.15  # without a chunk, at least, before chunks that are relayed are pulled
GAP_WEIGHT = 0.1  # of the newest gap between two chunks, in their mean

Blame = Callable[[PeerId, Reject], None]


class ChunkSource(Protocol):
    """The store of an artifact's verified chunks, by number. It does not block the event loop."""

    async def read(self, chunks: Sequence[int]) -> bytes:
        """An answer with these chunks."""

    def split(self, answer: bytes, most: int) -> list[bytes]:
        """The chunks of such an answer. RemoteProtocolError: it is malformed, or has more."""

    async def write(self, chunks: Mapping[int, bytes]) -> None: ...


@dataclass(frozen=True, slots=True)
class OfferedArtifact:
    """A published artifact and its chunks in order."""

    key: ArtifactKey
    refs: Sequence[ChunkRef]
    publisher: PeerId


@dataclass(slots=True)
class BroadcastCounters:
    chunks_in: Counter[str] = field(default_factory=Counter)  # by kind of request
    bytes_in: int = 0
    bytes_out: int = 0
    duplicate_bytes: int = 0
    corrupt_bytes: int = 0
    distrusted: int = 0


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A verified chunk that is not stored yet."""

    peer: PeerId
    kind: Kind
    chunk: int
    data: bytes


# Long: sending and receiving share the state of each chunk.
class Broadcast:
    """One node's part in one artifact's broadcast. `run` it until it is `complete`."""

    # Long: one line for each argument, counter and table.
    def __init__(
        self,
        service: ChunkService,
        offered: OfferedArtifact,
        source: ChunkSource,
        have: int,
        rng: Random,
        blame: Blame,
        down_bytes_per_s: float = 0.0,
    ) -> None:
        """`have`: the chunks that are here, bit i for chunk i."""
        refs = offered.refs
        if not 0 < len(refs) <= CHUNKS_MAX:
            raise LocalProtocolError(f"{len(refs)} chunks: must be 1 to {CHUNKS_MAX}")
        self.key = offered.key
        self.refs = tuple(refs)
        self._source = source
        self.publisher = offered.publisher
        self._size_bytes = sum(ref.size_bytes for ref in refs)
        self.chunk_bytes = max(ref.size_bytes for ref in refs)
        self.counters = BroadcastCounters()
        self.complete = trio.Event()
        self._service = service
        self._transport = service.transport
        self._own = service.transport.peer_id
        self._rng = rng
        self._blame = blame
        self._down = down_bytes_per_s
        self.down_measured = 0.0  # told to others in place of what was known before
        self._numbers = {ref.sha256: at for at, ref in enumerate(refs)}
        giver = None if self.publisher == self._own else self.publisher
        self.picker = Picker(len(refs), have, rng, giver)
        self._asked: dict[PeerId, trio.CancelScope] = {}
        self._avoid_until_s: dict[PeerId, float] = {}
        self._named: Counter[PeerId] = Counter()  # in flight
        self._relayed: Counter[PeerId] = Counter()  # in flight, or waiting there
        self._gave_nothing: Counter[PeerId] = Counter()  # named requests in a row
        self._proven: set[PeerId] = set()  # who sent a chunk of the artifact
        self._took_no_part: Counter[PeerId] = Counter()  # relayed requests since it asked us
        self._first_heard: dict[PeerId, trio.Event] = {}  # of peers that took no part before
        self._told_s: dict[PeerId, float] = {}
        self._telling: set[PeerId] = set()
        self._fresh_asked = 0
        self._fresh_scopes: set[trio.CancelScope] = set()  # of requests for such
        self._progress_s = 0.0  # when the last chunk came
        self._gap_s = 0.0  # between two chunks, in the mean
        self._unread = trio.Event()
        self._to_store: list[_Arrived] = []
        self._arrival = trio.Event()  # of one of these
        self._writing_bytes = 0
        self._fresh_writing = 0  # chunks that will add to what we owe
        self._written = trio.lowlevel.ParkingLot()
        self._is_last_lacking = False  # of us as the publisher: at most one peer lacks anything
        self.links: dict[PeerId, tuple[int, int]] = {}  # what peers say of theirs, up and down
        if self.picker.complete:
            self.complete.set()

    def hear(self, peer: PeerId, request: ChunkRequest) -> None:
        now_s = trio.current_time()
        have, relaying = from_bytes(request.have), from_bytes(request.relaying)
        self.picker.learn(peer, have, relaying, request.pending, now_s)
        self._avoid_until_s.pop(peer, None)
        self._took_no_part.pop(peer, None)
        if peer not in self.links and peer in self._first_heard:
            self._first_heard.pop(peer).set()
        if len(self.links) < NEIGHBOURS_MAX or peer in self.links:
            self.links[peer] = (request.up_bytes_per_s, request.down_bytes_per_s)

    def holds_back(self, peer: PeerId, request: ChunkRequest) -> bool:
        """True if the request gets no chunk, because that will come from elsewhere."""
        if request.kind not in ("named", "lost"):
            return False
        accused = PeerId(request.accused) if request.accused else None
        return self.picker.holds_back(peer, request.chunk, trio.current_time(), accused)

    def find(
        self, peer: PeerId, request: ChunkRequest, now_s: float, *, is_first: bool
    ) -> int | None:
        """A chunk that answers a request, the first or a further one; None: none yet."""
        if request.kind in ("named", "lost"):
            known = request.chunk < len(self.refs)
            return self.picker.wanted_by(peer, request.chunk, now_s) if known else None
        if request.kind == "fresh":
            return self.picker.fresh_for(peer, now_s)
        spare = self._is_last_lacking or (is_first and self._service.pacer.is_idle(now_s))
        return self.picker.relayed_for(peer, now_s, spare=spare)

    def batch_bytes(self, peer: PeerId) -> float:
        """Bytes of chunks that one answer may carry: what the slower link passes in `BATCH_S`."""
        down = self.links.get(peer, (0, 0))[1]
        rate = min(self._service.pacer.rate(), down or math.inf)
        return min(BATCH_BYTES_MAX, BATCH_S * rate)

    async def read(self, chunks: Sequence[int]) -> bytes:
        answer = await self._source.read(chunks)
        self.counters.bytes_out += sum(self.refs[chunk].size_bytes for chunk in chunks)
        return answer

    def not_sent(self, peer: PeerId, chunk: int) -> None:
        self.picker.failed(peer, chunk)

    async def run(self) -> None:
        """Serve what is here and fetch what is not, until cancelled."""
        self._service.add(self)
        self._progress_s = trio.current_time()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._store)
                while True:
                    self._keep_neighbours(nursery)
                    self._tick(nursery)
                    next_s = trio.current_time() + TICK_S_MIN
                    with trio.move_on_after(TICK_S):
                        await self._unread.wait()
                    await trio.sleep_until(next_s)
                    self._unread = trio.Event()
        finally:
            self._service.remove(self)

    def _keep_neighbours(self, nursery: trio.Nursery) -> None:
        there = set(self._transport.peers())
        for peer in [peer for peer in self._asked if peer not in there]:
            self._asked.pop(peer).cancel()
        for peer in [peer for peer in self.picker.neighbours if peer not in there]:
            self.picker.leave(peer)
            for about in (self.links, self._first_heard, self._told_s, self._avoid_until_s):
                about.pop(peer, None)
            self._gave_nothing.pop(peer, None)
            self._took_no_part.pop(peer, None)
        newcomers = sorted(there - self._asked.keys())
        room = NEIGHBOURS_MAX - len(self._asked)
        if len(newcomers) > room:
            first = [peer for peer in newcomers if peer == self.publisher]
            rest = [peer for peer in newcomers if peer != self.publisher]
            newcomers = first + self._rng.sample(rest, max(0, min(len(rest), room - len(first))))
        for peer in newcomers:
            scope = self._asked[peer] = trio.CancelScope()
            nursery.start_soon(self._ask, peer, scope)

    def _tick(self, nursery: trio.Nursery) -> None:
        now_s = trio.current_time()
        rate = self._service.pacer.rate()
        others = len(self._asked) - len(self.picker.finished())
        self._is_last_lacking = others <= 1
        self.picker.cycle_s = others * self.chunk_bytes / rate if rate else 0.0
        if self.publisher == self._own:
            self.picker.reclaim(now_s)
            room = TICK_S * rate / self.chunk_bytes - self.picker.copies_owed()
            self.picker.take_over(room, now_s)
        self._service.release_stalled(now_s)
        self._service.pump()
        if not self.picker.complete:
            for _ in range(self._fresh_wanted()):
                self._fresh_asked += 1
                nursery.start_soon(self._take_fresh)
            self._pull(nursery, now_s)
        self._tell(nursery, now_s)

    def _is_distrusted(self, peer: PeerId) -> bool:
        neighbour = self.picker.neighbours.get(peer)
        return neighbour is not None and neighbour.distrusted

    async def _ask(self, peer: PeerId, scope: trio.CancelScope) -> None:
        """Keep requests waiting at one neighbour for the chunks that it relays."""
        self.picker.meet(peer)
        self._relayed[peer] = 0
        with scope:
            async with trio.open_nursery() as nursery:
                while not self.picker.complete and not self._is_distrusted(peer):
                    for _ in range(self._to_park(peer) - self._relayed[peer]):
                        self._relayed[peer] += 1
                        nursery.start_soon(self._take_relayed, peer)
                    await trio.sleep(TICK_S)
        self._relayed.pop(peer, None)

    def _to_park(self, peer: PeerId) -> int:
        """The number of requests to keep waiting at a neighbour: about one for each chunk to
        come."""
        picker = self.picker
        least = RELAYED_AT_ONCE
        if peer == self.publisher:
            least = PUBLISHER_AT_ONCE
            if not self._service.pacer.rate():  # ours was never full: its may have much to spare
                chunks = PUBLISHER_AHEAD_BYTES // self.chunk_bytes
                least = min(RELAYED_AT_ONCE_MAX, max(least, chunks))
        known = (picker.meet(peer).relaying & picker.missing()).bit_count()
        down_bytes = max(RELAYED_BYTES_MIN, RELAYED_AHEAD_S * self._down)
        room = int(down_bytes / self.chunk_bytes) - self._relayed.total()
        return max(least, min(known, RELAYED_AT_ONCE_MAX, self._relayed[peer] + room))

    async def _take_relayed(self, peer: PeerId) -> None:
        """Keep one such request waiting."""
        try:
            while not self.picker.complete and not self._is_distrusted(peer):
                if not await self._request(peer, "relayed", 0, PARK_S):
                    self._took_no_part[peer] += 1
                    first = self._first_heard.setdefault(peer, trio.Event())
                    with trio.move_on_after(RETRY.spread(self._took_no_part[peer] - 1, self._rng)):
                        await first.wait()
                if self._relayed[peer] > self._to_park(peer):
                    return
        finally:
            self._relayed[peer] -= 1

    def _fresh_wanted(self) -> int:
        """The number of further fresh chunks to ask for; negative: too many are asked for."""
        publisher, picker = self.publisher, self.picker
        if publisher not in self._asked or self._is_distrusted(publisher):
            return NO_MORE_FRESH
        rate = self._service.pacer.rate()
        total_s = self._size_bytes / (self._down or rate or 1.0)
        if rate and len(self._asked) > 2 and self._is_slow(rate, total_s):
            return NO_MORE_FRESH
        owed = picker.copies_owed() * self.chunk_bytes
        others = max(1, len(self._asked) - 1)
        ahead_s = min(RELAY_AHEAD_S, max(RELAY_AHEAD_S_MIN, RELAY_AHEAD_SHARE * total_s))
        ahead = max(ahead_s * rate, RELAY_AHEAD_COPIES * others * self.chunk_bytes)
        room = math.ceil((ahead - owed) / (others * self.chunk_bytes))
        return min(FRESH_AT_ONCE, room) - self._fresh_asked - self._fresh_writing

    def _is_slow(self, rate: float, total_s: float) -> bool:
        """True if chunks would reach the others later through us than through them."""
        cycle_s = self.picker.cycle_s
        if cycle_s <= SLOW_CYCLE_SHARE * total_s:
            return False
        ups = [up for up, _ in self.links.values() if up]
        if not ups or len(self.links) < len(self._asked) / 2:  # nobody knows yet who is fast here
            return cycle_s > UNSURE_CYCLE_SHARE * total_s
        share = SLOW_UP_SHARE if cycle_s <= SLOW_UP_S else SLOW_UP_SHARE_LONG
        return rate < share * sum(ups) / len(ups)

    async def _take_fresh(self) -> None:
        scope = trio.CancelScope()
        self._fresh_scopes.add(scope)
        try:
            with scope:
                while await self._request(self.publisher, "fresh", 0, PARK_S):
                    if self.picker.complete or self._fresh_wanted() < -1:
                        return  # else the next is on its way while this one is passed on
                await trio.sleep(RETRY.first * self._rng.random())
        finally:
            self._fresh_scopes.discard(scope)
            self._fresh_asked -= 1

    def _pull(self, nursery: trio.Nursery, now_s: float) -> None:
        idle = now_s - self._progress_s > max(IDLE_S, 2.0 * self._gap_s)
        while self._named.total() < NAMED_IN_ALL:
            found = self.picker.pull(now_s, lambda peer: self._is_free(peer, now_s), idle=idle)
            if found is None:
                return
            peer, chunk = found
            self.picker.pending |= 1 << chunk
            self._named[peer] += 1
            nursery.start_soon(self._take_named, peer, chunk)

    def _is_free(self, peer: PeerId, now_s: float) -> bool:
        return (
            self._named[peer] < NAMED_AT_ONCE
            and peer in self._asked
            and self._avoid_until_s.get(peer, 0.0) <= now_s
        )

    async def _take_named(self, peer: PeerId, chunk: int) -> None:
        try:
            accused = None
            if peer == self.publisher:
                accused = self.picker.relay_of(chunk, distrusted=True)
            kind: Kind = "named" if accused is None else "lost"
            await self._request(peer, kind, chunk, NAMED_PARK_S, accused)
            if self.picker.here >> chunk & 1:
                self._gave_nothing.pop(peer, None)
                return
            self._avoid_until_s[peer] = trio.current_time() + AVOID.after(self._gave_nothing[peer])
            self._gave_nothing[peer] += 1
        finally:
            self._named[peer] -= 1
            self.picker.give_up(chunk)

    def _tell(self, nursery: trio.Nursery, now_s: float) -> None:
        """Report our progress to neighbours that got none for a while."""
        for peer in self._asked:
            neighbour = self.picker.neighbours.get(peer)
            if neighbour is None or (neighbour.have == self.picker.all and peer != self.publisher):
                continue
            told_s = self._told_s.get(peer, 0.0)
            if now_s - told_s >= max(NEWS_S, self.picker.cycle_s):
                self._told_s[peer] = now_s
                if peer not in self._telling:
                    self._telling.add(peer)
                    nursery.start_soon(self._tell_one, peer)

    async def _tell_one(self, peer: PeerId) -> None:
        try:
            with trio.move_on_after(NEWS_TIMEOUT_S):
                await self.tell(peer)
        finally:
            self._telling.discard(peer)

    async def tell(self, peer: PeerId) -> None:
        """Report our progress to a peer."""
        await self._request(peer, "news", 0, 0.0)

    async def _request(
        self, peer: PeerId, kind: Kind, chunk: int, wait_s: float, accused: PeerId | None = None
    ) -> bool:
        """Ask a neighbour for a chunk and take what comes. False: it does not take part."""
        picker, count = self.picker, len(self.refs)
        # A stranger may lie: one chunk bounds the garbage, and the memory for it.
        most = BATCH_CHUNKS_MAX if kind == "relayed" and peer in self._proven else 1
        self._told_s[peer] = trio.current_time()
        request = ChunkRequest(
            type="chunk",
            root=self.key.root,
            artifact=self.key.artifact,
            kind=kind,
            chunk=chunk,
            accused=accused,
            have=to_bytes(picker.have, count),
            relaying=to_bytes(picker.relaying, count),
            pending=tuple(members(picker.pending | picker.arrived))[:CHUNKS_PENDING_MAX],
            wait_ms=min(CHUNK_WAIT_MS_MAX, int(wait_s * 1e3)),
            up_bytes_per_s=int(self._service.pacer.rate()),
            down_bytes_per_s=int(self.down_measured or self._down),
            most=most,
        )
        try:
            data = await self._transport.request(
                peer,
                CHUNKS_PROTOCOL,
                codec.encode(request),
                timeout_s=wait_s + ANSWER_S + self.chunk_bytes / BYTES_PER_S_MIN,
                response_bytes_max=answer_bytes_max(self.chunk_bytes, most),
            )
            chunks = self._verified(data, most)
        except RemoteProtocolError as error:
            self._distrust(peer, error.reason)
            return False
        except TransportError:
            return False
        if chunks:
            self._proven.add(peer)
        for chunk, each in chunks:
            await self._take(peer, kind, chunk, each)
        return True

    def _verified(self, answer: bytes, most: int) -> list[tuple[int, bytes]]:
        """The chunks of an answer with their numbers. RemoteProtocolError: one is not the
        artifact's, or the answer is malformed."""
        chunks = self._source.split(answer, most)
        numbers = [self._numbers.get(hashlib.sha256(each).digest()) for each in chunks]
        if None in numbers:
            self.counters.corrupt_bytes += len(answer)
            raise RemoteProtocolError(Reject.MALFORMED, "a chunk that the manifest does not list")
        return [(at, each) for at, each in zip(numbers, chunks, strict=True) if at is not None]

    async def _take(self, peer: PeerId, kind: Kind, chunk: int, data: bytes) -> None:
        """Have a verified chunk stored."""
        counters, picker = self.counters, self.picker
        counters.bytes_in += len(data)
        if picker.here >> chunk & 1:
            counters.duplicate_bytes += len(data)
            counters.chunks_in["duplicate " + kind] += 1
            return
        picker.arrived |= 1 << chunk
        try:
            while self._writing_bytes and self._writing_bytes + len(data) > WRITING_BYTES_MAX:
                await self._written.park()
        except trio.Cancelled:  # who sent it has left
            picker.arrived &= ~(1 << chunk)
            raise
        self._writing_bytes += len(data)
        self._fresh_writing += kind == "fresh"
        self._to_store.append(_Arrived(peer, kind, chunk, data))
        self._arrival.set()

    async def _store(self) -> None:
        """Store chunks, while the next are asked for.

        All that came meanwhile are written together: a turn of a thread costs more than a chunk.
        """
        while True:
            await self._arrival.wait()
            if self._writing_bytes < GATHERED_BYTES:
                await trio.sleep(GATHER_S)
            self._arrival = trio.Event()
            batch, self._to_store = self._to_store, []
            try:
                await self._source.write({each.chunk: each.data for each in batch})
            finally:
                for each in batch:
                    self.picker.arrived &= ~(1 << each.chunk)
                    self._writing_bytes -= len(each.data)
                    self._fresh_writing -= each.kind == "fresh"
                self._written.unpark_all()
            for each in batch:
                self._count(each)
            self._unread.set()
            self._service.pump()

    def _count(self, arrived: _Arrived) -> None:
        """Count a stored chunk."""
        picker, chunk = self.picker, arrived.chunk
        self.counters.chunks_in[arrived.kind] += 1
        now_s = trio.current_time()
        self._gap_s += GAP_WEIGHT * (now_s - self._progress_s - self._gap_s)
        self._progress_s = now_s
        # A chunk that the publisher sent by number and that nobody else relays is passed on.
        named = arrived.kind in ("named", "lost") and arrived.peer == self.publisher
        orphan = named and picker.relay_of(chunk, distrusted=False) is None
        picker.got(chunk, relay=arrived.kind == "fresh" or orphan, now_s=now_s)
        if picker.complete:
            self.complete.set()
            for scope in (*self._asked.values(), *self._fresh_scopes):
                scope.cancel()  # what waits at others would take places from what comes next

    def _distrust(self, peer: PeerId, reason: Reject) -> None:
        neighbour = self.picker.meet(peer)
        if not neighbour.distrusted:
            neighbour.distrusted = True
            self.counters.distrusted += 1
        self._blame(peer, reason)


# All broadcasts of one policy.

LINKS_KEPT_MAX: Final = 512  # peers whose reported links are kept
MEASURE_S: Final = 0.5  # over which the downlink is measured
VERSIONS_SHARED_MAX: Final = 12  # at a time, the ones on their way included: pins are bounded


def pin_name(version: int) -> str:
    """The name of the pins of a version's chunks."""
    return f"version {version}"


class StoredChunks:
    def __init__(self, store: ChunkStore, refs: Sequence[ChunkRef], run_sync: RunSync) -> None:
        self._store = store
        self._refs = refs
        self._run_sync = run_sync

    async def read(self, chunks: Sequence[int]) -> bytes:
        """Raises `RequestRefused` where a chunk is gone, damaged or unreadable."""
        names = [self._refs[chunk].sha256 for chunk in chunks]
        found = [self._store.get_at_once(name) for name in names]
        if None in found:
            try:
                found = await self._run_sync(lambda: [self._store.get(name) for name in names])
            except StorageFailed as error:
                raise RequestRefused(f"that chunk cannot be read: {error}") from None
        there = [data for data in found if data is not None]
        if len(there) < len(chunks):
            raise RequestRefused("that chunk is no longer here")
        return join(there)

    def split(self, answer: bytes, most: int) -> list[bytes]:
        """Raises `RemoteProtocolError` for more than `most` chunks, and for a malformed answer."""
        return split(answer, most)

    async def write(self, chunks: Mapping[int, bytes]) -> None:
        """Raises `StoreFull` and `StorageFailed`."""
        await self._run_sync(self._write, chunks)

    def _write(self, chunks: Mapping[int, bytes]) -> None:
        for chunk, data in chunks.items():
            self._store.put(self._refs[chunk].sha256, data, verified=True)  # by the broadcast


@dataclass(frozen=True, slots=True)
class Fetched:
    """The cost of getting all chunks of an artifact."""

    missing_bytes: int  # not here before
    fetched_bytes: int  # received, duplicates included


@dataclass(frozen=True, slots=True)
class Holding:
    """The part of an artifact that is here."""

    version: int  # that it leads to
    chunks: int
    have: int  # bit i for chunk i
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


class Sharing:
    """All broadcasts of one policy. Set `nursery` before any is opened."""

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

    def versions(self) -> tuple[int, ...]:
        """Versions with a complete artifact, oldest first."""
        whole = (each for each in self._running.values() if each.broadcast.complete.is_set())
        return tuple(sorted({each.version for each in whole}))

    def version_of(self, root: bytes) -> int | None:
        found = (each.version for key, each in self._running.items() if key.root == root)
        return next(found, None)

    def progress_of(self, version: int) -> tuple[int, int]:
        """Bytes here and bytes in all of the artifacts on their way for a version."""
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
        """The artifact begun last on behalf of the newest version."""
        if not self._running:
            return None
        newest = max(each.on_behalf for each in self._running.values())
        last = [each.broadcast for each in self._running.values() if each.on_behalf == newest][-1]
        picker, refs = last.picker, last.refs
        size_bytes = sum(ref.size_bytes for ref in refs)
        return Holding(newest, len(refs), picker.have, size_bytes, picker.have == picker.all)

    def unfinished(self, version: int) -> tuple[PeerId, ...]:
        """Connected peers that lack chunks of each artifact of a version that they reported on."""
        lacking: set[PeerId] = set()
        done: set[PeerId] = set()
        there = set(self._chunks.transport.peers())
        for broadcast in self._of(version):
            picker = broadcast.picker
            for peer in broadcast.links.keys() & there:
                neighbour = picker.neighbours.get(peer)
                if neighbour is not None and not neighbour.distrusted:
                    (done if neighbour.have == picker.all else lacking).add(peer)
        return tuple(sorted(lacking - done))

    def _of(self, version: int) -> list[Broadcast]:
        return [each.broadcast for each in self._running.values() if each.version == version]

    def finished(self, version: int) -> int:
        """The number of peers that reported all chunks of an artifact of a version."""
        return len({peer for each in self._of(version) for peer in each.picker.finished()})

    def shares(self, version: int) -> dict[PeerId, float]:
        """The largest share of an artifact's chunks that each peer reported, 0 to 1."""
        found: dict[PeerId, float] = {}
        for broadcast in self._of(version):
            for peer, neighbour in broadcast.picker.neighbours.items():
                share = neighbour.have.bit_count() / len(broadcast.refs)
                found[peer] = max(found.get(peer, 0.0), share)
        return found

    @property
    def links(self) -> dict[PeerId, tuple[int, int]]:
        """The up- and downlinks that peers report, in bytes/s; 0: unknown to them."""
        for running in self._running.values():
            for peer, (up, down) in running.broadcast.links.items():
                before = self._links.pop(peer, (0, 0))
                self._links[peer] = (up or before[0], down or before[1])
        while len(self._links) > LINKS_KEPT_MAX:
            self._links.popitem(last=False)
        return dict(self._links)

    @property
    def up_bytes_per_s(self) -> float:
        """The measured rate of our uplink; 0: unknown."""
        return self._chunks.pacer.rate()

    def peer_links(self, without: PeerId) -> list[PeerLink]:
        """The links of connected peers that took part, and our own, without the publisher's."""
        transport = self._chunks.transport
        links = self.links
        found = [
            PeerLink(peer, float(links[peer][0]), float(links[peer][1]))
            for peer in transport.peers()
            if peer in links and peer != without
        ]
        if (own := transport.peer_id) != without:
            found.append(PeerLink(own, self.up_bytes_per_s, self.down_bytes_per_s))
        return found

    async def fetch(self, version: int, offered: OfferedArtifact, *, on_behalf: int) -> Fetched:
        """Get all chunks of an artifact into the store, and serve them as they come.

        Raises `StoreFull` and `StorageFailed`; what came stays in the store.
        """
        refs = offered.refs
        if not refs:
            return Fetched(0, 0)
        await self._pin(version, offered)
        first_bytes: int | None = None
        fetched_bytes = 0
        while True:
            missing = {ref.sha256 for ref in await self._run_sync(self.store.missing, refs)}
            missing_bytes = sum(ref.size_bytes for ref in refs if ref.sha256 in missing)
            first_bytes = missing_bytes if first_bytes is None else first_bytes
            have = sum(1 << at for at, ref in enumerate(refs) if ref.sha256 not in missing)
            running = await self._open(offered, version, on_behalf, have)
            await self._measure_until_done(running)
            fetched_bytes += running.broadcast.counters.bytes_in
            if running.broadcast.complete.is_set():
                return Fetched(first_bytes, fetched_bytes)
            await running.ended.wait()
            if running.failure is not None:
                raise running.failure
            # It ended for want of room: fetch again what is missing.

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

    async def give(self, version: int, offered: OfferedArtifact) -> None:
        """Serve an artifact of which all chunks are in the store."""
        if offered.key in self._running or not offered.refs:
            return
        await self._pin(version, offered)
        await self._open(offered, version, version, (1 << len(offered.refs)) - 1)

    async def _open(
        self, offered: OfferedArtifact, version: int, on_behalf: int, have: int
    ) -> _Running:
        before = self._running.get(offered.key)
        if before is not None:  # given up a moment ago
            before.scope.cancel()
            await before.ended.wait()
        broadcast = Broadcast(
            self._chunks,
            offered,
            StoredChunks(self.store, offered.refs, self._run_sync),
            have,
            Random(self._rng.random()),
            self._ledger.reject,
            self.down_bytes_per_s,
        )
        running = self._running[offered.key] = _Running(version, on_behalf, broadcast)
        self.nursery.start_soon(self._run, running)
        return running

    async def _run(self, running: _Running) -> None:
        try:
            with running.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(running.broadcast.run)
                    await running.broadcast.complete.wait()
                    running.done.set()
                    publisher = running.broadcast.publisher
                    if publisher != self._chunks.transport.peer_id:
                        await running.broadcast.tell(publisher)
        except* (StoreFull, StorageFailed) as group:
            error = first_of(group)
            assert isinstance(error, StoreFull | StorageFailed)
            running.failure = error
        finally:
            del self._running[running.broadcast.key]
            running.done.set()
            running.ended.set()

    def drop(self, version: int) -> None:
        """End the broadcasts on behalf of a version."""
        self._end(each for each in self._running.values() if each.on_behalf == version)
        self._unpin_ended()

    def keep_newest(self, versions: int) -> None:
        """Serve the newest so many versions, and end the rest."""
        newest = set(self.versions()[-versions:])
        self._end(each for each in self._running.values() if each.version not in newest)
        self._unpin_ended()

    def end(self, root: bytes, artifact: int) -> None:
        """Stop serving one artifact and unpin its chunks."""
        running = self._running.get(ArtifactKey(root, artifact))
        if running is None:
            return
        running.scope.cancel()
        refs = self._pins.get(running.version, {})
        refs.pop(running.broadcast.key, None)
        self.store.pin(pin_name(running.version), [ref for each in refs.values() for ref in each])

    def _end(self, leaving: Iterable[_Running]) -> None:
        for running in list(leaving):
            running.scope.cancel()

    async def _pin(self, version: int, offered: OfferedArtifact) -> None:
        """Pin chunks in the store. Where there is no room, older versions end."""
        self._pins.setdefault(version, {})[offered.key] = offered.refs
        while True:
            union = [ref for each in self._pins[version].values() for ref in each]
            older = sorted(each for each in self._pins if each < version)
            try:
                if len(self._pins) <= VERSIONS_SHARED_MAX or not older:
                    await self._run_sync(self.store.pin, pin_name(version), union)
                    return
            except StoreFull:
                if not older:
                    del self._pins[version][offered.key]
                    raise
            self._end(each for each in self._running.values() if each.version == older[0])
            self._unpin(older[0])

    def _unpin_ended(self) -> None:
        kept = {each.version for each in self._running.values() if not each.scope.cancel_called}
        for version in self._pins.keys() - kept:
            self._unpin(version)

    def _unpin(self, version: int) -> None:
        self._pins.pop(version, None)
        self.store.unpin(pin_name(version))
