"""Waits after failures in a row."""

from random import Random

from swarm.limits.backoff import Backoff


def test_waits_grow_by_the_factor_up_to_the_most_whatever_the_number_of_failures() -> None:
    waits = Backoff(0.5, 6.0)
    assert [waits.after(failures) for failures in range(6)] == [0.5, 1.0, 2.0, 4.0, 6.0, 6.0]
    assert waits.after(10**6) == 6.0
    assert Backoff(1.0, 9.0, 3.0).after(1) == 3.0


def test_spread_waits_are_half_to_one_and_a_half_times_as_long() -> None:
    rng, waits = Random(1), Backoff(1.0, 30.0)
    found = [waits.spread(2, rng) for _ in range(1_000)]
    assert 2.0 <= min(found) < 2.1
    assert 5.9 < max(found) <= 6.0
