"""Every wire message, its protocol ID and its limits. Append-only: a field's meaning never
changes under one protocol ID. Token ids and log-probs are little-endian byte columns, so that
their number is known before anything is allocated."""

import hashlib
import math
import struct
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

HELLO_PROTOCOL = "/swarm/hello/1.0.0"
ADVERTS_PROTOCOL = "/swarm/adverts/1.0.0"
ROLLOUTS_PROTOCOL = "/swarm/rollouts/1.0.0"
PIECES_PROTOCOL = "/swarm/pieces/1.0.0"
PROVIDERS_PROTOCOL = "/swarm/providers/1.0.0"
REACH_PROTOCOL = "/swarm/reach/1.0.0"
HOLDERS_PROTOCOL = "/swarm/holders/1.0.0"
HEADS_PROTOCOL = "/swarm/heads/1.0.0"
MANIFEST_PROTOCOL = "/swarm/manifest/1.0.0"
CHUNKS_PROTOCOL = "/swarm/chunks/2.0.0"
LEASES_PROTOCOL = "/swarm/leases/1.1.0"
SUBMISSIONS_PROTOCOL = "/swarm/submissions/1.0.0"
REPORTS_PROTOCOL = "/swarm/learner-report/1.0.0"
PLANS_PROTOCOL = "/swarm/plan/1.0.0"
RUN_PROTOCOL = "/swarm/run/1.0.0"
DATA_MANIFEST_PROTOCOL = "/swarm/data-manifest/1.0.0"
DATA_PROTOCOL = "/swarm/data/1.0.0"


def adverts_topic(run_id: str) -> str:
    """Gossip topic of a run's adverts."""
    return f"/swarm/adverts/1.0.0/{run_id}"


def weights_topic(run_id: str) -> str:
    """Gossip topic of a run's heads."""
    return f"/swarm/weights/1.0.0/{run_id}"


GROUP_DOMAIN = b"swarm/rollout-group/1\x00"
ADVERT_DOMAIN = b"swarm/advert/1\x00"
HELLO_DOMAIN = b"swarm/hello/1\x00"
HEAD_DOMAIN = b"swarm/weights-head/1\x00"
DATA_DOMAIN = b"swarm/data-manifest/1\x00"

