"""Which heads are believed, which are told of, and what is kept of them across restarts."""

from pathlib import Path
from typing import Any

import pytest

from swarm.errors import Reject, RemoteProtocolError
from swarm.identity import Identity
from swarm.weights.hot_swap import (
    HEADS_KEPT_MAX,
    POLICIES_MAX,
    HeadRules,
    HeadTable,
    load_heads,
    save_head,
)
from swarm.wire import codec
from swarm.wire.messages import HEADS_PER_REPLY_MAX, HeadBody
from tests.wire_samples import ALICE, BOB, sample_head

NOW_S = 1_800_000_000.0


def head(version: int, signer: Identity = ALICE, **changes: Any) -> bytes:
    """A signed head whose root follows from its version, unless another is given."""
    values = {
        "version": version,
        "publisher": signer.peer_id,
        "root": version.to_bytes(32, "big"),
        "created_at_s": int(NOW_S),
    }
    body = HeadBody.model_validate(sample_head().model_dump() | values | changes)
    return codec.sign_head(body, signer)


@pytest.fixture
def table() -> HeadTable:
    return HeadTable(HeadRules("sample-1", frozenset({ALICE.peer_id}), 120.0), lambda: NOW_S)


POLICY = sample_head().policy


def test_versions_move_forward_and_older_ones_are_kept(table: HeadTable) -> None:
    assert [table.hear(head(version))[1] for version in (3, 1, 3)] == [True, False, False]
    newest = table.newest(POLICY)
    assert newest is not None
    assert newest.version == 3
    assert [each.version for each in table.older(POLICY)] == [1]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (head(4, BOB), Reject.NOT_A_PUBLISHER),
        (head(4, run_id="sample-2"), Reject.WRONG_RUN),
        (head(4, created_at_s=int(NOW_S) + 121), Reject.FUTURE),
        (head(3, root=bytes(32)), Reject.REPUBLISHED),
        (head(2, root=bytes(32)), Reject.REPUBLISHED),
        (head(4)[:-1] + b"\x00", Reject.BAD_SIGNATURE),
    ],
    ids=lambda value: value.value if isinstance(value, Reject) else "",
)
def test_what_is_not_believed_changes_nothing(
    table: HeadTable, record: bytes, reason: Reject
) -> None:
    table.hear(head(2))
    table.hear(head(3))
    before = table.records(POLICY, range(9))
    with pytest.raises(RemoteProtocolError) as caught:
        table.hear(record)
    assert caught.value.reason is reason
    assert table.records(POLICY, range(9)) == before


def test_a_clock_within_the_skew_is_believed(table: HeadTable) -> None:
    assert table.hear(head(4, created_at_s=int(NOW_S) + 120))[1]


def test_a_reply_has_the_newest_of_each_policy_and_then_what_is_on_offer(table: HeadTable) -> None:
    for version in (1, 2, 3):
        table.hear(head(version))
    table.hear(head(9, policy="critic"))
    assert table.records(POLICY, {1, 3}) == (head(3), head(9, policy="critic"), head(1))


def test_all_of_it_is_bounded(table: HeadTable) -> None:
    for version in range(1, HEADS_KEPT_MAX + 5):
        table.hear(head(version))
    assert len(table.older(POLICY)) == HEADS_KEPT_MAX - 1
    assert table.of(POLICY, 4) is None
    assert table.of(POLICY, 5) is not None
    for number in range(POLICIES_MAX + 3):
        table.hear(head(1, policy=f"more-{number}"))
    assert table.newest(f"more-{POLICIES_MAX - 2}") is not None
    assert table.newest(f"more-{POLICIES_MAX - 1}") is None
    assert len(table.records(POLICY, range(99))) == HEADS_PER_REPLY_MAX


def test_heads_of_the_versions_that_are_kept_outlive_the_process(
    table: HeadTable, tmp_path: Path
) -> None:
    for version in (1, 2, 3):
        save_head(tmp_path / "heads", version, head(version), keep=(1, version))
    for record in load_heads(tmp_path / "heads"):
        table.hear(record)
    assert table.records(POLICY, range(9)) == (head(3), head(1))
    assert load_heads(tmp_path / "nothing") == ()
