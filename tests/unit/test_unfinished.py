"""Completions that are made in pieces."""

import pytest

from node.engines.vllm.unfinished import Ask, Piece, Unfinished, prompt_seeds
from swarm.rollouts import FinishReason, version_spans

PROMPT = (1, 2, 3)
STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


def piece(*tokens: int, reason: FinishReason = ABORT) -> Piece:
    return Piece(tokens, tuple(-token / 10 for token in tokens), reason)


def text(tokens) -> str:
    return "".join(map(str, tokens))


def test_untouched_it_is_one_request_each_time():
    work = Unfinished(PROMPT, 3, 8, seed=5)
    assert work.asks() == work.asks() == [Ask((0, 1, 2), PROMPT, 8, 5)]


def test_what_was_interrupted_goes_on_where_it_was():
    work = Unfinished(PROMPT, 3, 8, seed=5)
    [first] = work.asks()
    work.take(first, [piece(4, 5), piece(6, reason=STOP), piece()], 1)
    assert sum(len(row.tokens) for row in work._rows) == 3
    one, other = work.asks()
    assert (one.rows, one.token_ids, one.tokens_max) == ((0,), (*PROMPT, 4, 5), 6)
    assert (other.rows, other.token_ids, other.tokens_max) == ((2,), PROMPT, 8)
    assert len({first.seed, one.seed, other.seed}) == 3
    work.take(one, [piece(7)], 1)
    [more, _] = work.asks()
    assert (more.token_ids, more.tokens_max) == ((*PROMPT, 4, 5, 7), 5)
    assert more.seed != one.seed
    work.take(more, [piece(8, 9, reason=LENGTH)], 4)
    work.take(other, [piece(1, reason=STOP)], 4)
    assert work.done
    long, short, late = work.completions(text)
    assert long.token_ids == (4, 5, 7, 8, 9)
    assert long.logprobs == (-0.4, -0.5, -0.7, -0.8, -0.9)
    assert (long.spans, long.policy_version, long.finish_reason) == (((1, 3), (4, 2)), 1, LENGTH)
    assert (short.spans, short.policy_version, short.text) == ((), 1, "6")
    assert (late.spans, late.policy_version) == ((), 4)
    assert [sum(n for _, n in version_spans(each)) for each in (long, short, late)] == [5, 1, 1]


def test_another_line_of_versions_begins_again():
    work = Unfinished(PROMPT, 2, 8, seed=5)
    [before] = work.asks()
    work.take(before, [piece(4, 5), piece(6, reason=STOP)], 9)
    work.begin_again(line=1)
    assert (work.asks(), work.line, work.done) == ([before], 1, False)
    work.take(before, [piece(7, reason=STOP), piece(8, reason=STOP)], 2)
    assert [each.policy_version for each in work.completions(text)] == [2, 2]


def test_a_beginning_is_continued_by_each_row_and_ends_at_the_splice():
    work = Unfinished(PROMPT, 2, 8, seed=5)
    work.begin_with(piece(4, 5), 1)
    one, other = work.asks()
    assert (one.rows, one.token_ids, one.tokens_max) == ((0,), (*PROMPT, 4, 5), 6)
    assert (other.rows, other.token_ids, other.tokens_max) == ((1,), (*PROMPT, 4, 5), 6)
    assert one.seed != other.seed
    work.take(one, [piece(6, reason=STOP)], 1)
    work.take(other, [piece(7, reason=LENGTH)], 3)
    first, second = work.completions(text)
    assert (first.text, first.token_ids, first.logprobs) == ("456", (4, 5, 6), (-0.4, -0.5, -0.6))
    assert first.splices == second.splices == (2,)
    assert second.spans == ((1, 2), (3, 1))
    work.begin_again(line=1)
    assert work.untouched


def test_a_beginning_with_an_end_is_all():
    work = Unfinished(PROMPT, 2, 8, seed=5)
    work.begin_with(piece(4, 5, reason=STOP), 7)
    assert work.done
    assert [(each.token_ids, each.policy_version) for each in work.completions(text)] == [
        ((4, 5), 7)
    ] * 2


def test_seeds_follow_from_a_request_s_own_and_the_repetition():
    assert prompt_seeds(["a", "a", "b"], [1, 1, 1]) != prompt_seeds(["a", "a", "b"], [2, 2, 2])
    one, again, own, other = prompt_seeds(["a", "a", "a", "b"], [1, 1, 2, 1])
    assert len({one, again, own, other}) == 4
    assert [own] == prompt_seeds(["a"], [2])


def test_an_answer_for_other_rows_is_refused():
    work = Unfinished(PROMPT, 2, 8, seed=5)
    with pytest.raises(ValueError, match="shorter"):
        work.take(work.asks()[0], [piece(1)], 0)
