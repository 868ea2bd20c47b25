"""Which policy version made which tokens of a completion."""

import pytest

from swarm.errors import LocalProtocolError
from swarm.rollouts import (
    Completion,
    FinishReason,
    Spans,
    spans_fault,
    version_spans,
)


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
    with pytest.raises(LocalProtocolError, match=fault):
        version_spans(wrong)


def test_tokens_are_needed_for_a_run() -> None:
    assert spans_fault(completion(3, 0, ((3, 1),))) == "1 tokens in runs, 0 in all"
