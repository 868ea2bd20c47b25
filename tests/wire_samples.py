"""Strategies and fixed samples of everything that crosses the network."""

from dataclasses import replace
from typing import get_args

from hypothesis import strategies as st

from swarm.identity import Identity, PeerId
from swarm.leases import coordination
from swarm.rollouts import Completion, FinishReason, RolloutGroup, Task
from swarm.weights import manifest
from swarm.weights.manifest import Artifact, ChunkRef, Manifest, TensorSpec
from swarm.wire import codec
from swarm.wire.messages import (
    ADDRESS_CHARS_MAX,
    ADDRESSES_MAX,
    DATA_BYTES_MAX,
    DATA_CHUNKS_MAX,
    DATA_ITEMS_MAX,
    DEPTH_MAX,
    DETAIL_CHARS_MAX,
    GROUP_BYTES_MAX,
    LARGE_GROUP_BYTES_MAX,
    LEASE_GROUPS_MAX,
    LEASE_MS_MAX,
    MADE_BY_CHARS_MAX,
    MANIFEST_BYTES_MAX,
    NAME_CHARS_MAX,
    RUN_ID_CHARS_MAX,
    AdvertBody,
    AdvertEntry,
    AdvertsReply,
    ChunkRequest,
    DataManifest,
    DialBack,
    DialBackReply,
    FindProviders,
    GroupsReply,
    Have,
    HaveReply,
    HeadBody,
    HeadsReply,
    Hello,
    HelloReply,
    KnownPeer,
    LearnerPaceBody,
    LearnerReport,
    LearnerRulesBody,
    LearnerSizesBody,
    LearnerWorkBody,
    LeaseReply,
    ManifestBody,
    PackageBody,
    PieceReply,
    PlanReply,
    ProvidersReply,
    RecentAdverts,
    RunReply,
    SetPlan,
    Submission,
    SubmissionReply,
    Verdict,
    Want,
    WantData,
    WantDataManifest,
    WantHeads,
    WantLease,
    WantManifest,
    WantPiece,
    WantReport,
    WantRun,
    WireModel,
    manifest_of,
)

ALICE = Identity(bytes(range(32)))
BOB = Identity(bytes(range(1, 33)))
CAROL = Identity(bytes(range(2, 34)))


def text(chars_max: int, chars_min: int = 0) -> st.SearchStrategy[str]:
    """Any Unicode text that UTF-8 can carry."""
    return st.text(
        st.characters(exclude_categories=("Cs",)), min_size=chars_min, max_size=chars_max
    )


seq_nos = st.integers(0, 2**31 - 1)
seconds = st.integers(0, 2**40 - 1)
names = text(NAME_CHARS_MAX, 1)
run_ids = text(RUN_ID_CHARS_MAX, 1)
address_texts = st.text(
    st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=ADDRESS_CHARS_MAX
)
addresses = st.lists(address_texts, max_size=ADDRESSES_MAX).map(tuple)
identities = st.binary(min_size=32, max_size=32).map(Identity)
ids = st.binary(min_size=32, max_size=32)

made_by = st.text("abcxyz0189._+-", max_size=MADE_BY_CHARS_MAX)

tasks = st.builds(
    Task,
    environment=names,
    version=names,
    parameters=text(200),
    seed=st.integers(0, 2**63 - 1),
    index=seq_nos,
)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    tokens = draw(st.lists(st.integers(0, 2**32 - 1), max_size=20))
    logprob = st.floats(-(2.0**100), 2.0**-10, width=32)
    logprobs = draw(st.lists(logprob, min_size=len(tokens), max_size=len(tokens)))
    return Completion(
        text=draw(text(100)),
        token_ids=tuple(tokens),
        logprobs=tuple(logprobs),
        finish_reason=draw(st.sampled_from(FinishReason)),
        policy_version=draw(seq_nos),
    )


def groups(producer: PeerId) -> st.SearchStrategy[RolloutGroup]:
    """Groups that this producer may sign."""
    return st.builds(
        RolloutGroup,
        run_id=run_ids,
        producer=st.just(producer),
        round=seq_nos,
        task=tasks,
        completions=st.lists(completions(), min_size=1, max_size=4).map(tuple),
        tokenizer=names,
        temperature=st.floats(0.0, 10.0, exclude_min=True),
        top_p=st.floats(0.0, 1.0, exclude_min=True),
        created_at_s=seconds,
        expires_at_s=seconds,
        engine=made_by,
        precision=made_by,
    )


