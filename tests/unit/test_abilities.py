"""What a policy can do on held-out tasks, beside another."""

import pytest

from node.observe.abilities import TaskResult, share_interval, told, told_compared


def result(greedy: bool, passed: int, name: str = "sums", samples: int = 4) -> TaskResult:
    return TaskResult(name, greedy, passed, samples)


BEFORE = [result(False, 0), result(False, 1), result(True, 2), result(False, 0, "gcd")]
AFTER = [result(True, 4), result(True, 4), result(False, 0), result(False, 0, "gcd")]


def test_figures_of_a_policy() -> None:
    """One of four greedily, 3 of 16 samples, two of four in any sample."""
    _, row, *_ = told(BEFORE)
    assert [part.split()[0] for part in row.split("%")[0:1]] == ["all"]
    assert [cell.split()[-1] for cell in row.split(" %")[:3]] == ["25.0", "18.8", "50.0"]


def test_sharpening_is_not_unlocking() -> None:
    """The second task was passed now and then before, the first never: one is unlocked of two."""
    _, row, *_ = told_compared(BEFORE, AFTER)
    cells = row.replace("[", "").replace("]", "").split()
    assert (cells[2], cells[5]) == ("+25.0", "+31.2")
    assert row.split()[-5:] == ["2", "1", "1", "of", "2"]


def test_pairs_are_surer_than_two_rates() -> None:
    """Of 100 tasks the same 50 pass before and after, and 5 more: each rate alone is known to ten
    points, and the difference is clear."""
    before = [result(at < 50, 0) for at in range(100)]
    after = [result(at < 55, 0) for at in range(100)]
    cells = told_compared(before, after)[1].split()
    mean, low, high = (float(cell.strip("[,]")) for cell in cells[2:5])
    assert mean == pytest.approx(5.0)
    assert 0.0 < low < high < 10.0


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
