"""Bytes <-> messages. Foreign bytes are judged only here.

Every failure on foreign bytes is a `RemoteProtocolError`, on our own message a
`LocalProtocolError`. Checks go from cheap to expensive: size, MessagePack limits, signature,
schema. Signatures and hashes are over the payload as received.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import msgpack
from pydantic import ValidationError

from swarm.errors import LocalProtocolError, Reject, RemoteProtocolError
from swarm.identity import Identity, PeerId, public_key_of, verify
from swarm.rollouts import (
    Author,
    Completion,
    FinishReason,
    GroupId,
    RolloutGroup,
    Task,
    Turn,
    counters_fault,
    segments_fault,
    spans_fault,
    splices_fault,
)
from swarm.wire.messages import (
    ADVERT_BYTES_MAX,
    ADVERT_DOMAIN,
    ADVERT_GROUPS_MAX,
    ADVERTS_PER_REPLY_MAX,
    COMPLETIONS_MAX,
    DATA_MANIFEST_BYTES_MAX,
    DETAIL_CHARS_MAX,
    GROUP_BYTES_MAX,
    GROUP_DOMAIN,
    HEAD_BYTES_MAX,
    HEAD_DOMAIN,
    HELLO_BYTES_MAX,
    HELLO_DOMAIN,
    KNOWN_PEERS_MAX,
    LARGE_GROUP_BYTES_MAX,
    NESTING_MAX,
    SUBMISSION_BYTES_MAX,
    TEXT_CHARS_MAX,
    WANT_GROUPS_MAX,
    AdvertBody,
    CompletionBody,
    DataManifest,
    GroupBody,
    HeadBody,
    Hello,
    Signed,
    Submission,
    TaskBody,
    WireModel,
    chunks_of,
    data_id,
)

M = TypeVar("M", bound=WireModel)

VALUES_MAX = 2_048  # values in one message, nested ones included; the fullest group has about 1,000
FIELDS_MAX = 20  # of one map
ARRAY_MAX = max(
    COMPLETIONS_MAX, ADVERT_GROUPS_MAX, ADVERTS_PER_REPLY_MAX, WANT_GROUPS_MAX, KNOWN_PEERS_MAX
)
STRING_BYTES_MAX = 4 * TEXT_CHARS_MAX  # UTF-8 needs up to four bytes a character
LOGPROB_MAX = 1e-3  # rounding may lift a log-prob a little over 0
# The last byte of a 32-bit float, little-endian, that is from -2**127 to 2**-11 in any case.
_SURELY_LOGPROBS = bytes([*range(0x3A), *range(0x80, 0xFF)])

_CONTAINERS = frozenset({dict, tuple})  # exactly what `_unpack` makes of maps and arrays
_AUTHORS = (Author.POLICY, Author.ENVIRONMENT)  # by their numbers in a column of turns
_FINISH_REASONS = {reason.value: reason for reason in FinishReason}
_TOO_LONG = frozenset({"too_long", "string_too_long", "bytes_too_long"})


def encode(message: WireModel) -> bytes:
    """The message as MessagePack: a map by field name, without fields at their defaults."""
    tree = message.model_dump(exclude_defaults=True)
    packed: bytes = msgpack.packb(tree, use_bin_type=True)
    return packed


def decode(data: bytes, kind: type[M], bytes_max: int) -> M:
    """The one message of this kind in `data`. OVERSIZE over a limit, MALFORMED for all else."""
    if len(data) > bytes_max:
        raise RemoteProtocolError(Reject.OVERSIZE, f"{len(data)} bytes, at most {bytes_max}")
    tree = _unpack(data)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        reason, detail = _schema_fault(kind, error)
    # Not where it was caught: pydantic's error would hang on ours as its context. The garbage
    # collector cannot see through it, so each one that comes into a cycle would stay for ever.
    raise RemoteProtocolError(reason, detail)


def sign_group(
    group: RolloutGroup, identity: Identity, bytes_max: int = GROUP_BYTES_MAX
) -> tuple[GroupId, bytes]:
    """Id and signed record of our own group. Log-probs are rounded to 32 bits."""
    try:
        body = _group_body(group)
    except (ValidationError, struct.error, OverflowError) as error:
        raise LocalProtocolError(f"group does not fit the wire: {error}") from error
    payload, record = _sign(body, GROUP_DOMAIN, identity, bytes_max, "producer")
    return _group_id(payload), record


def decode_group(
    record: bytes, *, columns: bool = True, bytes_max: int = GROUP_BYTES_MAX
) -> tuple[GroupId, RolloutGroup]:
    """Id and content of a signed record, made by the producer that it names. Without `columns`
    tokens and log-probs are checked but left out, which takes a tenth of the time."""
    payload, body = _open_as(record, GROUP_DOMAIN, GroupBody, bytes_max, "producer")
    try:
        return _group_id(payload), _rollout_group(body, columns)
    except RemoteProtocolError as error:
        error.signer = body.producer
        raise


def kept_group(record: bytes, group_id: GroupId) -> RolloutGroup:
    """The group of a record whose signature was checked when it came, if it still has this id."""
    payload = decode(record, Signed, LARGE_GROUP_BYTES_MAX).payload
    if _group_id(payload) != group_id:
        raise RemoteProtocolError(Reject.MALFORMED, "another content than that of its id")
    return _rollout_group(decode(payload, GroupBody, LARGE_GROUP_BYTES_MAX), columns=True)


def content_id(group: RolloutGroup) -> GroupId:
    """The id that a group with its tokens has by its content; errors as in `sign_group`."""
    return _group_id(encode(_group_body(group)))


def submission(lease: bytes, group: RolloutGroup, identity: Identity) -> tuple[GroupId, Submission]:
    """The id of a group of ours, and the group, signed, generated under a lease (16 bytes)."""
    group_id, record = sign_group(group, identity)
    return group_id, Submission(type="submission", lease=lease, record=record)


def decode_submission(payload: bytes) -> tuple[bytes, GroupId, bytes, RolloutGroup]:
    """The lease that a submission names, and the group's id, signed record and content."""
    message = decode(payload, Submission, SUBMISSION_BYTES_MAX)
    group_id, group = decode_group(message.record)
    return message.lease, group_id, message.record, group


