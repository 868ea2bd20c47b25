"""A second, slow and simple judge of heads and manifests, beside `tests/wire_reference.py`.

It takes a tree that `wire_reference.read` made and `conform` passed, and shares no code with
`swarm.weights` and `swarm.wire.codec`: what one of the two accepts, the other must accept.
"""

import re
from itertools import pairwise
from typing import Any

from tests.wire_reference import Refused

TREE = dict[str, Any]
BITS = {
    "file": 8,
    "header": 8,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
TYPES = list(BITS)
SUFFIXES = r"\.(safetensors|json|txt|md|jinja|model|tiktoken|bpe|vocab)"
WORD = r"[A-Za-z0-9_]([A-Za-z0-9_.+=@ -]*[A-Za-z0-9_+=@-])?"
DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE | re.ASCII)


def need(condition: bool, what: str) -> None:
    if not condition:
        raise Refused(what)


def conform_manifest(tree: TREE) -> None:
    """Check the tree of a manifest.

    Raises:
        Refused: it breaks a rule.
    """
    entries = _entries(tree)
    total = sum(entry["size"] for entry in entries)
    need(total <= 2**43, "too large")
    by_file: dict[str, list[TREE]] = {}
    for entry in entries:
        by_file.setdefault(entry["file"], []).append(entry)
    need(len(by_file) <= 1024, "too many files")
    for file, inside in by_file.items():
        _file(file, inside, list(by_file))
    sizes: dict[bytes, int] = {}
    bases = [artifact["base_version"] for artifact in tree["artifacts"]]
    need(all(bases.count(base) == 1 for base in bases), "a base twice")
    for artifact in tree["artifacts"]:
        _artifact(artifact, tree["version"], total, sizes)


def _pieces(column: bytes, width: int) -> list[bytes]:
    need(len(column) % width == 0, "a column that ends within a value")
    return [column[at : at + width] for at in range(0, len(column), width)]


def _integers(column: bytes, width: int) -> list[int]:
    return [int.from_bytes(piece, "little") for piece in _pieces(column, width)]


def _texts(column: bytes) -> list[str]:
    found, rest = [], column
    while rest:
        text, end, rest = rest.partition(b"\x00")
        need(end == b"\x00", "a text without an end")
        try:
            found.append(text.decode())
        except UnicodeDecodeError:
            raise Refused("not UTF-8") from None
    return found


def _entries(tree: TREE) -> list[TREE]:
    names, files = _texts(tree["names"]), _texts(tree["files"])
    need(1 <= len(names) <= 131_072, "number of entries")
    need(all(a < b for a, b in pairwise(files)), "files out of order")
    types, ranks, axes = list(tree["dtypes"]), list(tree["ranks"]), _integers(tree["shapes"], 8)
    places, offsets = _integers(tree["file_positions"], 4), _integers(tree["offsets"], 8)
    columns = (types, ranks, places, offsets, _pieces(tree["hashes"], 32))
    need({len(column) for column in columns} == {len(names)}, "columns differ")
    need(sum(ranks) == len(axes), "shapes differ from ranks")
    need(sorted(set(places)) == list(range(len(files))), "a file unused or unknown")
    found: list[TREE] = []
    for name, kind, rank, place, offset in zip(names, types, ranks, places, offsets, strict=True):
        shape, axes = axes[:rank], axes[rank:]
        need(kind < len(TYPES) and rank <= 8, "type or rank")
        bits = BITS[TYPES[kind]]
        for size in shape:
            need(size <= 2**43, "a dimension")
            bits *= size
        need(bits % 8 == 0 and bits // 8 <= 2**43 and offset <= 2**43, "a size")
        need(not found or found[-1]["name"] < name, "order of names")
        need(1 <= len(name.encode()) <= 512 and name.isprintable(), "a name")
        entry = {"name": name, "type": TYPES[kind], "rank": rank, "file": files[place]}
        found.append(entry | {"offset": offset, "size": bits // 8})
    return found


def _file(file: str, entries: list[TREE], files: list[str]) -> None:
    parts = file.split("/")
    need(len(file) <= 255 and len(parts) <= 4, "a path too long")
    for part in parts:
        need(re.fullmatch(WORD, part) is not None and not DEVICE.fullmatch(part), "a path")
    need(re.search(SUFFIXES + r"\Z", file) is not None, "a kind of file")
    for other in files:
        if other is not file:
            need(other.lower() != file.lower(), "case alone")
            need(not file.lower().startswith(other.lower() + "/"), "a file inside another")
    entries = sorted(entries, key=lambda entry: (entry["offset"], entry["size"]))
    end = 0
    for entry in entries:
        need(entry["offset"] == end, "a hole")
        end += entry["size"]
    whole = [entry for entry in entries if entry["type"] in ("file", "header")]
    need(len(whole) == 1, "one header or one file")
    (first,) = whole
    need(first is entries[0] and first["name"] == file and first["rank"] == 1, "what is whole")
    if file.endswith(".safetensors"):
        need(first["type"] == "header" and first["size"] <= 2**26, "header")
    else:
        need(first["type"] == "file" and len(entries) == 1 and first["size"] <= 2**28, "file")


def _artifact(artifact: TREE, version: int, total: int, sizes: dict[bytes, int]) -> None:
    base, state = artifact["base_version"], artifact["base_state"]
    need((base is None) == (state is None), "base and its state")
    need(base is None or base < version, "a base that is not older")
    hashes = _pieces(artifact["chunk_hashes"], 32)
    lengths = _integers(artifact["chunk_sizes"], 4)
    need(len(hashes) == len(lengths) == len(set(hashes)), "chunks")
    need(base is not None or bool(hashes), "nothing at all")
    for name, length in zip(hashes, lengths, strict=True):
        need(1 <= length <= 2**24, "size of a chunk")
        need(sizes.setdefault(name, length) == length, "two sizes")
    need(sum(lengths) <= 2 * total + 4096 * len(hashes), "more chunks than it takes")