RUN_ID_CHARS_MAX = 80
PEER_ID_CHARS_MAX = 64
ADDRESS_CHARS_MAX = 256
ADDRESSES_MAX = 8
NAME_CHARS_MAX = 64
MADE_BY_CHARS_MAX = 32
PARAMETERS_CHARS_MAX = 4096
COMPLETIONS_MAX = 64
TEXT_CHARS_MAX = 65_536
TOKENS_MAX = 16_384
GROUP_BYTES_MAX = 1_048_576
LARGE_GROUP_BYTES_MAX = 4_194_304
PIECE_BYTES = 524_288
PIECES_MAX = LARGE_GROUP_BYTES_MAX // PIECE_BYTES
SEGMENTS_MAX = 128
SPLICES_MAX = 16
COUNTERS_MAX = 64
PACKAGES_MAX = 16
ADVERT_GROUPS_MAX = 64
ADVERT_BYTES_MAX = 16_384
ADVERTS_PER_REPLY_MAX = 64
WANT_GROUPS_MAX = 16
KNOWN_PEERS_MAX = 32
TRAINED_MAX = 64
HELLO_BYTES_MAX = 8_192
HELLO_REPLY_BYTES_MAX = 131_072
PROVIDERS_BYTES_MAX = 4_096
PROVIDERS_REPLY_BYTES_MAX = 65_536
PROVIDERS_PER_REPLY_MAX = 16
CLOSER_PER_REPLY_MAX = 8
REACH_BYTES_MAX = 512
REACH_PORTS_MAX = 4
WANT_BYTES_MAX = 4_096
ADVERTS_REPLY_BYTES_MAX = ADVERTS_PER_REPLY_MAX * (ADVERT_BYTES_MAX + 256)
GROUPS_REPLY_BYTES_MAX = 4 * GROUP_BYTES_MAX
PIECE_REPLY_BYTES_MAX = PIECE_BYTES + 256
HAVE_REPLY_BYTES_MAX = 256
HEAD_BYTES_MAX = 2_048
HEADS_PER_REPLY_MAX = 16
WANT_HEADS_BYTES_MAX = 512
RULES_BYTES_MAX = 1_048_576
WANT_RUN_BYTES_MAX = 512
RUN_REPLY_BYTES_MAX = RULES_BYTES_MAX + 256
HEADS_REPLY_BYTES_MAX = HEADS_PER_REPLY_MAX * (HEAD_BYTES_MAX + 256)
WANT_MANIFEST_BYTES_MAX = 512
MANIFEST_BYTES_MAX = 16_777_216
TENSORS_MAX = 131_072
TENSOR_NAMES_BYTES_MAX = 8_388_608
SHAPES_BYTES_MAX = 4_194_304
FILE_NAMES_BYTES_MAX = 262_144
ARTIFACTS_MAX = 8
CHUNKS_MAX = 65_536
CHUNK_BYTES_MAX = 16_777_216
CHUNKS_PENDING_MAX = 64
BATCH_CHUNKS_MAX = 32  # in one answer
CHUNK_REQUEST_BYTES_MAX = 20_480
CHUNK_WAIT_MS_MAX = 20_000
WANT_LEASE_BYTES_MAX = 512
LEASE_REPLY_BYTES_MAX = 512
LEASE_GROUPS_MAX = 256
LEASE_MS_MAX = 86_400_000
SPANS_MAX = 1_024
SUBMISSION_BYTES_MAX = GROUP_BYTES_MAX + 256
SUBMISSION_REPLY_BYTES_MAX = 1_024
DETAIL_CHARS_MAX = 200
WANT_REPORT_BYTES_MAX = 256
REPORT_BYTES_MAX = 131_072
REPORT_WORKERS_MAX = 512
REPORT_ROW_BYTES = 88
PLAN_BYTES_MAX = 65_536
PLAN_REPLY_BYTES_MAX = 1_024
DEPTH_MAX = 1_024
DATA_BYTES_MAX = 67_108_864
DATA_ITEMS_MAX = 1_000_000
DATA_CHUNK_BYTES_MAX = 262_144
DATA_CHUNKS_MAX = DATA_BYTES_MAX // DATA_CHUNK_BYTES_MAX
WANT_DATA_BYTES_MAX = 256
DATA_MANIFEST_BYTES_MAX = 32 * DATA_CHUNKS_MAX + 256
AMOUNT_MAX = 1e12
NESTING_MAX = 8
BELOW_ONE = math.nextafter(1.0, 0.0)

SeqNo = Annotated[int, Field(ge=0, lt=2**31)]
UnixSeconds = Annotated[int, Field(ge=0, lt=2**40)]
RunId = Annotated[str, Field(min_length=1, max_length=RUN_ID_CHARS_MAX)]
PeerIdText = Annotated[str, Field(min_length=1, max_length=PEER_ID_CHARS_MAX)]
Name = Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)]
GroupIdBytes = Annotated[bytes, Field(min_length=32, max_length=32)]
# Printable ASCII, so that its length in characters is its length in bytes
AddressText = Annotated[
    str, Field(min_length=1, max_length=ADDRESS_CHARS_MAX, pattern=r"^[\x21-\x7e]+$")
]
MadeBy = Annotated[
    str, Field(min_length=1, max_length=MADE_BY_CHARS_MAX, pattern=r"^[a-z0-9._+-]+$")
]
Addresses = Annotated[tuple[AddressText, ...], Field(max_length=ADDRESSES_MAX)]


def _no_integer(value: object) -> object:
    """Refuse integers, which pydantic takes for floats even in strict mode."""
    if isinstance(value, int):
        raise ValueError("an integer is no float")  # noqa: TRY004  what a validator may raise
    return value


Float = Annotated[float, BeforeValidator(_no_integer)]


class WireModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Signed(WireModel):
    """The envelope: `signature` is by `signer` over domain tag + `payload`, as received."""

    payload: Annotated[bytes, Field(max_length=LARGE_GROUP_BYTES_MAX)]
    signer: PeerIdText
    signature: Annotated[bytes, Field(min_length=64, max_length=64)]


