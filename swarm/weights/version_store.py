"""The versions of one policy on this machine: each is there as a whole, or not at all.

    versions/v00000012/           the files of version 12, and nothing else
    versions/v00000012.manifest   its manifest as published
    current -> versions/v00000012

A version is made in `versions/v00000012.partial`, synced, and renamed after its manifest is there;
it is removed the other way round. So kill -9 at any point leaves the versions before whole.
Everything blocks: call it off the event loop.
"""

import hashlib
import heapq
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import (
    ConfigError,
    LocalProtocolError,
    NoRoute,
    Reject,
    RemoteProtocolError,
    StorageFailed,
    WeightsMismatch,
)
from swarm.weights import manifest as manifest_wire
from swarm.weights.artifacts import Patcher, encode_artifact, estimated_bytes, suggested_chunk_bytes
from swarm.weights.chunk_store import ChunkStore
from swarm.weights.delta import AUTO_MAP, names_code
from swarm.weights.manifest import (
    Artifact,
    ChunkRef,
    Manifest,
    WeightsDirectory,
    disk,
    open_weights,
    state_of,
    sync,
)

_NAME = re.compile(r"v([0-9]{8,10})")
_PARTIAL = ".partial"
MANIFEST_SUFFIX = ".manifest"
VERSIONS = "versions"
CURRENT = "current"


@dataclass(frozen=True, slots=True)
class LocalVersion:
    """A complete version on this machine."""

    version: int
    directory: Path
    state: bytes  # hash of what the weights are, 32 bytes
    size_bytes: int
    entries: int
    created_at_s: int
    publisher: str


class Versions:
    """The versions in one directory, which is made. The newest `keep` stay.

    This and all methods raise `StorageFailed` if it cannot be read or written.
    """

    def __init__(self, directory: Path, keep: int = 2) -> None:
        if keep < 1:
            raise LocalProtocolError("at least the newest version is kept")
        self.directory, self._versions, self._keep = directory, directory / VERSIONS, keep
        with disk(directory):
            self._versions.mkdir(parents=True, exist_ok=True)
            for path in self._versions.glob(f"*{_PARTIAL}"):
                _remove(path)
        self._known = {local.version: local for local in read_versions(directory)}
        self._doubted: set[int] = set()

    def held(self) -> tuple[LocalVersion, ...]:
        """Complete versions, oldest first."""
        return tuple(self._known[version] for version in sorted(self._known))

    def states(self) -> dict[int, bytes]:
        """State hashes by version, without those in doubt."""
        return {
            version: local.state
            for version, local in self._known.items()
            if version not in self._doubted
        }

    def doubt(self, version: int) -> None:
        """Build nothing on a version whose files changed. It stays, as it may serve."""
        self._doubted.add(version)

    def get(self, version: int) -> LocalVersion | None:
        return self._known.get(version)

    def manifest_body(self, version: int) -> bytes:
        """A version's manifest as published."""
        return _manifest_body(self._path(version))

    def manifest(self, version: int) -> Manifest:
        return manifest_wire.decode_manifest(self.manifest_body(version))

    def current(self) -> LocalVersion | None:
        """The version that serves, or served in the process before; None: none yet."""
        version = read_current(self.directory)
        return None if version is None else self._known.get(version)

    def staging(self, version: int) -> Path:
        """A new empty directory in which to make a version."""
        self.discard(version)
        path = self._path(version, _PARTIAL)
        with disk(path):
            path.mkdir()
        return path

    def discard(self, version: int) -> None:
        """Remove a version that was begun, if any."""
        path = self._path(version, _PARTIAL)
        with disk(path):
            _remove(path)

    def commit(self, body: bytes) -> LocalVersion:
        """Complete the staged version of this manifest; it replaces a held one of that number.

        The caller has checked the content. Raises `RemoteProtocolError` if `body` is no manifest,
        `LocalProtocolError` if nothing was staged.
        """
        manifest = manifest_wire.decode_manifest(body)
        staged, final = self._path(manifest.version, _PARTIAL), self._path(manifest.version)
        if not staged.is_dir():
            raise LocalProtocolError(f"version {manifest.version} was not made")
        self._forget(manifest.version)
        with disk(staged):
            for folder, _, files in os.walk(staged, topdown=False):
                for name in files:
                    sync(Path(folder) / name)
                sync(Path(folder))
            sidecar = self._path(manifest.version, MANIFEST_SUFFIX)
            temporary = sidecar.with_name(sidecar.name + _PARTIAL)
            temporary.write_bytes(body)
            sync(temporary)
            temporary.replace(sidecar)
            staged.rename(final)
            sync(self._versions)
        self._known[manifest.version] = _local(manifest, final)
        return self._known[manifest.version]

    def make_current(self, version: int) -> None:
        """Point `current` at a complete version, in one step."""
        if version not in self._known:
            raise LocalProtocolError(f"version {version} is not held")
        temporary = self.directory / f"{CURRENT}{_PARTIAL}"
        with disk(self.directory):
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(Path(VERSIONS) / self._path(version).name)
            temporary.replace(self.directory / CURRENT)
            sync(self.directory)

    def prune(self) -> tuple[int, ...]:
        """Remove all but the newest `keep`, and the current one; return which."""
        current = self.current()
        stay = set(sorted(self._known)[-self._keep :])
        if current is not None:
            stay.add(current.version)
        leaving = tuple(version for version in sorted(self._known) if version not in stay)
        for version in leaving:
            self._forget(version)
        return leaving

    def _forget(self, version: int) -> None:
        """Remove a version so that it is never there in part under its name."""
        self._known.pop(version, None)
        self._doubted.discard(version)
        path = self._path(version)
        leaving = path.with_name(f"{path.name}.old{_PARTIAL}")
        with disk(path):
            _remove(leaving)
            if path.exists():
                path.rename(leaving)
            self._path(version, MANIFEST_SUFFIX).unlink(missing_ok=True)
            _remove(leaving)

    def _path(self, version: int, suffix: str = "") -> Path:
        return self._versions / f"{_name(version)}{suffix}"


