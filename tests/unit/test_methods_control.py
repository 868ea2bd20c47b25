"""Tasks, budgets and admission against worked examples, limiting cases and slow definitions."""

import itertools
import math
from collections.abc import Callable
from dataclasses import fields, replace
from random import Random
from statistics import fmean
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from node.methods import admission_control as admitting
from node.methods import rollout_budgets as budgets
from node.methods import task_control as control
from node.methods.admission_control import Admission, Credits, Reclamation
from node.methods.checked import finite, probability, right_of, whole
from node.methods.filters import informative_probability
from node.methods.registry import METHODS
from node.methods.rollout_budgets import Brorl, Dars, Duet, RolloutStatistics, XrpoAllocation
from node.methods.task_control import (
    AdaptiveExternal,
    Cdas,
    Competence,
    ExternalGains,
    SuccessBeliefs,
    SuccessCounts,
    Vade,
)

CHANCES = st.floats(0, 1)


def near(found: float, wanted: float, within: float = 1e-4) -> bool:
    return math.isclose(found, wanted, rel_tol=0.0, abs_tol=within)


# --- what methods are given -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "why"),
    [
        (lambda: probability(math.nan, "share"), "share nan: not within 0 and 1"),
        (lambda: probability(1.5, "share"), "share 1.5"),
        (lambda: finite([1.0, math.inf], "gains"), "gains: not all are finite"),
        (lambda: whole(-1, "count"), "count -1: below 0"),
        (lambda: right_of(3, 2), "3 right ones of 2 rollouts"),
        (lambda: right_of(0, 0), "0 right ones of 0 rollouts"),
    ],
)
def test_what_is_no_number_is_named(check: Callable[[], Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check()
    assert (probability(0.0, ""), finite([], ""), whole(0, ""), right_of(1, 1)) == (
        0,
        (),
        0,
        (1, 1),
    )


def test_every_setting_has_a_default_within_its_bounds() -> None:
    every = [method.parameters for method in METHODS]
    assert len(every) == len(set(every))
    for each in every:
        adapter = TypeAdapter(each)
        defaults = {field.name: field.default for field in fields(each)}
        assert adapter.validate_python(defaults) == each()
        for name, default in defaults.items():
            if isinstance(default, int | float) and not isinstance(default, bool):
                for wrong in (-1e9, math.nan):
                    with pytest.raises(ValidationError):
                        adapter.validate_python({name: wrong})


# --- cdas -----------------------------------------------------------------------------------------


def test_a_task_that_went_worse_than_expected_is_harder() -> None:
    state = control.rated(Competence(), {"a": 0.25}, 4, Cdas())
    assert state.difficulty("a") == 0.125
    assert state.value == -0.125 / 4
    again = control.rated(state, {"a": 1.0}, 4, Cdas())
    surprise = 1 / (1 + math.exp(0.125 + 0.03125)) - 1.0
    assert near(again.difficulty("a"), 0.125 * 2 / 3 + surprise / 3, 1e-12)
    assert state.difficulty("a") == 0.125  # nothing was changed in place
    assert state.difficulty("unknown") == 0.0


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), CHANCES), max_size=8))
def test_competence_is_less_the_mean_difficulty(steps: list[dict[str, float]]) -> None:
    state = Competence()
    sums = dict.fromkeys("abcd", 0.0)
    counts = dict.fromkeys("abcd", 1)
    for rates in steps:
        for task, rate in rates.items():  # a mean of all surprises, and of the 0 at first
            sums[task] += control.expected_rate(state.difficulty(task), state.value) - rate
            counts[task] += 1
        turned = dict(reversed(rates.items()))
        following = control.rated(state, rates, 4, Cdas())
        assert following == control.rated(state, turned, 4, Cdas())
        state = following
    assert all(near(state.difficulty(t), sums[t] / counts[t], 1e-12) for t in "abcd")
    assert near(state.value, -fmean([state.difficulty(t) for t in "abcd"]), 1e-12)


def state_of(**difficulties: float) -> Competence:
    known = {task: control.TaskDifficulty(value, 2) for task, value in difficulties.items()}
    return Competence(0.0, 5, known)