class TaskBody(WireModel):
    environment: Name
    version: Name
    parameters: Annotated[str, Field(max_length=PARAMETERS_CHARS_MAX)]
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    index: SeqNo


class CompletionBody(WireModel):
    """`swarm.rollouts.Completion` on the wire.

    Fields after `policy_version` are absent by default. Columns are u32 little-endian: `segments`
    is triples (author: 0 the policy, 1 the environment; characters of `text`; tokens), `spans`
    pairs (policy version, tokens), `splices` numbers of tokens.
    """

    text: Annotated[str, Field(max_length=TEXT_CHARS_MAX)]
    token_ids: Annotated[bytes, Field(max_length=4 * TOKENS_MAX)]  # u32 little-endian
    logprobs: Annotated[bytes, Field(max_length=4 * TOKENS_MAX)]  # f32 little-endian
    finish_reason: Literal["stop", "length", "abort"]
    policy_version: SeqNo
    segments: Annotated[bytes, Field(min_length=12, max_length=12 * SEGMENTS_MAX)] = b""
    spans: Annotated[bytes, Field(min_length=8, max_length=8 * SPANS_MAX)] = b""
    propensity: Annotated[Float, Field(gt=0.0, le=BELOW_ONE)] = 1.0
    splices: Annotated[bytes, Field(min_length=4, max_length=4 * SPLICES_MAX)] = b""


class GroupBody(WireModel):
    """The signed payload of one shared group.

    Fields after `expires_at_s` are absent unless the producer states them. `counters` is triples of
    u32 little-endian: (bucket, tries, successes).
    """

    type: Literal["group"]
    run_id: RunId
    producer: PeerIdText
    round: SeqNo
    task: TaskBody
    completions: Annotated[
        tuple[CompletionBody, ...], Field(min_length=1, max_length=COMPLETIONS_MAX)
    ]
    tokenizer: Name
    temperature: Annotated[Float, Field(gt=0.0, le=10.0)]
    top_p: Annotated[Float, Field(gt=0.0, le=1.0)]
    created_at_s: UnixSeconds
    expires_at_s: UnixSeconds
    engine: MadeBy = ""  # what sampled it, such as `vllm`
    precision: MadeBy = ""  # such as `bfloat16`, or how its weights are quantised
    attempt: Annotated[int, Field(ge=1, lt=2**31)] = (
        0  # how many groups of its producer for this task came before
    )
    context: MadeBy = ""  # the short name of what stood before the task's prompt
    counters: Annotated[bytes, Field(min_length=12, max_length=12 * COUNTERS_MAX)] = b""


class AdvertEntry(WireModel):
    group_id: GroupIdBytes
    size_bytes: Annotated[int, Field(gt=0, le=LARGE_GROUP_BYTES_MAX)]  # of the signed record


class AdvertBody(WireModel):
    """The signed payload that a producer gossips once a round: its groups and addresses."""

    type: Literal["advert"]
    run_id: RunId
    producer: PeerIdText
    round: SeqNo
    addresses: Addresses
    groups: Annotated[tuple[AdvertEntry, ...], Field(min_length=1, max_length=ADVERT_GROUPS_MAX)]
    created_at_s: UnixSeconds
    expires_at_s: UnixSeconds


class KnownPeer(WireModel):
    """A peer that the sender is or was connected to: a hint to dial."""

    peer_id: PeerIdText
    addresses: Addresses


class PackageBody(WireModel):
    name: MadeBy
    version: MadeBy


Packages = Annotated[tuple[PackageBody, ...], Field(max_length=PACKAGES_MAX)]


class Hello(WireModel):
    """Sent on connecting and as a heartbeat, inside `Signed` (`HELLO_DOMAIN`): a proof for
    others. `trained` is absent by default."""

    type: Literal["hello"]
    run_id: RunId
    instance: Annotated[bytes, Field(min_length=16, max_length=16)]  # random at each start
    started_at_s: UnixSeconds
    sent_at_s: UnixSeconds
    agent: Name
    packages: Packages
    addresses: Addresses
    # groups of others that went into updates of the sender lately
    trained: Annotated[tuple[GroupIdBytes, ...], Field(min_length=1, max_length=TRAINED_MAX)] = ()


