"""One end of a transfer of weights in a process of its own, for `bench_weights_path.py`.

    python weights_peers.py ROW give DIRECTORY            prints its address
    python weights_peers.py ROW get DIRECTORY ADDRESS     prints `ready`; for a line on its
                                                                  input: gets all, prints seconds

DIRECTORY is what `make_artifact` made. Rows: `requests` asks for chunk after chunk, from memory to
nowhere; `memory` is a broadcast from memory to memory; `disk` one from store to store. With
SWARM_PROFILE each end writes a cProfile of the transfer under that name and its role.
"""

import cProfile
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Final

import trio

from swarm.errors import Reject
from swarm.identity import Identity, PeerId
from swarm.peers.ledger import Ledger
from swarm.transport.base import ServeLimits, Transport
from swarm.transport.libp2p.host import open_libp2p
from swarm.weights.broadcast.broadcast import Broadcast
from swarm.weights.broadcast.chunk_server import CHUNK_LIMITS, ArtifactKey, ChunkService
from swarm.weights.broadcast.sessions import Sharing
from swarm.weights.format.artifacts import suggested_chunk_bytes
from swarm.weights.format.manifest import ChunkRef
from swarm.weights.format.topology import Plan, Strategy
from swarm.weights.store.chunks import ChunkStore

LOOPBACK: Final = "/ip4/127.0.0.1/tcp/0"
PROTOCOL: Final = "/bench/chunks/1.0.0"
KEY: Final = ArtifactKey(bytes(32), 0)
STORE_BYTES_MAX: Final = 1 << 40
REQUESTS_AT_ONCE: Final = 8
REQUEST_TIMEOUT_S: Final = 60.0
VERSION: Final = 1


def make_artifact(directory: Path, size_bytes: int) -> None:
    """A store with random chunks, as large as a publisher would cut them, and a list of them."""
    chunk_bytes = suggested_chunk_bytes(size_bytes)
    with (
        ChunkStore(directory / "store", STORE_BYTES_MAX) as store,
        _list(directory).open("w") as to,
    ):
        for start in range(0, size_bytes, chunk_bytes):
            data = os.urandom(min(chunk_bytes, size_bytes - start))
            name = sha256(data).digest()
            store.put(name, data)
            to.write(f"{name.hex()} {len(data)}\n")


def _list(directory: Path) -> Path:
    return directory / "chunks.txt"


def _refs(directory: Path) -> list[ChunkRef]:
    lines = (line.split() for line in _list(directory).read_text().splitlines())
    return [ChunkRef(bytes.fromhex(name), int(size)) for name, size in lines]


class MemoryChunks:
    """Chunks by number that need no disk."""

    def __init__(self, chunks: dict[int, bytes]) -> None:
        self._chunks = chunks

    async def read(self, chunk: int) -> bytes:
        return self._chunks[chunk]

    async def write(self, chunk: int, data: bytes) -> None:
        self._chunks[chunk] = data


def _load(directory: Path, refs: Sequence[ChunkRef]) -> dict[int, bytes]:
    with ChunkStore(directory / "store", STORE_BYTES_MAX) as store:
        return {at: store.get(ref.sha256) or b"" for at, ref in enumerate(refs)}


def _blame(peer: PeerId, reason: Reject, detail: str) -> None:
    raise AssertionError(f"{peer}: {reason} {detail}")


def _broadcast(
    transport: Transport, refs: Sequence[ChunkRef], chunks: dict[int, bytes], publisher: PeerId
) -> Broadcast:
    have = sum(1 << chunk for chunk in chunks)
    source = MemoryChunks(chunks)
    service = ChunkService(transport)
    return Broadcast(service, KEY, refs, source, publisher, have=have, rng=Random(1), blame=_blame)


def _sharing(transport: Transport, store: ChunkStore, nursery: trio.Nursery) -> Sharing:
    service = ChunkService(transport)
    run_sync = trio.to_thread.run_sync
    sharing = Sharing(service, store, Ledger(), rng=Random(1), run_sync=run_sync)
    sharing.nursery = nursery
    return sharing


# --- the giving end ----------------------------------------------------------------------------


