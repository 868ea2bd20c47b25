"""Heads and manifests: the judgement of a version that a peer announces.

A head is small and signed, and travels by gossip (`swarm.wire.codec` opens it). It names the
SHA-256 of its manifest, which is fetched from anybody: the bytes are hashed before they are read,
so whatever is wrong inside is the publisher's doing and nobody else's.

The judgement of a manifest is one function for both directions. What does not pass it is neither
published nor believed.
"""

import hashlib
import struct
from collections.abc import Collection, Sequence

from pydantic import ValidationError

from swarm.errors import LocalProtocolError, Reject, RemoteProtocolError
from swarm.identity import PeerId, public_key_of
from swarm.weights.format.layout import BadLayout, check_entries, entry_of, size_of
from swarm.weights.format.manifest import MANIFEST_DOMAIN, Artifact, ChunkRef, Manifest, TensorSpec
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

# On the wire a type is its position in here: append only.
DTYPES = (
    *("file", "header", "BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"),
    *("F8_E4M3FNUZ", "F8_E5M2FNUZ", "U16", "I16", "F16", "BF16", "U32", "I32", "F32"),
    *("U64", "I64", "F64", "C64", "F4", "F6_E2M3", "F6_E3M2"),
)

OVERHEAD_PER_CHUNK_BYTES_MAX = 4_096  # how far an artifact may exceed twice its state's size


# --- heads -------------------------------------------------------------------------------------


def is_newer_head(
    head: HeadBody,
    newest: HeadBody | None,
    *,
    run_id: str,
    publishers: Collection[PeerId],
    now_s: float,
    skew_s: float,
) -> bool:
    """True if a head that `codec.decode_head` opened is of a newer version than `newest`. Pure.

    Args:
        newest: the head of this policy that was accepted last; None: none yet.
        publishers: who may publish, by the run's rules.
        now_s, skew_s: our clock (unix seconds), and how far another may be ahead of it.

    Raises:
        RemoteProtocolError: WRONG_RUN, NOT_A_PUBLISHER, FUTURE, or REPUBLISHED for other weights
            under the version of `newest`; with the publisher as signer, but for WRONG_RUN: what
            was signed for elsewhere is the offence of whoever brings it here.
    """
    if head.run_id != run_id:
        raise RemoteProtocolError(Reject.WRONG_RUN, "a head of another run")
    publisher = PeerId(head.publisher)
    if publisher not in publishers:
        raise RemoteProtocolError(
            Reject.NOT_A_PUBLISHER, f"{publisher} is no publisher of this run", publisher
        )
    if head.created_at_s > now_s + skew_s:
        ahead_s = head.created_at_s - now_s
        raise RemoteProtocolError(Reject.FUTURE, f"created {ahead_s:.0f} s ahead", publisher)
    if newest is None or head.version > newest.version:
        return True
    if head.version == newest.version and head.root != newest.root:
        raise RemoteProtocolError(
            Reject.REPUBLISHED, f"other weights as version {head.version}", publisher
        )
    return False


# --- manifests ---------------------------------------------------------------------------------


def root_of(body: bytes) -> bytes:
    """The hash by which a manifest is named and asked for, 32 bytes."""
    return hashlib.sha256(MANIFEST_DOMAIN + body).digest()


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest's bytes, as they are hashed, served and parsed.

    Raises:
        LocalProtocolError: it is none that a peer would accept; says what is wrong.
    """
    fault = manifest_fault(manifest)
    if fault is not None:
        raise LocalProtocolError(f"version {manifest.version}: {fault}")
    files = sorted({tensor.file for tensor in manifest.tensors})
    position = {file: at for at, file in enumerate(files)}
    tensors = manifest.tensors
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
    """The manifest in bytes that have the root that was asked for; see `open_manifest`.

    Takes about a second for a hundred thousand tensors, so call it off the event loop.

    Raises:
        RemoteProtocolError: OVERSIZE or MALFORMED.
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
    """The manifest that a head stands for, in bytes that any peer sent. Hashes, then parses.

    Raises:
        RemoteProtocolError: WRONG_HASH, the sender's offence: no signer. Or OVERSIZE or MALFORMED,
            also where it does not agree with the head, the publisher's: with the signer.
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
        check_entries([entry_of(spec) for spec in manifest.tensors])
    except BadLayout as error:
        return str(error)
    if any(len(spec.sha256) != 32 for spec in manifest.tensors):
        return "a hash that is no SHA-256"
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
    """`sizes` by hash, of all artifacts seen before; these chunks are added."""
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


# --- columns -----------------------------------------------------------------------------------


def _column(form: str, numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}{form}", *numbers)


def _numbers(form: str, column: bytes) -> tuple[int, ...]:
    """The numbers in a column whose length in bytes is known to be right."""
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
        tensors.append(
            TensorSpec(
                name=name,
                dtype=dtype,
                shape=shape,
                file=files[positions[index]],
                offset_bytes=offsets[index],
                size_bytes=size_of(dtype, shape),
                sha256=body.hashes[32 * index : 32 * index + 32],
            )
        )
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