class HelloReply(WireModel):
    """`run_id` differs where the responder takes part in another run."""

    type: Literal["hello_reply"]
    run_id: RunId
    agent: Name
    packages: Packages
    addresses: Addresses
    known_peers: Annotated[tuple[KnownPeer, ...], Field(max_length=KNOWN_PEERS_MAX)]
    # The newest signed `Hello` of another instance under the requester's peer id, None if unknown
    other_hello: Annotated[bytes, Field(max_length=HELLO_BYTES_MAX)] | None


class RecentAdverts(WireModel):
    type: Literal["recent_adverts"]
    run_id: RunId


class AdvertsReply(WireModel):
    """Signed adverts, newest first."""

    type: Literal["adverts"]
    records: Annotated[
        tuple[Annotated[bytes, Field(max_length=ADVERT_BYTES_MAX)], ...],
        Field(max_length=ADVERTS_PER_REPLY_MAX),
    ]


class Want(WireModel):
    type: Literal["want"]
    run_id: RunId
    group_ids: Annotated[tuple[GroupIdBytes, ...], Field(min_length=1, max_length=WANT_GROUPS_MAX)]


class GroupsReply(WireModel):
    """Signed groups, as many of those wanted as the responder holds and the reply can carry."""

    type: Literal["groups"]
    records: Annotated[
        tuple[Annotated[bytes, Field(max_length=GROUP_BYTES_MAX)], ...],
        Field(max_length=WANT_GROUPS_MAX),
    ]


class WantPiece(WireModel):
    """Asks for bytes `PIECE_BYTES` x `piece` and on of a signed group."""

    type: Literal["want_piece"]
    run_id: RunId
    group_id: GroupIdBytes
    piece: Annotated[int, Field(ge=0, lt=PIECES_MAX)]


class PieceReply(WireModel):
    """One piece and the size of the record; `data` is empty if the responder lacks the group."""

    type: Literal["piece"]
    size_bytes: Annotated[int, Field(ge=0, le=LARGE_GROUP_BYTES_MAX)]
    data: Annotated[bytes, Field(max_length=PIECE_BYTES)]


class Have(WireModel):
    """Asks which of these groups the responder would serve now."""

    type: Literal["have"]
    run_id: RunId
    group_ids: Annotated[tuple[GroupIdBytes, ...], Field(min_length=1, max_length=WANT_GROUPS_MAX)]


class HaveReply(WireModel):
    """Positions, in the request's `group_ids`, of the groups that the responder would serve."""

    type: Literal["have_reply"]
    held: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=WANT_GROUPS_MAX)], ...],
        Field(max_length=WANT_GROUPS_MAX),
    ]


class FindProviders(WireModel):
    """Asks for members of the run with this key; `provide` announces the asker as one."""

    type: Literal["find_providers"]
    key: Annotated[bytes, Field(min_length=32, max_length=32)]
    intent: Literal["find", "provide"]
    addresses: Addresses


class ProvidersReply(WireModel):
    """Members of the run, and peers to ask next. All of it is hearsay."""

    type: Literal["providers"]
    providers: Annotated[tuple[KnownPeer, ...], Field(max_length=PROVIDERS_PER_REPLY_MAX)]
    closer: Annotated[tuple[KnownPeer, ...], Field(max_length=CLOSER_PER_REPLY_MAX)]


Port = Annotated[int, Field(ge=1, le=65_535)]
Ports = Annotated[tuple[Port, ...], Field(max_length=REACH_PORTS_MAX)]


class DialBack(WireModel):
    """Asks a peer to dial these ports at the address that it sees us under."""

    type: Literal["dial_back"]
    ports: Ports


class DialBackReply(WireModel):
    """The ports that led to the asker, and its address as the responder sees it."""

    type: Literal["dial_back_reply"]
    observed_ip: AddressText
    observed_port: Port | None  # of the connection that the request came over
    ports: Ports


