"""Groups as they come to a pool: signed, verified, small."""

from dataclasses import replace

from swarm.exchange.pool import AddResult, Pool
from swarm.identity import Identity
from swarm.rollouts import ScoredGroup, Task
from swarm.wire import codec
from tests.wire_samples import sample_group

CREATED_AT_S = 1_000
EXPIRES_AT_S = 2_000
PRODUCERS = tuple(Identity(bytes([i]) * 32) for i in range(1, 6))


def make_group(
    producer: int,
    index: int,
    *,
    variant: int = 0,
    round_: int = 0,
    created_at_s: int = CREATED_AT_S,
    expires_at_s: int = EXPIRES_AT_S,
) -> tuple[bytes, ScoredGroup]:
    """The group of one producer's task; another variant is another group for the same task."""
    identity = PRODUCERS[producer]
    group = replace(
        sample_group(),
        producer=identity.peer_id,
        round=round_,
        temperature=1.0 - variant / 100,
        task=Task("sums", "1", "{}", 7, index),
        created_at_s=created_at_s,
        expires_at_s=expires_at_s,
    )
    group_id, record = codec.sign_group(group, identity)
    return record, ScoredGroup(group_id, group, f"prompt {index}", (0.25, 1.0))


def add(
    pool: Pool, record: bytes, verified: ScoredGroup, now_s: float, *, own: bool = False
) -> AddResult:
    """Add one group."""
    return pool.add_all([(record, verified)], own=own, now_s=now_s)[0]
