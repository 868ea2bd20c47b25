"""The experiment on methods: an arm that is cheaper in a round is no better for that alone."""

from typing import Any

import pytest

from tests.support import script

for imported in ("on_record", "measuring"):
    script(imported)
policies = script("experiment_policies")


def swarm(a_round: float, points_better: float = 0.0, rounds: int = 60) -> dict[str, Any]:
    """One node that generates so many tokens in a round, and whose pass rate rises with all that it
    generated, by a percent for each thousand."""
    points = []
    for at in range(0, rounds + 1, 5):
        tokens = at * a_round
        passed = 0.2 + tokens / 100_000 + points_better / 100
        points.append({"node": 0, "round": at, "passed": passed, "generated": tokens})
    totals = dict.fromkeys(policies.TOTALS, 1)
    return {"points": points, "totals": totals, "processor_s": 1.0}


@pytest.mark.parametrize(("mine", "other"), [(100, 400), (400, 100), (100, 100)])
def test_who_learns_the_same_of_a_token_is_level_at_equal_tokens(mine: float, other: float) -> None:
    assert policies.ahead([swarm(mine)], [swarm(other)])[0] == pytest.approx(0.0)


@pytest.mark.parametrize(("mine", "other"), [(100, 400), (400, 100)])
def test_who_learns_more_of_a_token_is_ahead(mine: float, other: float) -> None:
    assert policies.ahead([swarm(mine, 3.0)], [swarm(other)])[0] == pytest.approx(3.0)


def test_the_same_end_takes_the_same_tokens_whatever_a_round_costs() -> None:
    costs = policies.costs_of([swarm(100, rounds=240)], [swarm(400)])
    assert costs["to the end"] == [pytest.approx(1.0)]