HashBytes = Annotated[bytes, Field(min_length=32, max_length=32)]  # SHA-256
# A policy's name becomes part of file names
PolicyName = Annotated[
    str, Field(min_length=1, max_length=NAME_CHARS_MAX, pattern=r"^[a-z0-9][a-z0-9-]*$")
]


class HeadBody(WireModel):
    """The signed payload that a publisher gossips: this version of a policy exists."""

    type: Literal["weights"]
    run_id: RunId
    policy: PolicyName
    version: SeqNo
    publisher: PeerIdText
    root: HashBytes  # of the manifest
    manifest_bytes: Annotated[int, Field(gt=0, le=MANIFEST_BYTES_MAX)]
    created_at_s: UnixSeconds


class WantRun(WireModel):
    type: Literal["want_run"]
    run_id: RunId


class RunReply(WireModel):
    """The rules as canonical JSON, from which the run's id follows."""

    type: Literal["run"]
    rules: Annotated[bytes, Field(min_length=2, max_length=RULES_BYTES_MAX)]


class WantHeads(WireModel):
    type: Literal["want_heads"]
    run_id: RunId


class HeadsReply(WireModel):
    """Signed heads: the newest of each policy, then older versions held here, newest first."""

    type: Literal["heads"]
    records: Annotated[
        tuple[Annotated[bytes, Field(max_length=HEAD_BYTES_MAX)], ...],
        Field(max_length=HEADS_PER_REPLY_MAX),
    ]


class WantManifest(WireModel):
    """Asks for the manifest with this root; the answer is the encoded `ManifestBody`."""

    type: Literal["want_manifest"]
    run_id: RunId
    root: HashBytes


class ArtifactBody(WireModel):
    """`swarm.weights.manifest.Artifact` on the wire."""

    base_version: SeqNo | None
    base_state: HashBytes | None
    chunk_hashes: Annotated[bytes, Field(max_length=32 * CHUNKS_MAX)]
    chunk_sizes: Annotated[bytes, Field(max_length=4 * CHUNKS_MAX)]  # u32 little-endian


class ManifestBody(WireModel):
    """`swarm.weights.manifest.Manifest` on the wire; a head signs for its hash. Tensors are
    columns in the order of their names. Sizes follow from shapes and types."""

    type: Literal["manifest"]
    run_id: RunId
    policy: PolicyName
    version: SeqNo
    publisher: PeerIdText
    created_at_s: UnixSeconds
    names: Annotated[bytes, Field(max_length=TENSOR_NAMES_BYTES_MAX)]  # UTF-8, each ends in NUL
    dtypes: Annotated[bytes, Field(max_length=TENSORS_MAX)]  # positions in `wire.DTYPES`
    ranks: Annotated[bytes, Field(max_length=TENSORS_MAX)]
    shapes: Annotated[bytes, Field(max_length=SHAPES_BYTES_MAX)]  # u64 little-endian, of all
    hashes: Annotated[bytes, Field(max_length=32 * TENSORS_MAX)]
    files: Annotated[bytes, Field(max_length=FILE_NAMES_BYTES_MAX)]  # ASCII, each ends in NUL
    file_positions: Annotated[bytes, Field(max_length=4 * TENSORS_MAX)]  # u32 LE, into `files`
    offsets: Annotated[bytes, Field(max_length=8 * TENSORS_MAX)]  # u64 LE, in the file
    artifacts: Annotated[tuple[ArtifactBody, ...], Field(min_length=1, max_length=ARTIFACTS_MAX)]


