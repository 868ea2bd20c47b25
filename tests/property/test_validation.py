"""What holds of the decisions on any course of evaluations."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from node.run.validation import RATE_SHARE_MIN, Validated, decide, fall_bound

RATES = st.integers(0, 64).map(lambda right: right / 64)
COURSES = st.lists(RATES, min_size=1, max_size=60)


@given(COURSES, st.booleans(), st.integers(1, 1000))
def test_what_is_kept_and_when_the_rate_falls(
    passed: list[float], returns: bool, tasks: int
) -> None:
    now, acts, befores = Validated(), [], []
    for number, each in enumerate(passed):
        befores.append(now)
        act, now = decide(now, each, tasks, number, returns=returns)
        acts.append(act)
        assert now.best == max(passed[: number + 1])
        assert now.best_round == passed.index(now.best)
    for number, act in enumerate(acts):
        is_gain = number == 0 or passed[number] > max(passed[:number])
        assert (act == "keep") == is_gain
    shares = [each.rate_share for each in (*befores, now)]
    for act, (share, after) in zip(acts, pairwise(shares), strict=True):
        halved = max(RATE_SHARE_MIN, share / 2)
        assert after == (halved if act == "return" else share)
    assert returns or "return" not in acts
    assert now.returns == acts.count("return")


@given(COURSES, st.integers(1, 1000))
def test_it_goes_back_after_two_evaluations_far_below_the_best_and_no_other(
    passed: list[float], tasks: int
) -> None:
    now, far = Validated(), 0  # since the last return
    for number, each in enumerate(passed):
        best = now.best
        act, now = decide(now, each, tasks, number)
        is_far = best is not None and best - each > fall_bound(best, tasks, each, tasks)
        far = far + 1 if is_far else 0
        assert (act == "return") == (far == 2)
        far = 0 if act == "return" else far


@given(RATES, st.integers(1, 1000), RATES, st.integers(1, 1000))
def test_more_tasks_never_widen_the_bound(
    best: float, best_tasks: int, passed: float, tasks: int
) -> None:
    bound = fall_bound(best, best_tasks, passed, tasks)
    assert bound >= fall_bound(best, best_tasks + 1, passed, tasks)
    assert bound >= fall_bound(best, best_tasks, passed, tasks + 1)
    assert 0.10 <= bound <= 2.5
