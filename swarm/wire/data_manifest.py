"""A run's own items as bytes: cut into chunks, and known by the hash of their manifest. Pure.

The hash of a manifest stands for how many items there are, for their size, and for every byte of
them. So whoever knows it can tell, before it fetches anything, how much will come, and of each
chunk by itself whether it is the right one.
"""

import hashlib
import struct
from typing import Final

from swarm.wire.messages import DATA_CHUNK_BYTES_MAX, DATA_DOMAIN, DataManifest

_HEAD: Final = struct.Struct(">QQ")


def chunks_of(size_bytes: int) -> int:
    """Into how many chunks so many bytes are cut."""
    return -(-size_bytes // DATA_CHUNK_BYTES_MAX)


def chunk_size(manifest: DataManifest, chunk: int) -> int:
    """The size of a chunk in bytes."""
    return min(DATA_CHUNK_BYTES_MAX, manifest.size_bytes - chunk * DATA_CHUNK_BYTES_MAX)


def chunk_hash(manifest: DataManifest, chunk: int) -> bytes:
    """The SHA-256 of a chunk."""
    return manifest.chunk_hashes[32 * chunk : 32 * (chunk + 1)]


def manifest_of(content: bytes, items: int) -> DataManifest:
    """The manifest of data within the limits."""
    cuts = range(0, len(content), DATA_CHUNK_BYTES_MAX)
    view = memoryview(content)
    hashes = (hashlib.sha256(view[at : at + DATA_CHUNK_BYTES_MAX]).digest() for at in cuts)
    return DataManifest(
        type="data_manifest",
        items=items,
        size_bytes=len(content),
        chunk_hashes=b"".join(hashes),
    )


def data_id(manifest: DataManifest) -> bytes:
    """The SHA-256 by which the data of a manifest is known: over the domain, the number of items,
    the size (both 8 bytes, big-endian) and the chunks' hashes."""
    head = _HEAD.pack(manifest.items, manifest.size_bytes)
    return hashlib.sha256(DATA_DOMAIN + head + manifest.chunk_hashes).digest()
