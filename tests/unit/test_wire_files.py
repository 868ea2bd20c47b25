"""The bytes of every message are fixed: each file in `tests/wire` decodes to its sample."""

import hashlib
from pathlib import Path

import pytest

from swarm.rollouts import RolloutGroup
from swarm.weights import manifest
from swarm.wire import codec, messages
from swarm.wire import messages as steering
from swarm.wire.messages import (
    ADVERT_DOMAIN,
    ADVERTS_REPLY_BYTES_MAX,
    GROUP_DOMAIN,
    GROUPS_REPLY_BYTES_MAX,
    Signed,
    WireModel,
)
from tests.wire_samples import (
    ALICE,
    sample_advert,
    sample_group,
    sample_head,
    sample_hello,
    sample_made_group,
    sample_manifest,
    sample_messages,
    sample_trained_hello,
)
from tests.wire_turns import sample_turns_group

WIRE = Path(__file__).parent.parent / "wire"
BYTES_MAX = max(GROUPS_REPLY_BYTES_MAX, ADVERTS_REPLY_BYTES_MAX)


def golden() -> dict[str, bytes]:
    """What each file holds, by its name."""
    records = {
        "signed_group": codec.sign_group(sample_group(), ALICE)[1],
        "signed_made_group": codec.sign_group(sample_made_group(), ALICE)[1],
        "signed_turns_group": codec.sign_group(sample_turns_group(), ALICE)[1],
        "signed_advert": codec.sign_advert(sample_advert(), ALICE)[1],
        "signed_hello": codec.sign_hello(sample_hello(), ALICE),
        "signed_trained_hello": codec.sign_hello(sample_trained_hello(), ALICE),
        "signed_weights": codec.sign_head(sample_head(), ALICE),
    }
    return records | {name: codec.encode(value) for name, value in sample_messages().items()}


def read(name: str) -> bytes:
    return (WIRE / f"{name}.bin").read_bytes()


@pytest.mark.parametrize(
    ("name", "sample"),
    [
        ("signed_group", sample_group()),
        ("signed_made_group", sample_made_group()),
        ("signed_turns_group", sample_turns_group()),
    ],
)
def test_group_file(name: str, sample: RolloutGroup) -> None:
    group_id, group = codec.decode_group(read(name))
    assert group == sample
    payload = codec.decode(read(name), Signed, BYTES_MAX).payload
    assert group_id == hashlib.sha256(GROUP_DOMAIN + payload).digest()


def test_advert_file() -> None:
    advert_id, advert = codec.decode_advert(read("signed_advert"))
    assert advert == sample_advert()
    payload = codec.decode(read("signed_advert"), Signed, BYTES_MAX).payload
    assert advert_id == hashlib.sha256(ADVERT_DOMAIN + payload).digest()


def test_hello_file() -> None:
    assert codec.decode_hello(read("signed_hello")) == (ALICE.peer_id, sample_hello())
    told = codec.decode_hello(read("signed_trained_hello"))
    assert told == (ALICE.peer_id, sample_trained_hello())


def test_head_file() -> None:
    assert codec.decode_head(read("signed_weights")) == sample_head()
    assert manifest.open_manifest(read("manifest"), sample_head()) == sample_manifest()


@pytest.mark.parametrize("name", sorted(sample_messages()))
def test_message_file(name: str) -> None:
    message = sample_messages()[name]
    assert codec.decode(read(name), type(message), BYTES_MAX) == message


def test_files_are_what_is_encoded_today() -> None:
    assert {path.stem: path.read_bytes() for path in WIRE.glob("*.bin")} == golden()


def test_every_message_has_a_file() -> None:
    known = (
        each
        for module in (messages, steering)
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, WireModel)
    )
    kinds = {
        kind.model_fields["type"].annotation.__args__[0]  # type: ignore[union-attr]
        for kind in known
        if "type" in kind.model_fields
    }
    signed = {"group", "advert", "hello", "weights"}
    assert kinds == signed | set(sample_messages())
    records = {f"signed_{kind}" for kind in signed}
    records |= {"signed_made_group", "signed_turns_group", "signed_trained_hello"}
    assert records | set(sample_messages()) == set(golden())


def write_missing() -> None:
    """Write the files that are missing; never change one."""
    for name, data in golden().items():
        path = WIRE / f"{name}.bin"
        if not path.exists():
            path.write_bytes(data)


if __name__ == "__main__":
    write_missing()
