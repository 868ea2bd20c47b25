"""Small versions of a policy, and chunks for them, to test with."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm.weights.chunk_store import ChunkStore
from swarm.weights.manifest import Artifact, ChunkRef, Manifest, TensorSpec
from tests.wire_samples import ALICE


def chunk_ref(number: int, size_bytes: int = 100) -> ChunkRef:
    """A chunk of a hash of its own."""
    return ChunkRef(hashlib.sha256(str(number).encode()).digest(), size_bytes)


def files_of(version: int) -> dict[str, bytes]:
    """What the files of a version hold."""
    return {f"part-{part}.json": f"{version} {part}\n".encode() * 999 for part in range(8)}


def manifest_of(
    version: int,
    artifacts: Sequence[Artifact] = (),
    files: Mapping[str, bytes] | None = None,
) -> Manifest:
    """A version made of plain files; without artifacts, one that can be had whole."""
    contents = files_of(version) if files is None else files
    return Manifest(
        run_id="sample-1",
        policy="actor",
        version=version,
        publisher=ALICE.peer_id,
        created_at_s=1_800_000_000 + version,
        tensors=tuple(
            TensorSpec(name, "file", (len(data),), name, 0, len(data), _sha256(data))
            for name, data in sorted(contents.items())
        ),
        artifacts=tuple(artifacts) or (Artifact(None, None, (chunk_ref(version),)),),
    )


def write_files(directory: Path, version: int) -> None:
    """The files of a version."""
    for name, data in files_of(version).items():
        (directory / name).write_bytes(data)


def is_whole(directory: Path, version: int) -> bool:
    """Whether a directory is exactly that version."""
    found = {path.name: path.read_bytes() for path in directory.iterdir()}
    return found == files_of(version)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@dataclass(frozen=True, slots=True)
class StoreFigures:
    chunks: int
    held_bytes: int
    unverified: int  # found at the start and not used since
    stored: int
    evicted: int
    damaged: int


def figures_of(store: ChunkStore) -> StoreFigures:
    held = store._held
    return StoreFigures(
        chunks=len(held),
        held_bytes=store._held_bytes,
        unverified=sum(not each.verified for each in held.values()),
        stored=store._stored,
        evicted=store._evicted,
        damaged=store._damaged,
    )