def sign_advert(body: AdvertBody, identity: Identity) -> tuple[bytes, bytes]:
    """The 32-byte id and the signed record of our own advert."""
    payload, record = _sign(body, ADVERT_DOMAIN, identity, ADVERT_BYTES_MAX, "producer")
    return _advert_id(payload), record


def decode_advert(record: bytes) -> tuple[bytes, AdvertBody]:
    """The 32-byte id and the content of an advert signed by the producer that it names."""
    payload, body = _open_as(record, ADVERT_DOMAIN, AdvertBody, ADVERT_BYTES_MAX, "producer")
    return _advert_id(payload), body


def sign_hello(body: Hello, identity: Identity) -> bytes:
    return _sign(body, HELLO_DOMAIN, identity, HELLO_BYTES_MAX)[1]


def decode_hello(record: bytes) -> tuple[PeerId, Hello]:
    """The signer and the hello in a signed record."""
    payload, signer = _open(record, HELLO_DOMAIN, HELLO_BYTES_MAX)
    return signer, decode(payload, Hello, HELLO_BYTES_MAX)


def sign_head(body: HeadBody, identity: Identity) -> bytes:
    return _sign(body, HEAD_DOMAIN, identity, HEAD_BYTES_MAX, "publisher")[1]


def decode_head(record: bytes) -> HeadBody:
    """A head signed by the publisher that it names. `swarm.weights.manifest` checks its claims."""
    return _open_as(record, HEAD_DOMAIN, HeadBody, HEAD_BYTES_MAX, "publisher")[1]


def decode_data_manifest(payload: bytes, wanted: bytes) -> DataManifest:
    """The manifest with this hash (32 bytes). WRONG_HASH: another one."""
    manifest = decode(payload, DataManifest, DATA_MANIFEST_BYTES_MAX)
    if len(manifest.chunk_hashes) != 32 * chunks_of(manifest.size_bytes):
        raise RemoteProtocolError(Reject.MALFORMED, "not one hash for each chunk")
    if data_id(manifest) != wanted:
        raise RemoteProtocolError(Reject.WRONG_HASH, "the manifest of other data")
    return manifest


def check_data_chunk(chunk: bytes, wanted: bytes) -> None:
    if hashlib.sha256(chunk).digest() != wanted:
        raise RemoteProtocolError(Reject.WRONG_HASH, f"{len(chunk)} bytes of other data")


def check_times(
    created_at_s: int, expires_at_s: int, now_s: float, life_s_max: float, skew_s: float
) -> None:
    """FUTURE, or EXPIRED if ended or too long-lived. `skew_s`: how far a clock may be ahead."""
    if created_at_s > now_s + skew_s:
        raise RemoteProtocolError(Reject.FUTURE, f"created {created_at_s - now_s:.0f} s ahead")
    if expires_at_s <= now_s:
        raise RemoteProtocolError(Reject.EXPIRED, f"ended {now_s - expires_at_s:.0f} s ago")
    life_s = expires_at_s - created_at_s
    if not 0 < life_s <= life_s_max:
        raise RemoteProtocolError(Reject.EXPIRED, f"life of {life_s} s, at most {life_s_max}")


