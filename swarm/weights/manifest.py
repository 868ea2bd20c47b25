"""A version of a policy: its files, its manifest, and the head that announces it.

A version is a directory of safetensors files and the files that belong to them. It is offered as
artifacts: the full state, and deltas against earlier versions. An artifact is a list of chunks,
each named by its SHA-256; chunks are patched in in any order.
The *state* hash covers names, types, shapes and content: equal states are bit-identical. The *root*
hash covers the whole published manifest.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from swarm.errors import (
    ConfigError,
    LocalProtocolError,
    Reject,
    RemoteProtocolError,
    StorageFailed,
    StoreFull,
)
from swarm.identity import PeerId, public_key_of
from swarm.wire import codec
from swarm.wire.messages import (
    ARTIFACTS_MAX,
    CHUNK_BYTES_MAX,
    CHUNKS_MAX,
    DETAIL_CHARS_MAX,
    MANIFEST_BYTES_MAX,
    ArtifactBody,
    HeadBody,
    ManifestBody,
)

STATE_DOMAIN = b"swarm/weights-state/1\x00"
MANIFEST_DOMAIN = b"swarm/weights-manifest/1\x00"

FILE_DTYPE = "file"  # of a file without tensors, such as `config.json`: bytes, one axis
HEADER_DTYPE = "header"  # of a safetensors file up to its first tensor: bytes, one axis


@dataclass(frozen=True, slots=True)
class Entry:
    """The place of a tensor, of the header of a file of tensors, or of one other file."""

    name: str  # of a tensor with the folder of its file in front, else the file's path
    dtype: str  # as in safetensors (`BF16`, `F32`, `I64`, ...), or `header` or `file`
    shape: tuple[int, ...]
    file: str  # path relative to the version's directory, with `/` between folders
    offset_bytes: int  # in its file
    size_bytes: int

    def hashed(self, sha256: bytes) -> "TensorSpec":
        return TensorSpec(
            self.name, self.dtype, self.shape, self.file, self.offset_bytes, self.size_bytes, sha256
        )


@dataclass(frozen=True, slots=True)
class TensorSpec(Entry):
    """An entry with the SHA-256 of its raw bytes (32 bytes), little-endian and row-major."""

    sha256: bytes


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """One chunk: the SHA-256 of its bytes (32 bytes) and how many there are."""

    sha256: bytes
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Artifact:
    """A way to make a version: all of it, or the changes since another."""

    base_version: int | None  # None: the full state
    base_state: bytes | None  # state hash of that version, 32 bytes
    chunks: tuple[ChunkRef, ...]

    @property
    def size_bytes(self) -> int:
        return sum(chunk.size_bytes for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about one version that its publisher signs."""

    run_id: str
    policy: str  # which of the run's policies; one line of versions each
    version: int
    publisher: PeerId
    created_at_s: int
    tensors: tuple[TensorSpec, ...]  # ordered by name
    artifacts: tuple[Artifact, ...]

    @property
    def state(self) -> bytes:
        return state_of(self.tensors)

    @property
    def size_bytes(self) -> int:
        """Raw size of all tensors and files."""
        return sum(tensor.size_bytes for tensor in self.tensors)


def state_of(tensors: tuple[TensorSpec, ...]) -> bytes:
    """The state hash (32 bytes). It covers the file of each tensor, but not their order."""
    digest = hashlib.sha256(STATE_DOMAIN)
    for tensor in sorted(tensors, key=lambda each: each.name):
        shape = ",".join(map(str, tensor.shape))
        for text in (tensor.name, tensor.dtype, shape, tensor.file):
            data = text.encode()
            digest.update(len(data).to_bytes(4, "big") + data)
        digest.update(tensor.sha256)
    return digest.digest()


# The layout of entries in files, and the files that a version may have. Pure.

