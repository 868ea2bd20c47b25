"""Keys that cost nothing against a learner: what they hold starves neither its workers nor those
that come in the middle of it. A planted fault is noticed."""

import pytest

from swarm.leases.staleness import Account
from tests.simulation.free_keys import run_siege

COUNTED_S = 300.0
BEGINS_AT_S = 80.0  # the learner is fed by then


def steps(name: str) -> int:
    row = run_siege(name, counted_s=COUNTED_S, begins_at_s=BEGINS_AT_S)
    assert row.over == 0
    assert row.newcomer_s is not None  # an honest worker came in the middle of it, and is at work
    count: int = row.steps
    return count


@pytest.mark.long
def test_keys_that_never_deliver_take_no_steps_from_a_learner_at_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thirty at a time, a new one as soon as one holds all that it gets, from the honest workers'
    own address: nothing but the cap on all of them together can help."""
    alone = steps("nobody")
    assert alone >= 10
    assert steps("rotating, one machine") >= 0.8 * alone

    def all_that_is_out(account: Account) -> int:
        return account.reserved + account.buffered

    monkeypatch.setattr(Account, "_counted_on", property(all_that_is_out))
    assert run_siege("rotating, one machine", counted_s=COUNTED_S).steps < 0.5 * alone


@pytest.mark.long
def test_a_learner_under_siege_from_its_first_second_gets_going() -> None:
    """They take all that workers on trial may hold before any honest worker has come, and lose it
    within the life of one short lease."""
    row = run_siege("fixed, own blocks", counted_s=200.0)
    assert row.first_step_s is not None
    assert row.first_step_s < 160.0
