"""What travels of a group that was made under a lease."""

from dataclasses import replace

import pytest

from swarm.errors import LocalProtocolError, Reject, RemoteProtocolError
from swarm.rollouts import RolloutGroup, Spans
from swarm.wire import codec
from swarm.wire.messages import SPANS_MAX
from tests.wire_samples import ALICE, sample_group

LEASE = bytes(range(16))


def with_runs(*runs: tuple[int, int]) -> RolloutGroup:
    """The sample with spans of its first completion, which has three tokens of version 6."""
    group = sample_group()
    first = replace(group.completions[0], spans=runs)
    return replace(group, completions=(first, *group.completions[1:]))


@pytest.mark.parametrize("group", [sample_group(), with_runs((6, 1), (7, 2)), with_runs((6, 3))])
def test_a_group_arrives_with_its_lease_and_its_spans(group: RolloutGroup) -> None:
    lease, group_id, record, there = codec.decode_submission(
        codec.encode(codec.submission(LEASE, group, ALICE)[1])
    )
    assert lease == LEASE
    assert there == group
    assert (group_id, group) == codec.decode_group(record)


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        (((6, 1), (7, 1)), "2 tokens in runs, 3 in all"),
        (((6, 0), (7, 3)), "a run without tokens"),
        (((6, 2**32 - 1), (7, 4)), "4294967299 tokens in runs"),
        (((6, 2), (5, 1)), "a version before an older one"),
        (((5, 1), (6, 2)), "is not the oldest"),
        (((7, 3),), "is not the oldest"),
    ],
)
def test_spans_that_lie(runs: Spans, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(codec, "spans_fault", lambda *_: None)
        lie = codec.encode(codec.submission(LEASE, with_runs(*runs), ALICE)[1])
    with pytest.raises(RemoteProtocolError, match=why) as caught:
        codec.decode_submission(lie)
    assert caught.value.reason is Reject.MALFORMED


def test_spans_that_make_no_sense_are_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="2 tokens in runs"):
        codec.submission(LEASE, with_runs((6, 2)), ALICE)
    tokens = 2 * SPANS_MAX
    group = sample_group()
    long = replace(
        group.completions[0],
        token_ids=(1,) * tokens,
        logprobs=(-1.0,) * tokens,
        spans=tuple((version, 1) for version in range(6, 6 + tokens)),
    )
    with pytest.raises(LocalProtocolError, match="does not fit the wire"):
        codec.submission(LEASE, replace(group, completions=(long,)), ALICE)