def test_half_of_the_tasks_are_easier_and_half_harder() -> None:
    state = state_of(a=-0.5, b=-0.1, c=0.0, d=0.1, e=0.3, f=0.9)

    def drawn(count: int, tasks: str = "abcdef") -> str:
        return "".join(sorted(control.cdas(state, tasks, count, Random(1), Cdas())))

    assert drawn(4) == "bcde"
    assert drawn(3) == "cde"  # the odd one is harder
    assert drawn(4, "abcd") == "abcd"  # one side lends
    assert drawn(4, "cdef") == "cdef"
    assert drawn(9) == "abcdef"
    assert drawn(0) == ""
    for order in itertools.permutations("bcd"):
        assert control.cdas(state, order, 2, Random(1), Cdas()) == ("c", "d")


def test_tasks_of_which_nothing_is_known_are_drawn_evenly() -> None:
    names = "abcd"
    for state in (Competence(), Competence(0.0, 1)):  # the uniform step, and equally near ones
        counts = dict.fromkeys(names, 0)
        rng = Random(3)
        for _ in range(2_000):
            for task in control.cdas(state, names, 2, rng, Cdas()):
                counts[task] += 1
        assert all(abs(each - 1_000) < 5 * math.sqrt(500) for each in counts.values())


def test_the_state_is_bounded_and_rates_are_checked() -> None:
    state = Competence()
    for task in "abcab":
        state = control.rated(state, {task: 0.5}, 3, Cdas(tasks_max=2))
    assert list(state.difficulties) == ["a", "b"]
    assert control.rated(Competence(), {}, 3, Cdas()) == Competence(0.0, 1)
    with pytest.raises(ValueError, match="pass rate nan"):
        control.rated(state, {"a": math.nan}, 3, Cdas())
    with pytest.raises(ValueError, match="tasks 1: below 2"):
        control.rated(state, {"a": 0.1, "b": 0.1}, 1, Cdas())
    assert control.expected_rate(0.0, 0.0) == 0.5
    assert (control.expected_rate(1e4, 0.0), control.expected_rate(-1e4, 0.0)) == (0.0, 1.0)


# --- vade -----------------------------------------------------------------------------------------


def test_information_is_largest_at_a_third() -> None:
    assert near(control.information(1 / 3), 0.1481)
    assert max(range(1001), key=lambda each: control.information(each / 1000)) == 333
    assert control.information(0.0) == control.information(1.0) == 0.0
    with pytest.raises(ValueError, match="success nan"):
        control.information(math.nan)


def test_counts_decay_and_add_up() -> None:
    set_to = Vade(decay_global=0.5, decay_local=0.25, evidence_max=8)
    first = control.learned(SuccessBeliefs(), [("a", 2, 8), ("b", 1, 1)], set_to)
    assert (first.of("a"), first.of("b")) == (SuccessCounts(2, 6), SuccessCounts(1, 0))
    results = [("a", 4, 16), ("a", 1, 1)]  # of the first, which is large, half
    then = control.learned(first, results, set_to)
    assert then.of("a") == SuccessCounts(2 * 0.125 + 2 + 1, 6 * 0.125 + 6)
    assert then.of("b") == SuccessCounts(0.5, 0)
    assert then == control.learned(first, results[::-1], set_to)
    assert first.of("a") == SuccessCounts(2, 6)
    with pytest.raises(ValueError, match="2 right ones of 1 rollouts"):
        control.learned(first, [("a", 2, 1)], set_to)
    bounded = control.learned(first, [("c", 1, 2)], Vade(tasks_max=2))
    assert list(bounded.counts) == ["b", "c"]


def density(success: float, counts: SuccessCounts) -> float:
    return success**counts.right * (1 - success) ** counts.wrong


def test_tasks_are_drawn_as_often_as_their_beliefs_say() -> None:
    beliefs = SuccessBeliefs({"a": SuccessCounts(3, 5), "b": SuccessCounts(6, 2)})
    grid = [(each + 0.5) / 300 for each in range(300)]
    first, second = ([density(p, beliefs.of(task)) for p in grid] for task in "ab")
    worth = [p * (1 - p) ** 2 for p in grid]
    lead = sum(
        x * y
        for x, of_x in zip(first, worth, strict=True)
        for y, of_y in zip(second, worth, strict=True)
        if of_x > of_y
    )
    wanted = lead / sum(first) / sum(second)
    rng, draws = Random(5), 6_000
    found = sum(control.vade(beliefs, "ab", 1, rng) == ("a",) for _ in range(draws)) / draws
    assert 0.6 < wanted < 0.95
    assert abs(found - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / draws) + 0.003


