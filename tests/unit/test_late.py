"""How many places slow peers hold, and who gives way."""

from random import Random

import pytest

from swarm.exchange.fetching import BATCHES_FACTOR, LATE_FACTOR, Trials, to_give_up
from swarm.limits.quotas import RELAYED

PARALLEL = 4
MOST = LATE_FACTOR * PARALLEL


def test_some_batches_are_never_late_ones() -> None:
    assert LATE_FACTOR < BATCHES_FACTOR


def test_nothing_is_given_up_within_the_bounds() -> None:
    assert to_give_up([], PARALLEL) is None
    assert to_give_up(["block"] * PARALLEL, PARALLEL) is None
    assert to_give_up([RELAYED] * (MOST // 2), PARALLEL) is None
    assert to_give_up([f"peer {n}" for n in range(MOST)], PARALLEL) is None


def test_one_block_has_its_part_and_its_oldest_gives_way() -> None:
    waiting = ["a", "block", "b", "block", "block", "block", "c"]
    assert to_give_up(waiting, PARALLEL) is None
    assert to_give_up([*waiting, "block"], PARALLEL) == 1
    assert to_give_up(["a", *[RELAYED] * (MOST // 2 + 1)], PARALLEL) == 1


def test_of_too_many_in_all_the_oldest_of_the_greatest_crowd_gives_way() -> None:
    alone = [f"peer {n}" for n in range(MOST - 2)]
    assert to_give_up([*alone, "two", "two", "one"], PARALLEL) == len(alone)
    assert to_give_up([*alone, "x", "y", "z"], PARALLEL) == 0


@pytest.mark.parametrize("seed", range(20))
def test_however_many_come_late_the_bounds_hold(seed: int) -> None:
    rng, waiting = Random(seed), list[str]()
    for _ in range(300):
        waiting.append(rng.choice(["block", "block", RELAYED, f"peer {rng.randrange(99)}"]))
        at = to_give_up(waiting, PARALLEL)
        if at is not None:
            del waiting[at]
        assert to_give_up(waiting, PARALLEL) is None
        assert len(waiting) <= MOST
        assert waiting.count("block") <= PARALLEL
        assert waiting.count(RELAYED) <= MOST // 2
        if rng.random() < 0.3:
            del waiting[rng.randrange(len(waiting))]


def taken(trials: Trials, kinds: str) -> str:
    """Which of some producers are tried: quick, slow, unproven, by their first letters."""
    return "".join(k for k in kinds if trials.take(k != "u", k == "s"))


def test_one_place_is_for_who_delivers_in_time() -> None:
    for kinds in ("ssssuuuuqq", "uuuussssqq", "susususuqq"):
        tried = taken(Trials.left(PARALLEL, [], []), kinds)
        assert tried.count("s") <= 2
        assert tried.count("u") <= 2
        assert tried.count("s") + tried.count("u") == PARALLEL - 1
        assert tried.endswith("qq")


def test_those_under_way_count_until_they_are_late() -> None:
    assert taken(Trials.left(PARALLEL, [False], [False, False]), "us") == ""
    assert taken(Trials.left(PARALLEL, [True], [True, True]), "uuus") == "uus"
    assert taken(Trials.left(PARALLEL, [True] * (BATCHES_FACTOR * PARALLEL // 2), []), "us") == "s"


def test_with_one_place_everybody_gets_it_in_turn() -> None:
    assert taken(Trials.left(1, [], []), "ssuu") == "s"
    assert taken(Trials.left(1, [], [True, True]), "uss") == "u"
