"""Items on disk, each set in one file by the hash of its manifest, for their owner alone.

<hash>.jsonl  the items; what is in it is checked whenever it is read
<hash>.part   chunks that came so far, each checked before it was written
<hash>.own    beside items of a file of one's own that nobody has agreed to hand to strangers
"""

import functools
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from node.environments.data.items import Content, Items
from node.system.caches import cache_directory
from node.system.child_environment import CACHE_VARIABLE
from swarm.errors import ConfigError
from swarm.storage.files import write_whole
from swarm.wire.data_manifest import chunk_hash, chunk_size, chunks_of, data_id, manifest_of
from swarm.wire.messages import DATA_BYTES_MAX, DATA_CHUNK_BYTES_MAX, DataManifest

LOADED_MAX: Final = 4  # sets of items in memory


def path_of(sha256: str) -> Path:
    """The path of the items with this hash, also before they are there."""
    named = os.environ.get(CACHE_VARIABLE)
    return cache_directory(Path(named) if named else None) / "data" / f"{sha256}.jsonl"


def sha256_of(content: Content) -> str:
    """The hash by which items are known."""
    return data_id(manifest_of(content.data, content.items)).hex()


def keep_own(content: Content) -> str:
    """Keep items of a file of one's own; their hash. Until somebody agrees, they are not for
    strangers.

    Raises:
        ConfigError: they cannot be written.
    """
    sha256 = sha256_of(content)
    path = path_of(sha256)
    if path.exists():
        return sha256
    try:
        path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        path.with_suffix(".own").touch(mode=0o600)
        write_whole(path, content.data)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; the items of a run are kept there") from None
    return sha256


def is_unshared(sha256: str) -> bool:
    """True if nobody has agreed yet to hand these items to strangers."""
    return path_of(sha256).with_suffix(".own").exists()


def agree_to_share(sha256: str) -> None:
    """Note that they may go to strangers."""
    path_of(sha256).with_suffix(".own").unlink(missing_ok=True)


def is_here(sha256: str) -> bool:
    """True if the items are on this machine."""
    return path_of(sha256).exists()


def read(sha256: str) -> tuple[DataManifest, bytes]:
    """Items and their manifest.

    Raises:
        ConfigError: they are not here, or no longer what they were.
    """
    path = path_of(sha256)
    try:
        with path.open("rb") as file:
            data = file.read(DATA_BYTES_MAX + 1)
    except OSError:
        raise ConfigError(
            f"environment dataset: the items {sha256[:12]}… are not on this machine; join with "
            "--peer, and a node of the run hands them on, or name their file as path"
        ) from None
    if 0 < len(data) <= DATA_BYTES_MAX and (count := data.count(b"\n")):
        manifest = manifest_of(data, count)
        if data_id(manifest).hex() == sha256:
            return manifest, data
    raise ConfigError(f"{path}: is damaged; delete it and start again")


@functools.lru_cache(maxsize=LOADED_MAX)
def load(sha256: str) -> Items:
    """Items in memory.

    Raises:
        ConfigError: as `read`.
    """
    return Items(read(sha256)[1])


class Arriving:
    """Items that come chunk by chunk. What came is there after a restart."""

    def __init__(self, sha256: str, manifest: DataManifest) -> None:
        """
        Raises:
            OSError: the place cannot be written.
        """
        self._path = path_of(sha256)
        self._part = self._path.with_suffix(".part")
        self._manifest = manifest
        self._path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        self._part.touch(mode=0o600)

    def missing(self) -> Iterator[int]:
        """The chunks that are not there yet."""
        for chunk in range(chunks_of(self._manifest.size_bytes)):
            with self._part.open("rb") as file:
                file.seek(chunk * DATA_CHUNK_BYTES_MAX)
                found = file.read(chunk_size(self._manifest, chunk))
            if hashlib.sha256(found).digest() != chunk_hash(self._manifest, chunk):
                yield chunk

    def write(self, chunk: int, content: bytes) -> None:
        """Keep a chunk that was checked."""
        with self._part.open("r+b") as file:
            file.seek(chunk * DATA_CHUNK_BYTES_MAX)
            file.write(content)

    def whole(self) -> bytes:
        """All of it, after the last chunk."""
        with self._part.open("rb") as file:
            return file.read(self._manifest.size_bytes)

    def finish(self) -> None:
        """Put what came, and was judged, in its place."""
        os.truncate(self._part, self._manifest.size_bytes)
        self._part.replace(self._path)

    def give_up(self) -> None:
        """Leave nothing of it."""
        self._part.unlink(missing_ok=True)