def test_what_is_sure_decides_and_order_does_not() -> None:
    sure = SuccessBeliefs({"a": SuccessCounts(1e6, 2e6), "b": SuccessCounts(1e6, 0)})
    assert control.vade(sure, "ab", 1, Random(0)) == ("a",)
    assert control.vade(sure, "abc", 3, Random(7)) == control.vade(sure, "cabb", 9, Random(7))
    for seed in range(20):
        found = control.vade(SuccessBeliefs(), "abcd", 2, Random(seed))
        assert found == control.vade(SuccessBeliefs(), "dcbaa", 2, Random(seed))
    assert control.vade(sure, "", 3, Random(0)) == control.vade(sure, "a", 0, Random(0)) == ()


# --- schedules ------------------------------------------------------------------------------------


def test_groups_must_vary_more_after_some_steps() -> None:
    set_to = budgets.VarianceCurriculum()
    found = [budgets.variance_curriculum(step, set_to) for step in (0, 19, 20, 999)]
    assert found == [0.3, 0.3, 0.8, 0.8]
    with pytest.raises(ValueError, match="step -1"):
        budgets.variance_curriculum(-1, set_to)


def test_the_length_swings_by_a_cosine() -> None:
    set_to = budgets.LengthSchedule(tokens_min=8_000, tokens_max=16_000, period_steps=100, cycles=2)
    found = [
        budgets.length_schedule(step, 20_000, set_to)
        for step in (0, 25, 50, 75, 100, 150, 200, 250)
    ]
    assert found == [16_000, 12_000, 8_000, 12_000, 16_000, 8_000, 16_000, 16_000]
    tenth = budgets.length_schedule(10, 20_000, set_to)
    assert tenth == round(12_000 + 4_000 * math.cos(math.pi / 5))
    cut = [budgets.length_schedule(step, 12_000, set_to) for step in (0, 50)]
    assert cut == [12_000, 8_000]  # by the run's limit
    half = [budgets.length_schedule(step, 9, budgets.LengthSchedule()) for step in (0, 100)]
    assert half == [9, 5]
    with pytest.raises(ValueError, match="over tokens_max"):
        budgets.LengthSchedule(tokens_min=9, tokens_max=8)


# --- widths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "parameters", "wanted"),
    [
        (2, {}, 3),  # S = 0.375, and (4 - 3) / S = 2.67
        (2, {"treatment": "hardness"}, 8),  # (1.5 * 4 - 3) / S, exactly
        (0, {}, 24),  # 27 but for the bound of 32
        (0, {"treatment": "hardness"}, 56),  # exactly; so is the bound of 64
        (0, {"treatment": "hardness", "rollouts_max": 40}, 32),
        (0, {"rollouts_max": 4}, 0),
        (2, {"over_std": True}, 2),  # S = 0.866
        (1, {"over_std": True, "treatment": "hardness"}, 14),
        (4, {}, 0),
        (8, {}, 0),
    ],
)
def test_hard_tasks_get_more_rollouts(right: int, parameters: dict[str, Any], wanted: int) -> None:
    assert budgets.dars(right, 8, Dars(**parameters)) == wanted


def test_rounding_does_not_cost_a_rollout() -> None:
    hardness = Dars(treatment="hardness")
    assert budgets.dars(6, 18, hardness) == 9  # which doubles put a little above 9
    assert budgets.dars(8, 20, hardness) == 5


@given(st.integers(1, 40), st.integers(0, 40), st.booleans(), st.booleans())
def test_the_least_number_that_reaches_the_aim(
    rollouts: int, right: int, over_std: bool, by_hardness: bool
) -> None:
    if right > rollouts:
        return
    set_to = Dars("hardness" if by_hardness else "equal", over_std, 100_000)
    more = budgets.dars(right, rollouts, set_to)
    share = max(right, 0.5) / rollouts
    if share >= 0.5:
        assert more == 0
        return
    each = 2 * share * (1 - share) if not over_std else 2 * math.sqrt(share * (1 - share))
    aim = rollouts * (1.0 if over_std else 0.5) * (2 * (1 - share) if by_hardness else 1.0)
    assert (rollouts + more) * each >= aim - 1e-6
    assert (rollouts + more - 1) * each < aim


