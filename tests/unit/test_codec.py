"""Each reason for which the codec refuses bytes, by one planted fault."""

import math
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from swarm.errors import LocalProtocolError, Reject, RemoteProtocolError
from swarm.identity import Identity, PeerId
from swarm.rollouts import Completion, FinishReason, RolloutGroup
from swarm.wire import codec, messages
from swarm.wire.messages import (
    ADVERT_BYTES_MAX,
    ADVERT_DOMAIN,
    COMPLETIONS_MAX,
    GROUP_BYTES_MAX,
    GROUP_DOMAIN,
    HELLO_DOMAIN,
    NESTING_MAX,
    TEXT_CHARS_MAX,
    RecentAdverts,
    Signed,
    Want,
)
from tests.wire_samples import ALICE, BOB, sample_advert, sample_group, sample_hello

Fields = dict[str, Any]


def refused(decode: Callable[[], Any]) -> Reject:
    with pytest.raises(RemoteProtocolError) as caught:
        decode()
    return caught.value.reason


def group_fields() -> Fields:
    """The payload of the sample group, to plant a fault in."""
    record = codec.sign_group(sample_group(), ALICE)[1]
    fields: Fields = msgpack.unpackb(msgpack.unpackb(record)["payload"])
    return fields


def sealed(fields: Fields, identity: Identity = ALICE, domain: bytes = GROUP_DOMAIN) -> bytes:
    """A record that is signed as it should be, whatever its payload says."""
    payload = msgpack.packb(fields)
    return codec.encode(
        Signed(payload=payload, signer=identity.peer_id, signature=identity.sign(domain, payload))
    )


def test_sealed_sample_is_accepted() -> None:
    assert codec.decode_group(sealed(group_fields()))[1] == sample_group()


