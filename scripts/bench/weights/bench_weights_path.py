"""The path of a version's chunks between two processes on loopback, step by step.

    python bench_weights_path.py [--sizes 48 512] [--repeats 5] [--rows ...] [--profile PREFIX]

One process gives an artifact of random bytes, one gets it, by production code over libp2p. Both
are new for each run. The time is from the first request to the last chunk stored.

    tls        the same bytes over trio's TCP and TLS, no libp2p: the baseline.
    stream     one stream of our transport.
    requests   one request on one stream for each chunk, 8 at a time, from memory to nowhere.
    memory     a broadcast: asks, picks, paces and hashes, from memory to memory.
    disk       a broadcast from a store on disk to a store on disk.

Rows take turns. Figures are medians, with the least and the most in brackets. `--profile` writes a
cProfile of both ends of the last row. ext4 creates files slowly where many were just removed:
TMPDIR=/dev/shm leaves the disk out.
"""

import argparse
import cProfile
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from random import Random
from statistics import median

import trio

sys.path.insert(0, str(Path(__file__).parents[1] / "network"))
from bench_network import child

from swarm.errors import Reject
from swarm.identity import Identity, PeerId
from swarm.peers.reputation import Ledger
from swarm.storage import Runtime
from swarm.transport.base import ServeLimits, Transport
from swarm.transport.libp2p.host import open_libp2p
from swarm.weights.artifacts import suggested_chunk_bytes
from swarm.weights.broadcast import Broadcast, OfferedArtifact, Sharing
from swarm.weights.chunk_server import CHUNK_LIMITS, ArtifactKey, ChunkService, join, split
from swarm.weights.chunk_store import ChunkStore
from swarm.weights.manifest import ChunkRef

MB, GB, MIB = 1e6, 1e9, 1 << 20
STREAM_PEERS = str(Path(__file__).parents[1] / "network" / "stream_peers.py")
STREAMS = {"tls": "tls", "stream": "ours"}  # rows that `stream_peers.py` knows
ROWS = (*STREAMS, "requests", "memory", "disk")
SETTLE_S = 0.5  # after a connection
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
PROTOCOL = "/bench/chunks/1.0.0"
KEY = ArtifactKey(bytes(32), 0)
STORE_BYTES_MAX = 1 << 40
REQUESTS_AT_ONCE = 8
REQUEST_TIMEOUT_S = 60.0
VERSION = 1


@dataclass(slots=True)
class Row:
    """One step of the path with one size; one value for each run."""

    name: str
    size_bytes: int
    mb_per_s: list[float] = field(default_factory=list)
    give_cpu_s_per_gb: list[float] = field(default_factory=list)
    get_cpu_s_per_gb: list[float] = field(default_factory=list)


# --- the artifact ---


def make_artifact(directory: Path, size_bytes: int, chunk_bytes: int) -> None:
    """A store with random chunks, and a list of them."""
    with ChunkStore(directory / "store", STORE_BYTES_MAX) as store:
        refs: list[ChunkRef] = []
        for start in range(0, size_bytes, chunk_bytes):
            data = os.urandom(min(chunk_bytes, size_bytes - start))
            refs.append(ChunkRef(sha256(data).digest(), len(data)))
            store.pin("all", refs)
            store.put(refs[-1].sha256, data)
    lines = [f"{each.sha256.hex()} {each.size_bytes}\n" for each in refs]
    (directory / "chunks.txt").write_text("".join(lines))


def refs_in(directory: Path) -> list[ChunkRef]:
    lines = (line.split() for line in (directory / "chunks.txt").read_text().splitlines())
    return [ChunkRef(bytes.fromhex(name), int(size)) for name, size in lines]


class MemoryChunks:
    """Chunks by number that need no disk."""

    def __init__(self, chunks: dict[int, bytes]) -> None:
        self._chunks = chunks

    async def read(self, chunks: Sequence[int]) -> bytes:
        return join([self._chunks[chunk] for chunk in chunks])

    def split(self, answer: bytes, most: int) -> list[bytes]:
        return split(answer, most)

    async def write(self, chunks: Mapping[int, bytes]) -> None:
        self._chunks.update(chunks)


def blame(peer: PeerId, reason: Reject) -> None:
    raise AssertionError(f"{peer}: {reason}")


def broadcast(
    transport: Transport, refs: Sequence[ChunkRef], chunks: dict[int, bytes], publisher: PeerId
) -> Broadcast:
    have = sum(1 << chunk for chunk in chunks)
    offered = OfferedArtifact(KEY, refs, publisher)
    return Broadcast(ChunkService(transport), offered, MemoryChunks(chunks), have, Random(1), blame)


def sharing(transport: Transport, store: ChunkStore, nursery: trio.Nursery) -> Sharing:
    runtime = Runtime(time.time, Random(1), trio.to_thread.run_sync)
    made = Sharing(ChunkService(transport), store, Ledger(), runtime)
    made.nursery = nursery
    return made


# --- the two ends, each in a process of its own ---


@asynccontextmanager
async def giving(row: str, directory: Path, transport: Transport) -> AsyncIterator[None]:
    refs, own = refs_in(directory), transport.peer_id
    with ChunkStore(directory / "store", STORE_BYTES_MAX) as store:
        assert not store.missing(refs)  # verified, as after a publication
        async with trio.open_nursery() as nursery:
            if row == "disk":
                offered = OfferedArtifact(KEY, refs, own)
                await sharing(transport, store, nursery).give(VERSION, offered)
            else:
                chunks = {at: store.get(ref.sha256) or b"" for at, ref in enumerate(refs)}
                if row == "memory":
                    nursery.start_soon(broadcast(transport, refs, chunks, own).run)
                else:

                    async def answer(_: PeerId, payload: bytes) -> bytes:
                        return chunks[int(payload)]

                    most = CHUNK_LIMITS.response_bytes_max
                    transport.serve(
                        PROTOCOL, answer, ServeLimits(64, most, concurrent_per_peer_max=32)
                    )
            yield
            nursery.cancel_scope.cancel()