def test_widths_are_the_least_that_teach_with_some_chance() -> None:
    for p in (0.004, 0.05, 0.3, 0.5, 0.97):
        for by in ("informative", "mass"):
            set_to = Brorl(by, 0.9, 1, 512)
            told = [
                n
                for n in range(1, 513)
                if (1 - p**n - (1 - p) ** n if by == "informative" else 1 - (1 - p) ** n) >= 0.9
            ]
            assert budgets.brorl(p, 8, set_to) == (told[0] if told else 512)
    assert [budgets.brorl(p, 16, Brorl()) for p in (0.0, 1.0, 0.5, 1e-9)] == [16, 16, 16, 512]
    assert near(budgets.unseen_mass(0.05, 16), 0.4401)
    assert informative_probability(0.05, budgets.brorl(0.05, 16, Brorl())) >= 0.9
    with pytest.raises(ValueError, match="success nan"):
        budgets.brorl(math.nan, 16, Brorl())
    with pytest.raises(ValueError, match="rollouts_min 9"):
        Brorl(rollouts_min=9, rollouts_max=8)


# --- xrpo -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "freedom", "wanted"),
    [
        (0.95, 1, 12.7062),
        (0.95, 2, 4.3027),
        (0.95, 3, 3.1824),
        (0.95, 7, 2.3646),
        (0.95, 30, 2.0423),
        (0.99, 10, 3.1693),
        (0.95, 500, 1.9647),
    ],
)
def test_students_quantiles_are_those_of_the_tables(
    level: float, freedom: int, wanted: float
) -> None:
    assert near(budgets.student_quantile(level, freedom), wanted, 6e-5)


def test_a_mean_is_known_the_better_the_more_there_is() -> None:
    assert near(budgets.half_width(4, 0.5, 0.05), 3.18245 * 0.25)
    assert budgets.half_width(1, 0.5, 0.05) == math.inf
    task = RolloutStatistics(4, 0.5)
    found = budgets.rollout_priority(task, 4, 20, XrpoAllocation(bonus=2.0))
    narrowed = 3.18245 * 0.25 - 2.77645 * 0.5 / math.sqrt(5)
    assert near(found, narrowed + 2.0 * math.sqrt(math.log(21) / 4))
    flat = budgets.rollout_priority(RolloutStatistics(4, 0.0), 4, 20, XrpoAllocation(bonus=0.0))
    assert flat == 0.0
    with pytest.raises(ValueError, match=r"level 1\.0"):
        budgets.student_quantile(1.0, 3)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(2, 5), st.sampled_from([0.0, 0.2, 0.5])), max_size=3),
    st.integers(0, 6),
)
def test_no_other_allocation_is_worth_more(drawn: list[tuple[int, float]], budget: int) -> None:
    tasks = [RolloutStatistics(count, std) for count, std in drawn]
    set_to = XrpoAllocation(rollouts_max=7)
    total = sum(count for count, _ in drawn)

    def worth(more: tuple[int, ...]) -> float:
        return sum(
            budgets.rollout_priority(task, task.rollouts + at, total, set_to)
            for task, count in zip(tasks, more, strict=True)
            for at in range(count)
        )

    found = budgets.xrpo_allocation(tasks, budget, set_to)
    choices = itertools.product(*(range(7 - task.rollouts + 1) for task in tasks))
    assert near(worth(found), max(worth(each) for each in choices if sum(each) <= budget), 1e-9)
    assert sum(found) == min(budget, sum(7 - task.rollouts for task in tasks))
    turned = budgets.xrpo_allocation(tasks[::-1], budget, set_to)
    assert near(worth(turned[::-1]), worth(found), 1e-9)


def test_unknown_tasks_come_first_and_the_budget_is_cut_in_phases() -> None:
    tasks = [RolloutStatistics(8, 0.5), RolloutStatistics(), RolloutStatistics(1)]
    assert budgets.xrpo_allocation(tasks, 1, XrpoAllocation()) == (0, 1, 0)
    assert budgets.xrpo_allocation(tasks, 3, XrpoAllocation()) == (0, 2, 1)
    assert budgets.xrpo_allocation([], 3, XrpoAllocation()) == ()
    assert budgets.xrpo_allocation(tasks, 0, XrpoAllocation()) == (0, 0, 0)
    assert budgets.phase_budgets(8, XrpoAllocation()) == (3, 3, 2)
    for wrong in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="not a deviation"):
            budgets.xrpo_allocation([RolloutStatistics(2, wrong)], 1, XrpoAllocation())


# --- duet -----------------------------------------------------------------------------------------


