"""Directories of weights, in and out: safetensors files and the few others that belong to them.

Reading and writing go by offset (`pread`, `pwrite`) into buffers of the caller's size, not through
mappings: a mapped file that another process cuts short, or a disk that fills up under one, kills
the process instead of raising, and mapped pages count as memory of ours.

All of it blocks, on disk and on SHA-256; whoever has an event loop calls it from a thread. Objects
here hold no open files, so that a version of a thousand files takes no descriptors.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm.errors import ConfigError, StorageFailed, StoreFull
from swarm.weights.format.layout import (
    FILE_BYTES_MAX,
    FILE_SUFFIXES,
    TENSORS_SUFFIX,
    BadLayout,
    Entry,
    check_entries,
    check_path,
    check_specs,
    entry_of,
    header_size,
    parse_header,
)
from swarm.weights.format.manifest import FILE_DTYPE, TensorSpec

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
READ_BYTES = 8 << 20
"""How much is read at a time to be hashed or copied."""
INDEX_SUFFIX = ".safetensors.index.json"

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class WeightsDirectory:
    """A directory of weights: what is in it (`specs`, ordered by name), and reading from it.

    `left_out` names what is there and no part of a version: hidden files, links to folders, and
    kinds of file that a loader might execute. Its methods are safe from several threads.
    """

    path: Path
    specs: tuple[TensorSpec, ...]
    left_out: tuple[str, ...] = ()

    def read(self, spec: TensorSpec, start_bytes: int, size_bytes: int) -> Bytes:
        """Some of an entry's bytes, as a new writable array.

        Raises `StorageFailed` where the file is no longer as long as it was.
        """
        if not 0 <= start_bytes <= start_bytes + size_bytes <= spec.size_bytes:
            raise ValueError(f"{spec.name!r} has no bytes {start_bytes}+{size_bytes}")
        return read_at(self.path / spec.file, spec.offset_bytes + start_bytes, size_bytes)

    def first_difference(self) -> TensorSpec | None:
        """Reads everything: the first entry whose content is not what its hash says."""
        return next((spec for spec in self.specs if self.sha256(spec) != spec.sha256), None)

    def sha256(self, spec: TensorSpec) -> bytes:
        """The hash of an entry's content as it is now, 32 bytes."""
        return _sha256(self.path, entry_of(spec))


def open_weights(path: Path, specs: tuple[TensorSpec, ...] | None = None) -> WeightsDirectory:
    """A directory of ours. Headers are parsed, and content hashed, unless its `specs` are known:
    then only layouts are compared. Files may be links, as they are in Hugging Face's cache.

    Raises `ConfigError`, one line that names the file, where there is none, or one is damaged, cut
    short, of a shape that no peer would take, or not as `specs` have it.
    """
    entries, left_out = _layout(path)
    if specs is None:
        hashed = {}
        for entry in sorted(entries, key=lambda each: (each.file, each.offset_bytes)):
            hashed[entry.name] = entry.hashed(_sha256(path, entry))
        specs = tuple(hashed[entry.name] for entry in entries)
    for spec, entry in zip_longest(specs, entries):
        if spec is None or entry is None or entry_of(spec) != entry:
            raise ConfigError(f"weights: {path}: {(entry or spec).name!r} is not as it was")
    return WeightsDirectory(path, specs, left_out)


def _layout(path: Path) -> tuple[list[Entry], tuple[str, ...]]:
    """Entries by name, and what is left out; raises `ConfigError`."""
    if not path.is_dir():
        raise ConfigError(f"weights: {path} is no directory")
    entries: list[Entry] = []
    left_out: list[str] = []
    for name in _files(path, left_out):
        try:
            entries += _read_file(path, name)
        except (BadLayout, OSError) as error:
            raise ConfigError(f"weights: {path / name}: {error}") from None
    if not any(entry.file.endswith(TENSORS_SUFFIX) for entry in entries):
        raise ConfigError(f"weights: {path} has no {TENSORS_SUFFIX} file")
    entries.sort(key=lambda entry: entry.name)
    try:
        check_entries(entries)
        _check_indices(path, entries)
    except (BadLayout, OSError) as error:
        raise ConfigError(f"weights: {path}: {error}") from None
    return entries, tuple(sorted(left_out))


def _sha256(path: Path, entry: Entry) -> bytes:
    digest = hashlib.sha256()
    for start in range(0, entry.size_bytes, READ_BYTES):
        size_bytes = min(READ_BYTES, entry.size_bytes - start)
        digest.update(read_at(path / entry.file, entry.offset_bytes + start, size_bytes).data)
    return digest.digest()


def _files(root: Path, left_out: list[str]) -> Iterator[str]:
    """Relative names of the files of a version; other names go to `left_out`."""
    for folder, folders, files in os.walk(root):
        inside = Path(folder).relative_to(root)
        for name in list(folders):
            if name.startswith(".") or (root / inside / name).is_symlink():
                folders.remove(name)
                left_out.append((inside / name).as_posix())
        for name in files:
            relative = (inside / name).as_posix()
            known = name.endswith((TENSORS_SUFFIX, *FILE_SUFFIXES)) and not name.startswith(".")
            if known and (root / relative).is_file():
                yield relative
            else:
                left_out.append(relative)