entries = st.builds(AdvertEntry, group_id=ids, size_bytes=st.integers(1, GROUP_BYTES_MAX))


def adverts(producer: PeerId) -> st.SearchStrategy[AdvertBody]:
    """Adverts that this producer may sign."""
    return st.builds(
        AdvertBody,
        type=st.just("advert"),
        run_id=run_ids,
        producer=st.just(producer),
        round=seq_nos,
        addresses=addresses,
        groups=st.lists(entries, min_size=1, max_size=5).map(tuple),
        created_at_s=seconds,
        expires_at_s=seconds,
    )


known_peers = st.builds(KnownPeer, peer_id=text(64, 1), addresses=addresses)
packages = st.lists(
    st.builds(
        PackageBody,
        name=made_by.filter(bool),
        version=made_by.filter(bool),
    ),
    max_size=4,
).map(tuple)
hellos = st.builds(
    Hello,
    packages=packages,
    type=st.just("hello"),
    run_id=run_ids,
    instance=st.binary(min_size=16, max_size=16),
    started_at_s=seconds,
    sent_at_s=seconds,
    agent=names,
    addresses=st.lists(address_texts, max_size=ADDRESSES_MAX).map(tuple),
)
hello_replies = st.builds(
    HelloReply,
    packages=packages,
    type=st.just("hello_reply"),
    run_id=run_ids,
    agent=names,
    addresses=addresses,
    known_peers=st.lists(known_peers, max_size=4).map(tuple),
    other_hello=st.none() | st.binary(max_size=200),
)
want_pieces = st.builds(
    WantPiece,
    type=st.just("want_piece"),
    run_id=run_ids,
    group_id=ids,
    piece=st.integers(0, 7),
)
piece_replies = st.builds(
    PieceReply,
    type=st.just("piece"),
    size_bytes=st.integers(0, LARGE_GROUP_BYTES_MAX),
    data=st.binary(max_size=200),
)
recent_adverts = st.builds(RecentAdverts, type=st.just("recent_adverts"), run_id=run_ids)
adverts_replies = st.builds(
    AdvertsReply,
    type=st.just("adverts"),
    records=st.lists(st.binary(max_size=200), max_size=8).map(tuple),
)
wants = st.builds(
    Want,
    type=st.just("want"),
    run_id=run_ids,
    group_ids=st.lists(ids, min_size=1, max_size=8).map(tuple),
)
groups_replies = st.builds(
    GroupsReply,
    type=st.just("groups"),
    records=st.lists(st.binary(max_size=200), max_size=8).map(tuple),
)
haves = st.builds(
    Have,
    type=st.just("have"),
    run_id=run_ids,
    group_ids=st.lists(ids, min_size=1, max_size=8).map(tuple),
)
have_replies = st.builds(
    HaveReply,
    type=st.just("have_reply"),
    held=st.lists(st.integers(0, 15), max_size=16).map(tuple),
)
want_runs = st.builds(WantRun, type=st.just("want_run"), run_id=run_ids)
run_replies = st.builds(RunReply, type=st.just("run"), rules=st.binary(min_size=2, max_size=200))
want_data_manifests = st.builds(
    WantDataManifest, type=st.just("want_data_manifest"), data=st.binary(min_size=32, max_size=32)
)
data_manifests = st.builds(
    DataManifest,
    type=st.just("data_manifest"),
    items=st.integers(1, DATA_ITEMS_MAX),
    size_bytes=st.integers(1, DATA_BYTES_MAX),
    chunk_hashes=st.binary(min_size=32, max_size=200),
)
want_data = st.builds(
    WantData,
    type=st.just("want_data"),
    data=st.binary(min_size=32, max_size=32),
    chunk=st.integers(0, DATA_CHUNKS_MAX - 1),
)
want_heads = st.builds(WantHeads, type=st.just("want_heads"), run_id=run_ids)
heads_replies = st.builds(
    HeadsReply,
    type=st.just("heads"),
    records=st.lists(st.binary(max_size=200), max_size=8).map(tuple),
)
lease_ids = st.binary(min_size=16, max_size=16)
want_leases = st.builds(
    WantLease,
    type=st.just("want_lease"),
    run_id=run_ids,
    version=seq_nos,
)
lease_replies = st.builds(
    LeaseReply,
    type=st.just("lease"),
    lease=lease_ids,
    learner_version=seq_nos,
    stream=st.just("") | st.binary(min_size=32, max_size=32).map(bytes.hex),
    groups=st.integers(0, LEASE_GROUPS_MAX),
    life_ms=st.integers(0, LEASE_MS_MAX),
    retry_ms=st.integers(0, LEASE_MS_MAX),
    reason=text(NAME_CHARS_MAX),
)
submissions = st.builds(
    Submission,
    type=st.just("submission"),
    lease=lease_ids,
    record=st.binary(max_size=200),
)
submission_replies = st.builds(
    SubmissionReply,
    type=st.just("submission_reply"),
    verdict=st.sampled_from(get_args(Verdict)),
    reason=text(NAME_CHARS_MAX),
    detail=text(DETAIL_CHARS_MAX),
    learner_version=seq_nos,
)
amounts = st.floats(0.0, 1e12)
counts = st.integers(0, 2**48 - 1)
depths = st.integers(0, DEPTH_MAX)
reports = st.builds(
    LearnerReport,
    type=st.just("report"),
    run_id=run_ids,
    plan=st.integers(0, 2**53 - 1),
    version=seq_nos,
    published=seq_nos,
    rules=st.builds(
        LearnerRulesBody,
        staleness_max=depths,
        pacing=depths,
        publish_every=depths,
        groups_per_step=counts,
        credits=counts,
    ),
    work=st.builds(
        LearnerWorkBody,
        buffered=counts,
        leased=counts,
        consumed=counts,
        discarded=counts,
        would_be_stale=counts,
    ),
    pace=st.builds(
        LearnerPaceBody,
        train_s=amounts,
        step_s=amounts,
        idle_share=amounts,
        broadcast_s=amounts,
        staleness_mean=amounts,
        staleness_worst=depths,
        effective_share=st.none() | amounts,
        mismatch_k3=st.none() | amounts,
    ),
    sizes=st.builds(
        LearnerSizesBody,
        weights_bytes=counts,
        delta_bytes=counts,
        up_bytes_per_s=counts,
        group_bytes=counts,
    ),
    workers=st.binary(max_size=200),
)
plans = st.builds(
    SetPlan,
    type=st.just("plan"),
    number=st.integers(0, 2**53 - 1),
    standby=st.binary(max_size=100),
    pacing=depths,
    publish_every=depths,
    credits=counts,
)
plan_replies = st.builds(
    PlanReply,
    type=st.just("plan_reply"),
    number=st.integers(0, 2**53 - 1),
    detail=text(DETAIL_CHARS_MAX),
)
plain_messages: st.SearchStrategy[WireModel] = st.one_of(
    hellos,
    hello_replies,
    want_pieces,
    piece_replies,
    recent_adverts,
    adverts_replies,
    wants,
    groups_replies,
    haves,
    have_replies,
    want_heads,
    want_runs,
    run_replies,
    want_data_manifests,
    data_manifests,
    want_data,
    heads_replies,
    want_leases,
    lease_replies,
    submissions,
    submission_replies,
    st.just(WantReport(type="want_report")),
    reports,
    plans,
    plan_replies,
)


