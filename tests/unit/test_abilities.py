"""What a policy can do on held-out tasks, beside another."""

import pytest

from node.observe.abilities import (
    TaskResult,
    abilities,
    compared,
    share_interval,
    told,
    told_compared,
)


def result(greedy: bool, passed: int, name: str = "sums", samples: int = 4) -> TaskResult:
    return TaskResult(name, greedy, passed, samples)


BEFORE = [result(False, 0), result(False, 1), result(True, 2), result(False, 0, "gcd")]
AFTER = [result(True, 4), result(True, 4), result(False, 0), result(False, 0, "gcd")]


def test_figures_of_a_policy() -> None:
    found = abilities(BEFORE)
    assert found.greedy[0] == 0.25
    assert found.sampled is not None
    assert found.any_of is not None
    assert found.sampled[0] == pytest.approx(3 / 16)
    assert found.any_of[0] == 0.5


def test_sharpening_is_not_unlocking() -> None:
    """The second task was passed now and then before, the first never: one is unlocked of two."""
    found = compared(BEFORE, AFTER)
    assert (found.gained, found.lost) == (2, 1)
    assert (found.unlocked, found.locked) == (1, 2)
    assert found.greedy[0] == 0.25
    assert found.sampled is not None
    assert found.sampled[0] == pytest.approx(5 / 16)


def test_pairs_are_surer_than_two_rates() -> None:
    """Of 100 tasks the same 50 pass before and after, and 5 more: each rate alone is known to ten
    points, and the difference is clear."""
    before = [result(at < 50, 0) for at in range(100)]
    after = [result(at < 55, 0) for at in range(100)]
    mean, low, high = compared(before, after).greedy
    assert mean == pytest.approx(0.05)
    assert 0.0 < low < high < 0.1


def test_a_share_of_none_or_all_is_not_known_for_sure() -> None:
    assert share_interval(0, 20) == pytest.approx((0.0, 0.0, 0.161), abs=1e-3)
    assert share_interval(20, 20) == pytest.approx((1.0, 0.839, 1.0), abs=1e-3)
    assert share_interval(10, 20) == pytest.approx((0.5, 0.299, 0.701), abs=1e-3)


def test_tables_have_a_row_for_all_and_one_for_each_environment() -> None:
    more = [*BEFORE, result(True, 3, "gcd")]
    lines = told(more)
    assert lines[0].split() == ["tasks", "greedy", "sampled", "pass@4"]
    assert [line.split()[0] for line in lines[1:]] == ["all", "gcd", "sums"]
    assert lines[1].split()[1:4] == ["5", "40.0", "%"]
    pairs = told_compared(more, [*AFTER, result(True, 3, "gcd")])
    assert pairs[1].endswith("1 of 2")
    assert "sampled" not in told_compared([result(False, 0, samples=0)] * 2, AFTER[:2])[0]
    assert "pass@" not in told([result(True, 0, samples=0)] * 2)[0]