BOMBS = {
    "array of 2**32 - 1": b"\xdd\xff\xff\xff\xff" + bytes(11),
    "map of 2**32 - 1": b"\xdf\xff\xff\xff\xff" + bytes(11),
    "binary of 4 GiB": b"\xc6\xff\xff\xff\xff" + bytes(11),
    "text of 4 GiB": b"\xdb\xff\xff\xff\xff" + bytes(11),
    "extension of 4 GiB": b"\xc9\xff\xff\xff\xff\x01" + bytes(10),
    "extension, empty": b"\xc7\x00\x05",
    "extension, one byte": b"\xd4\x05\x00",
    "timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "nested arrays": b"\x91" * 100_000 + b"\x00",
    "nested maps": b"\x81\xa1a" * 30_000 + b"\x00",
    "nested and complete": b"\x91" * (NESTING_MAX + 1) + b"\x00",
    "trailing byte": b"\x80\x00",
    "nothing": b"",
    "unused code": b"\xc1",
    "text that is no UTF-8": b"\x81\xa1\xff\x00",
    "surrogate in text": b"\x81\xa3\xed\xa0\x80\x00",
    "number as key": b"\x81\x01\x00",
    "binary as key": b"\x81\xc4\x04type\x00",
    "key twice": b"\x82\xa4type\x00\xa4type\x00",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_bombs_are_malformed(bomb: bytes) -> None:
    assert refused(lambda: codec.decode(bomb, RecentAdverts, 2**20)) is Reject.MALFORMED


@pytest.mark.parametrize(
    "bomb",
    [
        b"\xdc\x00\x40" * 20_000,
        b"\x91" * 900 + (b"\xdc\x00\x40" + b"\x80" * 63) * 9_000,
        BOMBS["binary of 4 GiB"],
    ],
    ids=["claims of claims", "small maps", "binary of 4 GiB"],
)
def test_bombs_cost_little_memory(bomb: bytes) -> None:
    tracemalloc.start()
    try:
        refused(lambda: codec.decode(bomb, RecentAdverts, 2**20))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20


def test_many_small_values_are_oversize() -> None:
    row = b"\xdc\x00\x40" + b"\xc0" * 64
    bomb = b"\xdc\x00\x40" + row * 64
    assert refused(lambda: codec.decode(bomb, RecentAdverts, 2**20)) is Reject.OVERSIZE


def test_nesting_up_to_the_limit_is_left_to_the_schema() -> None:
    data = b"\x91" * NESTING_MAX + b"\x00"
    with pytest.raises(RemoteProtocolError) as caught:
        codec.decode(data, RecentAdverts, 2**20)
    assert "RecentAdverts" in caught.value.detail


def test_size_is_checked_first() -> None:
    message = codec.encode(RecentAdverts(type="recent_adverts", run_id="r"))
    assert codec.decode(message, RecentAdverts, len(message)).run_id == "r"
    limit = len(message) - 1
    assert refused(lambda: codec.decode(message, RecentAdverts, limit)) is Reject.OVERSIZE


def test_fullest_group_passes() -> None:
    completion = Completion("x", (1,) * 200, (-1.0,) * 200, FinishReason.LENGTH, 3)
    full = replace(sample_group(), completions=(completion,) * COMPLETIONS_MAX)
    assert codec.decode_group(codec.sign_group(full, ALICE)[1])[1] == full


def test_unknown_and_missing_fields() -> None:
    known: Fields = {"type": "recent_adverts", "run_id": "r"}
    for fields in (known | {"extra": 1}, {"type": "recent_adverts"}, known | {"type": "want"}):
        data = msgpack.packb(fields)
        assert refused(lambda data=data: codec.decode(data, RecentAdverts, 999)) is Reject.MALFORMED


def test_a_refusal_leaves_no_garbage_that_cannot_be_collected() -> None:
    """Pydantic's error, hung on ours in a cycle with a frame, would never be freed."""
    with pytest.raises(RemoteProtocolError) as caught:
        codec.decode(msgpack.packb({"type": "want"}), Want, 999)
    assert caught.value.__context__ is None


def test_foreign_text_in_an_error_is_short_and_printable() -> None:
    data = msgpack.packb({"type": "want", "run_id": "r", "\x1b[2J\n" + "x" * 9_000: 1})
    with pytest.raises(RemoteProtocolError) as caught:
        codec.decode(data, RecentAdverts, 2**20)
    assert caught.value.detail.isprintable()
    assert len(caught.value.detail) <= messages.DETAIL_CHARS_MAX


@pytest.mark.parametrize("value", [True, 1.0, "1", None, b"1"])
def test_numbers_are_not_coerced(value: object) -> None:
    record = sealed(group_fields() | {"round": value})
    assert refused(lambda: codec.decode_group(record)) is Reject.MALFORMED


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0, 11.0, 1, True])
def test_temperature_out_of_range_or_no_float(value: float) -> None:
    record = sealed(group_fields() | {"temperature": value})
    assert refused(lambda: codec.decode_group(record)) is Reject.MALFORMED


COLUMN_FAULTS: dict[str, Fields] = {
    "fewer log-probs": {"logprobs": struct.pack("<2f", -1, -1)},
    "no log-probs": {"logprobs": b""},
    "no token ids": {"token_ids": b""},
    "odd lengths": {"token_ids": bytes(11), "logprobs": bytes(11)},
    "nan": {"logprobs": struct.pack("<3f", -1, float("nan"), -1)},
    "infinite": {"logprobs": struct.pack("<3f", -1, float("-inf"), -1)},
    "over zero": {"logprobs": struct.pack("<3f", -1, 0.002, -1)},
}


@pytest.mark.parametrize("fault", COLUMN_FAULTS.values(), ids=COLUMN_FAULTS)
def test_token_columns(fault: Fields) -> None:
    fields = group_fields()
    fields["completions"][0] |= fault
    assert refused(lambda: codec.decode_group(sealed(fields))) is Reject.MALFORMED