ENTRIES_MAX = 1 << 17  # of one version; large mixtures of experts have some 90,000
FILES_MAX = 1024  # of one version, those of tensors included
HEADER_BYTES_MAX = 64 << 20  # of a safetensors file; the format's own limit is 100 MB
FILE_BYTES_MAX = 256 << 20  # without tensors; the largest tokenizers have some 40 MB
VERSION_BYTES_MAX = 1 << 43  # raw: 8 TiB
NAME_BYTES_MAX = 512
PATH_BYTES_MAX = 255
FOLDERS_MAX = 3  # above a file: `unet/model.safetensors` has one
DIMENSIONS_MAX = 8

TENSORS_SUFFIX = ".safetensors"
# Other files of a version: nothing that a loader would execute or unpickle.
FILE_SUFFIXES = (".json", ".txt", ".md", ".jinja", ".model", ".tiktoken", ".bpe", ".vocab")

DTYPE_BITS = {  # of one element
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
    FILE_DTYPE: 8, HEADER_DTYPE: 8,
}  # fmt: skip

PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@ -]*")
RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?")


class BadLayout(ValueError):
    """Bytes or names that no version may have. The message is one line."""


def entry_of(spec: TensorSpec) -> Entry:
    """A spec without its hash."""
    return Entry(spec.name, spec.dtype, spec.shape, spec.file, spec.offset_bytes, spec.size_bytes)


def size_of(dtype: str, shape: Sequence[int]) -> int:
    """The size of a tensor in bytes; `BadLayout` where no such tensor can exist."""
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise BadLayout(f"unknown dtype {dtype[:32]!r}")
    if len(shape) > DIMENSIONS_MAX:
        raise BadLayout(f"{len(shape)} dimensions, at most {DIMENSIONS_MAX}")
    if any(type(size) is not int or not 0 <= size <= VERSION_BYTES_MAX for size in shape):
        raise BadLayout("a size in the shape is no size")
    size_bytes, rest = divmod(math.prod(shape) * bits, 8)
    if rest or size_bytes > VERSION_BYTES_MAX:
        raise BadLayout(f"no tensor of {dtype} has the shape {list(shape)}")
    return size_bytes


def check_path(path: str) -> None:
    """Raise `BadLayout` unless a path is plain, relative and of a kind that a version may have."""
    shown = path[:PATH_BYTES_MAX]
    parts = path.split("/")
    if len(path.encode(errors="replace")) > PATH_BYTES_MAX or len(parts) > FOLDERS_MAX + 1:
        raise BadLayout(f"file name {shown!r} is too long")
    for part in parts:
        if not PART.fullmatch(part) or part[-1] in ". " or RESERVED.fullmatch(part):
            raise BadLayout(f"file name {shown!r} is not allowed")
    if not path.endswith((TENSORS_SUFFIX, *FILE_SUFFIXES)):
        raise BadLayout(f"file {shown!r} is of no kind that a version may have")


def tensor_name(file: str, inside: str) -> str:
    """The name in a version. The folder of its file lets pipeline parts share names."""
    folder = PurePosixPath(file).parent
    return inside if folder == PurePosixPath() else f"{folder}/{inside}"


def header_size(start: bytes) -> int:
    """The size of a safetensors header, from and with its first 8 bytes; raises `BadLayout`."""
    size_bytes = 8 + int.from_bytes(start, "little")
    if len(start) != 8 or size_bytes > HEADER_BYTES_MAX:
        raise BadLayout(f"no safetensors header, or one over {HEADER_BYTES_MAX} bytes")
    return size_bytes


