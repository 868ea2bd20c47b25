"""The gain from sharing, found in a node's rounds."""

from dataclasses import replace
from math import inf

import pytest

from node.config import NodeConfig
from node.engines.scripted import ScriptedPolicy
from node.observe.usefulness import (
    ROUNDS_MIN,
    advice,
    saved,
    saved_text,
    usefulness,
)
from tests.unit.monitor_records import round_done
from tests.unit.simulated_pair import rounds_beside
from tests.unit.tasks_support import make_run


def rounds_with(own: int, foreign: int, train_s: float = 2.0, count: int = ROUNDS_MIN):
    made = replace(
        round_done(1), local_groups=4, own_informative=own, informative_groups=own + foreign,
        external_groups=foreign, generated_tokens=400, generate_s=4.0, score_s=0.0,
        train_s=train_s,
    )  # fmt: skip
    return [made] * count


def test_rounds_tell_what_sharing_brought():
    found = usefulness(rounds_with(own=1, foreign=3, train_s=4.0), 4)
    assert found is not None
    assert found.per_token == 4.0
    # Alone: one group for 4 s of generating and a quarter of 4 s of training.
    assert found.per_second == pytest.approx((4 / 8) / (1 / 5))


def test_a_session_says_what_it_saved():
    found = saved(rounds_with(own=2, foreign=1))
    assert found is not None
    assert (found.foreign, found.own, found.seconds) == (ROUNDS_MIN, 2 * ROUNDS_MIN, 20.0)
    assert found.tokens == (2000.0, 2000.0, 2000.0)  # half of 400 in each round, always
    text = saved_text(rounds_with(own=2, foreign=1))
    assert "10 groups of others taught beside 20 of your own" in text
    assert "about 2.00 k more tokens (2.00 k to 2.00 k), 20 s of generating" in text


def test_the_interval_of_what_was_saved_is_that_of_rounds():
    made = [*rounds_with(own=2, foreign=0, count=50), *rounds_with(own=2, foreign=2, count=50)]
    found = saved(made)
    assert found is not None
    # by hand: half of the rounds are one standard deviation of 1 group off, of 2 own a round
    tokens, low, high = found.tokens
    assert tokens == 20_000.0
    half = 1.96 * 10 / 200 * 40_000
    assert [high - tokens, tokens - low] == pytest.approx([half, half])
    assert saved(rounds_with(0, 3)) is saved(rounds_with(1, 1, count=3)) is None
    assert saved_text(rounds_with(own=2, foreign=0)) == ""


def test_few_rounds_say_nothing():
    assert usefulness(rounds_with(1, 3, count=ROUNDS_MIN - 1), 4) is None


@pytest.mark.parametrize(
    ("own", "foreign", "train_s", "wanted", "said"),
    [
        (1, 3, 1.0, 3, "a higher --external"),
        (1, 3, 1.0, 8, "found 3.0 of 8.0 that it wanted"),
        (4, 0, 1.0, 4, "found as many"),
        (0, 2, 1.0, 2, "All that this node learned"),
        (0, 0, 1.0, 4, "No group taught anything"),
        (1, 3, 1.0, 0, "takes no groups"),
    ],
)
def test_the_advice_is_one_sentence(own, foreign, train_s, wanted, said):
    found = usefulness(rounds_with(own, foreign, train_s), wanted)
    assert found is not None
    assert said in advice(found)
    assert "inf" not in advice(found)


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({"a": 2, "b": 1}, "more nodes would bring more"),
        ({"a": 1, "b": 1, "c": 1}, "would bring nothing"),
        ({"a": 3}, "would bring nothing"),  # of the only one there is no bound
    ],
)
def test_the_bound_of_one_node_is_not_taken_for_what_there_is(counts, said):
    made = [replace(each, foreign_by_producer=counts) for each in rounds_with(1, 3)]
    found = usefulness(made, 8)
    assert found is not None
    assert said in advice(found)


def test_what_a_hint_taught_came_of_others():
    made = [replace(each, hinted_groups=3, hinted_taught=2) for each in rounds_with(3, 1)]
    found = usefulness(made, 4)
    assert found is not None
    assert (found.own, found.foreign) == (1.0, 3.0)


def test_a_node_that_generates_nothing_learns_from_others():
    made = [replace(each, local_groups=0, generated_tokens=0) for each in rounds_with(0, 4)]
    found = usefulness(made, 4)
    assert found is not None
    assert advice(found).startswith("All that this node learned")


def test_hardly_any_own_groups_are_no_factor_of_hundreds():
    found = usefulness([*rounds_with(0, 4, count=199), *rounds_with(1, 3, count=1)], 4)
    assert found is not None
    assert "more than 20 times" in advice(found)


def test_what_rescued_a_group_came_of_others():
    made = [replace(each, rescued_groups=3) for each in rounds_with(1, 0)]
    found = usefulness(made, 4)
    assert found is not None
    assert (found.foreign, found.per_token) == (3.0, 4.0)


def test_a_round_says_what_it_wanted_and_an_old_log_does_not_say_what_taught():
    made = [replace(each, external_wanted=4) for each in rounds_with(1, 4)]
    found = usefulness([*made, *(replace(each, external_wanted=2) for each in made)], 8)
    assert found is not None
    assert found.wanted == 3.0
    assert usefulness([replace(each, own_informative=None) for each in made], 4) is None


def test_training_alone_never_makes_sharing_slower_than_being_alone():
    found = usefulness(rounds_with(1, 7, train_s=1e6), 8)
    assert found is not None
    assert found.per_second == pytest.approx(1.0, abs=1e-4)
    assert found.per_token < inf


def test_a_node_shows_what_sharing_brings_once_it_can_be_said():
    run = make_run({"name": "scripted_sum", "parameters": {"max": 5_000}})
    config = NodeConfig(run=run, local_groups=2, external_groups=2, group_size=4, rounds=12)
    shown = []
    rounds = rounds_beside(
        config, ScriptedPolicy(skill=0.1), config, ScriptedPolicy(skill=0.5), shown
    )
    told = [each.sharing_per_token for each in shown]
    assert told[: ROUNDS_MIN - 1] == [None] * (ROUNDS_MIN - 1)
    found = usefulness(rounds, 2)
    assert found is not None
    assert told[-1] == pytest.approx(found.per_token)
    assert told[-1] > 1.0
    alone = config.model_copy(update={"external_groups": 0})
    shown.clear()
    rounds_beside(alone, ScriptedPolicy(skill=0.5), config, ScriptedPolicy(skill=0.5), shown)
    assert [each.sharing_per_token for each in shown] == [None] * 12