def test_what_made_a_group_may_be_unsaid() -> None:
    made = replace(sample_group(), engine="vllm", precision="fp8")
    fields = group_fields()
    assert not {"engine", "precision"} & fields.keys()
    assert codec.decode_group(sealed(fields | {"engine": "vllm", "precision": "fp8"}))[1] == made
    assert made.is_quantised
    assert not replace(made, precision="bfloat16").is_quantised
    assert not sample_group().is_quantised


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"engine": ""}, Reject.MALFORMED),  # has nothing to say, and says it
        ({"engine": None}, Reject.MALFORMED),
        ({"engine": "vLLM"}, Reject.MALFORMED),
        ({"precision": "fp8\n"}, Reject.MALFORMED),
        ({"precision": "\x1b[2J"}, Reject.MALFORMED),
        ({"precision": "x" * 33}, Reject.OVERSIZE),
        ({"dtype": "fp8"}, Reject.MALFORMED),  # another field
    ],
)
def test_what_made_a_group_is_bounded(fault: Fields, reason: Reject) -> None:
    assert refused(lambda: codec.decode_group(sealed(group_fields() | fault))) is reason


def test_log_prob_within_rounding_passes() -> None:
    fields = group_fields()
    fields["completions"][0]["logprobs"] = struct.pack("<3f", 0.0009, 0.0, -1)
    assert codec.decode_group(sealed(fields))[1].completions[0].logprobs[1] == 0.0


def test_without_columns_all_else_is_the_same_and_what_is_wrong_in_them_is_found() -> None:
    record = sealed(group_fields())
    group_id, group = codec.decode_group(record)
    bare = tuple(replace(each, token_ids=(), logprobs=()) for each in group.completions)
    without = (group_id, replace(group, completions=bare))
    assert codec.decode_group(record, columns=False) == without != (group_id, group)
    fields = group_fields()
    fields["completions"][0]["logprobs"] = struct.pack("<3f", -1, 0.002, -1)
    bad = sealed(fields)
    assert refused(lambda: codec.decode_group(bad, columns=False)) is Reject.MALFORMED


@pytest.mark.parametrize("low", [0, 1, 0x126F, 0x126E, 0x1270, 0xFFFF])
def test_a_glance_at_log_probs_finds_what_a_look_at_each_does(low: int) -> None:
    found = set()
    for high in range(2**16):
        column = struct.pack("<fI", -1.0, high << 16 | low)
        values = struct.unpack("<2f", column)
        right = all(math.isfinite(each) and each <= codec.LOGPROB_MAX for each in values)
        assert codec._are_logprobs(column) is right, column
        found.add(right)
    assert found == {True, False}


def test_too_long_is_oversize() -> None:
    fields = group_fields()
    fields["completions"][0]["text"] = "x" * (TEXT_CHARS_MAX + 1)
    assert refused(lambda: codec.decode_group(sealed(fields))) is Reject.OVERSIZE
    want = msgpack.packb({"type": "want", "run_id": "r", "group_ids": [bytes(32)] * 17})
    assert refused(lambda: codec.decode(want, Want, 4096)) is Reject.OVERSIZE


def test_record_over_its_limit() -> None:
    record = bytes(GROUP_BYTES_MAX + 1)
    assert refused(lambda: codec.decode_group(record)) is Reject.OVERSIZE
    assert refused(lambda: codec.decode_advert(record[: ADVERT_BYTES_MAX + 1])) is Reject.OVERSIZE


def test_signed_by_another_than_the_producer() -> None:
    stolen = sealed(group_fields(), BOB)
    assert refused(lambda: codec.decode_group(stolen)) is Reject.WRONG_PRODUCER
    advert = msgpack.unpackb(
        msgpack.unpackb(codec.sign_advert(sample_advert(), ALICE)[1])["payload"]
    )
    stolen = sealed(advert, BOB, ADVERT_DOMAIN)
    assert refused(lambda: codec.decode_advert(stolen)) is Reject.WRONG_PRODUCER


def test_signature_of_another() -> None:
    envelope = msgpack.unpackb(sealed(group_fields(), BOB)) | {"signer": ALICE.peer_id}
    assert refused(lambda: codec.decode_group(msgpack.packb(envelope))) is Reject.BAD_SIGNATURE


