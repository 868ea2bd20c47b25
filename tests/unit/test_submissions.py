"""What travels of a group that was made under a lease."""

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import LocalProtocolError, Reject, RemoteProtocolError
from swarm.rollouts import RolloutGroup
from swarm.wire import codec
from swarm.wire.messages import SPANS_MAX, Submission
from tests.wire_samples import ALICE, sample_group

LEASE = bytes(range(16))


def with_runs(*runs: tuple[int, int]) -> RolloutGroup:
    """The sample with spans of its first completion, which has three tokens of version 6."""
    group = sample_group()
    first = replace(group.completions[0], spans=runs)
    return replace(group, completions=(first, *group.completions[1:]))


def submission(spans: bytes) -> bytes:
    record = codec.sign_group(sample_group(), ALICE)[1]
    return codec.encode(Submission(type="submission", lease=LEASE, record=record, spans=spans))


@pytest.mark.parametrize("group", [sample_group(), with_runs((6, 1), (7, 2)), with_runs((6, 3))])
def test_a_group_arrives_with_its_lease_and_its_spans(group: RolloutGroup) -> None:
    lease, group_id, record, _, there = codec.decode_submission(
        codec.encode_submission(LEASE, group, ALICE)
    )
    assert lease == LEASE
    assert there == group
    assert (group_id, replace(group, completions=sample_group().completions)) == codec.decode_group(
        record
    )


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        ((0, 6, 1, 0, 7), "odd length"),
        ((0, 6, 1, 0, 7, 1), "2 tokens in runs, 3 in all"),
        ((0, 6, 0, 0, 7, 3), "a run without tokens"),
        ((0, 6, 2**32 - 1, 0, 7, 4), "4294967299 tokens in runs"),
        ((0, 6, 2, 0, 5, 1), "a version before an older one"),
        ((0, 5, 1, 0, 6, 2), "is not the oldest"),
        ((0, 7, 3), "is not the oldest"),
        ((2, 6, 3), "no completion"),
        ((1, 6, 1, 0, 6, 3), "out of order"),
        ((1, 6, 1), "1 tokens in runs, 0 in all"),
    ],
)
def test_spans_that_lie(numbers: tuple[int, ...], why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why) as caught:
        codec.decode_submission(submission(struct.pack(f"<{len(numbers)}I", *numbers)))
    assert caught.value.reason is Reject.MALFORMED


@given(st.binary(max_size=120))
def test_no_column_does_more_than_be_refused(column: bytes) -> None:
    try:
        group = codec.with_spans(sample_group(), column)
    except RemoteProtocolError:
        return
    for completion in group.completions:
        assert sum(tokens for _, tokens in completion.spans) in (0, len(completion.token_ids))


def test_spans_that_make_no_sense_are_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="2 tokens in runs"):
        codec.encode_submission(LEASE, with_runs((6, 2)), ALICE)
    tokens = 2 * SPANS_MAX
    group = sample_group()
    long = replace(
        group.completions[0],
        token_ids=(1,) * tokens,
        logprobs=(-1.0,) * tokens,
        spans=tuple((version, 1) for version in range(6, 6 + tokens)),
    )
    with pytest.raises(LocalProtocolError, match="does not fit the wire"):
        codec.encode_submission(LEASE, replace(group, completions=(long,)), ALICE)