def read_versions(directory: Path) -> tuple[LocalVersion, ...]:
    """Complete versions, oldest first, without changing anything. Raises `StorageFailed`."""
    found = []
    with disk(directory):
        paths = sorted((directory / VERSIONS).iterdir()) if (directory / VERSIONS).is_dir() else []
    for path in paths:
        if not _NAME.fullmatch(path.name) or not path.is_dir():
            continue
        try:
            manifest = manifest_wire.decode_manifest(_manifest_body(path))
        except (RemoteProtocolError, StorageFailed):
            continue
        if path.name == _name(manifest.version):
            found.append(_local(manifest, path))
    return tuple(sorted(found, key=lambda local: local.version))


def read_current(directory: Path) -> int | None:
    """The version that `current` names, complete or not; None: none."""
    try:
        return version_of((directory / CURRENT).readlink())
    except (OSError, LocalProtocolError):
        return None


def version_of(directory: Path) -> int:
    """The version of a directory, by its name; raises `LocalProtocolError`."""
    match = _NAME.fullmatch(directory.name)
    if match is None:
        raise LocalProtocolError(f"{directory} is not named as a version")
    return int(match[1])


def _name(version: int) -> str:
    return f"v{version:08d}"


def _manifest_body(path: Path) -> bytes:
    sidecar = path.with_name(path.name + MANIFEST_SUFFIX)
    with disk(sidecar):
        return sidecar.read_bytes()


def _local(manifest: Manifest, directory: Path) -> LocalVersion:
    return LocalVersion(
        version=manifest.version,
        directory=directory,
        state=manifest.state,
        size_bytes=manifest.size_bytes,
        entries=len(manifest.tensors),
        created_at_s=manifest.created_at_s,
        publisher=manifest.publisher,
    )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# The cheapest route to a version: from one that is held, over others, or from nothing. Pure.

_NOTHING = -1  # the base of full artifacts


@dataclass(frozen=True, slots=True)
class Step:
    """Make `version` of the version that `artifact` is based on."""

    version: int
    artifact: Artifact


def cheapest_route(
    wanted: int,
    held: Mapping[int, bytes],
    manifests: Mapping[int, Manifest],
    has: Callable[[ChunkRef], bool],
) -> tuple[Step, ...]:
    """The steps to version `wanted` that have the least to fetch; () if it is held.

    `held` are state hashes of complete versions, `manifests` those known, with that of `wanted`;
    `has` says if a chunk is in the store. Raises `NoRoute`, which names each unusable base.
    """
    states = {version: manifest.state for version, manifest in manifests.items()}
    usable = {
        version: state for version, state in held.items() if states.get(version, state) == state
    }
    known = {**states, **usable}
    refused: list[str] = []
    steps_from: dict[int, list[Step]] = {}
    for version, manifest in sorted(manifests.items()):
        for artifact in manifest.artifacts if version <= wanted else ():
            base = _NOTHING if artifact.base_version is None else artifact.base_version
            if artifact.base_version is None or known.get(base) == artifact.base_state:
                steps_from.setdefault(base, []).append(Step(version, artifact))
            fault = _base_fault(artifact, held, known)
            if fault is not None:
                refused.append(f"version {version}: {fault}")
    found = _search(wanted, usable, steps_from, has)
    if found is None:
        why = "; ".join(refused) or "nothing that is offered leads there"
        raise NoRoute(f"no way to version {wanted}: {why}")
    return found


