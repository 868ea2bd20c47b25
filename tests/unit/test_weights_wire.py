"""Heads and manifests of weights: what is believed, and why the rest is not."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from swarm.errors import LocalProtocolError, Reject, RemoteProtocolError
from swarm.identity import PeerId
from swarm.weights import artifacts, manifest
from swarm.weights.chunk_server import (
    BATCH_BYTES_MAX,
    CHUNK_LIMITS,
    answer_bytes_max,
    join,
    split,
)
from swarm.weights.hot_swap import HeadRules, HeadTable
from swarm.weights.manifest import DTYPE_BITS, Artifact, ChunkRef, Manifest, TensorSpec
from swarm.wire import codec, messages
from swarm.wire.messages import (
    ARTIFACTS_MAX,
    BATCH_CHUNKS_MAX,
    CHUNK_BYTES_MAX,
    CHUNK_REQUEST_BYTES_MAX,
    HEAD_BYTES_MAX,
    HEAD_DOMAIN,
    MANIFEST_BYTES_MAX,
    ChunkRequest,
    HeadBody,
)
from tests.fuzz.fuzz_codec import manifest_faults
from tests.unit.test_codec import refused, sealed
from tests.wire_samples import ALICE, BOB, sample_head, sample_manifest, sample_messages

NOW_S = 1_800_000_010
SKEW_S = 120.0


def head(**changes: Any) -> HeadBody:
    return sample_head().model_copy(update=changes)


def judge(
    record: HeadBody,
    newest: HeadBody | None = None,
    run_id: str = "sample-1",
    publishers: Collection[PeerId] = (ALICE.peer_id,),
    now_s: float = NOW_S,
) -> bool:
    table = HeadTable(HeadRules(run_id, frozenset(publishers), SKEW_S), lambda: now_s)
    for each in (newest, record) if newest else (record,):
        is_newer = table.hear(codec.sign_head(each, ALICE))[1]
    return is_newer


def refusal(
    record: HeadBody, newest: HeadBody | None = None, **changes: Any
) -> RemoteProtocolError:
    with pytest.raises(RemoteProtocolError) as caught:
        judge(record, newest, **changes)
    return caught.value


# --- heads -------------------------------------------------------------------------------------


def test_a_head_of_a_publisher_is_news_once() -> None:
    assert judge(head())
    assert not judge(head(), head())
    assert judge(head(version=13), head())


@pytest.mark.parametrize("root", [bytes(32), sample_head().root])
def test_an_older_version_changes_nothing_and_is_no_offence(root: bytes) -> None:
    assert not judge(head(version=11, root=root), head())


def test_another_content_under_a_version_is_refused() -> None:
    error = refusal(head(root=bytes(32)), head())
    assert (error.reason, error.signer) == (Reject.REPUBLISHED, ALICE.peer_id)


@pytest.mark.parametrize("publishers", [(), {BOB.peer_id}])
def test_nobody_but_the_named_may_publish(publishers: Any) -> None:
    error = refusal(head(), publishers=publishers)
    assert (error.reason, error.signer) == (Reject.NOT_A_PUBLISHER, ALICE.peer_id)


def test_a_head_of_another_run_is_not_its_signers_offence() -> None:
    error = refusal(head(), run_id="sample-2")
    assert (error.reason, error.signer) == (Reject.WRONG_RUN, None)


def test_a_clock_may_be_ahead_as_far_as_the_skew() -> None:
    assert judge(head(created_at_s=NOW_S + 120))
    error = refusal(head(created_at_s=NOW_S + 121))
    assert (error.reason, error.signer) == (Reject.FUTURE, ALICE.peer_id)


def test_old_age_is_no_fault() -> None:
    assert judge(head(created_at_s=0))


def test_a_head_is_its_publishers_own() -> None:
    with pytest.raises(LocalProtocolError):
        codec.sign_head(head(), BOB)
    stolen = sealed(head().model_dump(), BOB, HEAD_DOMAIN)
    assert refused(lambda: codec.decode_head(stolen)) is Reject.WRONG_PRODUCER


def test_a_changed_head_is_not_signed() -> None:
    record = msgpack.unpackb(codec.sign_head(head(), ALICE))
    record["payload"] = record["payload"].replace(b"actor", b"actos")
    assert refused(lambda: codec.decode_head(msgpack.packb(record))) is Reject.BAD_SIGNATURE


def test_the_longest_head_fits() -> None:
    long = {"version": 2**31 - 1, "manifest_bytes": MANIFEST_BYTES_MAX, "created_at_s": 2**40 - 1}
    full = head(run_id="r" * 80, policy="p" * 64, **long)
    record = codec.sign_head(full, ALICE)
    assert 2 * len(record) <= HEAD_BYTES_MAX
    assert codec.decode_head(record) == full


def test_the_largest_chunk_is_that_of_artifacts() -> None:
    assert manifest.CHUNK_BYTES_MAX == artifacts.CHUNK_BYTES_MAX


# --- manifests ---------------------------------------------------------------------------------


def test_dtypes_are_those_of_versions() -> None:
    assert sorted(manifest.DTYPES) == sorted(DTYPE_BITS)


def test_bytes_are_hashed_before_they_are_read() -> None:
    """What is wrong with other bytes is their sender's offence, even where they do not parse."""
    body = manifest.encode_manifest(sample_manifest())
    for other in (
        b"",
        body[:-1],
        body + b"\x00",
        bytes(len(body)),
        body.replace(b"actor", b"actos"),
    ):
        with pytest.raises(RemoteProtocolError) as caught:
            manifest.open_manifest(other, sample_head())
        assert (caught.value.reason, caught.value.signer) == (Reject.WRONG_HASH, None)