def sample_group() -> RolloutGroup:
    """One fixed group of Alice's."""
    return RolloutGroup(
        run_id="sample-1",
        producer=ALICE.peer_id,
        round=7,
        task=Task("propositional_logic", "0.1.25", '{"max_vars":3}', 2**62 + 1, 12),
        completions=(
            Completion("¬P ∨ Q", (5, 900, 2**32 - 1), (-0.5, -1.25, 0.0), FinishReason.STOP, 6),
            Completion("", (), (), FinishReason.ABORT, 6),
        ),
        tokenizer="bytes-1",
        temperature=1.0,
        top_p=0.95,
        created_at_s=1_800_000_000,
        expires_at_s=1_800_000_600,
    )


def sample_made_group() -> RolloutGroup:
    """The same, from a producer that says what sampled it."""
    return replace(sample_group(), engine="vllm", precision="fp8")


def sample_advert() -> AdvertBody:
    """One fixed advert of Alice's."""
    return AdvertBody(
        type="advert",
        run_id="sample-1",
        producer=ALICE.peer_id,
        round=7,
        addresses=(f"/ip4/127.0.0.1/tcp/4001/p2p/{ALICE.peer_id}",),
        groups=(AdvertEntry(group_id=bytes(32), size_bytes=321),),
        created_at_s=1_800_000_000,
        expires_at_s=1_800_000_600,
    )


