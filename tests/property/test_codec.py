"""Whatever the bytes, the codec gives back what was put in or a `RemoteProtocolError`."""

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import Reject, RemoteProtocolError
from swarm.identity import Identity
from swarm.wire import codec
from swarm.wire.messages import (
    GROUP_BYTES_MAX,
    AdvertBody,
    AdvertsReply,
    GroupBody,
    GroupsReply,
    Have,
    HaveReply,
    Hello,
    HelloReply,
    PieceReply,
    RecentAdverts,
    Signed,
    Want,
    WantPiece,
    WireModel,
)
from tests.wire_samples import (
    ALICE,
    adverts,
    groups,
    hellos,
    identities,
    plain_messages,
    sample_advert,
    sample_group,
    sample_hello,
    sample_messages,
)
from tests.wire_turns import extended, sample_turns_group

KINDS = (
    GroupBody,
    AdvertBody,
    Hello,
    HelloReply,
    RecentAdverts,
    AdvertsReply,
    Want,
    GroupsReply,
    WantPiece,
    PieceReply,
    Have,
    HaveReply,
    Signed,
)
RECORD_DECODERS: tuple[Callable[[bytes], Any], ...] = (
    codec.decode_group,
    codec.decode_advert,
    codec.decode_hello,
)
SIGNED_SAMPLES = (
    codec.sign_group(sample_group(), ALICE)[1],
    codec.sign_group(sample_turns_group(), ALICE)[1],
    codec.sign_advert(sample_advert(), ALICE)[1],
    codec.sign_hello(sample_hello(), ALICE),
)
SAMPLES = (*SIGNED_SAMPLES, *(codec.encode(value) for value in sample_messages().values()))


def try_everything(data: bytes) -> None:
    """Let every decoder judge the bytes; only `RemoteProtocolError` may come out."""
    for kind in KINDS:
        try_one(lambda kind=kind: codec.decode(data, kind, GROUP_BYTES_MAX))
    for decoder in RECORD_DECODERS:
        try_one(lambda decoder=decoder: decoder(data))


def try_one(decode: Callable[[], Any]) -> None:
    refused = refusal(decode)
    if refused is not None:
        assert refused.reason in {
            Reject.MALFORMED,
            Reject.OVERSIZE,
            Reject.BAD_SIGNATURE,
            Reject.WRONG_PRODUCER,
        }
        assert len(refused.detail) < 400
        assert refused.detail.isprintable()


def refusal(decode: Callable[[], Any]) -> RemoteProtocolError | None:
    try:
        decode()
    except RemoteProtocolError as error:
        return error
    return None


@given(plain_messages)
def test_message_round_trip(message: WireModel) -> None:
    assert codec.decode(codec.encode(message), type(message), 2**20) == message


@given(identities.flatmap(lambda who: st.tuples(st.just(who), groups(who.peer_id))))
def test_group_round_trip(case: tuple[Identity, Any]) -> None:
    identity, group = case
    group_id, record = codec.sign_group(group, identity)
    assert codec.decode_group(record) == (group_id, group)


@given(groups(ALICE.peer_id).flatmap(extended))
def test_extended_group_round_trip(group: Any) -> None:
    group_id, record = codec.sign_group(group, ALICE)
    assert codec.decode_group(record) == (group_id, group)
    _, bare = codec.decode_group(record, columns=False)
    assert [each.segments for each in bare.completions] == [
        each.segments for each in group.completions
    ]


@given(adverts(ALICE.peer_id))
def test_advert_round_trip(advert: AdvertBody) -> None:
    advert_id, record = codec.sign_advert(advert, ALICE)
    assert codec.decode_advert(record) == (advert_id, advert)


@given(hellos)
def test_hello_round_trip(hello: Hello) -> None:
    assert codec.decode_hello(codec.sign_hello(hello, ALICE)) == (ALICE.peer_id, hello)


@given(st.binary(max_size=300))
def test_arbitrary_bytes(data: bytes) -> None:
    try_everything(data)


trees = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
    | st.binary(max_size=20)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=8)),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(st.characters(exclude_categories=("Cs",)), max_size=8), inner)
    ),
    max_leaves=20,
)


@given(trees)
def test_arbitrary_msgpack(tree: Any) -> None:
    try_everything(msgpack.packb(tree))


@given(st.sampled_from(SAMPLES), st.data())
def test_one_field_replaced_by_anything(sample: bytes, data: st.DataObject) -> None:
    fields = msgpack.unpackb(sample)
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(trees)
    try_everything(msgpack.packb(fields))


@given(st.sampled_from(SAMPLES), st.data())
def test_bytes_changed_cut_or_added(sample: bytes, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(sample) - 1))
    match data.draw(st.sampled_from(["change", "cut", "add"])):
        case "change":
            changed = bytes([data.draw(st.integers(0, 255))])
            try_everything(sample[:position] + changed + sample[position + 1 :])
        case "cut":
            try_everything(sample[:position])
        case _:
            added = data.draw(st.binary(min_size=1, max_size=9))
            try_everything(sample[:position] + added + sample[position:])


@pytest.mark.parametrize(
    ("sample", "decoder"),
    list(zip(SIGNED_SAMPLES, (RECORD_DECODERS[0], *RECORD_DECODERS), strict=True)),
    ids=["group", "turns", "advert", "hello"],
)
def test_no_changed_byte_of_a_signed_record_passes(
    sample: bytes, decoder: Callable[[bytes], Any]
) -> None:
    decoder(sample)
    for position in range(len(sample)):
        changed = bytes([sample[position] ^ 0x01])
        with pytest.raises(RemoteProtocolError):
            decoder(sample[:position] + changed + sample[position + 1 :])