def spent(rollouts: tuple[int, ...], lengths: list[float]) -> float:
    return sum(count * length for count, length in zip(rollouts, lengths, strict=True))


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(1, 500)), min_size=1, max_size=5),
    st.floats(0.05, 1.0),
)
@example(drawn=[(0.001953125, 33.0)], share=1.0)
def test_the_price_is_the_lowest_within_the_budget(
    drawn: list[tuple[float, float]], share: float
) -> None:
    signals, lengths = ([each[at] for each in drawn] for at in (0, 1))
    full = 8 * sum(lengths)
    set_to = Duet(budget_share=share, rollouts_min=1, rollouts_max=8, halvings=60)
    found = budgets.duet(signals, lengths, full, set_to)
    # Every price at which some task's rollouts change, and what is spent just above it.
    edges = {
        (signal / (count + 0.5)) ** 2 / length
        for signal, length in drawn
        for count in range(9)
        if signal > 0
    }
    # Prices have bounds, and the lowest of them is one besides.
    least = math.exp(-budgets.PRICE_LOG)
    edges = {edge for edge in edges if edge > least} | {least}
    fitting = [sum(lengths)]
    for edge in edges:
        counts = tuple(
            min(max(round(s / math.sqrt(edge * (1 + 1e-9) * n)), 1), 8) for s, n in drawn
        )
        fitting += [spent(counts, lengths)] if spent(counts, lengths) <= share * full else []
    if sum(lengths) > share * full:
        assert found.rollouts == (1,) * len(drawn)
    else:
        assert near(spent(found.rollouts, lengths), max(fitting), 1e-6)


def test_long_tasks_get_fewer_rollouts_and_longer_ones() -> None:
    set_to = Duet(rollouts_min=1, halvings=60)
    found = budgets.duet([10.0, 10.0], [100.0, 400.0], 16 * 500, set_to)
    assert found.rollouts == (13, 6)  # 13 * 100 + 6 * 400 = 3,700 of 4,000
    assert near(found.propensities[1], 6 / 9.5)
    assert found.propensities[0] == 1.0
    assert near(found.tokens[1] / found.tokens[0], 2.0, 0.01)
    assert budgets.duet([], [], 100.0, set_to) == budgets.Spending((), (), ())
    nothing = budgets.duet([0.0, 1e12], [100.0, 100.0], 1e6, set_to)
    assert nothing.rollouts == (1, 32)
    assert nothing.tokens == (32, 4_096)
    assert near(nothing.propensities[0], 1 / 16.5)
    coarse = budgets.duet([10.0, 10.0], [100.0, 400.0], 16 * 500, Duet())
    assert coarse.rollouts == (13, 6)


@pytest.mark.parametrize(
    ("signals", "lengths", "parameters", "why"),
    [
        ([math.nan], [1.0], {}, "signals: not all are finite"),
        ([-1.0], [1.0], {}, "a signal below 0"),
        ([1.0], [0.0], {}, "a length below 1"),
        ([1.0], [], {}, "1 signals and 0 lengths"),
        ([1.0], [1.0], {"tokens_min": 9, "tokens_max": 8}, "the wrong way round"),
    ],
)
def test_what_cannot_be_spent_is_named(
    signals: list[float], lengths: list[float], parameters: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        budgets.duet(signals, lengths, 100.0, Duet(**parameters))


# --- admission ------------------------------------------------------------------------------------


@given(
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 20),
    st.lists(st.integers(0, 9), max_size=60),
)
def test_no_work_in_order_is_older_than_the_bound(
    staleness: int, batch: int, running_max: int, moves: list[int]
) -> None:
    """Against the rule of the paper: floor((N - 1) / B) <= v + eta at each start."""
    set_to = Admission(staleness_max=staleness, running_max=running_max)
    credit = Credits()
    runs: list[int] = []  # versions at which they began, in order
    stored: list[int] = []
    ever = 0
    for move in moves:
        for _ in range(min(move, admitting.admission(credit, batch, set_to))):
            credit = replace(credit, running=credit.running + 1)
            runs.append(credit.version)
            ever += 1
            assert (ever - 1) // batch <= credit.version + staleness
            assert len(runs) <= running_max
        if move % 3 == 1 and runs:  # the newest is lost, and may be begun again
            runs.pop()
            credit = replace(credit, running=credit.running - 1)
            ever -= 1
        elif runs:
            stored.append(runs.pop(0))
            accepted, running = credit.accepted + 1, credit.running - 1
            credit = replace(credit, accepted=accepted, running=running)
        if len(stored) >= batch:
            taken, stored = stored[:batch], stored[batch:]
            assert all(credit.version - each <= staleness for each in taken)
            credit = Credits(credit.version + 1, credit.accepted, credit.running)
    if admitting.admission(credit, batch, set_to) == 0 and len(runs) < running_max:
        assert ever // batch > credit.version + staleness  # one more would be one too many


