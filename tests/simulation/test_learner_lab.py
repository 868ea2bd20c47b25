"""Plans of a central learner hold, and so does the bound under faults. Small steps; planted faults
are noticed."""

from dataclasses import replace

import pytest

from node.run import learner_role
from node.run.claims import LearnerChecks
from swarm.leases.staleness import StalenessRules
from tests.simulation import planned_learner
from tests.simulation.learner_faults import run_fault

GROUPS = 16


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of few groups, and broadcasts of few chunks."""
    monkeypatch.setattr(planned_learner, "GROUPS_PER_STEP", GROUPS)
    monkeypatch.setattr(planned_learner, "CHUNKS_MAX", 16)
    planned_learner.version_bytes.cache_clear()
    planned_learner.broadcast_s.cache_clear()


@pytest.mark.usefixtures("small")
def test_a_plan_is_what_comes_and_a_plan_for_other_workers_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = planned_learner.Setting(3, 0.1, 4)
    row = planned_learner.measure(setting, steps=4, warm_up=4)
    assert not row.is_off
    assert row.violations == 0
    assert row.broadcast_s == pytest.approx(10.0, rel=0.1)  # the model said 0.1 steps
    plan = planned_learner.plan
    monkeypatch.setattr(planned_learner, "plan", lambda each: plan(replace(each, supply=1.1)))
    assert planned_learner.measure(replace(setting, supply=0.5), steps=4, warm_up=4).is_off


@pytest.mark.long
@pytest.mark.usefixtures("small")
def test_a_storm_breaks_no_bound_and_a_learner_that_takes_older_groups_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = planned_learner.weather(2, 12, workers=4, groups_per_step=GROUPS)
    witness = found.there.witness
    assert found.deaths
    assert found.repeats
    assert witness.groups == GROUPS * len(witness.worst_at)
    assert (witness.violations, witness.true_violations, witness.repeated) == (0, 0, 0)
    assert (witness.worst, witness.false_groups) == (2, 0)

    def lenient(bound: int, groups_per_step: int, groups_max: int) -> StalenessRules:
        return StalenessRules(bound + 2, groups_per_step, groups_max)

    monkeypatch.setattr(learner_role, "StalenessRules", lenient)
    planted = planned_learner.weather(2, 12, workers=4, groups_per_step=GROUPS).there.witness
    assert planted.violations > 0
    assert planted.true_violations > 0


@pytest.mark.parametrize("name", ["learner killed", "one lies about log-probs"])
def test_a_fault_breaks_no_bound_and_training_goes_on(name: str) -> None:
    row = run_fault(name, GROUPS, fault_step=3, steps=5)
    assert row.is_good
    assert (row.truly_over, row.believed) == (0, 0)
    if "lies" in name:
        assert "false_logprobs" in row.seen
    else:
        assert row.seen.startswith("killed after step 3, resumes at version 1")


@pytest.mark.long
def test_who_claims_a_version_that_was_never_published_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "one lies about version: the learner's own"
    row = run_fault(name, GROUPS, fault_step=2, steps=6)
    assert (row.believed, row.truly_over) == (0, 0)
    monkeypatch.setattr(LearnerChecks, "_check_published", lambda self, group: None)
    assert run_fault(name, GROUPS, fault_step=2, steps=6).believed > 0