def sample_hello() -> Hello:
    """One fixed hello of Alice's."""
    return Hello(
        type="hello",
        run_id="sample-1",
        instance=bytes(16),
        started_at_s=1_800_000_000,
        sent_at_s=1_800_000_030,
        agent="swarm-node/0.1.0",
        packages=(PackageBody(name="reasoning-gym", version="0.1.25"),),
        addresses=(f"/ip4/127.0.0.1/tcp/4001/p2p/{ALICE.peer_id}",),
    )


def sample_trained_hello() -> Hello:
    """The same, after updates with groups of others."""
    return sample_hello().model_copy(update={"trained": (bytes(32), bytes([7]) * 32)})


def sample_manifest() -> Manifest:
    """One fixed manifest of Alice's: a version that can be had whole, or from the one before."""
    spec, shared = TensorSpec, ChunkRef(bytes([1]) * 32, 130)
    one, two = "model-1.safetensors", "model-2.safetensors"
    return Manifest(
        run_id="sample-1",
        policy="actor",
        version=12,
        publisher=ALICE.peer_id,
        created_at_s=1_800_000_000,
        tensors=(
            spec("config.json", "file", (17,), "config.json", 0, 17, bytes([2]) * 32),
            spec("embed.weight", "BF16", (4, 8), one, 80, 64, bytes([3]) * 32),
            spec("größe", "F32", (), two, 96, 4, bytes([4]) * 32),
            spec("head.weight", "BF16", (3, 0), two, 100, 0, bytes([5]) * 32),
            spec(one, "header", (80,), one, 0, 80, bytes([9]) * 32),
            spec(two, "header", (96,), two, 0, 96, bytes([10]) * 32),
        ),
        artifacts=(
            Artifact(None, None, (shared, ChunkRef(bytes([6]) * 32, 40))),
            Artifact(11, bytes([7]) * 32, (shared,)),
            Artifact(8, bytes([8]) * 32, ()),
        ),
    )


def sample_head() -> HeadBody:
    """One fixed head of Alice's, for the sample manifest."""
    body = manifest.encode_manifest(sample_manifest())
    return HeadBody(
        type="weights",
        run_id="sample-1",
        policy="actor",
        version=12,
        publisher=ALICE.peer_id,
        root=manifest.root_of(body),
        manifest_bytes=len(body),
        created_at_s=1_800_000_001,
    )


def feeding_messages() -> dict[str, WireModel]:
    """Those between a learner and its workers."""
    return {
        "want_lease": WantLease(type="want_lease", run_id="sample-1", version=11),
        "lease": LeaseReply(
            type="lease",
            lease=bytes(range(16)),
            learner_version=12,
            stream="0123456789abcdef" * 4,
            groups=4,
            width=16,
            limit=192,
            life_ms=90_000,
            retry_ms=0,
            reason="",
        ),
        "submission": Submission(
            type="submission",
            lease=bytes(range(16)),
            record=codec.sign_group(sample_group(), ALICE)[1],
        ),
        "submission_reply": SubmissionReply(
            type="submission_reply",
            verdict="refused",
            reason="stale",
            detail="too old",
            learner_version=12,
        ),
    }


def steering_messages() -> dict[str, WireModel]:
    """Those between a learner and its coordinator."""
    workers = coordination.pack(
        (
            coordination.ReportedWorker(
                peer=BOB.peer_id,
                version=11,
                groups_per_s=0.5,
                failed_share=0.25,
                turnaround_s=8.0,
                heard_s=1.5,
                admitted=30,
                refused=10,
                leased=4,
                up_bytes_per_s=1_250_000,
                down_bytes_per_s=12_500_000,
                standing_by=True,
            ),
        )
    )
    return {
        "want_report": WantReport(type="want_report"),
        "report": LearnerReport(
            type="report",
            run_id="sample-1",
            plan=1_800_000_000_000,
            version=12,
            published=11,
            rules=LearnerRulesBody(
                staleness_max=6,
                pacing=4,
                publish_every=3,
                groups_per_step=128,
                credits=256,
            ),
            work=LearnerWorkBody(
                buffered=100,
                leased=120,
                consumed=1_408,
                discarded=7,
                would_be_stale=3,
            ),
            pace=LearnerPaceBody(
                train_s=100.0,
                step_s=112.5,
                idle_share=0.125,
                broadcast_s=31.5,
                staleness_mean=2.5,
                staleness_worst=4,
                effective_share=0.75,
                mismatch_k3=None,
            ),
            sizes=LearnerSizesBody(
                weights_bytes=16_400_000_000,
                delta_bytes=680_000_000,
                up_bytes_per_s=125_000_000,
                group_bytes=200_000,
            ),
            workers=workers,
        ),
        "plan": SetPlan(
            type="plan",
            number=1_800_000_005_000,
            standby=coordination.pack_peers([CAROL.peer_id]),
            pacing=4,
            publish_every=3,
            credits=300,
        ),
        "plan_reply": PlanReply(
            type="plan_reply", number=1_800_000_005_000, detail="a later plan is in force"
        ),
    }