ChunkSet = Annotated[bytes, Field(max_length=CHUNKS_MAX // 8)]  # bit i of byte j: chunk 8 j + i


class ChunkRequest(WireModel):
    """Asks for a chunk of an artifact, with the asker's progress.

    Answered with chunks, each behind its size (u32, big-endian); nothing: there is none. The
    kind `relayed` gets several where both links are fast, at most `most`.
    """

    type: Literal["chunk"]
    root: HashBytes  # of the manifest
    artifact: Annotated[int, Field(ge=0, lt=ARTIFACTS_MAX)]  # its place in the manifest
    kind: Literal["fresh", "relayed", "named", "lost", "news"]
    chunk: Annotated[int, Field(ge=0, lt=CHUNKS_MAX)]  # of kind `named` or `lost`, else 0
    accused: PeerIdText | None  # of kind `lost`: who said it relays the chunk, and sent another
    have: ChunkSet  # what the asker has
    relaying: ChunkSet  # what of it it sends to all who ask for `relayed`
    # what it has asked others for by name, so that it need not come from here
    pending: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=CHUNKS_MAX)], ...], Field(max_length=CHUNKS_PENDING_MAX)
    ]
    wait_ms: Annotated[int, Field(ge=0, le=CHUNK_WAIT_MS_MAX)]  # for a chunk that is not there yet
    up_bytes_per_s: Annotated[int, Field(ge=0, lt=2**50)]  # of the asker's link; 0: unknown
    down_bytes_per_s: Annotated[int, Field(ge=0, lt=2**50)]
    most: Annotated[int, Field(ge=1, le=BATCH_CHUNKS_MAX)] = 1  # chunks that the answer may have


LeaseId = Annotated[bytes, Field(min_length=16, max_length=16)]
Milliseconds = Annotated[int, Field(ge=0, le=LEASE_MS_MAX)]
Verdict = Literal["accepted", "refused", "again"]
LeaseStream = Annotated[str, Field(max_length=64, pattern=r"^([0-9a-f]{64})?$")]


class WantLease(WireModel):
    """Asks the learner for tasks; `version` is the policy that serves here."""

    type: Literal["want_lease"]
    run_id: RunId
    version: SeqNo


class LeaseReply(WireModel):
    """A lease on places 0 to `groups` - 1 of a stream; with 0 groups: why, and when to retry."""

    type: Literal["lease"]
    lease: LeaseId
    learner_version: SeqNo
    stream: LeaseStream
    groups: Annotated[int, Field(ge=0, le=LEASE_GROUPS_MAX)]
    width: Annotated[int, Field(ge=0, le=COMPLETIONS_MAX)]  # completions each; 0: the run's
    limit: Annotated[int, Field(ge=0, le=TOKENS_MAX)]  # tokens of a completion; 0: the run's
    life_ms: Milliseconds  # of the lease, from now
    retry_ms: Milliseconds
    reason: Annotated[str, Field(max_length=NAME_CHARS_MAX)]


class Submission(WireModel):
    """A group generated under a lease; its task's index is its place in the lease."""

    type: Literal["submission"]
    lease: LeaseId
    record: Annotated[bytes, Field(max_length=GROUP_BYTES_MAX)]  # a signed group


class SubmissionReply(WireModel):
    """The verdict: accepted, refused for good, or to be sent again."""

    type: Literal["submission_reply"]
    verdict: Verdict
    reason: Annotated[str, Field(max_length=NAME_CHARS_MAX)]
    detail: Annotated[str, Field(max_length=DETAIL_CHARS_MAX)]
    learner_version: SeqNo


class WantDataManifest(WireModel):
    """Asks for the manifest with this hash of a run's items; answered with `DataManifest`."""

    type: Literal["want_data_manifest"]
    data: HashBytes  # of the manifest: see `swarm.wire.messages`


class DataManifest(WireModel):
    """A run's items: their number, and the hashes of their bytes by chunk."""

    type: Literal["data_manifest"]
    items: Annotated[int, Field(gt=0, le=DATA_ITEMS_MAX)]
    size_bytes: Annotated[int, Field(gt=0, le=DATA_BYTES_MAX)]
    chunk_hashes: Annotated[bytes, Field(min_length=32, max_length=32 * DATA_CHUNKS_MAX)]


class WantData(WireModel):
    type: Literal["want_data"]
    data: HashBytes
    chunk: Annotated[int, Field(ge=0, lt=DATA_CHUNKS_MAX)]


