"""Fuzz target: foreign bytes into the codec, held against `tests/wire_reference.py`.

The first byte of an input says what to do with the rest:

    0        a message: every wire type and every record decoder judges it
    1, 2, 3  the payload of a group, an advert, a hello: signed as it should be, then judged
    4        a place, a change, and maybe a payload: a record with a changed byte must be refused
    5        a peer id as text
    6        the payload of a head, as 1, 2 and 3
    7        the bytes of a manifest
"""

import re
import struct
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import msgpack

from swarm.errors import Reject, RemoteProtocolError
from swarm.identity import peer_id_of, public_key_of
from swarm.weights import manifest as manifest_wire
from swarm.wire import codec
from swarm.wire.messages import (
    ADVERT_DOMAIN,
    DATA_CHUNK_BYTES_MAX,
    GROUP_BYTES_MAX,
    GROUP_DOMAIN,
    HEAD_DOMAIN,
    HELLO_DOMAIN,
    AdvertBody,
    DataManifest,
    GroupBody,
    HeadBody,
    Hello,
    ManifestBody,
    Signed,
    WireModel,
    data_id,
)
from tests.unit.test_codec import BOMBS
from tests.unit.test_wire_files import golden
from tests.weights_reference import conform_manifest
from tests.wire_reference import Refused, conform, conform_columns, kinds, read, rules
from tests.wire_samples import ALICE, sample_advert, sample_group, sample_head, sample_hello
from tests.wire_turns import sample_turns_group

BYTES_MAX = 4 * GROUP_BYTES_MAX
INPUT_BYTES_MAX = 8_192
DETAIL_CHARS_MAX = 400
MODES = 8
MESSAGE, GROUP, ADVERT, HELLO, CHANGED, PEER_ID, HEAD, MANIFEST = range(MODES)
REASONS = {
    Reject.MALFORMED,
    Reject.OVERSIZE,
    Reject.BAD_SIGNATURE,
    Reject.WRONG_PRODUCER,
    Reject.WRONG_HASH,
}
KINDS = kinds()


def _mark(kind: type[WireModel]) -> bytes:
    """What every message of a kind holds: its word, or else the name of its first field."""
    known = rules(kind)
    words = known["type"].words if "type" in known else None
    return (words or tuple(known))[0].encode()


MARKS = {kind: _mark(kind) for kind in KINDS}

Decoder = Callable[[bytes], Any]
SEALED: dict[int, tuple[bytes, type[WireModel], Decoder]] = {
    GROUP: (GROUP_DOMAIN, GroupBody, lambda record: codec.decode_group(record)),
    ADVERT: (ADVERT_DOMAIN, AdvertBody, lambda record: codec.decode_advert(record)),
    HELLO: (HELLO_DOMAIN, Hello, lambda record: codec.decode_hello(record)),
    HEAD: (HEAD_DOMAIN, HeadBody, lambda record: codec.decode_head(record)),
}
RECORDS = {
    GROUP: codec.sign_group(sample_group(), ALICE)[1],
    ADVERT: codec.sign_advert(sample_advert(), ALICE)[1],
    HELLO: codec.sign_hello(sample_hello(), ALICE),
    HEAD: codec.sign_head(sample_head(), ALICE),
}
TREES = {MESSAGE, MANIFEST, *SEALED}  # modes whose input is MessagePack


def check(data: bytes) -> None:
    """Judge one input.

    Raises:
        AssertionError: the codec and the reference differ, or a promise is broken.
    """
    mode, rest = (data[0] % MODES, data[1:]) if data else (MESSAGE, b"")
    if mode == MESSAGE:
        _check_message(rest)
    elif mode in SEALED:
        _check_sealed(mode, rest)
    elif mode == CHANGED:
        _check_changed(rest)
    elif mode == MANIFEST:
        _check_manifest(rest)
    else:
        _check_peer_id(rest)


def _judge(decode: Callable[[], Any]) -> Any:
    """What was decoded, or `None` where it was refused as it should be."""
    try:
        return decode()
    except RemoteProtocolError as error:
        refusal = error
    assert refusal.reason in REASONS, refusal
    assert len(refusal.detail) < DETAIL_CHARS_MAX
    assert refusal.detail.isprintable()
    return None


def _reference(data: bytes) -> Any:
    try:
        return read(data)
    except Refused:
        return None