@pytest.mark.parametrize("domain", [ADVERT_DOMAIN, HELLO_DOMAIN, b""])
def test_signature_for_another_purpose(domain: bytes) -> None:
    record = sealed(group_fields(), ALICE, domain)
    assert refused(lambda: codec.decode_group(record)) is Reject.BAD_SIGNATURE


def test_signature_comes_before_the_schema() -> None:
    envelope = msgpack.unpackb(sealed({"type": "nonsense"})) | {"signature": bytes(64)}
    assert refused(lambda: codec.decode_group(msgpack.packb(envelope))) is Reject.BAD_SIGNATURE


@pytest.mark.parametrize("signer", ["", "nobody", ALICE.peer_id + " ", ALICE.peer_id + "\n"])
def test_peer_id_has_one_form(signer: str) -> None:
    """Otherwise one key could count as many producers."""
    fields = group_fields() | {"producer": signer}
    envelope = msgpack.unpackb(sealed(fields)) | {"signer": signer}
    assert refused(lambda: codec.decode_group(msgpack.packb(envelope))) is Reject.MALFORMED


def test_group_id_covers_the_received_bytes() -> None:
    """The same content in other bytes is another group; a re-encoding would hide that."""
    fields = group_fields()
    turned = dict(reversed(fields.items()))
    (one, first), (two, second) = (codec.decode_group(sealed(each)) for each in (fields, turned))
    assert first == second
    assert one != two


LOCAL_FAULTS: dict[str, Callable[[RolloutGroup, Completion], RolloutGroup]] = {
    "of another": lambda group, _: replace(group, producer=BOB.peer_id),
    "no name": lambda group, _: replace(group, producer=PeerId("")),
    "no completions": lambda group, _: replace(group, completions=()),
    "uneven columns": lambda group, one: replace(
        group, completions=(replace(one, logprobs=(-1.0,)),)
    ),
    "token id": lambda group, one: replace(
        group, completions=(replace(one, token_ids=(2**32, 0, 0)),)
    ),
    "log-prob": lambda group, one: replace(
        group, completions=(replace(one, logprobs=(0.0, 0.0, float("nan"))),)
    ),
    "log-prob over 32 bits": lambda group, one: replace(
        group, completions=(replace(one, logprobs=(0.0, 0.0, -1e300)),)
    ),
    "text with a surrogate": lambda group, one: replace(
        group, completions=(replace(one, text="\ud800"),)
    ),
    "over the limit": lambda group, one: replace(
        group, completions=(replace(one, text="x" * TEXT_CHARS_MAX),) * 17
    ),
}


@pytest.mark.parametrize("fault", LOCAL_FAULTS.values(), ids=LOCAL_FAULTS)
def test_our_own_faults_are_local(fault: Callable[..., RolloutGroup]) -> None:
    group = sample_group()
    with pytest.raises(LocalProtocolError):
        codec.sign_group(fault(group, group.completions[0]), ALICE)


def test_advert_of_another_is_not_signed() -> None:
    with pytest.raises(LocalProtocolError):
        codec.sign_advert(sample_advert(), BOB)


def test_hello_names_its_signer() -> None:
    record = codec.sign_hello(sample_hello(), BOB)
    assert codec.decode_hello(record) == (BOB.peer_id, sample_hello())


@pytest.mark.parametrize(
    ("created_at_s", "expires_at_s", "reason"),
    [
        (100, 200, None),
        (105, 200, None),
        (106, 200, Reject.FUTURE),
        (0, 100, Reject.EXPIRED),
        (0, 101, Reject.EXPIRED),
        (1, 101, None),
        (105, 105, Reject.EXPIRED),
        (105, 101, Reject.EXPIRED),
        (100, 201, Reject.EXPIRED),
    ],
)
def test_times(created_at_s: int, expires_at_s: int, reason: Reject | None) -> None:
    def check() -> None:
        codec.check_times(created_at_s, expires_at_s, now_s=100, life_s_max=100, skew_s=5)

    if reason is None:
        check()
    else:
        assert refused(check) is reason