def test_what_is_wrong_inside_is_the_publishers_offence() -> None:
    for body in (b"\x80", msgpack.packb(manifest_faults()["chunk-twice"])):
        promised = head(root=manifest.root_of(body), manifest_bytes=len(body))
        with pytest.raises(RemoteProtocolError) as caught:
            manifest.open_manifest(body, promised)
        assert (caught.value.reason, caught.value.signer) == (Reject.MALFORMED, ALICE.peer_id)


@pytest.mark.parametrize(
    "other",
    [{"run_id": "sample-2"}, {"policy": "critic"}, {"version": 13}, {"publisher": BOB.peer_id}],
)
def test_a_manifest_is_of_what_its_head_says(other: dict[str, Any]) -> None:
    body = manifest.encode_manifest(replace(sample_manifest(), **other))
    promised = head(root=manifest.root_of(body), manifest_bytes=len(body))
    assert refused(lambda: manifest.open_manifest(body, promised)) is Reject.MALFORMED
    agreed = promised.model_copy(update=other)
    assert manifest.open_manifest(body, agreed) == replace(sample_manifest(), **other)


@pytest.mark.parametrize("name", manifest_faults())
def test_each_fault_of_a_manifest_is_refused(name: str) -> None:
    body = msgpack.packb(manifest_faults()[name])
    with pytest.raises(RemoteProtocolError) as caught:
        manifest.decode_manifest(body)
    assert caught.value.reason is Reject.MALFORMED
    assert caught.value.detail.isprintable()
    assert len(caught.value.detail) <= messages.DETAIL_CHARS_MAX


FIRST, *OTHERS = sample_manifest().tensors
LOCAL_FAULTS: dict[str, dict[str, Any]] = {
    "nothing": {"tensors": ()},
    "out of order": {"tensors": sample_manifest().tensors[::-1]},
    "no artifact": {"artifacts": ()},
    "artifacts": {"artifacts": sample_manifest().artifacts[1:2] * 2},
    "policy": {"policy": "../actor"},
    "surrogate": {"tensors": (replace(sample_manifest().tensors[0], name="\ud800"),)},
    "hash": {
        "tensors": (
            replace(sample_manifest().tensors[0], sha256=b""),
            *sample_manifest().tensors[1:],
        )
    },
}