def parse_header(header: bytes, file: str) -> list[Entry]:
    """The entries of one safetensors file: its header, then the tensors by offset.

    `header` are its first 8 + N bytes. Raises `BadLayout`, and nothing else, for whatever bytes.
    """
    if header_size(header[:8]) != len(header):
        raise BadLayout("the header is cut short")
    try:
        table = json.loads(header[8:].decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise BadLayout(f"the header is no JSON object: {str(error)[:80]}") from None
    if not isinstance(table, dict):
        raise BadLayout("the header is no JSON object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise BadLayout("the header's metadata are not texts")
    if len(table) > ENTRIES_MAX:
        raise BadLayout(f"more than {ENTRIES_MAX} tensors")
    tensors = [_tensor(name, fields, file, len(header)) for name, fields in table.items()]
    tensors.sort(key=lambda entry: (entry.offset_bytes, entry.size_bytes, entry.name))
    start = Entry(file, HEADER_DTYPE, (len(header),), file, 0, len(header))
    _check_whole([start, *tensors])
    return [start, *tensors]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key is there twice")
    return table


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _tensor(name: str, fields: Any, file: str, begin: int) -> Entry:
    """One row of a header."""
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadLayout(f"tensor {name[:64]!r}: not dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype in (FILE_DTYPE, HEADER_DTYPE):
        raise BadLayout(f"tensor {name[:64]!r}: unknown dtype")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise BadLayout(f"tensor {name[:64]!r}: shape or offsets are no lists")
    size_bytes = size_of(dtype, shape)
    if any(type(offset) is not int or offset < 0 for offset in offsets):
        raise BadLayout(f"tensor {name[:64]!r}: offsets are no offsets")
    if offsets[1] - offsets[0] != size_bytes:
        raise BadLayout(f"tensor {name[:64]!r}: {dtype} {shape} does not take its bytes")
    return Entry(tensor_name(file, name), dtype, tuple(shape), file, begin + offsets[0], size_bytes)


def _check_whole(entries: Sequence[Entry]) -> None:
    """Refuse holes and overlaps between the entries of one file, given in their order."""
    end = 0
    for entry in entries:
        if entry.offset_bytes != end:
            raise BadLayout(f"{entry.file!r} has a hole or an overlap before {entry.name[:64]!r}")
        end += entry.size_bytes


def check_entries(entries: Sequence[Entry]) -> None:
    """Raise `BadLayout` for entries that no version may have.

    Names are sorted and unique, file names differ in more than case, sizes agree with dtype and
    shape, files of tensors begin with a header and have no holes, and this file's limits hold.
    """
    if len(entries) > ENTRIES_MAX:
        raise BadLayout(f"more than {ENTRIES_MAX} entries")
    if any(one.name >= other.name for one, other in pairwise(entries)):
        raise BadLayout("names of entries are not sorted, or one is there twice")
    for entry in entries:
        _check_entry(entry)
    if sum(entry.size_bytes for entry in entries) > VERSION_BYTES_MAX:
        raise BadLayout(f"more than {VERSION_BYTES_MAX} bytes")
    files: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda each: (each.file, each.offset_bytes, each.size_bytes)):
        files.setdefault(entry.file, []).append(entry)
    _check_files(files)


def _check_entry(entry: Entry) -> None:
    if not 0 < len(entry.name.encode(errors="replace")) <= NAME_BYTES_MAX:
        raise BadLayout(f"an entry's name has over {NAME_BYTES_MAX} bytes, or none")
    if not entry.name.isprintable():
        raise BadLayout(f"name {entry.name[:64]!r} is not printable")
    if size_of(entry.dtype, entry.shape) != entry.size_bytes:
        raise BadLayout(f"{entry.name!r}: {entry.dtype} {list(entry.shape)} has another size")
    if not 0 <= entry.offset_bytes <= VERSION_BYTES_MAX:
        raise BadLayout(f"{entry.name!r}: no offset")
    if entry.dtype not in (FILE_DTYPE, HEADER_DTYPE):
        return
    limit = FILE_BYTES_MAX if entry.dtype == FILE_DTYPE else HEADER_BYTES_MAX
    whole = entry.name == entry.file and len(entry.shape) == 1 and entry.offset_bytes == 0
    if not whole or entry.size_bytes > limit:
        raise BadLayout(f"{entry.name!r}: no {entry.dtype}, or over {limit} bytes")


def _check_files(files: dict[str, list[Entry]]) -> None:
    """`files`: by name, their entries by offset."""
    if len(files) > FILES_MAX:
        raise BadLayout(f"more than {FILES_MAX} files")
    folded = {name.casefold() for name in files}
    if len(folded) != len(files):
        raise BadLayout("names of files differ in case alone")
    for name, entries in files.items():
        check_path(name)
        if any(str(folder).casefold() in folded for folder in PurePosixPath(name).parents):
            raise BadLayout(f"{name!r} is in a folder that is a file")
        is_tensors = name.endswith(TENSORS_SUFFIX)
        if is_tensors != (entries[0].dtype == HEADER_DTYPE):
            raise BadLayout(f"{name!r} is a file of tensors without a header, or the reverse")
        if any(entry.dtype in (FILE_DTYPE, HEADER_DTYPE) for entry in entries[1:]):
            raise BadLayout(f"{name!r} is there twice")
        if not is_tensors and len(entries) > 1:
            raise BadLayout(f"{name!r} holds tensors")
        _check_whole(entries)


def check_specs(specs: Sequence[TensorSpec]) -> None:
    """Raise `RemoteProtocolError` for entries of a peer that no version may have."""
    try:
        check_entries(specs)
    except BadLayout as error:
        raise RemoteProtocolError(Reject.MALFORMED, f"a version's entries: {error}") from None
    if any(len(spec.sha256) != 32 for spec in specs):
        raise RemoteProtocolError(Reject.MALFORMED, "a version's entries: a hash is no SHA-256")


def check_header(header: bytes, specs: Iterable[TensorSpec], file: str) -> None:
    """Raise `RemoteProtocolError` unless a header that came lists the entries `specs` of `file`."""
    try:
        told = parse_header(header, file)
    except BadLayout as error:
        raise RemoteProtocolError(Reject.MALFORMED, f"{file}: {error}") from None
    if {entry.name: entry for entry in told} != {spec.name: entry_of(spec) for spec in specs}:
        raise RemoteProtocolError(Reject.MALFORMED, f"{file}: its header tells of other tensors")


# Heads and manifests: the judgement of a version that a peer announces.

# On the wire a type is its position in here: append only.
DTYPES = (
    *("file", "header", "BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"),
    *("F8_E4M3FNUZ", "F8_E5M2FNUZ", "U16", "I16", "F16", "BF16", "U32", "I32", "F32"),
    *("U64", "I64", "F64", "C64", "F4", "F6_E2M3", "F6_E3M2"),
)

OVERHEAD_PER_CHUNK_BYTES_MAX = 4_096  # how far an artifact may exceed twice its state's size


def root_of(body: bytes) -> bytes:
    """The hash (32 bytes) by which a manifest is named and asked for."""
    return hashlib.sha256(MANIFEST_DOMAIN + body).digest()


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest's bytes as they are hashed and served.

    Raises `LocalProtocolError` for a manifest that no peer would accept.
    """
    fault = manifest_fault(manifest)
    if fault is not None:
        raise LocalProtocolError(f"version {manifest.version}: {fault}")
    tensors = manifest.tensors
    files = sorted({tensor.file for tensor in tensors})
    position = {file: at for at, file in enumerate(files)}
    axes = [size for tensor in tensors for size in tensor.shape]
    try:
        body = codec.encode(
            ManifestBody(
                type="manifest",
                run_id=manifest.run_id,
                policy=manifest.policy,
                version=manifest.version,
                publisher=manifest.publisher,
                created_at_s=manifest.created_at_s,
                names=_text_column([tensor.name for tensor in tensors]),
                dtypes=bytes(DTYPES.index(tensor.dtype) for tensor in tensors),
                ranks=bytes(len(tensor.shape) for tensor in tensors),
                shapes=_column("Q", axes),
                hashes=b"".join(tensor.sha256 for tensor in tensors),
                files=_text_column(files),
                file_positions=_column("I", [position[tensor.file] for tensor in tensors]),
                offsets=_column("Q", [tensor.offset_bytes for tensor in tensors]),
                artifacts=tuple(map(_artifact_body, manifest.artifacts)),
            )
        )
    except (ValidationError, UnicodeEncodeError) as error:
        raise LocalProtocolError(f"manifest does not fit the wire: {error}") from error
    if len(body) > MANIFEST_BYTES_MAX:
        raise LocalProtocolError(f"manifest of {len(body)} bytes, at most {MANIFEST_BYTES_MAX}")
    return body


def decode_manifest(body: bytes) -> Manifest:
    """The manifest in bytes that have the root that was asked for.

    Takes about a second for a hundred thousand tensors: call it off the event loop. Raises
    `RemoteProtocolError`: OVERSIZE or MALFORMED.
    """
    found = codec.decode(body, ManifestBody, MANIFEST_BYTES_MAX)
    public_key_of(found.publisher)  # a peer id in its one form, or it is refused
    try:
        tensors = _tensors(found)
    except BadLayout as error:
        raise _malformed(str(error)) from None
    manifest = Manifest(
        run_id=found.run_id,
        policy=found.policy,
        version=found.version,
        publisher=PeerId(found.publisher),
        created_at_s=found.created_at_s,
        tensors=tensors,
        artifacts=tuple(map(_artifact, found.artifacts)),
    )
    fault = manifest_fault(manifest)
    if fault is not None:
        raise _malformed(fault)
    return manifest


def open_manifest(body: bytes, head: HeadBody) -> Manifest:
    """The manifest that a head announces, in bytes that any peer sent.

    Raises `RemoteProtocolError`: WRONG_HASH without a signer, as the sender is to blame; OVERSIZE
    or MALFORMED, also where it disagrees with the head, with the publisher as signer.
    """
    if len(body) != head.manifest_bytes or root_of(body) != head.root:
        raise RemoteProtocolError(Reject.WRONG_HASH, "not the manifest that was asked for")
    try:
        manifest = decode_manifest(body)
        named = (manifest.run_id, manifest.policy, manifest.version, manifest.publisher)
        if named != (head.run_id, head.policy, head.version, head.publisher):
            raise _malformed("a manifest of something else than its head")
    except RemoteProtocolError as error:
        error.signer = head.publisher
        raise
    return manifest


def manifest_fault(manifest: Manifest) -> str | None:
    """The fault of a manifest, in one line; None: it has none."""
    if not manifest.tensors:
        return "nothing in it"
    try:
        check_specs(manifest.tensors)
    except RemoteProtocolError as error:
        return error.detail
    return _artifacts_fault(manifest)


def _malformed(detail: str) -> RemoteProtocolError:
    return RemoteProtocolError(Reject.MALFORMED, ascii(detail)[1:-1][:DETAIL_CHARS_MAX])


def _artifacts_fault(manifest: Manifest) -> str | None:
    artifacts = manifest.artifacts
    if not 0 < len(artifacts) <= ARTIFACTS_MAX:
        return f"{len(artifacts)} artifacts, at least 1 and at most {ARTIFACTS_MAX}"
    if len({artifact.base_version for artifact in artifacts}) != len(artifacts):
        return "two artifacts on one base"
    sizes: dict[bytes, int] = {}
    for artifact in artifacts:
        fault = _base_fault(artifact, manifest.version) or _chunks_fault(
            artifact.chunks, sizes, manifest.size_bytes
        )
        if fault is not None:
            base = "no base" if artifact.base_version is None else f"base {artifact.base_version}"
            return f"artifact on {base}: {fault}"
    return None


def _base_fault(artifact: Artifact, version: int) -> str | None:
    if artifact.base_version is None:
        if artifact.base_state is not None:
            return "the state of a base that it has not"
        return None if artifact.chunks else "no chunks"
    if artifact.base_version >= version:
        return f"not older than version {version}"
    if artifact.base_state is None or len(artifact.base_state) != 32:
        return "without its base's state"
    return None


def _chunks_fault(
    chunks: Sequence[ChunkRef], sizes: dict[bytes, int], state_bytes: int
) -> str | None:
    """The fault of an artifact's chunks, which are added to `sizes`, by hash."""
    if len(chunks) > CHUNKS_MAX:
        return f"{len(chunks)} chunks, at most {CHUNKS_MAX}"
    if len({chunk.sha256 for chunk in chunks}) != len(chunks):
        return "a chunk that is there twice"
    for chunk in chunks:
        if not 0 < chunk.size_bytes <= CHUNK_BYTES_MAX or len(chunk.sha256) != 32:
            return f"a chunk of {chunk.size_bytes} bytes, at most {CHUNK_BYTES_MAX}"
        if sizes.setdefault(chunk.sha256, chunk.size_bytes) != chunk.size_bytes:
            return "a chunk of two sizes"
    total_bytes = sum(chunk.size_bytes for chunk in chunks)
    if total_bytes > 2 * state_bytes + OVERHEAD_PER_CHUNK_BYTES_MAX * len(chunks):
        return f"{total_bytes} bytes for a state of {state_bytes}"
    return None


def _column(form: str, numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}{form}", *numbers)


def _numbers(form: str, column: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(column) // struct.calcsize(form)}{form}", column)


def _text_column(texts: Sequence[str]) -> bytes:
    return b"".join(text.encode() + b"\x00" for text in texts)


def _texts(column: bytes, of: str) -> list[str]:
    if not column.endswith(b"\x00"):
        raise _malformed(f"{of}: none, or the last has no end")
    try:
        return column[:-1].decode().split("\x00")
    except UnicodeDecodeError:
        raise _malformed(f"{of} that are not UTF-8") from None


def _tensors(body: ManifestBody) -> tuple[TensorSpec, ...]:
    names, files = _texts(body.names, "names"), _texts(body.files, "files")
    count = len(names)
    lengths = [len(body.dtypes), len(body.ranks), len(body.hashes)]
    if [*lengths, len(body.file_positions), len(body.offsets)] != [
        width * count for width in (1, 1, 32, 4, 8)
    ] or 8 * sum(body.ranks) != len(body.shapes):
        raise _malformed("columns of tensors of different lengths")
    positions = _numbers("I", body.file_positions)
    if max(body.dtypes) >= len(DTYPES):
        raise _malformed("a type that is not known")
    if set(positions) != set(range(len(files))) or sorted(set(files)) != files:
        raise _malformed("files that are not used, there twice, or out of order")
    axes, offsets = _numbers("Q", body.shapes), _numbers("Q", body.offsets)
    tensors, at = [], 0
    for index, name in enumerate(names):
        shape = axes[at : at + body.ranks[index]]
        at += len(shape)
        dtype = DTYPES[body.dtypes[index]]
        file, sha256 = files[positions[index]], body.hashes[32 * index : 32 * index + 32]
        size_bytes = size_of(dtype, shape)
        tensors.append(TensorSpec(name, dtype, shape, file, offsets[index], size_bytes, sha256))
    return tuple(tensors)


def _artifact_body(artifact: Artifact) -> ArtifactBody:
    return ArtifactBody(
        base_version=artifact.base_version,
        base_state=artifact.base_state,
        chunk_hashes=b"".join(chunk.sha256 for chunk in artifact.chunks),
        chunk_sizes=_column("I", [chunk.size_bytes for chunk in artifact.chunks]),
    )


def _artifact(body: ArtifactBody) -> Artifact:
    count = len(body.chunk_sizes) // 4
    if len(body.chunk_sizes) != 4 * count or len(body.chunk_hashes) != 32 * count:
        raise _malformed("columns of chunks of different lengths")
    return Artifact(
        base_version=body.base_version,
        base_state=body.base_state,
        chunks=tuple(
            ChunkRef(body.chunk_hashes[32 * at : 32 * at + 32], size)
            for at, size in enumerate(_numbers("I", body.chunk_sizes))
        ),
    )


# Directories of weights, in and out: safetensors files and the few others that belong to them.

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
READ_BYTES = 8 << 20  # at a time, to be hashed or copied
INDEX_SUFFIX = ".safetensors.index.json"

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class WeightsDirectory:
    """A directory of weights. Its methods are safe from several threads."""

    path: Path
    specs: tuple[TensorSpec, ...]  # ordered by name
    left_out: tuple[str, ...] = ()  # hidden files, links to folders, what a loader may execute

    def read(self, spec: TensorSpec, start_bytes: int, size_bytes: int) -> Bytes:
        """Some of an entry's bytes, as a new array; `StorageFailed` if the file became shorter."""
        if not 0 <= start_bytes <= start_bytes + size_bytes <= spec.size_bytes:
            raise ValueError(f"{spec.name!r} has no bytes {start_bytes}+{size_bytes}")
        return read_at(self.path / spec.file, spec.offset_bytes + start_bytes, size_bytes)

    def first_difference(self) -> TensorSpec | None:
        """Read everything; return the first entry whose content differs from its hash."""
        wrong = (spec for spec in self.specs if _sha256(self.path, spec) != spec.sha256)
        return next(wrong, None)


def open_weights(path: Path, specs: tuple[TensorSpec, ...] | None = None) -> WeightsDirectory:
    """Open a directory of weights. Files may be links, as in Hugging Face's cache.

    Headers are parsed and content is hashed; with known `specs` only layouts are compared. Raises
    `ConfigError`, one line that names the file, where none is there, or one is damaged, of a shape
    that no peer would take, or not as `specs` have it.
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
    """Entries by name, and left-out names; raises `ConfigError`."""
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
    """Relative names of a version's files; other names go to `left_out`."""
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
    """Raise `BadLayout` unless all shards that an index names are there."""
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

    All files are made at full size at once, so that a full disk fails early; `path` must not exist,
    or be empty. Raises `RemoteProtocolError` for entries that no version may have, `StoreFull` and
    `StorageFailed`. `write` is safe from several threads for different bytes.
    """

    def __init__(self, path: Path, specs: tuple[TensorSpec, ...]) -> None:
        check_specs(specs)
        self.path = path
        self._ends: dict[str, int] = {}
        for spec in specs:
            end = spec.offset_bytes + spec.size_bytes
            self._ends[spec.file] = max(end, self._ends.get(spec.file, 0))
        with disk(path, StoreFull):
            self._make()

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
                if size_bytes and hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size_bytes)
                else:
                    file.truncate(size_bytes)

    def write(self, spec: TensorSpec, start_bytes: int, content: NDArray[Any]) -> None:
        """Write `content` into an entry, `start_bytes` after its start."""
        data = content.reshape(-1).view(np.uint8).data
        if not 0 <= start_bytes <= start_bytes + len(data) <= spec.size_bytes:
            raise ValueError(f"{spec.name!r} has no bytes {start_bytes}+{len(data)}")
        offset = spec.offset_bytes + start_bytes
        with _opened(self.path / spec.file, os.O_WRONLY | os.O_NOFOLLOW) as file:
            while data:
                written = os.pwrite(file, data, offset)
                data, offset = data[written:], offset + written

    def sync(self) -> None:
        """Flush all files and folders to disk."""
        with disk(self.path, StoreFull):
            folders = {self.path, self.path.parent}
            for name in self._ends:
                sync(self.path / name)
                folders.add((self.path / name).parent)
                folders.update((self.path / up) for up in PurePosixPath(name).parents)
            for folder in sorted(folders):
                sync(folder)


def read_at(path: Path, offset: int, size_bytes: int) -> Bytes:
    """Exactly these bytes of a file; `StorageFailed` where there are fewer."""
    content: Bytes = np.empty(size_bytes, np.uint8)
    data, done = content.data, 0
    with _opened(path, os.O_RDONLY) as file:
        while done < size_bytes:
            got = os.preadv(file, [data[done:]], offset + done)
            if got == 0:
                raise StorageFailed(f"weights: {path} is shorter than it was")
            done += got
    return content


@contextmanager
def disk(path: Path, full: type[StoreFull | StorageFailed] = StorageFailed) -> Iterator[None]:
    """Turn an OSError into `StorageFailed`, or into `full` where the disk has no room."""
    try:
        yield
    except OSError as error:
        kind = full if error.errno in NO_ROOM else StorageFailed
        raise kind(f"weights: {path}: {error.strerror or error}") from None


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    with disk(path, StoreFull):
        file = os.open(path, flags | os.O_CLOEXEC)
        try:
            yield file
        finally:
            os.close(file)


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
