"""Strategies and fixed samples of what is optional on the wire."""

from dataclasses import replace

from hypothesis import strategies as st

from swarm.rollouts import Author, Completion, RolloutGroup, Turn
from tests.wire_samples import completions, made_by, sample_group, seq_nos


@st.composite
def transcripts(draw: st.DrawFn) -> Completion:
    """Completions with turns, spans, splices and a propensity."""
    plain = draw(completions())
    tokens = len(plain.token_ids)
    spans: tuple[tuple[int, int], ...] = ()
    splices: tuple[int, ...] = ()
    segments: tuple[Turn, ...] = ()
    if tokens:
        cut = draw(st.integers(1, tokens))
        splices = draw(st.sampled_from(((), (cut,), (tokens,))))
        later = (plain.policy_version, cut), (2**31 - 1, tokens - cut)
        spans = draw(st.sampled_from(((), tuple(run for run in later if run[1]))))
        said = sorted(draw(st.lists(st.integers(0, len(plain.text)), min_size=2, max_size=2)))
        segments = (
            Turn(Author.POLICY, said[0], cut),
            Turn(Author.ENVIRONMENT, said[1] - said[0], 0),
        )
        if cut < tokens:
            segments += (Turn(Author.POLICY, len(plain.text) - said[1], tokens - cut),)
        else:
            segments += (Turn(Author.ENVIRONMENT, len(plain.text) - said[1], 0),)
    propensity = draw(st.floats(0.0, 1.0, exclude_min=True))
    return replace(plain, segments=segments, spans=spans, splices=splices, propensity=propensity)


def extended(group: RolloutGroup) -> st.SearchStrategy[RolloutGroup]:
    """The group with such completions, and optional fields of its own."""
    return st.builds(
        replace,
        st.just(group),
        completions=st.lists(transcripts(), min_size=1, max_size=4).map(tuple),
        attempt=seq_nos.filter(bool),
        context=made_by,
        counters=st.sampled_from(((), ((0, 3, 3),), ((1, 5, 0), (2**32 - 1, 2**32 - 1, 7)))),
    )


def sample_turns_group() -> RolloutGroup:
    """The same, of turns, with every optional field."""
    group = sample_group()
    first, second = group.completions
    turns = (
        Turn(Author.POLICY, 2, 2),
        Turn(Author.ENVIRONMENT, 3, 0),
        Turn(Author.POLICY, 1, 1),
    )
    assert len(first.text) == 6
    told = replace(first, segments=turns, spans=((6, 2), (7, 1)), splices=(2,), propensity=0.25)
    return replace(
        group,
        completions=(told, second),
        attempt=2,
        context="hint-1",
        counters=((0, 8, 3), (4, 8, 0)),
    )
