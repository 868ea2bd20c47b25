"""What evaluations on validation tasks decide."""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from random import Random

import pytest

from node.run import validation
from node.run.validation import RATE_SHARE_MIN, Validated, decide, fall_bound

TASKS = 64
SHORT = {"none": "-", "keep": "K", "return": "R"}


def course(
    passed: Sequence[float], before: Validated | None = None, tasks: int = TASKS, **settings: bool
) -> tuple[str, Validated]:
    """What these evaluations lead to, a letter for each, and what they came to."""
    acts, now = "", before or Validated()
    for number, each in enumerate(passed):
        act, now = decide(now, each, tasks, 10 * number, **settings)
        acts += SHORT[act]
    return acts, now


# Of 64 tasks: the bound below 0.60 is 0.22 at about a half.
EXAMPLES = {
    "a policy that learns": ([0.30, 0.40, 0.45, 0.55, 0.60], "KKKKK"),
    "the fall of a policy": ([0.40, 0.60, 0.30, 0.28, 0.58], "KK-R-"),
    "one bad evaluation": ([0.60, 0.30, 0.55, 0.30, 0.55], "K----"),
    "a loss that may be chance": ([0.60, 0.42, 0.44, 0.42, 0.45], "K----"),
    "four without a gain, then one": ([0.50, 0.49, 0.48, 0.50, 0.47, 0.51, 0.5], "K----K-"),
    "a plateau": ([0.50] * 11, "K----------"),
    "as good as the best is no gain": ([0.50, 0.45, 0.50], "K--"),
    "it falls from the best again": ([0.60, 0.30, 0.28, 0.30, 0.28], "K-R-R"),
    "a fall counts anew after a return": ([0.60, 0.30, 0.28, 0.29, 0.58], "K-R--"),
    "one before a gain and one after it": ([0.60, 0.30, 0.65, 0.30, 0.65], "K-K--"),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_worked_examples(name: str) -> None:
    passed, acts = EXAMPLES[name]
    assert course(passed)[0] == acts


def test_of_many_tasks_a_tenth_is_a_fall_and_less_is_none() -> None:
    assert course([0.60, 0.49, 0.49], tasks=10_000)[0] == "K-R"
    assert course([0.60, 0.51, 0.51], tasks=10_000)[0] == "K--"


def test_the_bound_is_that_of_two_measurements() -> None:
    assert fall_bound(0.6, 64, 0.3, 64) == pytest.approx(3.0 * sqrt((0.24 + 0.21) / 64))
    assert fall_bound(0.6, 64, 0.3, 256) == pytest.approx(3.0 * sqrt(0.24 / 64 + 0.21 / 256))
    assert fall_bound(0.6, 10_000, 0.5, 10_000) == 0.10
    assert fall_bound(1.0, 4, 0.0, 4) == 0.10  # as sure as can be


def test_the_rate_is_halved_down_to_a_sixteenth_and_never_raised() -> None:
    acts, now = course([0.50, *[0.10, 0.10] * 4])
    assert acts == "K" + "-R" * 4
    assert now.rate_share == RATE_SHARE_MIN
    act, now = decide(now, 0.90, TASKS, 400)
    assert (act, now.rate_share) == ("keep", RATE_SHARE_MIN)
    acts, now = course([0.30, 0.30] * 6, now)
    assert acts == "-R" * 6  # it goes back at the least rate too
    assert (now.rate_share, now.returns) == (RATE_SHARE_MIN, 10)


def test_a_return_halves_the_rate() -> None:
    acts, now = course([0.60, 0.30, 0.28])
    assert acts == "K-R"
    assert now == Validated(
        last=0.28, best=0.60, best_tasks=TASKS, best_round=0, rate_share=0.5, returns=1,
        went_back=True,
    )  # fmt: skip


def test_the_return_can_be_off() -> None:
    acts, now = course([0.60, 0.30, 0.28, 0.28, 0.28, 0.28], returns=False)
    assert (acts, now.rate_share) == ("K-----", 1.0)


def test_a_best_that_is_lost_is_replaced_by_the_next() -> None:
    _, now = course([0.60, 0.30])
    lost = now.with_best_of(None)
    assert decide(lost, 0.30, TASKS, 20)[0] == "keep"
    later = now.with_best_of(Validated(best=0.7, best_tasks=32, best_round=90, rate_share=0.25))
    assert later == replace(now, best=0.7, best_tasks=32, best_round=90)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FALLS", 1),
        ("FALLS", 1000),
        ("FALL_ERRORS", 0.0),
        ("FALL_ERRORS", 1000.0),
    ],
)
def test_planted_faults_change_an_example(
    name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, name, value)
    assert any(course(passed)[0] != acts for passed, acts in EXAMPLES.values())


def test_a_policy_that_stays_what_it_is_hardly_ever_goes_back() -> None:
    """Tasks of all difficulties, a hundred evaluations: one node of a hundred. With less room for
    chance it would be one of six."""

    def share_that_went_back() -> float:
        rng, nodes, found = Random(1), 200, 0
        for _ in range(nodes):
            chances = [rng.random() for _ in range(64)]
            state = Validated()
            for round_ in range(100):
                passed = sum(rng.random() < chance for chance in chances) / 64
                act, state = decide(state, passed, 64, round_)
                if act == "return":
                    found += 1
                    break
        return found / nodes

    assert share_that_went_back() <= 0.03
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "FALL_ERRORS", 2.5)
        assert share_that_went_back() > 0.08
