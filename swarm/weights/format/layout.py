"""The layout of entries in files, and the files that a version may have. Pure.

A version's files come from its publisher, so their names, sizes and places are judged here before
anything is opened or made: plain relative names, suffixes that no loader executes, files of tensors
without holes. A directory of our own is held to the same, so that what is published is accepted.

A safetensors file is eight bytes with the length N of a JSON object (little-endian), the object
itself, and the tensors, without holes. The first 8 + N bytes are an entry of their own, which keeps
metadata, order and padding: what is made from entries is the same file, byte for byte.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

from swarm.errors import Reject, RemoteProtocolError
from swarm.weights.format.manifest import FILE_DTYPE, HEADER_DTYPE, TensorSpec

ENTRIES_MAX = 1 << 17
"""Tensors, headers and files of one version. Large mixtures of experts have some 90,000."""
FILES_MAX = 1024
"""Files of one version, those of tensors included."""
HEADER_BYTES_MAX = 64 << 20
"""A safetensors header. The format itself ends at 100 MB."""
FILE_BYTES_MAX = 256 << 20
"""A file that holds no tensors. The largest tokenizers have some 40 MB."""
VERSION_BYTES_MAX = 1 << 43
"""All of one version, raw: 8 TiB."""
NAME_BYTES_MAX = 512
PATH_BYTES_MAX = 255
FOLDERS_MAX = 3
"""How deep a file may be: `unet/model.safetensors` has one folder."""
DIMENSIONS_MAX = 8

TENSORS_SUFFIX = ".safetensors"
FILE_SUFFIXES = (".json", ".txt", ".md", ".jinja", ".model", ".tiktoken", ".bpe", ".vocab")
"""Other files of a version. Nothing that a loader would execute or unpickle."""

DTYPE_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
    FILE_DTYPE: 8, HEADER_DTYPE: 8,
}  # fmt: skip
"""What one element of each dtype takes."""

PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@ -]*")
RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?")


class BadLayout(ValueError):
    """Bytes or names that no version may have. The message is one line."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A `TensorSpec` without the hash of its content."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset_bytes: int
    size_bytes: int

    def hashed(self, sha256: bytes) -> TensorSpec:
        """This entry with the SHA-256 of its bytes."""
        return TensorSpec(
            self.name, self.dtype, self.shape, self.file, self.offset_bytes, self.size_bytes, sha256
        )


def entry_of(spec: TensorSpec) -> Entry:
    """The place without the content of what a version names."""
    return Entry(spec.name, spec.dtype, spec.shape, spec.file, spec.offset_bytes, spec.size_bytes)


def size_of(dtype: str, shape: Sequence[int]) -> int:
    """The bytes of a tensor; `BadLayout` where there is no such tensor."""
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
    """Refuse what is no plain relative file name of a kind that a version may have: `BadLayout`."""
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
    """A tensor's name in a version: with its file's folder, so that parts of a pipeline in
    folders of their own may use the same names."""
    folder = PurePosixPath(file).parent
    return inside if folder == PurePosixPath() else f"{folder}/{inside}"


def header_size(start: bytes) -> int:
    """The size of a safetensors file's header from its first 8 bytes, with these;
    `BadLayout`."""
    size_bytes = 8 + int.from_bytes(start, "little")
    if len(start) != 8 or size_bytes > HEADER_BYTES_MAX:
        raise BadLayout(f"no safetensors header, or one over {HEADER_BYTES_MAX} bytes")
    return size_bytes


def parse_header(header: bytes, file: str) -> list[Entry]:
    """The entries of one safetensors file, first its header, then the tensors in their order in it.

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
    """In one file's tensors, in their order, nothing overlaps and nothing is left between."""
    end = 0
    for entry in entries:
        if entry.offset_bytes != end:
            raise BadLayout(f"{entry.file!r} has a hole or an overlap before {entry.name[:64]!r}")
        end += entry.size_bytes


def check_entries(entries: Sequence[Entry]) -> None:
    """Refuse what no version may consist of, with `BadLayout`.

    That is: names that are not sorted and unique, file names that `check_path` refuses or that
    differ in case alone, sizes that disagree with dtype and shape, files of tensors that have
    holes or no header, and what goes over the limits of this file.
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
    """Check the entries that a peer lists; raises `RemoteProtocolError`. Nothing is opened."""
    try:
        check_entries([entry_of(spec) for spec in specs])
    except BadLayout as error:
        raise RemoteProtocolError(Reject.MALFORMED, f"a version's entries: {error}") from None
    if any(len(spec.sha256) != 32 for spec in specs):
        raise RemoteProtocolError(Reject.MALFORMED, "a version's entries: a hash is no SHA-256")


def check_header(header: bytes, specs: Iterable[TensorSpec], file: str) -> None:
    """A header that came has to be the one that the version's entries tell of; else
    `RemoteProtocolError`. `specs` are those of `file`."""
    try:
        told = parse_header(header, file)
    except BadLayout as error:
        raise RemoteProtocolError(Reject.MALFORMED, f"{file}: {error}") from None
    if sorted(told, key=_name) != sorted((entry_of(spec) for spec in specs), key=_name):
        raise RemoteProtocolError(Reject.MALFORMED, f"{file}: its header tells of other tensors")


def _name(entry: Entry) -> str:
    return entry.name
