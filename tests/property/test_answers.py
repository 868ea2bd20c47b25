"""What of a text is its answer: the same as a second judge finds, and soon."""

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from node.envs.answers import FORMATS, AnswerFormat, answer_in, written
from tests.answers_reference import ANY, TEXT_CHARS_MAX, reference
from tests.fuzz.fuzz_answers import PIECES, REASONING, check

TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join)
NUMBERS = st.from_regex(r"-?[1-9][0-9]{0,5}(\.[0-9]{1,2}|/[1-9][0-9]{0,3})?|0", fullmatch=True)
KINDS = st.sampled_from(FORMATS)


@settings(max_examples=1000, deadline=None)
@given(KINDS, TEXTS)
@example("last_number", "1,234,567.50**.$")
@example("boxed", "\\boxed{{}}{}}")
def test_two_judges_agree(kind: AnswerFormat, text: str) -> None:
    text = text[:TEXT_CHARS_MAX]
    assert reference(kind, text) in (answer_in(kind, text), ANY)


@settings(max_examples=500, deadline=None)
@given(KINDS, TEXTS)
def test_an_answer_is_found_again_and_nothing_may_follow_it(kind: AnswerFormat, text: str) -> None:
    check(bytes([FORMATS.index(kind)]) + text.encode(errors="replace"))


@settings(max_examples=300, deadline=None)
@given(NUMBERS, st.sampled_from(["{}", "It is {}", "= {}.", "**{}**", "${}$", "\\boxed{{{}}}"]))
def test_numbers_in_sentences_are_found_as_they_are(number: str, sentence: str) -> None:
    text = REASONING + sentence.format(number)
    assert answer_in("last_number", text) == number
    assert answer_in("last_number", number) == number


@settings(max_examples=100, deadline=None)
@given(KINDS, st.sampled_from(PIECES), st.sampled_from(PIECES))
def test_a_text_a_thousand_times_as_long_takes_no_more_than_that(
    kind: AnswerFormat, one: str, other: str
) -> None:
    started = time.process_time()
    answer_in(kind, (one + other) * 20_000)
    answer_in(kind, written(kind, one * 20_000 + other))
    assert time.process_time() - started < 0.25


def test_a_search_that_goes_back_over_the_text_would_take_more() -> None:
    """The negative control: what is looked for once for each place that it could begin at."""
    text = "<answer>" * 4_000
    started = time.process_time()
    for at in range(0, len(text), 8):
        text.find("</answer>", at)
    naive_s = time.process_time() - started
    started = time.process_time()
    answer_in("tags", text)
    assert naive_s > 20 * (time.process_time() - started)


@pytest.mark.parametrize("kind", FORMATS)
def test_lone_surrogates_are_text_too(kind: AnswerFormat) -> None:
    assert answer_in(kind, "\ud800") in (None, "\ud800")
