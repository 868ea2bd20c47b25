"""The byte budget, on a clock of its own."""

from swarm.limits.quotas import ByteBudget


def test_a_steady_load_gets_its_rate_and_no_more() -> None:
    budget, now, sent = ByteBudget(1000.0, 0.0), 0.0, 0
    while now < 10.0:
        now += budget.spend(250, now)
        sent += 250
    assert 10_000 <= sent <= 11_500  # ten seconds' worth and the first full bucket


def test_an_idle_budget_does_not_save_up() -> None:
    budget = ByteBudget(1000.0, 0.0)
    assert budget.spend(1000, 100.0) == 0.0
    assert budget.is_spent(100.0)
    assert budget.spend(500, 100.0) == 0.5
    assert not budget.is_spent(101.0)


def test_a_record_over_the_rate_passes_and_delays_what_follows() -> None:
    budget = ByteBudget(100.0, 0.0)
    assert budget.spend(1000, 0.0) == 9.0
    assert budget.spend(1, 9.0) == 0.01
