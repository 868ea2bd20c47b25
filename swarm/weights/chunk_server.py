"""Answers to requests for chunks, of as many artifacts as are in flight.

A request waits until a chunk is found for it and the uplink has room. The peer that was sent least
is served first.
"""

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import trio

from swarm.errors import LocalProtocolError, Reject, RemoteProtocolError, RequestRefused
from swarm.identity import PeerId
from swarm.limits.quotas import Kind as Quota
from swarm.peers.connection_gater import ConnectionGater
from swarm.transport.base import ServeLimits, Transport
from swarm.weights.manifest import ChunkRef
from swarm.weights.piece_selection import Pacer
from swarm.wire import codec
from swarm.wire.messages import (
    CHUNK_BYTES_MAX,
    CHUNK_REQUEST_BYTES_MAX,
    CHUNKS_PROTOCOL,
    ChunkRequest,
)

PARK_S = 10.0  # longest wait of a request for a chunk
ANSWER_S = 60.0  # time limit of an answer on its way, beyond its size at `BYTES_PER_S_MIN`
BYTES_PER_S_MIN = 16_384
ANSWER_STALLED_S = 3.0  # after which an answer waits for its reader, beyond its size at the rate
ANSWER_BYTES_PER_S = 131_072.0  # of an answer that does not
PEER_OUT_BYTES_MAX = 8_388_608  # on their way to one peer; one chunk may be larger
SERVED_PEERS_MAX = 1_024  # whose bytes are counted
BATCH_BYTES_MAX = 1_048_576  # of an answer with several chunks
CHUNK_HEAD = struct.Struct("!I")  # before each chunk of an answer: its bytes

Kind = Literal["fresh", "relayed", "named", "lost", "news"]
ORDER: tuple[Kind, ...] = ("fresh", "lost", "named", "relayed")  # in which requests are answered


def join(chunks: Sequence[bytes]) -> bytes:
    """An answer with these chunks."""
    return b"".join(part for each in chunks for part in (CHUNK_HEAD.pack(len(each)), each))


def split(answer: bytes, most: int) -> list[bytes]:
    """The chunks of an answer. Raises `RemoteProtocolError` for more than `most`, and for a
    malformed one."""
    view = memoryview(answer)
    chunks: list[bytes] = []
    while view:
        if len(chunks) == most or len(view) < CHUNK_HEAD.size:
            raise RemoteProtocolError(Reject.MALFORMED, "an answer that is no list of chunks")
        (size_bytes,) = CHUNK_HEAD.unpack_from(view)
        view = view[CHUNK_HEAD.size :]
        if not 0 < size_bytes <= len(view):
            raise RemoteProtocolError(Reject.MALFORMED, "an answer that ends within a chunk")
        chunks.append(bytes(view[:size_bytes]))
        view = view[size_bytes:]
    return chunks


def answer_bytes_max(chunk_bytes: int, most: int) -> int:
    """The size of the largest answer with up to `most` chunks of up to so many bytes."""
    one = CHUNK_HEAD.size + chunk_bytes
    return min(most * one, max(BATCH_BYTES_MAX, one))


CHUNK_LIMITS = ServeLimits(
    request_bytes_max=CHUNK_REQUEST_BYTES_MAX,
    response_bytes_max=CHUNK_BYTES_MAX + CHUNK_HEAD.size,
    concurrent_max=1024,  # most wait and hold nothing but their place
    concurrent_per_peer_max=32,
    timeout_s=PARK_S + ANSWER_S + CHUNK_BYTES_MAX / BYTES_PER_S_MIN,
)


@dataclass(frozen=True, slots=True)
class ArtifactKey:
    """The name of an artifact: the root of its manifest (32 bytes), and its place in it."""

    root: bytes
    artifact: int


