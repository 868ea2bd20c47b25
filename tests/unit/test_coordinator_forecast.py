"""Predictions that learn from what came of them, and warnings that are withdrawn."""

import pytest

from coordinator.forecast import LOOKS, Forecast
from coordinator.view import CoordinatorView, render_state, view_json
from swarm.wire.messages import LearnerReport
from tests.unit.test_coordinator_reporting import learner_report, predicted

TRAIN_S = predicted().utilisation * predicted().step_s


def report(
    version: int, waits: float, *, stale: int = 0, worst: int = 2, evaluates_s: float = 0.0
) -> LearnerReport:
    """`evaluates_s`: of each step, in the mean."""
    made, step_s = learner_report(), (TRAIN_S + evaluates_s) / (1.0 - waits)
    figures = {"train_s": TRAIN_S, "step_s": step_s, "idle_share": waits}
    pace = made.pace.model_copy(update=figures | {"staleness_worst": worst})
    work = made.work.model_copy(update={"would_be_stale": stale, "discarded": 0})
    rules = made.rules.model_copy(update={"staleness_max": 4})
    return made.model_copy(update={"version": version, "pace": pace, "work": work, "rules": rules})


def after(looks: list[LearnerReport]) -> Forecast:
    found = Forecast()
    for each in looks:
        found = found.looked(each, predicted())
    return found


@pytest.mark.parametrize("evaluates_s", [0.0, TRAIN_S])
@pytest.mark.parametrize("waits", [0.0, 0.3, 0.57, 0.9])
def test_the_prediction_comes_to_what_is_measured(waits: float, evaluates_s: float) -> None:
    looks = [report(1 + n, waits, evaluates_s=evaluates_s) for n in range(2 * LOOKS)]
    found = after(looks)
    assert found.waits == pytest.approx(waits, abs=0.05)
    assert found.error == pytest.approx(0.0, abs=0.05)
    shown = found.corrected(predicted(), looks[-1])
    assert 1.0 - shown.utilisation == found.waits
    assert shown.step_s == pytest.approx(looks[-1].pace.step_s, rel=0.05)


def test_the_error_is_of_predictions_made_before() -> None:
    first = after([report(1, 0.5)])
    assert first.error is None  # nothing had been predicted
    second = first.looked(report(2, 0.9), predicted())
    assert first.waits is not None
    assert second.errors == (pytest.approx(0.9 - first.waits),)
    assert len(after([report(1 + n, 0.1 * (n % 9)) for n in range(50)]).errors) == LOOKS


def test_a_look_without_a_step_teaches_nothing() -> None:
    once = after([report(1, 0.5)])
    assert once.looked(report(1, 0.9), predicted()) == once


def test_without_a_model_there_is_no_prediction() -> None:
    found = after([report(1, 0.5)]).looked(report(2, 0.5), None)
    assert (found.waits, found.errors) == (None, ())


def test_calm_ends_with_one_group_that_is_too_old() -> None:
    calm = [report(1 + n, 0.2) for n in range(LOOKS)]
    assert after(calm).is_calm
    assert not after(calm[:-1]).is_calm
    for broken in (report(99, 0.2, stale=1), report(99, 0.2, worst=5)):
        assert not after([*calm, broken]).is_calm


def test_nobody_is_told_of_an_age_that_is_never_admitted() -> None:
    looks = [report(1 + n, 0.2) for n in range(LOOKS)]
    modelled = predicted().__class__(
        **{name: getattr(predicted(), name) for name in predicted().__slots__}
        | {"staleness_worst": 51}
    )
    assert Forecast().corrected(modelled, looks[0]).staleness_worst == 4  # S
    assert after(looks).corrected(modelled, looks[-1]).staleness_worst == 2  # as measured


def test_the_table_says_how_far_predictions_were_off() -> None:
    made = report(3, 0.57)
    view = CoordinatorView("l", report=made, predicted=predicted(), error=0.062)
    assert "(off by 6 points lately)" in render_state(view_json(view, 100.0, 5.0), 100.0)
    unknown = CoordinatorView("l", report=made, predicted=predicted())
    assert "off by" not in render_state(view_json(unknown, 100.0, 5.0), 100.0)