def _conforms(tree: Any, kind: type[WireModel]) -> bool:
    try:
        conform(tree, kind)
        if kind is GroupBody:
            conform_columns(tree)
        if kind is ManifestBody:
            conform_manifest(tree)
    except Refused:
        return False
    return True


def _check_message(data: bytes) -> None:
    tree = _reference(data)
    for kind in _close_kinds(data):
        message = _judge(lambda kind=kind: codec.decode(data, kind, BYTES_MAX))
        expected = _follows(tree, kind)
        assert (message is not None) == expected, f"{kind.__name__}: reference says {expected}"
        if message is not None:
            again = codec.decode(codec.encode(message), kind, BYTES_MAX)
            assert again == message, f"{kind.__name__} changed on the way"
            sent = message.model_dump(exclude_unset=True)  # a field with a default may be absent
            assert _plain(sent) == _plain(tree), f"{kind.__name__}: coerced"
        if isinstance(message, DataManifest):
            _check_data_manifest(message, data)
    decoders = [decoder for _, _, decoder in SEALED.values()]
    for decoder in decoders if _follows(tree, Signed) else decoders[:1]:
        _judge(lambda decoder=decoder: decoder(data))


def _check_data_manifest(message: DataManifest, data: bytes) -> None:
    """It is taken for its own hash if it has one hash for each chunk, and for no other."""
    chunks = -(-message.size_bytes // DATA_CHUNK_BYTES_MAX)
    taken = _judge(lambda: codec.decode_data_manifest(data, data_id(message)))
    assert (taken is not None) == (len(message.chunk_hashes) == 32 * chunks)
    assert _judge(lambda: codec.decode_data_manifest(data, bytes(32))) is None


def _close_kinds(data: bytes) -> list[type[WireModel]]:
    """Those whose mark is in the bytes. No other can accept them; one stands for all of those,
    lest a run spend its time on them."""
    return [kind for kind in KINDS if MARKS[kind] in data] or KINDS[:1]


def _follows(tree: Any, kind: type[WireModel]) -> bool:
    try:
        conform(tree, kind)
    except Refused:
        return False
    return True


def _plain(value: Any) -> Any:
    """A tree that can be compared with its types: 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return type(value).__name__, value


def sealed(payload: bytes, domain: bytes) -> bytes:
    """A record that Alice signed, whatever its payload says."""
    signature = ALICE.sign(domain, payload)
    return msgpack.packb({"payload": payload, "signer": ALICE.peer_id, "signature": signature})


def _check_sealed(mode: int, payload: bytes) -> None:
    domain, kind, decoder = SEALED[mode]
    found = _judge(lambda: decoder(sealed(payload, domain)))
    tree = _reference(payload)
    expected = _conforms(tree, kind) and _maker(tree) == ALICE.peer_id
    assert (found is not None) == expected, f"{kind.__name__}: reference says {expected}"
    if found is not None and mode == GROUP:
        group = found[1]
        again = codec.decode_group(codec.sign_group(group, ALICE)[1])[1]
        assert again == group, "a group changed on the way"


def _maker(tree: dict[str, Any]) -> Any:
    """Whom a payload names as its signer; a hello names nobody."""
    return tree.get("producer", tree.get("publisher", ALICE.peer_id))


def _check_manifest(data: bytes) -> None:
    manifest = _judge(lambda: manifest_wire.decode_manifest(data))
    tree = _reference(data)
    expected = _conforms(tree, ManifestBody) and _is_peer_id(tree["publisher"])
    assert (manifest is not None) == expected, f"manifest: reference says {expected}"
    if manifest is not None:
        again = manifest_wire.decode_manifest(manifest_wire.encode_manifest(manifest))
        assert again == manifest, "a manifest changed on the way"


def _is_peer_id(text: str) -> bool:
    return _judge(lambda: public_key_of(text)) is not None


def _check_changed(data: bytes) -> None:
    """No record passes with one byte of it changed, be it a sample or made of the input."""
    if len(data) < 4:
        return
    which, place, change = (
        list(SEALED)[data[0] % len(SEALED)],
        int.from_bytes(data[1:3], "big"),
        data[3],
    )
    domain, _, decoder = SEALED[which]
    record = sealed(data[4:], domain) if data[4:] else RECORDS[which]
    at = place % len(record)
    changed = record[:at] + bytes([record[at] ^ (change or 1)]) + record[at + 1 :]
    assert _judge(lambda: decoder(changed)) is None, f"changed at {at} and accepted"


def _check_peer_id(data: bytes) -> None:
    text = data.decode("utf-8", errors="replace")
    key = _judge(lambda: public_key_of(text))
    assert key is None or (len(key) == 32 and peer_id_of(key) == text), text


# --- seeds and mutation ----------------------------------------------------------------------


def seeds() -> dict[str, bytes]:
    """Inputs to start from, by name: a message of every type, and known bombs."""
    found = {f"message-{name}": bytes([MESSAGE]) + data for name, data in golden().items()}
    for at, (name, mode) in enumerate(
        {"group": GROUP, "advert": ADVERT, "hello": HELLO, "head": HEAD}.items()
    ):
        payload = codec.decode(RECORDS[mode], Signed, BYTES_MAX).payload
        found[f"sealed-{name}"] = bytes([mode]) + payload
        found[f"changed-{name}"] = bytes([CHANGED, at, 0, 40, 1])
    turns = codec.sign_group(sample_turns_group(), ALICE)[1]
    found["sealed-turns"] = bytes([GROUP]) + codec.decode(turns, Signed, BYTES_MAX).payload
    for name, bomb in BOMBS.items():
        found["bomb-" + re.sub(r"[^a-z0-9]+", "-", name.lower())] = bytes([MESSAGE]) + bomb[:1024]
    found |= {f"fault-{name}": data for name, data in _faults().items()}
    found["manifest"] = bytes([MANIFEST]) + golden()["manifest"]
    found["peer-id"] = bytes([PEER_ID]) + ALICE.peer_id.encode()
    found["peer-id-other-spelling"] = bytes([PEER_ID]) + b"1" + ALICE.peer_id.encode()
    return found


def _faults() -> dict[str, bytes]:
    """Messages that are right but for one thing."""
    want = msgpack.unpackb(golden()["want"])
    group, advert, head = (_payload(mode) for mode in (GROUP, ADVERT, HEAD))
    task, (completion, *others) = group["task"], group["completions"]
    columns: dict[str, dict[str, bytes]] = {
        "nan": {"logprobs": struct.pack("<3f", -1, float("nan"), 0)},
        "over-zero": {"logprobs": struct.pack("<3f", -1, 0.002, 0)},
        "uneven": {"logprobs": b""},
        "odd": {"logprobs": bytes(5), "token_ids": bytes(5)},
    }
    trees = {
        "column-" + name: (GROUP, group | {"completions": [completion | column, *others]})
        for name, column in columns.items()
    }
    trees |= {
        "group-integer-for-float": (GROUP, group | {"temperature": 1}),
        "group-true-for-float": (GROUP, group | {"top_p": True}),
        "group-true-for-integer": (GROUP, group | {"round": True}),
        "group-float-for-integer": (GROUP, group | {"round": 7.0}),
        "group-text-for-bytes": (
            GROUP,
            group | {"completions": [completion | {"token_ids": "", "logprobs": ""}]},
        ),
        "group-nested-unknown": (GROUP, group | {"task": task | {"answer": "42"}}),
        "group-without-completions": (GROUP, group | {"completions": []}),
        "group-of-another": (GROUP, group | {"producer": "somebody"}),
        "advert-of-another": (ADVERT, advert | {"producer": "somebody"}),
        "advert-line-end": (ADVERT, advert | {"addresses": ["/ip4/10.0.0.1/tcp/1\n"]}),
        "hello-without-agent": (HELLO, {k: v for k, v in _payload(HELLO).items() if k != "agent"}),
        "head-of-another": (HEAD, head | {"publisher": "somebody"}),
        "want-17": (MESSAGE, want | {"group_ids": [bytes(32)] * 17}),
        "want-number": (MESSAGE, want | {"run_id": b"sample-1"}),
        "want-unknown": (MESSAGE, want | {"extra": None}),
    }
    trees |= {"turns-" + name: (GROUP, tree) for name, tree in _turns_faults().items()}
    trees |= {"manifest-" + name: (MANIFEST, tree) for name, tree in manifest_faults().items()}
    found = {name: bytes([mode]) + msgpack.packb(tree) for name, (mode, tree) in trees.items()}
    twice = b"\x84" + golden()["want"][1:] + msgpack.packb("run_id") + msgpack.packb("sample-1")
    return found | {"want-field-twice": bytes([MESSAGE]) + twice}


def _turns_faults() -> dict[str, dict[str, Any]]:
    """Groups of turns that are right but for one thing."""
    record = codec.sign_group(sample_turns_group(), ALICE)[1]
    right = msgpack.unpackb(codec.decode(record, Signed, BYTES_MAX).payload)
    told, *others = right["completions"]
    columns: dict[str, dict[str, Any]] = {
        "author": {"segments": struct.pack("<3I", 2, 6, 3)},
        "odd": {"segments": bytes(8)},
        "chars": {"segments": struct.pack("<3I", 0, 5, 3)},
        "tokens": {"segments": struct.pack("<3I", 0, 6, 2)},
        "environment-tokens": {"segments": struct.pack("<6I", 0, 3, 2, 1, 3, 1)},
        "policy-without-tokens": {"segments": struct.pack("<6I", 0, 3, 3, 0, 3, 0)},
        "spans-sum": {"spans": struct.pack("<4I", 6, 2, 7, 2)},
        "spans-falling": {"spans": struct.pack("<4I", 6, 2, 5, 1)},
        "splices-twice": {"splices": struct.pack("<2I", 2, 2)},
        "splices-beyond": {"splices": struct.pack("<I", 4)},
        "splices-zero": {"splices": struct.pack("<I", 0)},
        "propensity-over": {"propensity": 1.5},
        "propensity-zero": {"propensity": 0.0},
    }
    found = {
        name: right | {"completions": [told | column, *others]} for name, column in columns.items()
    }
    return found | {
        "counters-descend": right | {"counters": struct.pack("<6I", 4, 1, 1, 0, 1, 1)},
        "counters-over": right | {"counters": struct.pack("<3I", 4, 1, 2)},
    }


def manifest_faults() -> dict[str, dict[str, Any]]:
    """Trees of manifests that are right but for one thing."""
    right = msgpack.unpackb(golden()["manifest"])
    full, delta, empty = right["artifacts"]
    shapes, positions, offsets = (right[name] for name in ("shapes", "file_positions", "offsets"))

    def number(column: bytes, at: int, value: int, width: int = 8) -> bytes:
        start = at * width
        return column[:start] + value.to_bytes(width, "little") + column[start + width :]

    def artifacts(*changed: dict[str, Any]) -> dict[str, Any]:
        return {"artifacts": list(changed)}

    def named(old: bytes, new: bytes) -> dict[str, Any]:
        return {name: right[name].replace(old, new) for name in ("names", "files")}

    changes: dict[str, dict[str, Any]] = {
        "nothing": dict.fromkeys(
            ("names", "dtypes", "ranks", "shapes", "hashes", "files", "file_positions", "offsets"),
            b"",
        ),
        "name-twice": {"names": right["names"].replace(b"head.weight", b"embed.weight")},
        "names-without-end": {"names": right["names"][:-1]},
        "names-no-utf-8": {"names": right["names"].replace(b"\xc3", b"\xff")},
        "name-control": {"names": right["names"].replace(b"embed.", b"embed\n")},
        "name-long": {"names": right["names"].replace(b"embed.", b"e" * 600)},
        "type-unknown": {"dtypes": b"\x18" + right["dtypes"][1:]},
        "type-other": {"dtypes": right["dtypes"][:2] + b"\x02" + right["dtypes"][3:]},
        "rank": {"ranks": right["ranks"][:-1] + b"\x02"},
        "rank-9": {"ranks": b"\x09" + right["ranks"][1:], "shapes": bytes(64) + shapes},
        "shape": {"shapes": number(shapes, 5, 81)},
        "shape-huge": {"shapes": number(shapes, 1, 2**63)},
        "shape-uneven": {"shapes": shapes + b"\x00"},
        "hash-short": {"hashes": right["hashes"][:-1]},
        "position-unknown": {"file_positions": number(positions, 0, 9, 4)},
        "position-other": {"file_positions": number(positions, 1, 2, 4)},
        "file-unused": {"files": right["files"] + b"z.json\x00"},
        "files-out-of-order": {"files": b"z.json\x00" + right["files"]},
        "offset-hole": {"offsets": number(offsets, 1, 81)},
        "offset-overlap": {"offsets": number(offsets, 2, 95)},
        "path-parent": named(b"config.json", b"../nfig.txt"),
        "path-absolute": named(b"config.json", b"/onfig.json"),
        "path-hidden": named(b"config.json", b".onfig.json"),
        "path-code": named(b"config.json", b"config12.py"),
        "path-device": named(b"config.json", b"aux.json"),
        "path-inside-a-file": named(b"model-2", b"model-1.safetensors/a"),
        "path-case": {
            name: right[name].replace(b"l-1", b"l-A").replace(b"l-2", b"l-a")
            for name in ("names", "files")
        },
        "header-elsewhere": {"offsets": number(offsets, 4, 8)},
        "no-artifacts": artifacts(),
        "base-twice": artifacts(full, delta, delta),
        "base-itself": artifacts(full, delta | {"base_version": 12}),
        "base-without-state": artifacts(delta | {"base_state": None}),
        "state-without-base": artifacts(delta | {"base_version": None}),
        "full-and-empty": artifacts(full | {"chunk_hashes": b"", "chunk_sizes": b""}),
        "chunk-twice": artifacts(
            full | {"chunk_hashes": bytes(64), "chunk_sizes": full["chunk_sizes"]}
        ),
        "chunk-empty": artifacts(delta | {"chunk_sizes": bytes(4)}),
        "chunk-huge": artifacts(delta | {"chunk_sizes": b"\x01\x00\x00\x01"}),
        "chunk-two-sizes": artifacts(full, delta | {"chunk_sizes": b"\x01\x00\x00\x00"}),
        "chunk-too-much": artifacts(empty, delta | {"chunk_sizes": b"\x00\xff\x00\x00"}),
        "chunks-uneven": artifacts(delta | {"chunk_sizes": b"\x01\x00\x00"}),
        "publisher-other-spelling": {"publisher": "1" + right["publisher"]},
    }
    return {name: right | change for name, change in changes.items()}


def _payload(mode: int) -> dict[str, Any]:
    fields: dict[str, Any] = msgpack.unpackb(codec.decode(RECORDS[mode], Signed, BYTES_MAX).payload)
    return fields


LENGTHS = (0, 1, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 80, 81, 255, 256, 257, 4096, 4097)
NUMBERS = (
    0,
    1,
    -1,
    10,
    11,
    2**20,
    2**20 + 1,
    *(2**n - d for n in (31, 40, 63, 64) for d in (0, 1)),
)
FLOATS = (0.0, -0.0, 1.0, 10.0, 10.5, 1e-300, float("nan"), float("inf"), -1.0)


def _value(random: Random) -> Any:
    """One value at some border."""
    match random.randrange(7):
        case 0:
            return random.choice(NUMBERS)
        case 1:
            return random.choice(FLOATS)
        case 2:
            return random.choice("a\u00ac\x00\u2028\U0001f600") * random.choice(LENGTHS)
        case 3:
            return random.randbytes(random.choice(LENGTHS))
        case 4:
            return struct.pack("<2f", *random.choices((0.0, -1.0, 0.0009, 0.002, *FLOATS), k=2))
        case 5:
            return [random.choice([b"", "a", 1, None, {}])] * random.choice(LENGTHS[:14])
        case _:
            return random.choice([None, True, False, {}, [], "stop", "want", "advert"])


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in the tree."""
    if isinstance(tree, dict):
        keys: list[Any] = list(tree)
    else:
        keys = list(range(len(tree))) if isinstance(tree, list) else []
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def _change(tree: Any, random: Random) -> None:
    places = list(_places(tree))
    if not places:
        return
    container, key = random.choice(places)
    match random.randrange(5):
        case 0:
            del container[key]
        case 1 if isinstance(container, list):
            container.insert(key, container[key])
        case 1:
            container[random.choice(["x", "type", "round", "run_id"])] = _value(random)
        case 2:
            other, other_key = random.choice(places)
            container[key] = msgpack.unpackb(msgpack.packb(other[other_key]))
        case _:
            container[key] = _value(random)


def mutate(data: bytes, random: Random) -> bytes | None:
    """Another input of the same mode, changed as a tree; `None` where the input is none."""
    if not data or data[0] % MODES not in TREES:
        return None
    try:
        tree = msgpack.unpackb(data[1:], strict_map_key=False)
        for _ in range(random.randint(1, 3)):
            _change(tree, random)
        return data[:1] + msgpack.packb(tree)
    except (ValueError, TypeError, RecursionError, OverflowError, KeyError):
        return None