def full_bytes(manifest: Manifest) -> int:
    """The size of a version's full artifact, or else its raw size."""
    offered = [each.size_bytes for each in manifest.artifacts if each.base_version is None]
    return min(offered, default=manifest.size_bytes)


def _base_fault(
    artifact: Artifact, held: Mapping[int, bytes], known: Mapping[int, bytes]
) -> str | None:
    """The fault of an artifact's base here; None: it has none."""
    base, asked = artifact.base_version, artifact.base_state
    if base is None or asked is None:
        return None
    there = held.get(base, known.get(base))
    if there is None:
        return f"base {base} is neither held nor known"
    if there != asked:
        return f"base {base} is another here, {there.hex()[:12]} and not {asked.hex()[:12]}"
    return None


def _search(
    wanted: int,
    held: Collection[int],
    steps_from: Mapping[int, Sequence[Step]],
    has: Callable[[ChunkRef], bool],
) -> tuple[Step, ...] | None:
    """Dijkstra's algorithm over versions, by bytes and then by number of steps."""
    ways: dict[int, tuple[Step, ...]] = {}
    queue: list[tuple[int, int, int]] = [(0, 0, version) for version in (_NOTHING, *sorted(held))]
    reached: dict[tuple[int, int, int], tuple[Step, ...]] = dict.fromkeys(queue, ())
    while queue:
        at = heapq.heappop(queue)
        missing_bytes, _, version = at
        if version in ways:
            continue
        ways[version] = steps = reached[at]
        if version == wanted:
            return steps
        for step in steps_from.get(version, ()):
            more_bytes = sum(ref.size_bytes for ref in step.artifact.chunks if not has(ref))
            following = (missing_bytes + more_bytes, len(steps) + 1, step.version)
            if step.version not in ways and following not in reached:
                reached[following] = (*steps, step)
                heapq.heappush(queue, following)
    return None


# From a directory to its artifacts, and from chunks back to the directory.

BASE_AGES = (1, 2, 4, 8, 16, 32, 64)  # one artifact is the full one: ARTIFACTS_MAX in all


def base_versions(version: int, held: Iterable[int]) -> tuple[int, ...]:
    """The held versions 1, 2, 4, 8, ... before a new one: a peer n behind needs about log n
    deltas."""
    there = set(held)
    return tuple(version - age for age in BASE_AGES if version - age in there)


def offer(
    new: WeightsDirectory,
    bases: Sequence[tuple[int, WeightsDirectory]],
    store: ChunkStore,
    describe: Callable[[tuple[Artifact, ...]], Manifest],
) -> Manifest:
    """Cut a version into chunks in the store: all of it, and the changes since each base.

    A delta that is no smaller than the full artifact is left out. Chunks are not pinned here.
    `describe` makes the manifest. Raises `StoreFull` and `StorageFailed`.
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

    Raises `WeightsMismatch` if the source changed since it was hashed, and `StorageFailed`.
    """
    staged = versions.staging(version)
    try:
        Patcher(source.specs, source, staged).finish()
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
    """Make a version from its base and from chunks in the store. A failure leaves nothing of it.

    `manifest` is decoded from `body`. Each of the `threads` holds a few blocks in memory.

    Raises:
        WeightsMismatch: the base has changed, and is not used until it is made anew; or the result
            differs from the manifest.
        RemoteProtocolError: the publisher's fault: a malformed chunk, or a file that names code.
        StorageFailed, StoreFull: the disk, or a chunk that left the store.
    """
    base = None if step.artifact.base_version is None else _base(step, versions)
    staged = versions.staging(step.version)
    try:
        patcher = Patcher(manifest.tensors, base, staged, base_state=step.artifact.base_state)

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
            why = f"{code} names code of its own ({AUTO_MAP})"
            raise RemoteProtocolError(Reject.MALFORMED, why)
        return versions.commit(body)
    finally:
        versions.discard(step.version)  # nothing, where it was committed


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