@asynccontextmanager
async def _giving(row: str, directory: Path, transport: Transport) -> AsyncIterator[None]:
    refs = _refs(directory)
    own = transport.peer_id
    async with trio.open_nursery() as nursery:
        if row == "disk":
            with ChunkStore(directory / "store", STORE_BYTES_MAX) as store:
                assert not store.missing(refs)  # verified, as after a publication
                sharing = _sharing(transport, store, nursery)
                plan = Plan(Strategy.SWARM)
                await sharing.give(VERSION, KEY.root, KEY.artifact, refs, own, plan)
                yield
                nursery.cancel_scope.cancel()
            return
        chunks = _load(directory, refs)
        if row == "memory":
            nursery.start_soon(_broadcast(transport, refs, chunks, own).run)
        else:

            async def answer(_: PeerId, payload: bytes) -> bytes:
                return chunks[int(payload)]

            limits = ServeLimits(64, CHUNK_LIMITS.response_bytes_max, concurrent_per_peer_max=32)
            transport.serve(PROTOCOL, answer, limits)
        yield
        nursery.cancel_scope.cancel()


# --- the getting end ---------------------------------------------------------------------------


async def _get_requests(transport: Transport, peer: PeerId, refs: Sequence[ChunkRef]) -> None:
    left = list(range(len(refs)))

    async def ask() -> None:
        while left:
            chunk = left.pop()
            data = await transport.request(
                peer,
                PROTOCOL,
                str(chunk).encode(),
                timeout_s=REQUEST_TIMEOUT_S,
                response_bytes_max=CHUNK_LIMITS.response_bytes_max,
            )
            assert len(data) == refs[chunk].size_bytes

    async with trio.open_nursery() as nursery:
        for _ in range(REQUESTS_AT_ONCE):
            nursery.start_soon(ask)


async def _get_memory(transport: Transport, peer: PeerId, refs: Sequence[ChunkRef]) -> None:
    broadcast = _broadcast(transport, refs, {}, peer)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(broadcast.run)
        await broadcast.complete.wait()
        nursery.cancel_scope.cancel()


async def _get_disk(
    transport: Transport, peer: PeerId, refs: Sequence[ChunkRef], store: ChunkStore
) -> None:
    async with trio.open_nursery() as nursery:
        sharing = _sharing(transport, store, nursery)
        plan = Plan(Strategy.SWARM)
        await sharing.fetch(VERSION, KEY.root, KEY.artifact, refs, peer, plan, on_behalf=VERSION)
        nursery.cancel_scope.cancel()


async def _get(row: str, directory: Path, transport: Transport, peer: PeerId) -> None:
    """Get all chunks, and print how many seconds it took from the first request to the last."""
    refs = _refs(directory)
    with tempfile.TemporaryDirectory(dir=directory) as own:
        store = ChunkStore(Path(own), STORE_BYTES_MAX)
        await trio.to_thread.run_sync(sys.stdin.readline)
        started_s = time.perf_counter()
        with _profiled("get"):
            if row == "requests":
                await _get_requests(transport, peer, refs)
            elif row == "memory":
                await _get_memory(transport, peer, refs)
            else:
                await _get_disk(transport, peer, refs, store)
        took_s = time.perf_counter() - started_s
        print(took_s, flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)  # until the CPU seconds were read
        store.close()


@contextmanager
def _profiled(role: str) -> Iterator[None]:
    name = os.environ.get("SWARM_PROFILE")
    if name is None:
        yield
        return
    with cProfile.Profile() as profile:
        yield
    profile.dump_stats(f"{name}-{role}")


async def _main(row: str, role: str, directory: str, *address: str) -> None:
    async with open_libp2p(Identity.generate(), [LOOPBACK]) as transport:
        if role == "give":
            async with _giving(row, Path(directory), transport):
                print(transport.addresses()[0], flush=True)
                with _profiled("give"):
                    await trio.to_thread.run_sync(sys.stdin.read)
            return
        peer = await transport.connect(address[0])
        print("ready", flush=True)
        await _get(row, Path(directory), transport, peer)


if __name__ == "__main__":
    trio.run(_main, *sys.argv[1:])
