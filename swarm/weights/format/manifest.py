"""A version of a policy, and the chunks from which it can be made.

A version is a directory: tensors, in safetensors files, and the other files that belong to them. It
is offered as one or more artifacts: the full state, and deltas against earlier versions. An
artifact is a list of chunks, each named by the SHA-256 of its bytes; a chunk stands alone, so
chunks may come in any order, from anybody, and are patched in as they come.

Two hashes name a version. The *state* covers what the weights are: names, types, shapes and content
of all tensors and files, so equal states are bit-identical. The *root* covers the whole manifest as
it was published.
"""

import hashlib
from dataclasses import dataclass

from swarm.identity import PeerId

STATE_DOMAIN = b"swarm/weights-state/1\x00"
MANIFEST_DOMAIN = b"swarm/weights-manifest/1\x00"

FILE_DTYPE = "file"
"""The dtype of what is no tensor but a file of its own, such as `config.json`: bytes, one axis."""

HEADER_DTYPE = "header"
"""The dtype of the start of a safetensors file, up to its first tensor: bytes, one axis."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a version, the header of a file of tensors, or one other file.

    `dtype` is spelt as in safetensors (`BF16`, `F16`, `F32`, `I64`, ...), or is `header` or `file`.
    `file` names the file that holds it, relative to the version's directory, with `/` between
    folders. `sha256` is of its raw bytes, little-endian and in row-major order: 32 bytes.
    The name of a header or a file is `file`; that of a tensor has the folder of its file in front.
    `offset_bytes` is where it begins in its file: a receiver places tensors before it has the
    header.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset_bytes: int
    size_bytes: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """One chunk: the SHA-256 of its bytes (32 bytes) and how many there are."""

    sha256: bytes
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Artifact:
    """One way to come to a version: all of it, or what changed since another."""

    base_version: int | None  # None: the full state
    base_state: bytes | None  # state hash of that version, 32 bytes
    chunks: tuple[ChunkRef, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all its chunks."""
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
        """The state hash, 32 bytes."""
        return state_of(self.tensors)

    @property
    def size_bytes(self) -> int:
        """The size of all its tensors and files, raw."""
        return sum(tensor.size_bytes for tensor in self.tensors)


def state_of(tensors: tuple[TensorSpec, ...]) -> bytes:
    """The hash of what the weights are, 32 bytes, whatever the order of `tensors`.

    In which file a tensor is belongs to it, and where in it follows from the headers, which count
    as well: applying a version makes the same files everywhere.
    """
    digest = hashlib.sha256(STATE_DOMAIN)
    for tensor in sorted(tensors, key=lambda each: each.name):
        shape = ",".join(map(str, tensor.shape))
        for text in (tensor.name, tensor.dtype, shape, tensor.file):
            data = text.encode()
            digest.update(len(data).to_bytes(4, "big") + data)
        digest.update(tensor.sha256)
    return digest.digest()
