"""The pacing depth: as small as the links allow, and no up and down."""

import random
from dataclasses import replace

import pytest

from coordinator.model.pacing import Measured, Pacing, PacingRules, next_pacing
from swarm.errors import ConfigError

RULES = PacingRules(steps=5, calm_steps=50)
FINE = Measured(
    step=100,
    bound=6,
    least=2,
    idle_share=0.05,
    predicted_idle_share=0.05,
    refused=0,
    effective_share=0.9,
    mismatch_k3=0.001,
)
STARVED = replace(FINE, idle_share=0.5, refused=3)


def test_it_goes_from_the_bound_to_what_the_links_allow() -> None:
    moved = next_pacing(Pacing(6), FINE, RULES)
    assert moved.depth == 2
    assert next_pacing(moved, replace(FINE, step=1_000), RULES) == moved


def test_links_that_allow_less_raise_it_at_once() -> None:
    low = Pacing(2, since=100)
    assert next_pacing(low, replace(FINE, step=101, least=4), RULES).depth == 4
    assert next_pacing(low, replace(FINE, step=101, least=9), RULES).depth == 6  # never over S
    assert next_pacing(Pacing(6), replace(FINE, bound=3), RULES).depth == 3


def test_what_was_asked_for_is_planned_but_not_beyond_the_bound() -> None:
    wanted = replace(RULES, depth=3)
    assert next_pacing(Pacing(6), STARVED, wanted).depth == 3
    assert next_pacing(Pacing(3), STARVED, wanted) == Pacing(3)
    assert next_pacing(Pacing(3), replace(FINE, bound=2), wanted).depth == 2
    assert next_pacing(Pacing(3, since=1), FINE, RULES).depth == 2  # taken back


def test_where_nothing_is_known_of_the_links_it_stays_as_it_is() -> None:
    assert next_pacing(Pacing(6), replace(FINE, least=None), RULES).depth == 6
    assert next_pacing(Pacing(4, since=1), replace(FINE, least=None), RULES).depth == 4
    ill = replace(FINE, least=None, mismatch_k3=9.0)
    assert next_pacing(Pacing(4, since=1), ill, RULES).depth == 4


def test_links_raise_nothing_while_training_is_ill() -> None:
    ill = replace(FINE, least=5, effective_share=0.01)
    assert next_pacing(Pacing(2, since=1), ill, RULES).depth == 2


def test_starvation_raises_it_only_while_training_is_healthy() -> None:
    low = Pacing(2, since=90)
    assert next_pacing(low, STARVED, RULES).depth == 3
    assert next_pacing(low, replace(STARVED, refused=0), RULES).depth == 2  # it waits for others
    assert next_pacing(low, replace(STARVED, effective_share=0.4), RULES).depth == 2
    assert next_pacing(low, replace(STARVED, mismatch_k3=0.1), RULES).depth == 2
    assert next_pacing(low, replace(STARVED, effective_share=None), RULES).depth == 2
    assert next_pacing(Pacing(6, since=90), STARVED, RULES).depth == 6  # the bound is hard


def test_illness_lowers_it_but_not_below_what_the_links_allow() -> None:
    ill = replace(FINE, mismatch_k3=0.2)
    assert next_pacing(Pacing(4, since=90), ill, RULES).depth == 3
    assert next_pacing(Pacing(2, since=90), ill, RULES).depth == 2


def test_a_change_has_to_show_before_the_next() -> None:
    assert next_pacing(Pacing(2, since=97), STARVED, RULES).depth == 2
    assert next_pacing(Pacing(2, since=95), STARVED, RULES).depth == 3


def test_a_depth_that_starved_is_tried_ever_more_rarely() -> None:
    """The learner starves at 2 and not at 3, for a long time."""
    pacing, moves = Pacing(2, since=1), []
    for step in range(6, 5_000):
        seen = replace(STARVED if pacing.depth <= 2 else FINE, step=step)
        moved = next_pacing(pacing, seen, RULES)
        if moved.depth != pacing.depth:
            moves.append(step)
        pacing = moved
    assert len(moves) <= 14
    gaps = [later - earlier for earlier, later in zip(moves[::2], moves[2::2], strict=False)]
    assert gaps == sorted(gaps)


def test_a_row_of_failures_ends_where_a_depth_holds() -> None:
    """Eight troubles with 20,000 healthy steps between them are eight first ones."""
    pacing, high = Pacing(2, since=1), []
    for _ in range(8):
        at = pacing.since + 20_000
        pacing = next_pacing(pacing, replace(STARVED, step=at), RULES)
        assert pacing.depth == 3
        for step in range(at + 1, at + 20_000):
            pacing = next_pacing(pacing, replace(FINE, step=step), RULES)
            if pacing.depth == 2:
                high.append(step - at)
                break
    assert high == [100] * 8


def test_noise_causes_no_flapping() -> None:
    """Idle shares that jump about their prediction by less than the rules allow."""
    rng, pacing = random.Random(1), Pacing(6)
    moves = 0
    for step in range(6, 2_000):
        seen = replace(FINE, step=step, idle_share=0.05 + 0.09 * rng.random(), refused=1)
        moved = next_pacing(pacing, seen, RULES)
        moves += moved.depth != pacing.depth
        pacing = moved
    assert moves == 1


@pytest.mark.parametrize(
    "changes",
    [{"effective_share_min": 1.5}, {"idle_share_max": -0.1}, {"mismatch_k3_max": float("nan")},
     {"steps": 0}, {"calm_steps": 0}],
)  # fmt: skip
def test_bad_rules_are_refused_by_name(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        PacingRules(**changes)