def sample_messages() -> dict[str, WireModel]:
    """One fixed message of each unsigned kind, by name."""
    return {
        "hello_reply": HelloReply(
            type="hello_reply",
            run_id="sample-1",
            agent="swarm-node/0.1.0",
            packages=(PackageBody(name="reasoning-gym", version="0.1.25"),),
            addresses=("/ip4/127.0.0.1/tcp/4002",),
            known_peers=(KnownPeer(peer_id=ALICE.peer_id, addresses=("/ip4/10.0.0.1/tcp/1",)),),
            other_hello=codec.sign_hello(sample_hello(), ALICE),
        ),
        "want_piece": WantPiece(
            type="want_piece", run_id="sample-1", group_id=bytes(range(32)), piece=7
        ),
        "piece": PieceReply(type="piece", size_bytes=GROUP_BYTES_MAX + 3, data=b"abc"),
        "recent_adverts": RecentAdverts(type="recent_adverts", run_id="sample-1"),
        "adverts": AdvertsReply(
            type="adverts", records=(codec.sign_advert(sample_advert(), ALICE)[1],)
        ),
        "want": Want(type="want", run_id="sample-1", group_ids=(bytes(32), bytes([255]) * 32)),
        "groups": GroupsReply(type="groups", records=(codec.sign_group(sample_group(), ALICE)[1],)),
        "have": Have(type="have", run_id="sample-1", group_ids=(bytes(32), bytes([255]) * 32)),
        "have_reply": HaveReply(type="have_reply", held=(1,)),
        "find_providers": FindProviders(
            type="find_providers",
            key=bytes(range(32)),
            intent="provide",
            addresses=("/ip4/127.0.0.1/tcp/4002",),
        ),
        "providers": ProvidersReply(
            type="providers",
            providers=(KnownPeer(peer_id=ALICE.peer_id, addresses=("/ip4/10.0.0.1/tcp/1",)),),
            closer=(KnownPeer(peer_id=BOB.peer_id, addresses=()),),
        ),
        "chunk": ChunkRequest(
            type="chunk",
            root=bytes(range(32)),
            artifact=1,
            kind="lost",
            chunk=9,
            accused=BOB.peer_id,
            have=bytes([0b10000001, 0b00000001]),
            relaying=bytes([0b00000001, 0]),
            pending=(3, 4),
            wait_ms=500,
            up_bytes_per_s=12_500_000,
            down_bytes_per_s=0,
        ),
        **feeding_messages(),
        **steering_messages(),
        "want_run": WantRun(type="want_run", run_id="sample-1"),
        "run": RunReply(type="run", rules=b'{"name":"sample"}'),
        "want_data_manifest": WantDataManifest(type="want_data_manifest", data=bytes(range(32))),
        "data_manifest": manifest_of(bytes(range(256)) * 1_100, items=1_100),
        "want_data": WantData(type="want_data", data=bytes(range(32)), chunk=1),
        "want_heads": WantHeads(type="want_heads", run_id="sample-1"),
        "heads": HeadsReply(type="heads", records=(codec.sign_head(sample_head(), ALICE),)),
        "want_manifest": WantManifest(
            type="want_manifest", run_id="sample-1", root=sample_head().root
        ),
        "manifest": codec.decode(
            manifest.encode_manifest(sample_manifest()), ManifestBody, MANIFEST_BYTES_MAX
        ),
        "dial_back": DialBack(type="dial_back", ports=(4001, 65_535)),
        "dial_back_reply": DialBackReply(
            type="dial_back_reply", observed_ip="203.0.113.7", observed_port=4242, ports=(4001,)
        ),
    }
