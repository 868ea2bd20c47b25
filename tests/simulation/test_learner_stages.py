"""Methods of a learner's own: how far workers run ahead, and what leases ask for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.methods.admission_control import Admission, Reclamation
from node.methods.rollout_budgets import LengthSchedule
from node.stages.control import ScheduleLengths
from node.stages.feeding import AdmitInTime, GiveUpOld
from node.stages.stage import Stage
from tests.simulation.lab_learner import LabLearner
from tests.simulation.test_learner_runs import Play, case, check, until_step

STEPS = 14
AHEAD = {"admission": Admission(staleness_max=1), "reclamation": Reclamation(ratio=2.0)}
# a worker may begin work with a policy that is a version behind, which reclamation does not count
OLDEST = {"admission": 1, "reclamation": 2}
KINDS: dict[str, type[Stage[Any]]] = {"admission": AdmitInTime, "reclamation": GiveUpOld}


def played(directory: Path, *control: Any) -> LabLearner:
    async def scene(there: LabLearner) -> None:
        await until_step(there, STEPS)

    # slow links between versions, so that workers run ahead of the steps
    what = replace(case(), train_s=6.0, credits_per_step=4.0, settings={"control": control})
    there = Play(directory, what).run(scene)
    check(there)
    return there


def oldest(there: LabLearner) -> int:
    return max(step.staleness_max for step in there.steps)


@pytest.mark.parametrize("kind", sorted(AHEAD))
def test_work_runs_no_further_ahead_than_it_may(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = played(tmp_path / "acts", AHEAD[kind])
    assert oldest(there) <= OLDEST[kind]
    assert all(step.acted[kind] > 0 for step in there.steps)
    monkeypatch.setattr(KINDS[kind], "feed", Stage.feed)
    without = played(tmp_path / "planted", AHEAD[kind])
    assert oldest(without) > OLDEST[kind]
    assert not any(step.acted for step in without.steps)


def test_leases_carry_the_limit_of_a_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swing = LengthSchedule(tokens_min=4, tokens_max=32, period_steps=4, cycles=100)
    there = played(tmp_path / "acts", swing)
    assert there.up is not None
    limits = {held.lease.limit for held in there.up.intake.book._ended.values()}
    assert limits == {4, 18, 32}
    monkeypatch.setattr(ScheduleLengths, "lease", Stage.lease)
    without = played(tmp_path / "planted", swing)
    assert without.up is not None
    assert {held.lease.limit for held in without.up.intake.book._ended.values()} == {0}
