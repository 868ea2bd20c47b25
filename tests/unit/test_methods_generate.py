"""What generation decides, against worked examples, limiting cases and slow definitions."""

import itertools
import math
from functools import cache
from random import Random
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.methods import generation, hints
from node.methods.generation import Branching, Pruning, Purify, Speculative, WeightNoise
from node.methods.hints import Hints, Nudges

STRICT = Speculative(lenience=0.0)


def near(found: float, wanted: float, within: float = 1e-4) -> bool:
    return math.isclose(found, wanted, rel_tol=0.0, abs_tol=within)


# --- speculative ----------------------------------------------------------------------------------


def test_tokens_may_become_less_likely_by_the_lenience() -> None:
    gaps = (0.1, -0.3, -0.5, -1.0, -2.0)
    old = (-1.0,) * 5
    new = tuple(-1.0 + gap for gap in gaps)
    found = generation.keeping_probabilities(old, new, Speculative())
    wanted = (1.0, 1.0, 1.0, 0.6065, 0.2231)
    assert all(near(a, b) for a, b in zip(found, wanted, strict=True))
    draws = (0.99, 0.99, 0.99, 0.6, 0.3)
    assert generation.speculative(old, new, draws, Speculative()) == 4
    assert generation.speculative(old, new, (0.99,) * 3 + (0.61, 0.0), Speculative()) == 3
    assert generation.speculative(old, new, (0.0,) * 5, Speculative()) == 5
    assert generation.speculative(old, new, (0.99,) * 9, STRICT) == 1
    assert generation.speculative((), (), (), STRICT) == 0


def test_what_is_impossible_by_now_is_never_kept() -> None:
    assert generation.speculative((-1.0,), (-math.inf,), (0.0,), Speculative(lenience=20)) == 0
    rare = Speculative(probability_min=0.1)
    assert generation.keeping_probabilities((-1.0, -3.0), (-2.4, -2.2), rare) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("old", "new", "uniforms", "why"),
    [
        ((math.nan,), (-1.0,), (0.5,), "log-probs nan and -1.0"),
        ((-math.inf,), (-1.0,), (0.5,), "log-probs -inf and -1.0"),
        ((-1.0,), (math.nan,), (0.5,), "log-probs -1.0 and nan"),
        ((-1.0,), (math.inf,), (0.5,), "log-probs -1.0 and inf"),
        ((-1.0,), (), (0.5,), "1 log-probs of before and 0 of now"),
        ((-1.0,), (-1.0,), (), "0 random numbers for 1 tokens"),
        ((-1.0,), (-1.0,), (1.0,), "1.0: not in"),
        ((-1.0,), (-1.0,), (math.nan,), "nan: not in"),
    ],
)
def test_what_no_token_has_is_named(old: Any, new: Any, uniforms: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        generation.speculative(old, new, uniforms, STRICT)


def test_as_much_is_kept_as_two_distributions_share() -> None:
    before, now = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)
    rng, draws, length = Random(2), 8_000, 4
    kept = []
    for _ in range(draws):
        tokens = rng.choices(range(3), before, k=length)
        old = [math.log(before[token]) for token in tokens]
        new = [math.log(now[token]) for token in tokens]
        kept.append(generation.speculative(old, new, [rng.random() for _ in range(length)], STRICT))
    shared = sum(map(min, before, now))  # 0.7: of tokens of before, those that are kept
    wanted = sum(shared**at for at in range(1, length + 1))
    assert abs(fmean(kept) - wanted) < 4 * 1.7 / math.sqrt(draws)
    first = fmean(each > 0 for each in kept)
    assert abs(first - shared) < 4 * math.sqrt(shared * (1 - shared) / draws)


@given(st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0), st.floats(0, 0.99)), max_size=9))
def test_more_lenience_never_keeps_less(drawn: list[tuple[float, float, float]]) -> None:
    old, new, uniforms = ([each[at] for each in drawn] for at in range(3))
    found = [
        generation.speculative(old, new, uniforms, Speculative(lenience=lenience))
        for lenience in (-1.0, 0.0, 0.5, 20.0)
    ]
    assert found == sorted(found)
    assert found[-1] == len(drawn)


# --- noise ----------------------------------------------------------------------------------------


