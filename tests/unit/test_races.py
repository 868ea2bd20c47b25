"""Races to a level: when it is reached, by whom, and what a swarm that never gets there counts."""

import math
from typing import Any

import pytest

from tests.support import script

races = script("races")
LATE = {"says": "a newcomer", "levels": [0.5, 0.9], "counted": [1]}
RARE = {"says": "a swarm", "levels": [1.0], "goal": 50.0, "reached_by": 0.5}
TASKS = 100


def point(node: int, number: int, percent: int) -> dict[str, Any]:
    tasks = [["sums", place < percent, 0] for place in range(TASKS)]
    axes = {"tokens": 100 * number, "round": number, "seconds": float(number)}
    return {"node": node, "tasks": tasks, **axes}


def result(arm: str, *curves: list[int], first: int = 0, seed: int = 1) -> dict[str, Any]:
    """A swarm with a curve of each node, one evaluation each ten rounds."""
    points = [
        point(first + node, 10 * place, percent)
        for node, curve in enumerate(curves)
        for place, percent in enumerate(curve)
    ]
    return {"arm": arm, "seed": seed, "points": points}


def test_a_level_is_a_share_of_the_way_to_the_veterans() -> None:
    both = [result("4/4", [80, 82], [20, 50]), result("alone", [20, 30, 40], first=1)]
    goal = races.veterans_level(LATE, both)
    assert goal == 80.0  # nobody but the veterans, before their first round
    shared, alone = (races.reached(LATE, each, "tokens", 0.5, goal) for each in both)
    assert shared == (1_000.0, True)  # 50 % is half of the way from 20 to 80
    assert alone == (2_000.0, False)  # counted as if it had come there at its end
    assert races.reached(LATE, both[0], "round", 0.25, goal) == (5.0, True)


def test_a_swarm_is_there_once_half_of_its_nodes_are() -> None:
    made = result("4/4", [0, 0, 60], [0, 100, 100], [0, 0, 0], [0, 25, 75])
    assert races.reached(RARE, made, "round", 1.0, 50.0) == (15.0, True)  # the second of four
    none = result("4/4", [0, 0], [0, 0])
    assert races.reached(RARE, none, "tokens", 1.0, 50.0) == (1_000.0, False)


def test_the_wait_ends_with_the_first_gain_of_half_of_the_nodes() -> None:
    made = result("4/4", [0, 0, 60], [0, 1, 0], [5, 5, 5], [0, 0, 0, 0])
    assert races.waited(RARE, made) == 20.0  # the second of four; the third never gains


def test_a_race_is_over_once_half_are_at_the_goal() -> None:
    condition = RARE | {"nodes": ["smollm2"] * 2}
    assert not races.is_over(condition, {"points": []})
    assert not races.is_over(condition, result("4/4", [0, 40], [0, 49]))
    assert races.is_over(condition, result("4/4", [0, 50], [0, 0]))
    assert not races.is_over({"says": "no race"}, result("4/4", [0, 100], [0, 100]))


def test_a_race_with_veterans_is_over_at_its_last_level() -> None:
    late = LATE | {"nodes": ["veteran", "smollm2"]}
    assert not races.is_over(late, result("4/4", [80, 82]))  # the newcomer is not there yet
    assert not races.is_over(late, result("4/4", [80, 82], [20, 73]))
    assert races.is_over(late, result("4/4", [80, 82], [20, 74]))  # 90 % of the way to 80
    assert not races.is_over(late, result("alone", [20, 100], first=1))  # the goal is not known


def test_ratios_are_of_pairs_with_intervals() -> None:
    mine = [races.Reached(each, ever=True) for each in (100.0, 200.0, 400.0)]
    others = [races.Reached(2 * each.at, ever=True) for each in mine]
    assert races.ratio(mine, others, 1) == pytest.approx((2.0, 2.0, 2.0))
    mean, low, high = races.ratio(mine, others[::-1], 1)
    assert (mean, low < 1.0, high > 4.0) == (pytest.approx(2.0), True, True)
    assert races.ratio(mine[:1], others[:1], 1)[1:] == (0.0, math.exp(700.0))
    assert races.told_ratio(*races.ratio(mine[:1], others[:1], 1)) == "2.00 (unbounded)"
    assert races.told_ratio(2.0, 1.5, 2.5) == "2.00 (1.50 to 2.50)"


def test_the_table_compares_to_the_control_that_needs_least() -> None:
    results = [
        result("4/4", [80], [20, 80]),
        result("alone", [20, 20, 20, 80], first=1),
        result("8/0", [20, 20, 80], first=1),
    ]
    told = races.table(LATE, results, ["alone", "8/0"], 2)
    (row,) = (line for line in told.splitlines() if line.startswith("| 4/4 |"))
    cells = [each.strip() for each in row.strip("|").split("|")]
    assert cells[2] == "10.0"  # the evaluation of the first gain
    assert cells[3:7] == ["500", "5", "5", "0"]
    assert cells[7].startswith("3.00 (")  # 8/0 needs 1,500
    assert cells[7].endswith(" than 8/0")
    assert [each.split(" ")[0] for each in cells[8:10]] == ["3.00", "3.00"]
    assert "The goal is 80.0 %" in told
    one_more = result("4/4", [80], [20, 80], seed=2)
    assert " than " not in races.table(LATE, [*results, one_more], ["alone", "8/0"], 2)
    alone = result("alone", [20, 20, 20, 80], first=1, seed=2)
    told = races.table(LATE, [*results, one_more, alone], ["alone", "8/0"], 2)
    assert " than alone" in told  # 8/0 has not all seeds