def chunks_of(size_bytes: int) -> int:
    """Number of chunks of so many bytes."""
    return -(-size_bytes // DATA_CHUNK_BYTES_MAX)


def chunk_size(manifest: DataManifest, chunk: int) -> int:
    return min(DATA_CHUNK_BYTES_MAX, manifest.size_bytes - chunk * DATA_CHUNK_BYTES_MAX)


def chunk_hash(manifest: DataManifest, chunk: int) -> bytes:
    return manifest.chunk_hashes[32 * chunk : 32 * (chunk + 1)]


def manifest_of(content: bytes, items: int) -> DataManifest:
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
    """SHA-256 over domain, number of items, size (8 bytes big-endian each) and chunk hashes."""
    head = struct.pack(">QQ", manifest.items, manifest.size_bytes)
    return hashlib.sha256(DATA_DOMAIN + head + manifest.chunk_hashes).digest()


Depth = Annotated[int, Field(ge=0, le=DEPTH_MAX)]
Count = Annotated[int, Field(ge=0, lt=2**48)]
Amount = Annotated[Float, Field(ge=0.0, le=AMOUNT_MAX)]  # seconds, or a share
PlanNumber = Annotated[int, Field(ge=0, lt=2**53)]  # a later plan has a higher one
PublicKeys = Annotated[bytes, Field(max_length=32 * REPORT_WORKERS_MAX)]  # raw, 32 bytes each


class WantReport(WireModel):
    type: Literal["want_report"]


class LearnerRulesBody(WireModel):
    staleness_max: Depth  # S
    pacing: Depth  # the staleness that leases aim at
    publish_every: Depth  # κ, steps
    groups_per_step: Count
    credits: Count  # groups that may be granted and buffered together


class LearnerWorkBody(WireModel):
    """Numbers of groups."""

    buffered: Count
    leased: Count
    consumed: Count  # ever, as those below
    discarded: Count
    would_be_stale: Count  # leases that were refused because their groups would come too late


class LearnerPaceBody(WireModel):
    """Means over the last steps. 0 or None: unknown yet."""

    train_s: Amount  # all that a step takes but the wait for groups
    step_s: Amount  # from one step's end to the next
    idle_share: Amount  # of that, waited for groups
    broadcast_s: Amount  # from the announcement of a version until all have it
    staleness_mean: Amount
    staleness_worst: Depth
    effective_share: Amount | None  # effective sample size of importance weights, over their number
    mismatch_k3: Amount | None  # KL from what generated the tokens to the policy before the step


class LearnerSizesBody(WireModel):
    """Bytes. 0: unknown yet."""

    weights_bytes: Count  # a whole version
    delta_bytes: Count  # what a version differs by from the one before it
    up_bytes_per_s: Count
    group_bytes: Count  # a group on its way


class LearnerReport(WireModel):
    type: Literal["report"]
    run_id: RunId
    plan: PlanNumber  # that is in force; 0: none
    version: SeqNo
    published: SeqNo  # the newest version on offer
    rules: LearnerRulesBody
    work: LearnerWorkBody
    pace: LearnerPaceBody
    sizes: LearnerSizesBody
    # a row for each of those heard of last, little-endian: its raw public key, 32 bytes; u32
    # version; f32 groups_per_s (negative: not measured), failed share, turnaround_s, heard_s ago;
    # u32 admitted, refused, groups in open leases; u64 up and down bytes per s; u32 flags (1 stands
    # by, 2 relayed, 4 connected); u32 0
    workers: Annotated[bytes, Field(max_length=REPORT_ROW_BYTES * REPORT_WORKERS_MAX)]


class SetPlan(WireModel):
    """A coordinator's plan, in force until one with a higher number comes."""

    type: Literal["plan"]
    number: PlanNumber
    standby: PublicKeys  # who gets no leases; everybody else does
    pacing: Depth  # the staleness that leases aim at; the run's bound holds in any case
    publish_every: Depth  # κ; 0: as the run says
    credits: Count  # groups that may be granted and buffered together; 0: as the learner has it


class PlanReply(WireModel):
    """The plan in force; `detail`: why another one was not taken."""

    type: Literal["plan_reply"]
    number: PlanNumber
    detail: Annotated[str, Field(max_length=DETAIL_CHARS_MAX)]
