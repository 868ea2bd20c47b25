"""Chunks on disk: verified before they are stored, bounded, and still there after kill -9.

A chunk is a file named by its SHA-256, written under a temporary name and renamed. Chunks found at
the start are checked before their first use, as a power cut or anybody may have changed them.
Chunks of the versions in use are pinned. As many bytes again are kept for peers that are behind;
the least recently used leave first.

Everything blocks but `get_at_once`: call it off the event loop, from any thread.
"""

import fcntl
import hashlib
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final, Self

from swarm.errors import (
    ConfigError,
    LocalProtocolError,
    Reject,
    RemoteProtocolError,
    StorageFailed,
    StoreFull,
)
from swarm.weights.manifest import ChunkRef, disk

PIN_SETS_MAX: Final = 16
SPARE_BYTES_MIN: Final = 268_435_456  # kept unpinned, even where the pinned take less
AT_ONCE_BYTES_MAX: Final = 2_097_152  # of a chunk that is read on the event loop


@dataclass(slots=True)
class _Held:
    size_bytes: int
    verified: bool


class ChunkStore:
    """The chunks in one directory, for one process at a time.

    Raises `ConfigError` if another process has it, `StorageFailed` if it cannot be read or written.
    """

    def __init__(self, directory: Path, bytes_max: int) -> None:
        self._chunks, self._partial = directory / "chunks", directory / "partial"
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, _Held] = OrderedDict()  # least recently used first
        self._pins: dict[str, dict[bytes, int]] = {}  # sizes by hash
        self._pinned: dict[bytes, int] = {}  # of all sets together
        self._pinned_bytes = 0
        self._reserved_bytes = 0  # of chunks that are being written
        self._held_bytes = 0
        self._stored = self._evicted = self._damaged = 0
        self._names = count()
        with disk(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._own = (directory / "lock").open("w")
        try:
            fcntl.flock(self._own, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self._partial, ignore_errors=True)  # of a process that is no more
            self._partial.mkdir()
            self._find()
        except BlockingIOError:
            self._own.close()
            raise ConfigError(f"{directory}: in use by another process; stop that first") from None
        except OSError as error:
            self._own.close()
            raise StorageFailed(f"{directory}: {error.strerror}") from None

    def _find(self) -> None:
        """Find the chunks that another process left, in the order of writing."""
        found: list[tuple[int, bytes, int]] = []
        for number in range(256):
            folder = self._chunks / f"{number:02x}"
            folder.mkdir(parents=True, exist_ok=True)
            for entry in os.scandir(folder):
                sha256 = _hash_in(entry.name)
                if sha256 is not None and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, sha256, status.st_size))
        for _, sha256, size_bytes in sorted(found):
            self._held[sha256] = _Held(size_bytes, verified=False)
            self._held_bytes += size_bytes

    def close(self) -> None:
        """Let another process have the directory."""
        self._own.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def has(self, ref: ChunkRef) -> bool:
        """True if there is a file of that name and size; it is not read."""
        with self._lock:
            held = self._held.get(ref.sha256)
            return held is not None and held.size_bytes == ref.size_bytes

    def missing(self, refs: Iterable[ChunkRef]) -> list[ChunkRef]:
        """The chunks to fetch, in order. Reads unverified ones; raises `StorageFailed`."""
        return [ref for ref in refs if not self._check(ref)]

    def _check(self, ref: ChunkRef) -> bool:
        with self._lock:
            held = self._held.get(ref.sha256)
            if held is None or held.verified:
                return held is not None
        return self.get(ref.sha256) is not None

    def get(self, sha256: bytes) -> bytes | None:
        """A verified chunk; None if it is missing or damaged. Raises `StorageFailed`."""
        with self._lock:
            held = self._held.get(sha256)
            if held is None:
                return None
            self._held.move_to_end(sha256)
        data = b""
        with disk(self._path(sha256)), suppress(FileNotFoundError):  # just evicted, or removed
            data = self._path(sha256).read_bytes()
        right = len(data) == held.size_bytes and (
            held.verified or hashlib.sha256(data).digest() == sha256
        )
        with self._lock:
            if self._held.get(sha256) is not held:
                return data if right else None  # evicted or replaced while we read
            if right:
                held.verified = True
                return data
            self._damaged += 1
            self._remove(sha256)
        return None

    def get_at_once(self, sha256: bytes) -> bytes | None:
        """A verified chunk that the kernel has in memory; None: ask `get`.

        It waits neither for the disk nor for another thread, which would take many times as long.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            held = self._held.get(sha256)
            if held is None or not held.verified or held.size_bytes > AT_ONCE_BYTES_MAX:
                return None
            self._held.move_to_end(sha256)
        finally:
            self._lock.release()
        return _read_cached(self._path(sha256), held.size_bytes)

    def put(self, sha256: bytes, data: bytes, *, verified: bool = False) -> None:
        """Store a chunk that came from anybody. `verified`: the caller computed its hash.

        Raises `RemoteProtocolError` (WRONG_HASH), `StoreFull` where pinned chunks or the disk leave
        no room, and `StorageFailed`.
        """
        if not verified and hashlib.sha256(data).digest() != sha256:
            raise RemoteProtocolError(Reject.WRONG_HASH, "a chunk that is not what was asked for")
        with self._lock:
            held = self._held.get(sha256)
            if held is not None and held.verified:
                self._held.move_to_end(sha256)
                return
            self._make_room(len(data))
            self._reserved_bytes += len(data)
        temporary = self._partial / str(next(self._names))
        try:
            self._write(temporary, data)
            with self._lock:
                self._enter(sha256, temporary, len(data))
        except BaseException:
            with suppress(OSError):  # the next start clears it away
                temporary.unlink()
            raise
        finally:
            with self._lock:
                self._reserved_bytes -= len(data)

    def _make_room(self, size_bytes: int) -> None:
        """Drop chunks until two bounds hold: on those that nobody needs, and on the store."""
        enough = self._pinned_bytes + max(self._pinned_bytes, SPARE_BYTES_MIN)
        while self._held_bytes + size_bytes > enough and self._evict():
            pass
        while self._held_bytes + self._reserved_bytes + size_bytes > self._bytes_max:
            if not self._evict():
                raise StoreFull(
                    f"no room for {size_bytes} bytes: {self._held_bytes + self._reserved_bytes} of "
                    f"{self._bytes_max} are in use"
                )

    def _evict(self) -> bool:
        """Drop the least recently used chunk that is not pinned; False if there is none."""
        for _ in range(len(self._held)):
            sha256 = next(iter(self._held))
            if sha256 not in self._pinned:
                self._evicted += 1
                self._remove(sha256)
                return True
            self._held.move_to_end(sha256)  # lest each search pass over it again
        return False

    def _write(self, temporary: Path, data: bytes) -> None:
        """Write a chunk. On a full disk, unpinned chunks make room."""
        while True:
            try:
                with disk(temporary, StoreFull):
                    temporary.write_bytes(data)
            except StoreFull:
                with self._lock:
                    if not self._evict():
                        raise
            else:
                return

    def _enter(self, sha256: bytes, temporary: Path, size_bytes: int) -> None:
        path = self._path(sha256)
        with disk(path):
            temporary.replace(path)
        before = self._held.pop(sha256, None)  # not verified, or put twice at the same time
        self._held_bytes += size_bytes - (before.size_bytes if before else 0)
        self._held[sha256] = _Held(size_bytes, verified=True)
        self._stored += 1

    def _remove(self, sha256: bytes) -> None:
        self._held_bytes -= self._held.pop(sha256).size_bytes
        with disk(self._path(sha256)):
            self._path(sha256).unlink(missing_ok=True)

    def pin(self, name: str, refs: Iterable[ChunkRef]) -> None:
        """Keep these chunks, present or to come, in place of what `name` pinned.

        Pins end with the process. Raises `StoreFull` where all pins exceed the store; `name` then
        keeps its old pins.
        """
        with self._lock:
            pins = {**self._pins, name: {ref.sha256: ref.size_bytes for ref in refs}}
            if len(pins) > PIN_SETS_MAX:
                raise LocalProtocolError(f"more than {PIN_SETS_MAX} versions of weights in use")
            pinned = _union(pins)
            if sum(pinned.values()) > self._bytes_max:
                raise StoreFull(
                    f"{sum(pinned.values())} bytes of chunks are in use together, the store may "
                    f"hold {self._bytes_max}"
                )
            self._set_pins(pins, pinned)

    def unpin(self, name: str) -> None:
        """Unpin the chunks of `name`."""
        with self._lock:
            self._pins.pop(name, None)
            self._set_pins(self._pins, _union(self._pins))

    def _set_pins(self, pins: dict[str, dict[bytes, int]], pinned: dict[bytes, int]) -> None:
        self._pins, self._pinned = pins, pinned
        self._pinned_bytes = sum(pinned.values())  # once, and not for every chunk that is put

    def _path(self, sha256: bytes) -> Path:
        name = sha256.hex()
        return self._chunks / name[:2] / name


def _read_cached(path: Path, size_bytes: int) -> bytes | None:
    """A file of that size, if the kernel has all of it in memory."""
    if not hasattr(os, "RWF_NOWAIT"):  # Linux alone has it
        return None
    data = bytearray(size_bytes + 1)
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            count = os.preadv(file, [data], 0, os.RWF_NOWAIT)
        finally:
            os.close(file)
    except OSError:
        return None
    return bytes(memoryview(data)[:size_bytes]) if count == size_bytes else None


def _union(pins: Mapping[str, Mapping[bytes, int]]) -> dict[bytes, int]:
    return {sha256: size for each in pins.values() for sha256, size in each.items()}


def _hash_in(name: str) -> bytes | None:
    """The hash that a file's name spells."""
    try:
        sha256 = bytes.fromhex(name)
    except ValueError:
        return None
    return sha256 if len(sha256) == 32 and sha256.hex() == name else None
