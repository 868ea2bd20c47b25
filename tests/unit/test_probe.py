"""What a probe asks, and when its answers are another policy's."""

import math

import pytest

from node.engines.vllm.probe import (
    BF16,
    FP32,
    MOVED_MIN,
    ROWS,
    Difference,
    agrees,
    difference,
    is_stale,
    probe_rows,
)


def test_rows_are_the_same_each_time_and_fit():
    rows = probe_rows(260, 128)
    assert rows == probe_rows(260, 128)
    assert len(rows) == ROWS
    assert all(0 <= token < 260 for row in rows for token in row)
    assert {len(row) for row in probe_rows(260, 8)} == {7}


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([[-1.0, -2.0]], [[-1.0, -2.0]], Difference(0.0, 0.0)),
        ([[-1.0, -2.0]], [[-1.0, -2.5]], Difference(0.25, 0.5)),
        ([[-1.0]], [[-1.0, -2.0]], Difference(math.inf, math.inf)),
        ([[math.nan]], [[-1.0]], Difference(math.inf, math.inf)),
        ([], [], Difference(math.inf, math.inf)),
    ],
)
def test_how_far_two_are_apart(ours, theirs, expected):
    assert difference(ours, theirs) == expected


def test_both_the_mean_and_the_most_count():
    assert agrees(Difference(0.0, 0.0), FP32)
    assert not agrees(Difference(0.0, 2 * FP32.max), FP32)
    assert not agrees(Difference(2 * FP32.mean, 0.0), FP32)
    assert not agrees(Difference(math.nan, math.nan), FP32)


def moved(by: float, rounding: float = 0.0) -> list[list[float]]:
    return [[-1.0 - by + rounding * (-1) ** at for at in range(8)]]


def test_weights_that_were_not_loaded_show_however_small_the_step_is_beside_rounding():
    step, rounding = 1e-3, 0.05
    stale, fresh = moved(0.0, rounding), moved(step, rounding)
    assert agrees(difference(stale, moved(step)), BF16)  # its tolerance does not see it
    assert is_stale(stale, stale, moved(0.0), moved(step))
    assert not is_stale(stale, fresh, moved(0.0), moved(step))
    nothing = moved(0.5 * MOVED_MIN)
    assert not is_stale(stale, stale, moved(0.0), nothing)  # too little to be sure of
