"""The versions of one policy on this machine: each is there as a whole, or not at all.

    versions/v00000012/           the files of version 12, and nothing else
    versions/v00000012.manifest   its manifest as it was published, to be served on
    current -> versions/v00000012

A version is made in `versions/v00000012.partial`, synced, and renamed, its manifest being there
before; it leaves the other way round. So whatever has the final name is whole: kill -9 at any point
leaves what was there before. `current` is replaced in one step.

Everything here blocks: call it off the event loop.
"""

import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import (
    LocalProtocolError,
    RemoteProtocolError,
    StorageFailed,
)
from swarm.weights.format import manifest_wire
from swarm.weights.format.manifest import Manifest

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
    """The versions in one directory, which is made. `keep`: how many of the newest stay.

    Raises:
        StorageFailed: it cannot be read or written; so does everything in here.
    """

    def __init__(self, directory: Path, keep: int = 2) -> None:
        if keep < 1:
            raise LocalProtocolError("at least the newest version is kept")
        self.directory, self._versions, self._keep = directory, directory / VERSIONS, keep
        with _disk(directory):
            self._versions.mkdir(parents=True, exist_ok=True)
            for path in self._versions.glob(f"*{_PARTIAL}"):
                _remove(path)
        self._known = {local.version: local for local in read_versions(directory)}
        self._doubted: set[int] = set()

    # --- what is there -------------------------------------------------------------------------

    def held(self) -> tuple[LocalVersion, ...]:
        """Complete versions, oldest first."""
        return tuple(self._known[version] for version in sorted(self._known))

    def states(self) -> dict[int, bytes]:
        """Their state hashes by version, without those in doubt: as `routes.cheapest_route` takes
        them."""
        return {
            version: local.state
            for version, local in self._known.items()
            if version not in self._doubted
        }

    def doubt(self, version: int) -> None:
        """Build nothing on a version until it is made anew: its files are not what they were. It
        is not removed, for it may be the one that serves."""
        self._doubted.add(version)

    def get(self, version: int) -> LocalVersion | None:
        """A complete version; None if there is none of that number."""
        return self._known.get(version)

    def manifest_body(self, version: int) -> bytes:
        """A version's manifest as it was published: what `wire.root_of` hashes."""
        return _manifest_body(self._path(version))

    def manifest(self, version: int) -> Manifest:
        """A version's manifest, decoded."""
        return manifest_wire.decode_manifest(self.manifest_body(version))

    def current(self) -> LocalVersion | None:
        """The version that serves, or served when the process before ended; None: none yet."""
        version = read_current(self.directory)
        return None if version is None else self._known.get(version)

    # --- what comes and goes -------------------------------------------------------------------

    def staging(self, version: int) -> Path:
        """An empty directory in which to make a version. Earlier attempts there are removed."""
        path = self._path(version, _PARTIAL)
        with _disk(path):
            _remove(path)
            path.mkdir()
        return path

    def discard(self, version: int) -> None:
        """Give up a version that was begun; does nothing if none was."""
        path = self._path(version, _PARTIAL)
        with _disk(path):
            _remove(path)

    def commit(self, body: bytes) -> LocalVersion:
        """Take the staged directory of the version with this manifest for complete.

        Its content is the caller's word: whoever made it has checked the hashes. A version of that
        number that was held is replaced.

        Raises:
            RemoteProtocolError: `body` is no manifest.
            LocalProtocolError: nothing was staged for it.
        """
        manifest = manifest_wire.decode_manifest(body)
        staged, final = self._path(manifest.version, _PARTIAL), self._path(manifest.version)
        if not staged.is_dir():
            raise LocalProtocolError(f"version {manifest.version} was not made")
        self._forget(manifest.version)
        with _disk(staged):
            _sync_tree(staged)
            sidecar = self._path(manifest.version, MANIFEST_SUFFIX)
            temporary = sidecar.with_name(sidecar.name + _PARTIAL)
            with temporary.open("wb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(sidecar)
            staged.rename(final)
            _sync(self._versions)
        self._known[manifest.version] = _local(manifest, final)
        return self._known[manifest.version]

    def make_current(self, version: int) -> None:
        """Point `current` at a complete version, in one step."""
        if version not in self._known:
            raise LocalProtocolError(f"version {version} is not held")
        temporary = self.directory / f"{CURRENT}{_PARTIAL}"
        with _disk(self.directory):
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(Path(VERSIONS) / self._path(version).name)
            temporary.replace(self.directory / CURRENT)
            _sync(self.directory)

    def prune(self, in_use: Collection[int] = ()) -> tuple[int, ...]:
        """Remove all but the newest `keep`, the current one and those in use; returns which."""
        current = self.current()
        stay = {*sorted(self._known)[-self._keep :], *in_use}
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
        with _disk(path):
            _remove(leaving)
            if path.exists():
                path.rename(leaving)
            self._path(version, MANIFEST_SUFFIX).unlink(missing_ok=True)
            _remove(leaving)

    def _path(self, version: int, suffix: str = "") -> Path:
        return self._versions / f"{_name(version)}{suffix}"


def read_versions(directory: Path) -> tuple[LocalVersion, ...]:
    """Complete versions, oldest first, without changing anything: for whoever only looks.

    A directory without its manifest is none of ours. Raises `StorageFailed`.
    """
    found = []
    with _disk(directory):
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
    """The version that `current` names; None: none. It need not be complete."""
    try:
        target = Path(os.readlink(directory / CURRENT))
    except OSError:
        return None
    match = _NAME.fullmatch(target.name)
    return int(match[1]) if match is not None else None


def version_of(directory: Path) -> int:
    """The version of a directory, by its name.

    Raises:
        LocalProtocolError: it is not named as versions are.
    """
    match = _NAME.fullmatch(directory.name)
    if match is None:
        raise LocalProtocolError(f"{directory} is not named as a version")
    return int(match[1])


def _name(version: int) -> str:
    return f"v{version:08d}"


def _manifest_body(path: Path) -> bytes:
    sidecar = path.with_name(path.name + MANIFEST_SUFFIX)
    with _disk(sidecar):
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


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"weights: {path}: {error.strerror or error}") from None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_tree(directory: Path) -> None:
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            _sync(Path(folder) / name)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
