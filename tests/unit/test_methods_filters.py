"""Filters against worked examples, limiting cases and slow definitions."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from random import Random
from statistics import pvariance
from statistics import variance as unbiased_variance
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.methods import filters, replay
from node.methods.filters import (
    DynamicSampling,
    Extremes,
    Overlong,
    Variance,
    ZeroAdvantage,
)
from node.methods.replay import (
    PoolOfSuccesses,
    ReplayedSuccesses,
    Salvage,
    SalvagedAnswer,
)
from swarm.rollouts import ScoredGroup
from tests.scored_groups import scored


def near(found: float, wanted: float, within: float = 1e-4) -> bool:
    return math.isclose(found, wanted, rel_tol=0.0, abs_tol=within)


def view(*rewards: float, prompt: str = "") -> ScoredGroup:
    return scored(rewards, prompt)


# --- groups whose rewards differ ------------------------------------------------------------------


def test_groups_with_equal_rewards_are_left_out() -> None:
    groups = [view(1, 1), view(1, 0), view(0.3, 0.3 + 1e-12), view(0), view(), view(0, 0.5)]
    assert filters.zero_advantage(groups, ZeroAdvantage()) == (1, 5)
    assert filters.zero_advantage([], ZeroAdvantage()) == ()
    with pytest.raises(ValueError, match="not all are finite"):
        filters.zero_advantage([view(1, math.nan)], ZeroAdvantage())


@pytest.mark.parametrize(
    ("success", "rollouts", "wanted"),
    [
        (0.05, 8, 0.337),
        (0.1, 8, 0.570),
        (0.25, 8, 0.900),
        (0.5, 8, 0.992),
        (0.05, 16, 0.56),
        (0.05, 64, 0.962),
    ],
)
def test_how_likely_rewards_differ(success: float, rollouts: int, wanted: float) -> None:
    assert near(filters.informative_probability(success, rollouts), wanted, 6e-4)


@given(st.fractions(0, 1, max_denominator=1000), st.integers(1, 40))
def test_how_likely_rewards_differ_by_fractions(success: Fraction, rollouts: int) -> None:
    found = filters.informative_probability(float(success), rollouts)
    assert near(found, float(1 - success**rollouts - (1 - success) ** rollouts), 1e-12)
    assert near(found, filters.informative_probability(float(1 - success), rollouts), 1e-12)


def test_limits_of_that_probability() -> None:
    tiny = filters.informative_probability(1e-20, 8)
    assert math.isclose(tiny, 8e-20, rel_tol=1e-9)
    assert [filters.informative_probability(p, 8) for p in (0.0, 1.0)] == [0.0, 0.0]
    assert filters.informative_probability(0.3, 1) == 0.0
    with pytest.raises(ValueError, match="rollouts 0: below 1"):
        filters.informative_probability(0.3, 0)
    with pytest.raises(ValueError, match="success nan"):
        filters.informative_probability(math.nan, 8)


@pytest.mark.parametrize(
    ("wanted", "kept", "generated", "rounds", "prompts"),
    [
        (32, 0, 0, 0, 64),  # nothing is known: a half will pass
        (32, 15, 62, 1, 68),  # a quarter passed: (32 - 15) * 64 / 16
        (32, 32, 64, 1, 0),
        (32, 40, 64, 1, 0),
        (32, 0, 998, 1, 1_024),  # 32,000 but for the bound
        (32, 31, 900, 10, 0),  # the rounds are over
        (0, 0, 0, 0, 0),
        (5, 2, 3, 1, 5),  # 3 * 5 / 3
        (5, 3, 4, 1, 3),  # 2 * 6 / 4
        (5, 3, 5, 1, 4),  # 2 * 7 / 4, and up
    ],
)
def test_a_batch_is_filled_up_within_bounds(
    wanted: int, kept: int, generated: int, rounds: int, prompts: int
) -> None:
    found = filters.dynamic_sampling(wanted, kept, generated, rounds, DynamicSampling())
    assert found == prompts


def test_more_is_not_kept_than_was_generated() -> None:
    with pytest.raises(ValueError, match="generated 1: below 2"):
        filters.dynamic_sampling(4, 2, 1, 1, DynamicSampling())


# --- overlong -------------------------------------------------------------------------------------


def test_long_completions_lose_linearly() -> None:
    lengths = (16_384, 18_432, 20_480, 0, 30_000, 16_385)
    found = filters.overlong(lengths, 20_480, Overlong())  # a buffer of 4,096
    assert found == (0.0, -0.5, -1.0, 0.0, -1.0, -1 / 4_096)
    assert all(math.copysign(1.0, found[at]) == 1.0 for at in (0, 3))  # no negative zero
    assert filters.overlong([20_480], 20_480, Overlong(factor=0.5)) == (-0.5,)
    assert filters.overlong([], 9, Overlong()) == ()
    assert filters.overlong([7, 9], 100, Overlong(tokens_max=9, buffer=4)) == (-0.5, -1.0)
    assert filters.overlong([3, 4, 5], 5, Overlong(buffer=9)) == (-0.6, -0.8, -1.0)
    with pytest.raises(ValueError, match="buffer 9"):
        Overlong(tokens_max=8, buffer=9)
    with pytest.raises(ValueError, match="length -1"):
        filters.overlong([-1], 9, Overlong())


# --- variance -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rollouts", range(1, 12))
def test_scores_are_shares_of_the_largest_variance(rollouts: int) -> None:
    every = [
        unbiased_variance([1.0] * right + [0.0] * (rollouts - right)) if rollouts > 1 else 0.0
        for right in range(rollouts + 1)
    ]
    if rollouts % 2 == 0:
        assert near(max(every), rollouts / (4 * (rollouts - 1)), 1e-12)
    elif rollouts > 1:
        assert near(max(every), (rollouts + 1) / (4 * rollouts), 1e-12)
    for right, each in enumerate(every):
        found = each / (max(every) or 1.0)
        rewards = [1.0] * right + [0.0] * (rollouts - right)
        assert near(filters.reward_score(rewards), found, 1e-12)
        assert near(filters.reward_score([3 * r - 1 for r in rewards], 3.0), found, 1e-12)


def test_limits_of_scores() -> None:
    assert near(filters.reward_score([1] * 2 + [0] * 6), 0.75, 1e-12)
    assert filters.reward_score([]) == filters.reward_score([0.4]) == 0.0
    assert filters.reward_score([5.0, -5.0]) == 1.0  # beyond the range that was named
    with pytest.raises(ValueError, match="reward_range nan"):
        filters.reward_score([1, 0], math.nan)
    with pytest.raises(ValueError, match="not all are finite"):
        filters.reward_score([1, math.inf])


def test_dropped_groups_give_their_places_to_the_banks_best() -> None:
    bank = {"old": 0.5, "best": 0.9, "also": 0.5, "mixed": 0.4}
    groups = [view(1, 0, prompt="mixed"), view(1, 1, prompt="best"), view(0, 0, prompt="dull")]
    found = filters.variance(groups, 0.3, bank, Variance())
    assert found.kept == (0,)
    # "best" is in this batch already; of the equal ones the first by name comes first
    assert found.recalled == ("also", "old")
    assert dict(found.bank) == {"best": 0.9, "mixed": pytest.approx(0.9 * 0.4 + 0.1)}
    assert dict(bank)["old"] == 0.5  # nothing was changed in place
    mirrored = filters.variance(groups[::-1], 0.3, bank, Variance())
    assert (mirrored.kept, mirrored.recalled) == ((2,), found.recalled)
    assert mirrored.bank == found.bank


def test_the_bank_is_bounded_and_the_least_score_counts() -> None:
    groups = [view(1, 0, 0, 0, prompt="a"), view(1, 1, 0, 0, prompt="b"), view(1, 0)]
    found = filters.variance(groups, 0.75, {"z": 0.1}, Variance(bank_max=2))
    assert found.kept == (0, 1, 2)  # 0.75 is enough
    assert found.recalled == ()
    assert dict(found.bank) == {"a": 0.75, "b": 1.0}  # what has no name is not stored
    assert filters.variance(groups, 0.76, {}, Variance()).kept == (1, 2)
    assert filters.variance([view(1, 1)], 0.0, {}, Variance()).kept == ()
    assert filters.variance([], 0.5, {}, Variance()).kept == ()
    twice = [view(1, 0, prompt="a"), view(1, 0, 0, 0, prompt="a")]
    ways = {
        tuple(filters.variance(each, 0.1, {}, Variance()).bank.items())
        for each in (twice, twice[::-1])
    }
    assert len(ways) == 1
    with pytest.raises(ValueError, match="score_min nan"):
        filters.variance([], math.nan, {}, Variance())


# --- extremes -------------------------------------------------------------------------------------

VALUES = st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 3.0])


@settings(max_examples=60)
@given(st.lists(st.lists(VALUES | st.none(), max_size=4), max_size=3), st.integers(0, 12))
def test_no_other_choice_varies_more(rows: list[list[float | None]], count: int) -> None:
    groups = [tuple(each) for each in rows]
    found = filters.most_varied(groups, count)
    places = [
        (at, place) for at, row in enumerate(groups) for place, v in enumerate(row) if v is not None
    ]
    assert found == tuple(sorted(set(found)))
    assert set(found) <= set(places)
    assert len(found) == min(count, len(places))

    def spread(chosen: Sequence[tuple[int, int]]) -> float:
        values = [groups[at][place] for at, place in chosen]
        return pvariance([value for value in values if value is not None]) if values else 0.0

    best = max(map(spread, itertools.combinations(places, len(found))))
    assert near(spread(found), best, 1e-9)


def test_rounding_decides_no_tie_of_equally_varied_choices() -> None:
    for unit in (0.1, 0.3, 1.0, 7.0):
        assert filters.most_varied([(-6 * unit, -3 * unit)], 1) == ((0, 1),)
        steps = [tuple(unit * each for each in range(7))]
        assert filters.most_varied(steps, 3) == ((0, 0), (0, 5), (0, 6))
        assert filters.most_varied(steps, 5) == ((0, 0), (0, 1), (0, 4), (0, 5), (0, 6))


def test_the_largest_and_the_most_negative_stay() -> None:
    groups: list[tuple[float | None, ...]] = [(0.1, -0.5, None), (1.6, -0.2), (-0.6, 0.0)]
    assert filters.most_varied(groups, 3) == ((0, 1), (1, 0), (2, 0))
    assert filters.most_varied(groups, 1) == ((1, 0),)  # the farthest from the mean
    assert filters.most_varied([(0.1, -0.5, 0.0)], 1) == ((0, 1),)
    assert filters.most_varied([(0.0,) * 4], 2) == ((0, 0), (0, 3))
    lopsided = [(-3.0, -3.0, *(1.0,) * 6)]  # both far ones would not differ
    assert filters.most_varied(lopsided, 2) == ((0, 0), (0, 7))
    offset = [tuple(1e9 + v for v in (0.0, 1.0, 2.0, 5.0))]
    assert filters.most_varied(offset, 2) == ((0, 0), (0, 3))  # and squares do not drown it
    early = filters.extremes(groups, 0.0, Extremes())
    late = filters.extremes(groups, 1.0, Extremes())
    assert (len(early), len(late)) == (6, 3)
    assert len(filters.extremes(groups, 0.5, Extremes())) == 5  # 0.75 of 6, and up
    assert filters.extremes([], 0.5, Extremes()) == ()
    with pytest.raises(ValueError, match="advantages: not all are finite"):
        filters.most_varied([(math.nan,)], 1)
    with pytest.raises(ValueError, match="progress: no number"):
        filters.extremes(groups, math.nan, Extremes())


def test_shares_move_linearly_between_their_ends() -> None:
    found = [filters.relaxed(1.0, 0.5, at) for at in (-1.0, 0.0, 0.25, 1.0, 7.0)]
    assert found == [1.0, 1.0, 0.875, 0.5, 0.5]


def test_tokens_are_kept_by_advantage_and_entropy() -> None:
    advantages, entropies = (1.0, -2.0, 0.0), ((0.5, 0.1), (0.3, 0.2, 0.01), (9.0,))
    # worth: 0.5 0.1 | 0.6 0.4 0.02 | 0
    half = Extremes(tokens_first=0.5, tokens_last=0.5)
    found = filters.deciding_tokens(advantages, entropies, 0.0, half)
    assert found == ((True, False), (True, True, False), (False,))
    last = filters.deciding_tokens(advantages, entropies, 1.0, Extremes())
    assert sum(map(sum, last)) == 2  # 0.2 of 6, and up
    assert last == ((True, False), (True, False, False), (False,))
    assert filters.deciding_tokens((), (), 0.5, half) == ()
    everything = filters.deciding_tokens(advantages, entropies, 0.0, Extremes())
    assert all(map(all, everything))
    with pytest.raises(ValueError, match="entropies: not all are finite"):
        filters.deciding_tokens((1.0,), ((math.nan,),), 0.0, half)
    with pytest.raises(ValueError, match="shorter"):
        filters.deciding_tokens((1.0,), (), 0.0, half)


# --- successes ------------------------------------------------------------------------------------


def test_a_group_without_a_success_gets_a_stored_one() -> None:
    pool, set_to = "abc", PoolOfSuccesses(injected=2)
    drawn = [replay.pool_of_successes(pool, (0, 0.5), Random(seed), set_to) for seed in range(60)]
    assert {frozenset(each) for each in drawn} == {frozenset(p) for p in ("ab", "bc", "ac")}
    many = PoolOfSuccesses(injected=9)
    assert sorted(replay.pool_of_successes(pool, (), Random(0), many)) == ["a", "b", "c"]
    assert replay.pool_of_successes(pool, (0, 1), Random(0), set_to) == ()
    assert replay.pool_of_successes("", (0, 0), Random(0), set_to) == ()
    with pytest.raises(ValueError, match="rewards: not all are finite"):
        replay.pool_of_successes(pool, (math.nan,), Random(0), set_to)


def test_rare_successes_come_again() -> None:
    pool, set_to = "ab", ReplayedSuccesses()

    def count(*rewards: float) -> int:
        return len(replay.replayed_successes(pool, rewards, Random(0), set_to))

    assert count(1, 0, 0, 0) == count(0, 0, 0, 0) == 2
    assert count(1, 1, 0, 0) == count(1, 0, 0) == count(1, 1) == count() == 0


# --- salvage --------------------------------------------------------------------------------------


@given(st.text(alphabet="ab \n\r", max_size=30))
def test_steps_put_together_are_the_text(text: str) -> None:
    steps = replay.steps_of(text)
    assert "".join(steps) == text
    assert all(steps)
    if text.strip():
        assert all(step.strip() for step in steps)
        assert not any(step[0].isspace() and not step.splitlines()[0].strip() for step in steps[1:])


def test_steps_end_with_blank_lines() -> None:
    assert replay.steps_of("\none\ntwo\n\n \nthree\n\n") == ("\none\ntwo\n\n \n", "three\n\n")
    assert replay.steps_of("") == ()
    assert len(replay.steps_of("\n" * 200_000)) == 1  # which is not slow either


def test_what_is_right_before_the_first_wrong_step_is_kept() -> None:
    text = "1 + 1 = 2\n\n2 + 2 = 5\n\nso 7"

    def judge(steps: Sequence[str]) -> int | None:
        return next((at for at, step in enumerate(steps) if "5" in step), None)

    found = replay.salvage(text, judge, Salvage())
    assert found == SalvagedAnswer("1 + 1 = 2\n\n", 1, "2 + 2 = 5\n\nso 7")
    assert replay.salvage(text, judge, Salvage(steps_min=2)) is None
    assert replay.salvage("5\n\n6", judge, Salvage()) is None
    assert replay.salvage("6\n\n6", judge, Salvage()) is None
    assert replay.salvage("", lambda _: 0, Salvage()) is None
    asked: list[Any] = []
    assert replay.salvage(text, lambda steps: asked.append(steps), Salvage(steps_max=2)) is None  # type: ignore[func-returns-value]
    assert asked == []
    for wrong in (3, -1):
        with pytest.raises(ValueError, match=f"finds step {wrong} wrong of 3"):
            replay.salvage(text, lambda _, wrong=wrong: wrong, Salvage())  # type: ignore[misc]


def test_the_weight_of_distillation_falls_to_its_last_one() -> None:
    set_to = replay.Distil(weight=0.4, weight_last=0.1, steps=10)
    assert [replay.distil_weight(step, set_to) for step in (0, 5, 10, 99)] == pytest.approx(
        [0.4, 0.25, 0.1, 0.1]
    )
