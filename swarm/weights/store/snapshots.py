"""From a directory to what is published of it, and from chunks back to the same directory.

The two ends of a broadcast, without the network between them. Everything here blocks, for as long
as it takes to read and hash whole models: call it off the event loop.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from swarm.errors import (
    ConfigError,
    Reject,
    RemoteProtocolError,
    StorageFailed,
    WeightsMismatch,
)
from swarm.weights.format.artifacts import (
    Patcher,
    encode_artifact,
    estimated_bytes,
    suggested_chunk_bytes,
)
from swarm.weights.format.code import AUTO_MAP, names_code
from swarm.weights.format.manifest import Artifact, ChunkRef, Manifest, state_of
from swarm.weights.format.tensors import WeightsDirectory, open_weights
from swarm.weights.store.chunks import ChunkStore
from swarm.weights.store.routes import Step
from swarm.weights.store.versions import LocalVersion, Versions

BASE_AGES = (1, 2, 4, 8, 16, 32, 64)  # one artifact is the full one: ARTIFACTS_MAX in all


def base_versions(version: int, held: Iterable[int]) -> tuple[int, ...]:
    """The versions held against which a new one is offered: those 1, 2, 4, 8, ... before it, so
    that a peer that slept through n versions needs about log n deltas. Newest first. Pure."""
    there = set(held)
    return tuple(version - age for age in BASE_AGES if version - age in there)


def offer(
    new: WeightsDirectory,
    bases: Sequence[tuple[int, WeightsDirectory]],
    store: ChunkStore,
    describe: Callable[[tuple[Artifact, ...]], Manifest],
) -> Manifest:
    """Cut a version into chunks, into the store: all of it, and what changed since each base.

    A delta that is no smaller than the full artifact is left out. The chunks are not pinned before
    they are put, so pin the version after it, and give the store room for both.

    Args:
        bases: version and directory of each.
        describe: makes the manifest of these artifacts.

    Raises:
        StoreFull: the chunks do not fit. StorageFailed: the disk cannot be read or written.
    """
    full = Artifact(None, None, _put(new, None, store))
    artifacts = [full]
    for version, base in bases:
        artifact = Artifact(version, state_of(base.specs), _put(new, base, store))
        if artifact.size_bytes < full.size_bytes:
            artifacts.append(artifact)
    return describe(tuple(artifacts))


def _put(
    new: WeightsDirectory, base: WeightsDirectory | None, store: ChunkStore
) -> tuple[ChunkRef, ...]:
    refs = []
    chunk_bytes = suggested_chunk_bytes(estimated_bytes(new, base))
    for chunk in encode_artifact(new, base, chunk_bytes):
        ref = ChunkRef(hashlib.sha256(chunk).digest(), len(chunk))
        store.put(ref.sha256, chunk, verified=True)
        refs.append(ref)
    return tuple(refs)


def adopt(source: WeightsDirectory, body: bytes, versions: Versions, version: int) -> LocalVersion:
    """Copy weights of our own into `versions`, as the version that manifest `body` describes.

    Raises:
        WeightsMismatch: the source changed since it was hashed. StorageFailed: no room, or worse.
    """
    staged = versions.staging(version)
    try:
        Patcher(source.specs, source, staged, check_base=False).finish()
        return versions.commit(body)
    finally:
        versions.discard(version)


def make(
    step: Step,
    body: bytes,
    manifest: Manifest,
    versions: Versions,
    store: ChunkStore,
    threads: int = 1,
) -> LocalVersion:
    """Make a version from its base and from chunks that are all in the store; see `routes`.

    Every entry is hashed before the version counts as there. Whatever fails leaves nothing of it.

    Args:
        body, manifest: of the version that the step makes; the one decoded from the other.
        threads: that patch at a time. Each holds a few blocks in memory.

    Raises:
        WeightsMismatch: the base is not what it was, by name, and is not used again until it is
            made anew; or the result is not what the manifest says.
        RemoteProtocolError: the publisher's fault: a chunk is none, or a file names code.
        StorageFailed, StoreFull: the disk; or a chunk is no longer there.
    """
    base = None if step.artifact.base_version is None else _base(step, versions)
    staged = versions.staging(step.version)
    try:
        patcher = Patcher(
            manifest.tensors,
            base,
            staged,
            base_state=step.artifact.base_state,
            check_base=False,  # that has been done
        )

        def apply(ref: ChunkRef) -> None:
            chunk = store.get(ref.sha256)
            if chunk is None:
                raise StorageFailed(f"weights: chunk {ref.sha256.hex()[:16]} is no longer there")
            patcher.apply(chunk)

        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(apply, step.artifact.chunks):
                pass
        patcher.finish()
        if code := names_code(staged, {spec.file for spec in manifest.tensors}):
            raise RemoteProtocolError(
                Reject.MALFORMED, f"{code} names code of its own ({AUTO_MAP})"
            )
        return versions.commit(body)
    finally:
        versions.discard(step.version)  # nothing, where it was committed


def _refuse_code(staged: Path, manifest: Manifest) -> None:
    if code := names_code(staged, {spec.file for spec in manifest.tensors}):
        told = f"{code} names code of its own ({AUTO_MAP})"
        raise RemoteProtocolError(Reject.MALFORMED, told)


def _base(step: Step, versions: Versions) -> WeightsDirectory:
    number = step.artifact.base_version
    assert number is not None
    local = versions.get(number)
    if local is None:
        raise WeightsMismatch(f"base {number} is not held")
    try:
        base = open_weights(local.directory, versions.manifest(number).tensors)
        wrong = base.first_difference()
    except (ConfigError, StorageFailed) as error:
        versions.doubt(number)
        raise WeightsMismatch(f"base {number}: {error}") from None
    if wrong is not None:
        versions.doubt(number)
        raise WeightsMismatch(f"base {number}: {wrong.name!r} is not what it was", wrong.name)
    return base