@pytest.mark.parametrize("fault", LOCAL_FAULTS.values(), ids=LOCAL_FAULTS)
def test_our_own_faults_are_local(fault: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        manifest.encode_manifest(replace(sample_manifest(), **fault))


def large(tensors: int, files: int, chunks: int, artifacts: int) -> Manifest:
    """As many of everything as asked for."""
    hashes = iter(range(1 << 40))

    def digest() -> bytes:
        return next(hashes).to_bytes(32, "little")

    specs = []
    for file in range(files):
        path, end = f"model-{file:05d}-of-{files:05d}.safetensors", 4096
        specs.append(TensorSpec(path, "header", (end,), path, 0, end, digest()))
        for at in range(tensors // files - 1):
            name = f"model.layers.{file:04d}.mlp.experts.{at:05d}.gate_proj.weight"
            specs.append(TensorSpec(name, "BF16", (768, 2048), path, end, 2 * 768 * 2048, digest()))
            end += 2 * 768 * 2048
    refs = tuple(
        tuple(ChunkRef(digest(), 1 << 20) for _ in range(chunks)) for _ in range(artifacts)
    )
    return replace(
        sample_manifest(),
        version=1000,
        tensors=tuple(sorted(specs, key=lambda spec: spec.name)),
        artifacts=tuple(
            Artifact(at or None, digest() if at else None, each) for at, each in enumerate(refs)
        ),
    )


def test_large_models_fit() -> None:
    """Of 90,000 tensors, the number of the largest mixtures of experts, and 8 x 16,384 chunks."""
    model = large(tensors=90_112, files=256, chunks=16_384, artifacts=ARTIFACTS_MAX)
    body = manifest.encode_manifest(model)
    assert len(body) <= MANIFEST_BYTES_MAX
    assert manifest.decode_manifest(body) == model


def test_an_answer_is_a_list_of_chunks() -> None:
    chunks = [b"a", bytes(70_000), b"bc"]
    assert split(join(chunks), 3) == chunks
    assert split(b"", 1) == []
    most = [bytes([at]) for at in range(BATCH_CHUNKS_MAX)]
    assert split(join(most), BATCH_CHUNKS_MAX) == most


@pytest.mark.parametrize(
    "answer",
    [
        b"\0\0\0",
        b"\0\0\0\0",  # a chunk of no bytes
        b"\0\0\0\2a",
        b"\xff\xff\xff\xffa",
        join([b"a"]) + b"\0",
        join([b"a", b"b", b"c"]),  # more than were asked for
    ],
)
def test_a_malformed_answer_is_refused(answer: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        split(answer, 2)
    assert caught.value.reason is Reject.MALFORMED


def test_the_largest_answers_fit_what_is_asked_for() -> None:
    small = [bytes(BATCH_BYTES_MAX // BATCH_CHUNKS_MAX)] * BATCH_CHUNKS_MAX
    assert len(join(small[1:])) <= answer_bytes_max(len(small[0]), BATCH_CHUNKS_MAX)
    assert len(join(small[:1])) == answer_bytes_max(len(small[0]), 1)
    largest = answer_bytes_max(CHUNK_BYTES_MAX, BATCH_CHUNKS_MAX)
    assert len(join([bytes(CHUNK_BYTES_MAX)])) == largest == CHUNK_LIMITS.response_bytes_max


def test_who_does_not_say_how_many_chunks_it_takes_gets_one() -> None:
    request = sample_messages()["chunk"]
    assert codec.decode(codec.encode(request), ChunkRequest, CHUNK_REQUEST_BYTES_MAX).most == 1
    for most in (0, BATCH_CHUNKS_MAX + 1):
        payload = msgpack.packb(request.model_dump() | {"most": most})
        with pytest.raises(RemoteProtocolError) as caught:
            codec.decode(payload, ChunkRequest, CHUNK_REQUEST_BYTES_MAX)
        assert caught.value.reason is Reject.MALFORMED
