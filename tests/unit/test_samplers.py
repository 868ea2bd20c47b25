"""The sampling rule and the advantages, against their definitions."""

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.methods.advantages import grpo_advantages
from node.methods.samplers import distinct, draw_foreign, kept_completions, within_unknown_share
from node.verify.assignment import common_task
from swarm.exchange.pool import Candidate
from swarm.identity import PeerId
from swarm.rollouts import GroupId, ScoredGroup
from tests.unit.tasks_support import ALICE, BOB, make_group, make_run


def candidate(number: int, producer: str, rewards: tuple[float, ...] = (1.0, 0.0)) -> Candidate:
    return Candidate(GroupId(number.to_bytes(32, "big")), PeerId(producer), rewards, 1, 0)


def test_equal_rewards_are_never_drawn() -> None:
    flat = [candidate(n, "a", (r, r, r)) for n, r in enumerate([0.0, 1.0, 0.01, 0.5] * 10)]
    useful = [candidate(100 + n, "b") for n in range(3)]
    for seed in range(50):
        drawn = draw_foreign(flat + useful, 4, Random(seed))
        assert sorted(drawn) == sorted(c.group_id for c in useful)


def test_draws_are_uniform_over_groups_whatever_the_producer_and_the_order() -> None:
    # chi-square over 24 groups of 4 producers with very unequal numbers of groups
    groups = [candidate(n, "abcd"[min(n // 2, 3)]) for n in range(24)]
    counts: Counter[GroupId] = Counter()
    draws, each = 6000, 4
    rng = Random(1)
    for _ in range(draws):
        shuffled = groups[:]
        rng.shuffle(shuffled)
        counts.update(draw_foreign(shuffled, each, rng))
    expected = draws * each / len(groups)
    chi_square = sum((counts[c.group_id] - expected) ** 2 / expected for c in groups)
    assert chi_square < 49.7, chi_square  # 99.9 % quantile with 23 degrees of freedom


def test_order_of_arrival_does_not_change_the_draw() -> None:
    groups = [candidate(n, "a") for n in range(20)]
    assert draw_foreign(groups, 5, Random(3)) == draw_foreign(groups[::-1], 5, Random(3))
    assert draw_foreign(groups, 5, Random(3)) != draw_foreign(groups, 5, Random(4))


def test_no_group_is_drawn_twice() -> None:
    groups = [candidate(n, "a") for n in range(20)]
    drawn = draw_foreign(groups, 20, Random(0))
    assert len(set(drawn)) == 20


def test_no_producer_gets_more_than_its_places_when_there_are_others() -> None:
    groups = [candidate(n, "flood") for n in range(100)]
    groups += [candidate(200 + n, "other") for n in range(3)]
    owner = {c.group_id: c.producer for c in groups}
    for seed in range(50):
        counts = Counter(owner[each] for each in draw_foreign(groups, 8, Random(seed), 4))
        assert counts == {"flood": 4, "other": 3}
        unbounded = Counter(owner[each] for each in draw_foreign(groups, 8, Random(seed)))
        assert unbounded["flood"] >= 5  # the control


def test_a_single_producer_fills_the_batch() -> None:
    groups = [candidate(n, "only") for n in range(20)] + [candidate(99, "flat", (1.0, 1.0))]
    assert len(draw_foreign(groups, 8, Random(1), 4)) == 8


def test_the_bound_leaves_the_draw_uniform_within_each_producer() -> None:
    groups = [candidate(n, "a" if n < 16 else "b") for n in range(24)]
    counts: Counter[GroupId] = Counter()
    rng = Random(1)
    for _ in range(4000):
        counts.update(draw_foreign(groups, 4, rng, 2))
    for name, size in (("a", 16), ("b", 8)):
        of_producer = [counts[c.group_id] for c in groups if c.producer == name]
        expected = sum(of_producer) / size
        assert sum((n - expected) ** 2 / expected for n in of_producer) < 37.7  # 99.9 %, 15


def test_a_large_group_is_cut_to_a_sample_and_a_small_one_is_kept_whole() -> None:
    assert kept_completions(8, 8, Random(0)) == list(range(8))
    counts: Counter[int] = Counter()
    rng = Random(1)
    for _ in range(2000):
        kept = kept_completions(64, 8, rng)
        assert len(set(kept)) == 8
        assert kept == sorted(kept)
        counts.update(kept)
    assert sum((counts[at] - 250) ** 2 / 250 for at in range(64)) < 103.4  # 99.9 %, 63


def test_grpo_advantages_match_the_worked_example() -> None:
    advantages = grpo_advantages([1, 0, 0, 1, 0, 0, 0, 0])
    assert advantages[0] == pytest.approx(1.6202, abs=1e-4)
    assert advantages[1] == pytest.approx(-0.5401, abs=1e-4)
    assert math.isclose(sum(advantages), 0.0, abs_tol=1e-9)


@pytest.mark.parametrize("rewards", [[0.3] * 8, [1.0], [0.5, 0.5 + 1e-9]])
def test_equal_rewards_have_no_advantage(rewards: list[float]) -> None:
    assert set(grpo_advantages(rewards)) == {0.0}


# --- how much of a batch may be of unknown policies ------------------------------------------


@pytest.mark.parametrize(
    ("groups", "share", "used"),
    [
        ([(8, 0), (8, 8), (8, 0)], 0.5, [0, 1, 2]),
        ([(8, 8), (8, 0), (8, 8), (8, 8)], 0.5, [0, 1]),  # the earlier ones
        ([(8, 0), (8, 8)], 0.0, [0]),
        ([(8, 8), (8, 8)], 0.5, []),
        ([(8, 8), (8, 8)], 1.0, [0, 1]),
        ([(4, 0), (8, 8), (2, 2)], 0.5, [0, 2]),  # one that is too large makes way for a smaller
        ([(4, 1), (4, 0)], 0.125, [0, 1]),
        ([], 0.5, []),
    ],
)
def test_a_share_of_unknown_completions_is_used(groups, share, used) -> None:
    assert within_unknown_share(groups, share) == used


GROUP_COUNTS = st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))


@given(st.lists(GROUP_COUNTS, max_size=20), st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]))
def test_the_share_holds_and_whatever_lacks_nothing_is_used(groups, share) -> None:
    used = within_unknown_share(groups, share)
    assert used == sorted(set(used))
    total = sum(groups[place][0] for place in used)
    assert sum(groups[place][1] for place in used) <= share * total
    assert {place for place, (_, lacking) in enumerate(groups) if not lacking} <= set(used)
    if share == 1.0:
        assert used == list(range(len(groups)))


def test_answers_that_were_given_before_count_once() -> None:
    run = make_run(common={"tasks": 2, "share": 0.5})

    def verified(number: int, producer: PeerId, task: int, *texts: str) -> ScoredGroup:
        group = make_group(run, *texts, producer=producer, task=common_task(run, task))
        rewards = tuple(map(float, range(len(texts))))
        return ScoredGroup(GroupId(bytes([number]) * 32), group, "", rewards)

    first, copied = verified(1, ALICE, 0, "1", "2"), verified(2, BOB, 0, "2", "1")
    other, elsewhere = verified(3, BOB, 0, "1", "3"), verified(4, BOB, 1, "1", "2")
    again = verified(5, ALICE, 0, "5", "6")
    assert distinct([first, copied, other, elsewhere]) == [first, elsewhere]
    assert distinct([first, other, again, elsewhere]) == [first, other, elsewhere]
    assert distinct([copied, first]) == [copied]