class ChunkGiver(Protocol):
    """An artifact whose chunks are served: a `Broadcast`."""

    key: ArtifactKey
    refs: tuple[ChunkRef, ...]
    chunk_bytes: int

    def hear(self, peer: PeerId, request: ChunkRequest) -> None: ...

    def holds_back(self, peer: PeerId, request: ChunkRequest) -> bool: ...

    def find(
        self, peer: PeerId, request: ChunkRequest, now_s: float, *, is_first: bool
    ) -> int | None: ...

    def batch_bytes(self, peer: PeerId) -> float: ...

    async def read(self, chunks: Sequence[int]) -> bytes: ...

    def not_sent(self, peer: PeerId, chunk: int) -> None: ...


@dataclass(eq=False, slots=True)
class _Leaving:
    """An answer on its way."""

    size_bytes: int
    begun_s: float
    stalled: bool = False


@dataclass(eq=False, slots=True)
class _Waiting:
    """A request that has no answer yet."""

    peer: PeerId
    broadcast: ChunkGiver
    request: ChunkRequest
    done: trio.Event = field(default_factory=trio.Event)
    found: list[int] = field(default_factory=list)
    size_bytes: int = 0  # of the answer


class ChunkService:
    """Answers requests for chunks. At most one of a transport."""

    def __init__(
        self,
        transport: Transport,
        up_bytes_per_s: float = 0.0,
        gater: ConnectionGater | None = None,
    ) -> None:
        """`up_bytes_per_s`: the uplink's rate as measured before; 0: unknown. `gater` enforces
        quotas, and blames peers for malformed requests."""
        self._gater = gater
        self.transport = transport
        self.pacer = Pacer(up_bytes_per_s)
        self._broadcasts: dict[ArtifactKey, ChunkGiver] = {}
        self._waiting: dict[Kind, dict[_Waiting, None]] = {kind: {} for kind in ORDER}
        self._served_bytes: Counter[PeerId] = Counter()
        self._leaving: dict[PeerId, list[_Leaving]] = {}
        transport.serve(CHUNKS_PROTOCOL, self._serve, CHUNK_LIMITS, self._sent)

    def add(self, broadcast: ChunkGiver) -> None:
        """Answer for an artifact."""
        if broadcast.key in self._broadcasts:
            raise LocalProtocolError("this artifact is broadcast already")
        self._broadcasts[broadcast.key] = broadcast

    def remove(self, broadcast: ChunkGiver) -> None:
        """Stop answering for it; requests that wait get nothing."""
        self._broadcasts.pop(broadcast.key, None)
        for kind in self._waiting.values():
            for waiting in kind:
                if waiting.broadcast is broadcast:
                    waiting.done.set()

    async def _serve(self, peer: PeerId, payload: bytes) -> bytes:
        if self._gater is None:
            request = codec.decode(payload, ChunkRequest, CHUNK_REQUEST_BYTES_MAX)
        else:
            request = self._gater.read(
                Quota.CHUNK, peer, payload, ChunkRequest, CHUNK_REQUEST_BYTES_MAX
            )
        broadcast = self._broadcasts.get(ArtifactKey(request.root, request.artifact))
        if broadcast is None:
            raise RequestRefused("that artifact is not here")
        broadcast.hear(peer, request)
        if request.kind == "news" or broadcast.holds_back(peer, request):
            return b""
        waiting = _Waiting(peer, broadcast, request)
        leaves = False
        try:
            await self._find(waiting)
            if not waiting.found:
                return b""
            answer = await broadcast.read(waiting.found)
            leaves = True
        finally:
            if waiting.found and not leaves:  # cancelled, or the disk failed
                for chunk in waiting.found:
                    broadcast.not_sent(peer, chunk)
                self._sent(peer, waiting.size_bytes)
        return answer

    async def _find(self, waiting: _Waiting) -> None:
        """Find chunks for a request, once there is one and the uplink has room."""
        queue = self._waiting[waiting.request.kind]
        queue[waiting] = None
        try:
            self.pump()
            if not waiting.found:
                with trio.move_on_after(waiting.request.wait_ms / 1e3):
                    await waiting.done.wait()
        finally:
            queue.pop(waiting, None)

    def pump(self) -> None:
        """Send what may go, fresh chunks first: others wait to pass them on."""
        for kind in ORDER:
            queue = self._waiting[kind]
            while queue and (waiting := self._next(queue)) is not None:
                del queue[waiting]
                waiting.done.set()

    def _next(self, queue: dict[_Waiting, None]) -> _Waiting | None:
        """The request to answer next: of the peer that was sent least."""
        now_s = trio.current_time()
        asked: set[tuple[PeerId, ArtifactKey]] = set()
        for waiting in sorted(queue, key=lambda each: self._served_bytes[each.peer]):
            broadcast = waiting.broadcast
            if waiting.request.kind in ("fresh", "relayed"):  # all of one peer ask for the same
                if (waiting.peer, broadcast.key) in asked:
                    continue
                asked.add((waiting.peer, broadcast.key))
            if not self.pacer.has_room(broadcast.chunk_bytes):
                return None
            out_bytes = sum(each.size_bytes for each in self._leaving.get(waiting.peer, ()))
            if out_bytes + broadcast.chunk_bytes > max(PEER_OUT_BYTES_MAX, broadcast.chunk_bytes):
                continue
            found = broadcast.find(waiting.peer, waiting.request, now_s, is_first=True)
            if found is not None:
                self._take(waiting, found)
                self._take_more(waiting, now_s)
                size = waiting.size_bytes
                self.pacer.start(size, now_s)
                self._count(waiting.peer, size)
                self._leaving.setdefault(waiting.peer, []).append(_Leaving(size, now_s))
                return waiting
        return None

    def _take(self, waiting: _Waiting, chunk: int) -> None:
        waiting.found.append(chunk)
        waiting.size_bytes += CHUNK_HEAD.size + waiting.broadcast.refs[chunk].size_bytes

    def _take_more(self, waiting: _Waiting, now_s: float) -> None:
        """Let further chunks leave in the same answer: each request costs as much as a chunk."""
        broadcast = waiting.broadcast
        if waiting.request.kind != "relayed":  # nor a fresh one: its relay may turn out to lie
            return
        limit_bytes = broadcast.batch_bytes(waiting.peer)
        while len(waiting.found) < waiting.request.most:
            size_bytes = waiting.size_bytes + broadcast.chunk_bytes
            if size_bytes > limit_bytes or not self.pacer.has_room(size_bytes):
                return
            chunk = broadcast.find(waiting.peer, waiting.request, now_s, is_first=False)
            if chunk is None:
                return
            self._take(waiting, chunk)

    def _count(self, peer: PeerId, size_bytes: int) -> None:
        if len(self._served_bytes) >= SERVED_PEERS_MAX and peer not in self._served_bytes:
            there = set(self.transport.peers())
            for gone in [each for each in self._served_bytes if each not in there]:
                del self._served_bytes[gone]
        self._served_bytes[peer] += size_bytes

    def _sent(self, peer: PeerId, size_bytes: int) -> None:
        answers = self._leaving.get(peer, [])
        answer = next((each for each in answers if each.size_bytes == size_bytes), None)
        if answer is None:  # one without a chunk
            return
        answers.remove(answer)
        if not answers:
            del self._leaving[peer]
        now_s = trio.current_time()
        if not answer.stalled:
            peers = len(self.transport.peers())
            self.pacer.done(size_bytes, now_s - answer.begun_s, now_s, peers)
        self.pump()

    def release_stalled(self, now_s: float) -> None:
        """Let others leave beside answers that their readers take slowly."""
        for answer in [each for answers in self._leaving.values() for each in answers]:
            limit_s = ANSWER_STALLED_S + answer.size_bytes / ANSWER_BYTES_PER_S
            if not answer.stalled and now_s - answer.begun_s >= limit_s:
                answer.stalled = True
                self.pacer.give_up(answer.size_bytes)