def test_noise_shrinks_by_stages() -> None:
    found = [generation.stage_noise(stage, WeightNoise()) for stage in range(10)]
    wanted = [0, 1e-2, 5.62e-3, 3.16e-3, 1.78e-3, 1e-3, 5.62e-4, 3.16e-4, 1.78e-4, 1e-4]
    assert found[0] == 0.0
    assert all(math.isclose(a, b, rel_tol=2e-3) for a, b in zip(found[1:], wanted[1:], strict=True))
    by_step = [generation.noise(step, 20, WeightNoise()) for step in (0, 1, 2, 3, 19, 20, 999)]
    assert by_step == [0.0, 0.0, found[1], found[1], found[9], found[9], found[9]]
    few = [generation.stage_noise(stage, WeightNoise(stages=2)) for stage in range(2)]
    assert few == [0.0, 1e-2]
    assert generation.noise(7, 9, WeightNoise(stages=1)) == 0.0
    with pytest.raises(ValueError, match="stage 10 of 10"):
        generation.stage_noise(10, WeightNoise())
    with pytest.raises(ValueError, match="steps 0: below 1"):
        generation.noise(0, 0, WeightNoise())


# --- pruning --------------------------------------------------------------------------------------

EAGER = Pruning(uniform_steps=0)


def shares_of(found: tuple[float, ...], chances: list[float]) -> tuple[float, float]:
    """The expected share that goes on, and that of right ones among them."""
    right = sum(q * p for q, p in zip(found, chances, strict=True))
    return fmean(found), right / sum(found)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.1, 1.0))
def test_both_expectations_hold_as_far_as_they_can(chances: list[float], kept: float) -> None:
    set_to = Pruning(kept_share=kept, uniform_steps=0)
    found = generation.pruning(chances, 0, set_to)
    share, positive = shares_of(found, chances)
    assert near(share, kept, 1e-6)
    assert all(0.05 - 1e-9 <= each <= 1.0 for each in found)
    # What can be had at most and at least: all above the floor goes to the best, or to the worst.
    bounds = []
    for order in (sorted(chances), sorted(chances, reverse=True)):
        left = (kept - 0.05) / 0.95 * len(chances)
        mass = []
        for _ in order:
            mass.append(0.05 + 0.95 * min(1.0, max(0.0, left)))
            left -= 1.0
        bounds.append(sum(m * p for m, p in zip(mass, order, strict=True)) / sum(mass))
    aim = min(max(0.5, bounds[0]), bounds[1])
    assert near(positive, aim, 5e-3)
    ordered = [q for _, q in sorted(zip(chances, found, strict=True))]
    assert ordered in (sorted(ordered), sorted(ordered, reverse=True))


def test_right_ones_are_given_up_where_most_are_right() -> None:
    chances = [0.9, 0.9, 0.9, 0.2, 0.8, 0.1]
    found = generation.pruning(chances, 20, Pruning())
    share, positive = shares_of(found, chances)
    assert near(share, 0.5, 1e-9)
    assert near(positive, 0.5, 1e-6)
    assert found[5] > found[3] > found[4] > found[0]
    turned = generation.pruning(chances[::-1], 20, Pruning())
    assert all(near(a, b, 1e-9) for a, b in zip(turned[::-1], found, strict=True))


def test_limits_of_pruning() -> None:
    assert generation.pruning([0.1, 0.9], 19, Pruning()) == (1.0, 1.0)
    assert generation.pruning([], 20, Pruning()) == ()
    assert generation.pruning([0.3], 20, Pruning()) == (0.5,)
    assert generation.pruning([0.0] * 3, 20, Pruning()) == (0.5,) * 3
    assert generation.pruning([0.0, 1.0], 20, Pruning(kept_share=1.0)) == (1.0, 1.0)
    found = generation.pruning([0.0, 1.0, 0.0, 1.0], 20, Pruning())
    assert all(near(each, 0.5, 1e-6) for each in found)
    for wrong, why in ((math.nan, "chance nan"), (1.1, "chance 1.1")):
        with pytest.raises(ValueError, match=why):
            generation.pruning([wrong], 20, Pruning())
    with pytest.raises(ValueError, match="over 1024"):
        generation.pruning([0.5] * 1_025, 20, Pruning())
    with pytest.raises(ValueError, match=r"spared 0\.6"):
        generation.pruning([0.5], 20, Pruning(spared=0.6))