def _read_file(root: Path, name: str) -> list[Entry]:
    """The entries of one file; raises `BadLayout` and OSError."""
    check_path(name)
    with (root / name).open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if not name.endswith(TENSORS_SUFFIX):
            if size_bytes > FILE_BYTES_MAX:
                raise BadLayout(f"a file without tensors of over {FILE_BYTES_MAX} bytes")
            return [Entry(name, FILE_DTYPE, (size_bytes,), name, 0, size_bytes)]
        start = file.read(8)
        entries = parse_header(start + file.read(header_size(start) - 8), name)
    end = entries[-1].offset_bytes + entries[-1].size_bytes
    if end != size_bytes:
        raise BadLayout(f"its header tells of {end} bytes, it has {size_bytes}")
    return entries


def _check_indices(root: Path, entries: Iterable[Entry]) -> None:
    """The shards that an index names have to be all there; else `BadLayout`."""
    places = {(entry.file, entry.name) for entry in entries}
    for _, index in sorted(places):
        if not index.endswith(INDEX_SUFFIX) or (index, index) not in places:
            continue
        folder = PurePosixPath(index).parent
        prefix = "" if folder == PurePosixPath() else f"{folder}/"
        try:
            table: Any = json.loads((root / index).read_bytes())
        except (ValueError, RecursionError):
            raise BadLayout(f"{index} is no JSON") from None
        where = table.get("weight_map") if isinstance(table, dict) else None
        if not isinstance(where, dict):
            raise BadLayout(f"{index} has no weight_map")
        for name, file in where.items():
            if (f"{prefix}{file}", f"{prefix}{name}") not in places:
                raise BadLayout(f"{index} names {name!r} in {str(file)!r}, which is not there")


class WeightsWriter:
    """A new directory of the files that `specs` describe, to be filled in any order.

    Makes all files at their full size at once, so that a full disk says so here and not half-way;
    `path` must not exist, or be empty. Raises `RemoteProtocolError` for entries that no version may
    have, `StoreFull` for a full disk, `StorageFailed` for a broken one. `write` and `read` are safe
    from several threads where these touch different bytes.
    """

    def __init__(self, path: Path, specs: tuple[TensorSpec, ...]) -> None:
        check_specs(specs)
        self.path = path
        self._ends: dict[str, int] = {}
        for spec in specs:
            end = spec.offset_bytes + spec.size_bytes
            self._ends[spec.file] = max(end, self._ends.get(spec.file, 0))
        try:
            self._make()
        except OSError as error:
            raise _failed(path, error) from None

    def _make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        if any(self.path.iterdir()):
            raise StorageFailed(f"weights: {self.path} is not empty")
        needed, free = sum(self._ends.values()), shutil.disk_usage(self.path).free
        if needed > free:
            raise StoreFull(f"weights: {self.path} needs {needed} bytes, {free} are free")
        for name, size_bytes in self._ends.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC
            with open(os.open(self.path / name, flags, 0o644), "wb") as file:
                _reserve(file.fileno(), size_bytes)

    def write(self, spec: TensorSpec, start_bytes: int, content: NDArray[Any]) -> None:
        """Put `content` into an entry, `start_bytes` after its begin."""
        data = content.reshape(-1).view(np.uint8).data
        if not 0 <= start_bytes <= start_bytes + len(data) <= spec.size_bytes:
            raise ValueError(f"{spec.name!r} has no bytes {start_bytes}+{len(data)}")
        offset = spec.offset_bytes + start_bytes
        try:
            file = os.open(self.path / spec.file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                while data:
                    written = os.pwrite(file, data, offset)
                    data, offset = data[written:], offset + written
            finally:
                os.close(file)
        except OSError as error:
            raise _failed(self.path / spec.file, error) from None

    def sync(self) -> None:
        """Have all files and folders on the disk when this returns."""
        try:
            folders = {self.path, self.path.parent}
            for name in self._ends:
                _sync(self.path / name)
                folders.add((self.path / name).parent)
                folders.update((self.path / up) for up in PurePosixPath(name).parents)
            for folder in sorted(folders):
                _sync(folder)
        except OSError as error:
            raise _failed(self.path, error) from None


def read_at(path: Path, offset: int, size_bytes: int) -> Bytes:
    """Exactly these bytes of a file; `StorageFailed` where there are fewer."""
    content: Bytes = np.empty(size_bytes, np.uint8)
    data, done = content.data, 0
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while done < size_bytes:
                got = os.preadv(file, [data[done:]], offset + done)
                if got == 0:
                    raise StorageFailed(f"weights: {path} is shorter than it was")
                done += got
        finally:
            os.close(file)
    except OSError as error:
        raise _failed(path, error) from None
    return content


def _failed(path: Path, error: OSError) -> StoreFull | StorageFailed:
    kind = StoreFull if error.errno in NO_ROOM else StorageFailed
    return kind(f"weights: {path}: {error.strerror or error}")


def _reserve(file: int, size_bytes: int) -> None:
    """Give a file its size, and its blocks where the system can."""
    if size_bytes and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size_bytes)
    else:
        os.ftruncate(file, size_bytes)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
