"""What a policy can do on held-out tasks, beside another."""

import re
from collections.abc import Callable
from random import Random

import pytest

from node.observe.abilities import TaskResult, told, told_compared


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
    """Of 100 tasks the same 50 pass before and after, and 8 more: each rate alone is known to ten
    points, and the difference is clear."""
    before = [result(at < 50, 0) for at in range(100)]
    after = [result(at < 58, 0) for at in range(100)]
    cells = told_compared(before, after)[1].split()
    mean, low, high = (float(cell.strip("[,]")) for cell in cells[2:5])
    assert mean == pytest.approx(8.0)
    assert 0.0 < low < high < 16.0


def test_none_or_all_of_a_few_tasks_are_not_known_for_sure() -> None:
    """Greedily, in samples and in the difference of two policies."""
    nothing, all_of_it = [result(False, 0)] * 10, [result(True, 4)] * 10
    for cell in ends(told(nothing)[1]):
        assert cell[0] == 0.0
        assert 25.0 < cell[1] < 45.0
    for cell in ends(told(all_of_it)[1]):
        assert 55.0 < cell[0] < 75.0
        assert cell[1] == 100.0
    for low, high in ends(told_compared(nothing, nothing)[1]):
        assert low == pytest.approx(-high)
        assert 20.0 < high < 40.0


def ends(line: str) -> list[tuple[float, float]]:
    """The ends of all intervals in a line of a table."""
    return [
        (float(low), float(high)) for low, high in re.findall(r"\[([-+.\d]+), ([-+.\d]+)\]", line)
    ]


def covered(draw: Callable[[Random], str], truth: float, column: int) -> float:
    """How often of 600 times an interval of a drawn line holds the truth, in points."""
    rng = Random(5)
    found = [ends(draw(rng))[column] for _ in range(600)]
    return sum(low - 0.05 <= truth <= high + 0.05 for low, high in found) / len(found)


@pytest.mark.parametrize(
    ("tasks", "gained"), [(64, 0.05), (10, 0.1), (200, 0.01)], ids=lambda each: str(each)
)
def test_intervals_of_differences_hold_as_often_as_they_say(tasks: int, gained: float) -> None:
    def line(rng: Random) -> str:
        after = [result(rng.random() < gained, 0, samples=0) for _ in range(tasks)]
        return told_compared([result(False, 0, samples=0)] * tasks, after)[1]

    assert covered(line, 100 * gained, 0) >= 0.93


@pytest.mark.parametrize("tasks", [10, 20], ids=str)
def test_intervals_of_samples_hold_as_often_as_they_say(tasks: int) -> None:
    """Most tasks are far too hard, one in ten is passed nearly always."""

    def line(rng: Random) -> str:
        rates = [0.9 if rng.random() < 0.1 else 0.02 for _ in range(tasks)]
        passed = [sum(rng.random() < rate for _ in range(4)) for rate in rates]
        return told([result(False, each) for each in passed])[1]

    assert covered(line, 100 * (0.1 * 0.9 + 0.9 * 0.02), 1) >= 0.93


@pytest.mark.parametrize("rate", [0.017, 0.5, 0.983], ids=str)
def test_intervals_of_greedy_answers_hold_at_the_edges_too(rate: float) -> None:
    def line(rng: Random) -> str:
        return told([result(rng.random() < rate, 0, samples=0) for _ in range(10)])[1]

    assert covered(line, 100 * rate, 0) >= 0.93


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