def test_a_weighted_mean_of_survivors_is_that_of_all() -> None:
    chances = [0.9, 0.7, 0.9, 0.2, 0.8, 0.1]
    found, rng, draws = generation.pruning(chances, 0, EAGER), Random(4), 20_000
    weighted, counts = 0.0, 0
    for _ in range(draws):
        alive = generation.survivors(found, rng)
        counts += len(alive)
        weighted += sum(chances[place] / found[place] for place in alive)
    variance = sum(p * p * (1 - q) / q for p, q in zip(chances, found, strict=True)) / draws
    assert abs(weighted / draws - sum(chances)) < 4 * math.sqrt(variance)
    assert abs(counts / draws - 3.0) < 0.05
    assert generation.survivors([1.0, 0.0, 1.0], rng) == (0, 2)
    with pytest.raises(ValueError, match="propensity nan"):
        generation.survivors([math.nan], rng)


# --- branching ------------------------------------------------------------------------------------


def test_a_rollout_branches_where_two_tokens_are_as_likely() -> None:
    def does(first: float, second: float, token: int = 0, leaves: int = 1) -> bool:
        return generation.branching(first, second, token, leaves, Branching())

    assert does(0.4, 0.2)
    assert does(0.5, 0.5)
    assert not does(0.35, 0.15)  # not above the least
    assert not does(0.6, 0.3)  # leads by too much
    assert not does(0.5, 0.25)  # leads by the bound itself
    assert does(0.4, 0.2, 1_023, 7)
    assert not does(0.4, 0.2, 1_024)
    assert not does(0.4, 0.2, 0, 8)
    for wrong in ((0.2, 0.4), (0.9, 0.2)):
        with pytest.raises(ValueError, match="not the two likeliest"):
            does(*wrong)
    with pytest.raises(ValueError, match="second nan"):
        does(0.5, math.nan)


WORDS = st.text(alphabet="abc", max_size=7)


@given(WORDS, WORDS)
def test_edit_distance_against_its_definition(first: str, second: str) -> None:
    @cache
    def slow(left: int, right: int) -> int:
        if not left or not right:
            return left + right
        return min(
            slow(left - 1, right) + 1,
            slow(left, right - 1) + 1,
            slow(left - 1, right - 1) + (first[left - 1] != second[right - 1]),
        )

    assert generation.edit_distance(first, second) == slow(len(first), len(second))


def test_a_branch_that_says_the_same_is_cut() -> None:
    parent = list(range(20))
    differing = [*range(12), *range(100, 108)]  # 8 of 20: the bound itself
    assert generation.edit_distance("kitten", "sitting") == 3
    assert generation.is_cut(parent, parent, Branching())
    assert generation.is_cut(parent, [*range(13), *range(100, 107)], Branching())
    assert not generation.is_cut(parent, differing, Branching())
    assert not generation.is_cut(parent[:19], parent[:19], Branching())  # not looked at yet
    assert generation.is_cut([*parent, *range(30)], parent, Branching())  # went further
    assert not generation.is_cut([], parent, Branching())
    assert not generation.is_cut(parent, parent, Branching(look_ahead=()))
    for wrong in (0, 513):
        with pytest.raises(ValueError, match="not within 1 and 512"):
            generation.is_cut(parent, parent, Branching(look_ahead=(wrong,)))


def test_fewer_rollouts_are_trees_later() -> None:
    found = [generation.tree_share(step, Branching()) for step in (0, 99, 100, 250, 300, 9_999)]
    assert found == [1.0, 1.0, 0.75, 0.5, 0.25, 0.25]
    turned = Branching(tree_shares=((50, 0.5), (10, 1.0)))
    assert [generation.tree_share(step, turned) for step in (0, 10, 50)] == [0.0, 1.0, 0.5]
    with pytest.raises(ValueError, match="tree share 2"):
        generation.tree_share(0, Branching(tree_shares=((0, 2.0),)))


# --- purify ---------------------------------------------------------------------------------------


