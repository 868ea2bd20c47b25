"""Records for the monitor's tests: invented numbers in the shape of the real ones."""

from dataclasses import replace
from typing import Any

from node.observe.records import (
    HeldOut,
    PeerStatus,
    RoundDone,
    Started,
    StatusSnapshot,
    StepDone,
    WorkDone,
)

PEER_A = "12D3KooWTestOnlyAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAa"
PEER_B = "12D3KooWTestOnlyBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBb"


def started(peer_id: str = PEER_A, round_: int = 0) -> Started:
    return Started(
        peer_id=peer_id,
        run_id="test-run",
        agent="swarm-node/test",
        model="tiny",
        parameters=1_400_000,
        tokenizer="t",
        engine="torch",
        round=round_,
        seed=0,
        local_groups=4,
        external_groups=4,
        group_size=8,
        addresses=(f"/ip4/127.0.0.1/tcp/4001/p2p/{peer_id}",),
    )


def round_done(number: int, **changes: Any) -> RoundDone:
    record = RoundDone(
        round=number,
        policy_version=number,
        own_reward=0.5,
        local_groups=4,
        external_groups=2,
        informative_groups=5,
        foreign_by_producer={PEER_B: 2},
        groups_shared=4,
        generated_tokens=1000,
        generated_tokens_total=1000 * number,
        trained_tokens_total=1500 * number,
        generate_s=1.0,
        score_s=0.1,
        train_s=0.5,
        loss=0.01,
        grad_norm=1.0,
        own_logprob=-0.5,
        foreign_logprob=-0.7,
        clip_fraction=0.0,
        peers=1,
        pool_groups=10,
        pool_bytes=20_000,
        accepted_total=2 * number,
        rejected_total={},
        bytes_in_total=5000 * number,
        bytes_out_total=4000 * number,
    )
    return replace(record, **changes)


def held_out(round_: int, passed: float, **changes: Any) -> HeldOut:
    record = HeldOut(round_, 1000 * round_, passed, {"binary_matrix": passed}, 100, 2.0)
    return replace(record, **changes)


def snapshot(**changes: Any) -> StatusSnapshot:
    state = StatusSnapshot(
        peer_id=PEER_A,
        run_id="test-run",
        agent="swarm-node/test",
        model="tiny",
        parameters=1_400_000,
        engine="torch",
        uptime_s=125.0,
        phase="training",
        round=12,
        policy_version=12,
        local_groups=4,
        external_groups=3,
        external_groups_wanted=4,
        own_reward=0.512,
        held_out_passed=0.61,
        held_out_first=0.4,
        tokens_per_s=1234.0,
        pool_groups=40,
        pool_foreign=22,
        pool_bytes=81_000,
        accepted=36,
        rejected={"expired": 3, "malformed": 7},
        bytes_in=123_456,
        bytes_out=98_765,
        bytes_by_protocol={"/swarm/rollouts/1.0.0": (100_000, 90_000)},
        memory_bytes=150_000_000,
        trainer_memory_bytes=900_000_000,
        addresses=(f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER_A}",),
        peers=(
            PeerStatus(
                peer_id=PEER_B,
                addresses=(f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER_B}",),
                agent="swarm-node/test",
                groups_accepted=36,
                groups_trained=30,
                rejected={"expired": 3, "malformed": 7},
            ),
        ),
    )
    return replace(state, **changes)


def step_done(number: int, **changes: Any) -> StepDone:
    record = StepDone(
        step=number,
        version=number,
        published_version=number,
        groups=8,
        shared_groups=0,
        informative_groups=6,
        reward=0.4,
        staleness_mean=1.5,
        staleness_max=3,
        idle_s=0.5,
        train_s=2.0,
        groups_by_worker={PEER_B: 8},
        buffered_groups=2,
        leased_groups=4,
        discarded_total={},
        trained_tokens_total=1500 * number,
        loss=0.01,
        grad_norm=1.0,
        clip_fraction=0.0,
        effective_share=None,
        mismatch_k3=None,
        peers=1,
        bytes_in_total=5000 * number,
        bytes_out_total=4000 * number,
    )
    return replace(record, **changes)


def work_done(number: int, behind: int = 1) -> WorkDone:
    return WorkDone(
        batch=number,
        policy_version=number,
        learner_version=number + behind,
        groups=4,
        generated_tokens=1000,
        generated_tokens_total=1000 * number,
        generate_s=1.0,
        wait_s=0.1,
        verdicts_total={"accepted": 4 * number},
    )
