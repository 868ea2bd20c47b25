"""Which producers' adverts are passed on."""

from random import Random

import pytest

from swarm.exchange.adverts import REMEMBERED_MAX, ProducerSampler
from swarm.identity import PeerId


def taken(sampler: ProducerSampler, producers: int, rng: Random) -> set[int]:
    return {each for each in range(producers) if sampler.wants(PeerId(str(each)), rng)}


def test_of_few_producers_all_are_taken_in() -> None:
    sampler, rng = ProducerSampler(16), Random(0)
    for _ in range(5):
        assert taken(sampler, 16, rng) == set(range(16))
        sampler.next_round()


def test_who_has_heard_of_enough_asks_for_no_more() -> None:
    sampler, rng = ProducerSampler(16), Random(0)
    for _ in range(2):
        assert sampler.asks()
        taken(sampler, 15, rng)
        assert sampler.asks()
        taken(sampler, 16, rng)
        assert not sampler.asks()
        sampler.next_round()


def test_of_many_about_enough_are_and_in_time_each_of_them() -> None:
    sampler, rng = ProducerSampler(16), Random(0)
    taken(sampler, 200, rng)  # the first round has to find out
    rounds = []
    for _ in range(100):
        sampler.next_round()
        rounds.append(taken(sampler, 200, rng))
    assert sum(map(len, rounds)) / len(rounds) == pytest.approx(16, abs=1.5)
    assert set.union(*rounds) == set(range(200))


def test_a_producer_is_wanted_or_not_for_a_whole_round() -> None:
    sampler, rng = ProducerSampler(4), Random(0)
    assert taken(sampler, 100, rng) == taken(sampler, 100, rng)


def test_what_is_remembered_is_bounded() -> None:
    sampler = ProducerSampler(10 * REMEMBERED_MAX)
    assert len(taken(sampler, REMEMBERED_MAX + 9, Random(0))) == REMEMBERED_MAX