async def get_requests(transport: Transport, peer: PeerId, refs: Sequence[ChunkRef]) -> None:
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


async def get(
    row: str, transport: Transport, peer: PeerId, refs: Sequence[ChunkRef], store: ChunkStore
) -> None:
    if row == "requests":
        await get_requests(transport, peer, refs)
        return
    async with trio.open_nursery() as nursery:
        if row == "memory":
            taking = broadcast(transport, refs, {}, peer)
            nursery.start_soon(taking.run)
            await taking.complete.wait()
        else:
            offered = OfferedArtifact(KEY, refs, peer)
            await sharing(transport, store, nursery).fetch(VERSION, offered, on_behalf=VERSION)
        nursery.cancel_scope.cancel()


@contextmanager
def profiled(role: str) -> Iterator[None]:
    name = os.environ.get("SWARM_PROFILE")
    if name is None:
        yield
        return
    with cProfile.Profile() as profile:
        yield
    profile.dump_stats(f"{name}-{role}")


async def run_end(row: str, role: str, directory: str, *address: str) -> None:
    async with open_libp2p(Identity.generate(), [LOOPBACK]) as transport:
        if role == "give":
            async with giving(row, Path(directory), transport):
                print(transport.addresses()[0], flush=True)
                with profiled("give"):
                    await trio.to_thread.run_sync(sys.stdin.read)
            return
        peer = await transport.connect(address[0])
        refs = refs_in(Path(directory))
        print("ready", flush=True)
        await trio.to_thread.run_sync(sys.stdin.readline)
        own = Path(tempfile.mkdtemp(dir=directory))
        with ChunkStore(own, STORE_BYTES_MAX) as store:
            started_s = time.perf_counter()
            with profiled("get"):
                await get(row, transport, peer, refs, store)
            print(time.perf_counter() - started_s, flush=True)
            await trio.to_thread.run_sync(sys.stdin.read)  # until the CPU seconds were read


# --- the figures ---


def transfer(
    name: str, directory: Path, size_bytes: int, profile: str | None
) -> tuple[float, float, float]:
    """One run: its seconds, CPU seconds of the giving and of the getting end."""
    with ExitStack() as opened:
        if name in STREAMS:
            start = partial(child, STREAM_PEERS, STREAMS[name])
            getter = opened.enter_context(start("listen"))
            giver = opened.enter_context(start("send", getter.line()))
            asked, line = giver, str(size_bytes)
        else:
            variables = {"SWARM_PROFILE": profile} if profile else {}
            start = partial(child, __file__, "--end", name, **variables)
            giver = opened.enter_context(start("give", str(directory)))
            getter = opened.enter_context(start("get", str(directory), giver.line()))
            asked, line = getter, "go"
        assert asked.line() == "ready"
        time.sleep(SETTLE_S)
        give_s, get_s = giver.cpu_s(), getter.cpu_s()
        asked.tell(line)
        seconds = float(asked.line())
        return seconds, giver.cpu_s() - give_s, getter.cpu_s() - get_s


def measure(directory: Path, size_bytes: int, options: argparse.Namespace) -> list[Row]:
    rows = [Row(name, size_bytes) for name in options.rows]
    for _ in range(options.repeats):
        for row in rows:
            profile = options.profile if row is rows[-1] else None
            seconds, give_s, get_s = transfer(row.name, directory, size_bytes, profile)
            row.mb_per_s.append(size_bytes / MB / seconds)
            row.give_cpu_s_per_gb.append(give_s / (size_bytes / GB))
            row.get_cpu_s_per_gb.append(get_s / (size_bytes / GB))
    return rows


def spread(values: Sequence[float], digits: int) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return f"{median(values):.{digits}f} [{low}-{high}]"


def show(rows: Sequence[Row], chunk_bytes: int) -> None:
    tls = next((median(row.mb_per_s) for row in rows if row.name == "tls"), float("nan"))
    for row in rows:
        print(
            f"{row.size_bytes / MIB:4.0f} MiB {chunk_bytes / 1024:5.0f} KiB {row.name:9}"
            f" {spread(row.mb_per_s, 0):>18} {median(row.mb_per_s) / tls:6.2f}"
            f" {spread(row.give_cpu_s_per_gb, 2):>20} {spread(row.get_cpu_s_per_gb, 2):>20}",
            flush=True,
        )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[48, 512], help="in MiB")
    parser.add_argument("--chunk-kib", type=int, help="default: a publisher's choice")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--profile", metavar="PREFIX", help="cProfiles of both ends")
    options = parser.parse_args()
    print(
        f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores\n"
        f"{'size':>8} {'chunks':>9} {'row':9} {'MB/s':>18} {'/ tls':>6}"
        f" {'CPU s/GB giving':>20} {'CPU s/GB getting':>20}"
    )
    with tempfile.TemporaryDirectory() as base:
        for size in options.sizes:
            directory = Path(base) / str(size)
            directory.mkdir()
            chunk_bytes = (options.chunk_kib or 0) * 1024 or suggested_chunk_bytes(size * MIB)
            make_artifact(directory, size * MIB, chunk_bytes)
            show(measure(directory, size * MIB, options), chunk_bytes)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--end"]:
        trio.run(run_end, *sys.argv[2:])
    else:
        main()
