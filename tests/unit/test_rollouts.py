"""Which policy version made which tokens of a completion, and the oldest of a group."""

from dataclasses import replace

import pytest

from swarm.errors import LocalProtocolError
from swarm.rollouts import (
    Completion,
    FinishReason,
    Spans,
    oldest_version,
    spans_fault,
    version_spans,
)
from swarm.wire import codec
from tests.wire_samples import ALICE, sample_group


def completion(version: int, tokens: int = 5, spans: Spans = ()) -> Completion:
    columns = ((1,) * tokens, (-0.5,) * tokens)
    return Completion("x", *columns, FinishReason.LENGTH, version, spans)


@pytest.mark.parametrize(
    ("version", "tokens", "spans", "expected"),
    [
        (3, 5, (), ((3, 5),)),
        (3, 0, (), ()),
        (3, 5, ((3, 5),), ((3, 5),)),
        (3, 5, ((3, 1), (7, 4)), ((3, 1), (7, 4))),
        (3, 5, ((3, 2), (3, 1), (4, 2)), ((3, 2), (3, 1), (4, 2))),
    ],
)
def test_runs_add_up_to_the_tokens(
    version: int, tokens: int, spans: Spans, expected: Spans
) -> None:
    assert version_spans(completion(version, tokens, spans)) == expected


@pytest.mark.parametrize(
    ("spans", "fault"),
    [
        (((3, 5), (4, 0)), "a run without tokens"),
        (((3, 6), (4, -1)), "a run without tokens"),
        (((3, 2), (4, 2)), "4 tokens in runs, 5 in all"),
        (((3, 2), (4, 4)), "6 tokens in runs, 5 in all"),
        (((3, 2), (2, 3)), "a version before an older one"),
        (((4, 5),), "version 3 is not the oldest, 4 is"),
        (((2, 1), (3, 4)), "version 3 is not the oldest, 2 is"),
    ],
)
def test_other_runs_are_told(spans: Spans, fault: str) -> None:
    wrong = completion(3, 5, spans)
    assert spans_fault(wrong) == fault
    for judge in (
        lambda: version_spans(wrong),
        lambda: oldest_version(replace(sample_group(), completions=(completion(1), wrong))),
    ):
        with pytest.raises(LocalProtocolError, match=fault):
            judge()


def test_tokens_are_needed_for_a_run() -> None:
    assert spans_fault(completion(3, 0, ((3, 1),))) == "1 tokens in runs, 0 in all"


def test_the_oldest_version_of_a_group_is_that_of_any_of_its_tokens() -> None:
    mixed = completion(4, 5, ((4, 1), (9, 4)))
    group = replace(sample_group(), completions=(completion(7), mixed, completion(5)))
    assert oldest_version(group) == 4
    assert oldest_version(replace(group, completions=(completion(7), completion(5)))) == 5
    with pytest.raises(LocalProtocolError, match="without completions"):
        oldest_version(replace(group, completions=()))


def test_rollouts_on_the_wire_carry_the_oldest_version_alone() -> None:
    mixed, plain = completion(4, 5, ((4, 1), (9, 4))), completion(4, 5)
    records = [
        codec.sign_group(replace(sample_group(), completions=(each,)), ALICE)
        for each in (mixed, plain)
    ]
    assert records[0] == records[1]
    assert codec.decode_group(records[0][1])[1].completions == (plain,)