class _Limits:
    """Counts values while msgpack builds them, so that a bomb of tiny ones stays small."""

    def __init__(self) -> None:
        self.values = 0

    def _count(self, values: int) -> None:
        self.values += values
        if self.values > VALUES_MAX:
            raise RemoteProtocolError(Reject.OVERSIZE, f"more than {VALUES_MAX} values")

    def array(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        self._count(1 + len(items))
        return items

    def map(self, pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
        self._count(1 + len(pairs))
        fields = dict(pairs)
        if len(fields) != len(pairs):
            raise RemoteProtocolError(Reject.MALFORMED, "a map names a field twice")
        return fields


def _no_extension(code: int, data: bytes) -> None:
    raise RemoteProtocolError(Reject.MALFORMED, f"extension type {code}")


def _unpack(data: bytes) -> Any:
    limits = _Limits()
    try:
        tree = msgpack.unpackb(
            data,
            raw=False,
            unicode_errors="strict",
            strict_map_key=True,
            use_list=False,  # strict validation takes a tuple for a tuple, and no list
            list_hook=limits.array,
            object_pairs_hook=limits.map,
            ext_hook=_no_extension,
            max_str_len=STRING_BYTES_MAX,
            max_bin_len=len(data),  # each field's own limit is the schema's
            max_array_len=ARRAY_MAX,
            max_map_len=FIELDS_MAX,
            max_ext_len=0,
        )
    except (
        ValueError,
        msgpack.UnpackException,
        OverflowError,
        RecursionError,
        MemoryError,
    ) as error:
        raise RemoteProtocolError(Reject.MALFORMED, _bounded(f"MessagePack: {error}")) from None
    _check_nesting(tree)
    return tree


def _check_nesting(tree: Any) -> None:
    containers = [tree] if type(tree) in _CONTAINERS else []
    for _ in range(NESTING_MAX):
        if not containers:
            return
        containers = [
            value
            for each in containers
            for value in (each.values() if type(each) is dict else each)
            if type(value) in _CONTAINERS
        ]
    if not containers:
        return
    raise RemoteProtocolError(Reject.MALFORMED, f"nested deeper than {NESTING_MAX}")


def _schema_fault(kind: type[WireModel], error: ValidationError) -> tuple[Reject, str]:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    reason = Reject.OVERSIZE if first["type"] in _TOO_LONG else Reject.MALFORMED
    return reason, _bounded(f"{kind.__name__}: {first['type']} at {where}")


def _bounded(text: str) -> str:
    """Short and without control characters, for a log line."""
    return ascii(text[:DETAIL_CHARS_MAX])[1:-1][:DETAIL_CHARS_MAX]


def _sign(
    body: WireModel, domain: bytes, identity: Identity, bytes_max: int, owner: str = ""
) -> tuple[bytes, bytes]:
    """Payload and signed record of our own message, whose field `owner` must name us."""
    if owner and getattr(body, owner) != identity.peer_id:
        raise LocalProtocolError(f"cannot sign for {getattr(body, owner)} as {identity.peer_id}")
    payload = encode(body)
    if len(payload) > bytes_max:
        raise LocalProtocolError(f"payload of {len(payload)} bytes, at most {bytes_max}")
    signature = identity.sign(domain, payload)
    record = encode(Signed(payload=payload, signer=identity.peer_id, signature=signature))
    if len(record) > bytes_max:
        raise LocalProtocolError(f"record of {len(record)} bytes, at most {bytes_max}")
    return payload, record


def _open(record: bytes, domain: bytes, bytes_max: int) -> tuple[bytes, PeerId]:
    """Payload and signer of a signed record whose signature holds."""
    envelope = decode(record, Signed, bytes_max)
    public_key_of(envelope.signer)  # one key, one name: takes a peer id in its canonical form alone
    signer = PeerId(envelope.signer)
    verify(signer, domain, envelope.payload, envelope.signature)
    return envelope.payload, signer


def _open_as(
    record: bytes, domain: bytes, kind: type[M], bytes_max: int, owner: str
) -> tuple[bytes, M]:
    """Payload and message of a signed record; the message's field `owner` must name the signer."""
    payload, signer = _open(record, domain, bytes_max)
    try:
        body = decode(payload, kind, bytes_max)
        _check_producer(signer, getattr(body, owner))
    except RemoteProtocolError as error:
        error.signer = signer
        raise
    return payload, body


def _check_producer(signer: PeerId, producer: str) -> None:
    if signer != producer:
        detail = _bounded(f"{signer} signed for {producer}")
        raise RemoteProtocolError(Reject.WRONG_PRODUCER, detail)


def _group_id(payload: bytes) -> GroupId:
    return GroupId(hashlib.sha256(GROUP_DOMAIN + payload).digest())


def _advert_id(payload: bytes) -> bytes:
    return hashlib.sha256(ADVERT_DOMAIN + payload).digest()


def _body(kind: type[M], value: Any, **columns: object) -> M:
    """The wire form of a dataclass: its fields or their `columns`, without those at defaults."""
    values = {field.name: getattr(value, field.name) for field in fields(value)} | columns
    known = kind.model_fields
    return kind(**{name: each for name, each in values.items() if each != known[name].default})


def _group_body(group: RolloutGroup) -> GroupBody:
    return _body(
        GroupBody,
        group,
        type="group",
        task=_body(TaskBody, group.task),
        completions=tuple(_completion_body(each) for each in group.completions),
        temperature=float(group.temperature),
        top_p=float(group.top_p),
        counters=_packed(group.counters),
    )


def _packed(rows: Sequence[Sequence[int]]) -> bytes:
    """A column of u32, row by row."""
    numbers = [number for row in rows for number in row]
    return struct.pack(f"<{len(numbers)}I", *numbers)


def _rows_of(column: bytes, width: int, what: str) -> list[tuple[int, ...]]:
    """Rows of a column that `_packed` wrote."""
    if len(column) % (4 * width):
        raise RemoteProtocolError(Reject.MALFORMED, f"a column of {what} of an odd length")
    return list(struct.iter_unpack(f"<{width}I", column))


def _completion_body(completion: Completion) -> CompletionBody:
    token_ids, logprobs, turns = completion.token_ids, completion.logprobs, completion.segments
    if len(token_ids) != len(logprobs):
        raise LocalProtocolError(f"{len(token_ids)} token ids but {len(logprobs)} log-probs")
    body = _body(
        CompletionBody,
        completion,
        token_ids=_packed([token_ids]),
        logprobs=struct.pack(f"<{len(logprobs)}f", *logprobs),
        finish_reason=completion.finish_reason.value,
        segments=_packed([(_AUTHORS.index(t.author), t.chars, t.tokens) for t in turns]),
        spans=_packed(completion.spans),
        propensity=completion.propensity or 1.0,
        splices=_packed([completion.splices]),
    )
    if not _are_logprobs(body.logprobs):
        raise LocalProtocolError("log-probs that are not finite or over 0")
    fault = _completion_fault(completion, len(token_ids))
    if fault is not None:
        raise LocalProtocolError(fault)
    return body


def _completion_fault(completion: Completion, tokens: int) -> str | None:
    """Fault of the turns, spans or splices of a completion; None: none."""
    return (
        segments_fault(completion, tokens)
        or spans_fault(completion, tokens)
        or splices_fault(completion.splices, tokens)
    )


def _rollout_group(body: GroupBody, columns: bool) -> RolloutGroup:
    counters = tuple((b, t, s) for b, t, s in _rows_of(body.counters, 3, "counters"))
    fault = counters_fault(counters)
    if fault is not None:
        raise RemoteProtocolError(Reject.MALFORMED, fault)
    values = dict(body) | {
        "producer": PeerId(body.producer),
        "task": Task(**dict(body.task)),
        "completions": tuple(_completion(completion, columns) for completion in body.completions),
        "counters": counters,
    }
    del values["type"]
    return RolloutGroup(**values)


def _completion(body: CompletionBody, columns: bool) -> Completion:
    if len(body.token_ids) != len(body.logprobs) or len(body.token_ids) % 4:
        raise RemoteProtocolError(Reject.MALFORMED, "token columns of different or odd lengths")
    length = len(body.token_ids) // 4
    if not _are_logprobs(body.logprobs):
        raise RemoteProtocolError(Reject.MALFORMED, "log-probs that are not finite or over 0")
    turns = _rows_of(body.segments, 3, "turns")
    if any(author >= len(_AUTHORS) for author, _, _ in turns):
        raise RemoteProtocolError(Reject.MALFORMED, "a turn of an unknown author")
    completion = Completion(
        text=body.text,
        token_ids=struct.unpack(f"<{length}I", body.token_ids) if columns else (),
        logprobs=struct.unpack(f"<{length}f", body.logprobs) if columns else (),
        finish_reason=_FINISH_REASONS[body.finish_reason],
        policy_version=body.policy_version,
        propensity=body.propensity,
        segments=tuple(Turn(_AUTHORS[a], chars, count) for a, chars, count in turns),
        spans=tuple((version, count) for version, count in _rows_of(body.spans, 2, "spans")),
        splices=tuple(at for (at,) in _rows_of(body.splices, 1, "splices")),
    )
    fault = _completion_fault(completion, length)
    if fault is not None:
        raise RemoteProtocolError(Reject.MALFORMED, fault)
    return completion


def _are_logprobs(column: bytes) -> bool:
    if not column[3::4].translate(None, _SURELY_LOGPROBS):
        return True  # a tenth of the time
    values = struct.unpack(f"<{len(column) // 4}f", column)
    # each is a 32-bit float: their sum as doubles cannot overflow, so it is finite if all are
    return math.isfinite(sum(values)) and max(values, default=0.0) <= LOGPROB_MAX