def test_credits() -> None:
    set_to = Admission(staleness_max=1, running_max=100)
    assert admitting.admission(Credits(), 4, set_to) == 8
    assert admitting.admission(Credits(3, 12, 0), 4, set_to) == 8
    assert admitting.admission(Credits(0, 9, 0), 4, set_to) == 0
    assert admitting.admission(Credits(), 4, Admission(staleness_max=0)) == 4
    assert admitting.admission(Credits(0, 0, 7), 4, Admission(running_max=7)) == 0


def test_work_that_began_too_long_ago_is_given_up() -> None:
    assert admitting.reclamation(6, Reclamation(ratio=2)) == 5
    assert admitting.reclamation(6, Reclamation(ratio=1.5)) == 5
    assert admitting.reclamation(6, Reclamation(ratio=0)) == 7
    assert admitting.reclamation(0, Reclamation(ratio=2)) == 0
    assert admitting.starts_allowed(0, 0, 8, Reclamation(ratio=0.5)) == 12
    assert admitting.starts_allowed(2, 20, 8, Reclamation(ratio=0.5)) == 8
    assert admitting.starts_allowed(0, 9, 8, Reclamation(ratio=0)) == 0
    assert admitting.starts_allowed(0, 0, 10, Reclamation(ratio=0.1)) == 11  # and no rounding more


# --- foreign groups -------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["ucb", "thompson"])
def test_the_best_number_of_foreign_groups_is_found(rule: Any) -> None:
    set_to = AdaptiveExternal(levels=4, rule=rule, decay=1.0)
    state, rng = control.no_gains(set_to), Random(11)
    tried: list[int] = []
    for _ in range(600):
        groups = control.adaptive_external(state, rng, set_to)
        tried.append(groups)
        gain = 0.06 - 0.03 * abs(groups - 3) + rng.gauss(0, 0.02)
        state = control.gained(state, groups, gain, set_to)
    assert sorted(tried[:5]) == [0, 1, 2, 3, 4]
    assert tried[300:].count(3) > 220
    assert near(sum(state.trials), 600.0)


def test_gains_are_cut_and_forgotten() -> None:
    set_to = AdaptiveExternal(levels=1, gain_max=0.1, decay=0.5, exploration=0.0)
    first = control.gained(control.no_gains(set_to), 0, 7.0, set_to)
    then = control.gained(first, 1, -7.0, set_to)
    assert then == ExternalGains((0.5, 1.0), (0.05, -0.1))
    assert control.adaptive_external(then, Random(0), set_to) == 0
    assert control.adaptive_external(first, Random(0), set_to) == 1  # which was never tried
    late = ExternalGains((5e-324, 1.0), (0.0, 0.1))
    assert control.adaptive_external(late, Random(0), set_to) == 0  # as good as never tried
    equal = ExternalGains((2.0, 2.0), (0.1, 0.1))
    assert control.adaptive_external(equal, Random(0), set_to) == 0
    # ucb by hand: means 0.1 and 0.05, and 0.1 * sqrt(2 ln 5 / n) of 4 and of 1 trial
    ucb = AdaptiveExternal(levels=1, exploration=1.0)
    assert control.adaptive_external(ExternalGains((4.0, 1.0), (0.4, 0.05)), Random(0), ucb) == 1
    assert control.adaptive_external(ExternalGains((4.0, 1.0), (0.4, 0.0)), Random(0), ucb) == 0


def test_gains_that_are_none_are_named() -> None:
    set_to = AdaptiveExternal(levels=1)
    state = control.no_gains(set_to)
    with pytest.raises(ValueError, match="gain: not all are finite"):
        control.gained(state, 0, math.nan, set_to)
    with pytest.raises(ValueError, match="arm 2: not within 0 and 1"):
        control.gained(state, 2, 0.0, set_to)
    with pytest.raises(ValueError, match="0 arms where there are 2"):
        control.adaptive_external(ExternalGains(), Random(0), set_to)