def test_tokens_that_two_policies_see_most_unlike_leave() -> None:
    policy, reference = [-1.0] * 10, [-1.0] * 10
    reference[3], reference[7] = -4.0, 3.0 - 1.5
    found = generation.purify(policy, reference, Purify(share=0.15))  # 2 of 10: ceil(1.5)
    assert found == (0, 1, 2, 4, 5, 6, 8, 9)
    assert generation.purify(policy, reference, Purify(share=0.1)) == (
        0,
        1,
        2,
        4,
        5,
        6,
        7,
        8,
        9,
    )
    assert generation.purify(policy, reference, Purify(share=0.1), fixed={3}) == (
        0, 1, 2, 3, 4, 5, 6, 8, 9,
    )  # fmt: skip
    assert generation.purify(policy[:3], policy[:3], Purify()) == (
        1,
        2,
    )  # of equal ones the first
    assert generation.purify([-1.0], [-9.0], Purify()) == (0,)  # never all
    assert generation.purify([], [], Purify()) == ()
    assert generation.purify(policy, reference, Purify(), fixed=range(10)) == tuple(range(10))
    for wrong in (math.nan, -math.inf):
        with pytest.raises(ValueError, match="policy: not all are finite"):
            generation.purify([wrong], [-1.0], Purify())
    with pytest.raises(ValueError, match="1 log-probs of the policy, 0"):
        generation.purify([-1.0], [], Purify())


@given(st.lists(st.floats(-20, 0), min_size=2, max_size=40), st.sampled_from([0.01, 0.05, 0.3]))
def test_no_token_that_stays_differs_more(policy: list[float], share: float) -> None:
    kept = generation.purify(policy, [-3.0] * len(policy), Purify(share=share))
    gone = set(range(len(policy))) - set(kept)
    assert len(gone) == min(math.ceil(share * len(policy) - 1e-9), len(policy) - 1)
    gaps = [abs(each + 3.0) for each in policy]
    assert min(gaps[place] for place in gone) >= max(gaps[place] for place in kept)


def test_failures_give_their_places_to_successes() -> None:
    original = [False, True, False, False]
    out, of = generation.replaced(original, [True, False, True], Random(0))
    assert (len(out), of) == (2, (0, 2))
    drawn = {generation.replaced(original, [True], Random(seed))[0] for seed in range(40)}
    assert drawn == {(0,), (2,), (3,)}
    assert generation.replaced([True, True], [True], Random(0)) == ((), ())
    assert generation.replaced([], [], Random(0)) == ((), ())
    assert [generation.is_purified(each, Purify()) for each in ([True, False], [False], [])] == [
        False, True, False,
    ]  # fmt: skip
    set_to = Purify(original_weight=0.75)
    assert [generation.success_weight(each, set_to) for each in (True, False)] == [
        0.75,
        0.25,
    ]


# --- hints ----------------------------------------------------------------------------------------


def test_hard_tasks_get_more_of_a_hint_and_later_ones_less() -> None:
    set_to = Hints(share_max=0.8, success_max=0.5, steps=100)
    found = [hints.hints(success, 0, set_to) for success in (0.0, 0.25, 0.5, 1.0)]
    assert found == [0.8, 0.4, 0.0, 0.0]
    assert [hints.hints(0.0, step, set_to) for step in (50, 100, 999)] == [0.4, 0.0, 0.0]
    with pytest.raises(ValueError, match="success nan"):
        hints.hints(math.nan, 0, set_to)
    with pytest.raises(ValueError, match="step -1"):
        hints.hints(0.0, -1, set_to)
    tokens = [hints.hint_tokens(10, share) for share in (0.0, 0.3, 0.39, 1.0)]
    assert tokens == [0, 3, 3, 9]
    assert hints.hint_tokens(0, 1.0) == hints.hint_tokens(1, 1.0) == 0
    with pytest.raises(ValueError, match="share nan"):
        hints.hint_tokens(3, math.nan)


def test_nudges_are_dropped_as_a_binomial_number() -> None:
    bare = hints.nudges(Random(0), 8, Nudges(dropped=1.0))
    named = hints.nudges(Random(0), 8, Nudges(dropped=0.0))
    assert bare == (None,) * 8
    assert named == (0, 0, 0, 0, 1, 1, 1, 1)
    uneven = hints.nudges(Random(0), 5, Nudges(dropped=0.0, strategies=3))
    assert uneven == (0, 0, 1, 1, 2)
    rng, draws = Random(6), 4_000
    counts = dict.fromkeys(itertools.product(range(2), range(5)), 0)
    for _ in range(draws):
        found = hints.nudges(rng, 8, Nudges(dropped=0.25))
        assert {each for each in found[:4] if each is not None} <= {0}
        for strategy in range(2):
            counts[strategy, found[4 * strategy : 4 * strategy + 4].count(None)] += 1
    for (_, dropped), count in counts.items():
        wanted = math.comb(4, dropped) * 0.25**dropped * 0.75 ** (4 - dropped)
        assert abs(count / draws - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / draws)
