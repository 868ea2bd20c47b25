"""Reasoning-gym as environments: the same everywhere, and safe against what strangers write."""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from node.config import load_run, packaged_runs
from node.config.run import canonical_json
from node.envs.base import Problem
from node.envs.gym.environment import ADAPTER_REVISION, ReasoningGym
from node.envs.gym.scorers import FORMULA_OPERATORS_MAX
from node.envs.registry import environment
from node.envs.scoring import pose, score_group
from node.verify.assignment import held_out_tasks
from swarm.errors import ConfigError
from swarm.rollouts import Task
from tests.unit.tasks_support import ALICE, NINE, SUMS, first_tasks, make_run

PER_ENVIRONMENT = 25
# of everything below with reasoning-gym 0.1.25; a change means another ADAPTER_REVISION
DIGEST = "669b0065a755cdd78b0a689b283c16ad6c1e493e70b1f0d5425c87f04ecccf0f"


def tasks_of(name: str, count: int = PER_ENVIRONMENT, **parameters: object) -> tuple[Task, ...]:
    run = make_run({"name": name, "parameters": parameters})
    return first_tasks(run, ALICE, count)


def digest() -> str:
    """Of prompts and answers of all nine, in both styles."""
    sha = hashlib.sha256()
    for name in NINE:
        for style in ("full", "terse"):
            for task in tasks_of(name, prompt=style):
                problem = environment(name).problem(replace(task, version=""))
                sha.update(f"{problem.prompt}\0{problem.answer}\0".encode())
    return sha.hexdigest()


@pytest.mark.parametrize("hash_seed", ["1", "2"])
@pytest.mark.slow
def test_problems_are_the_same_in_every_process(hash_seed: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import digest; print(digest())"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == DIGEST
    assert (ADAPTER_REVISION, version("reasoning-gym")) == (1, "0.1.25")


@pytest.mark.parametrize("name", [*NINE, *SUMS])
def test_an_item_depends_on_neither_size_nor_order(name: str) -> None:
    import reasoning_gym

    few = reasoning_gym.create_dataset(name, seed=5, size=1)
    many = reasoning_gym.create_dataset(name, seed=5, size=500)
    late = [many[index] for index in (7, 3)]
    assert [few[3], few[7]] == late[::-1]


@pytest.mark.parametrize("style", ["full", "terse"])
@pytest.mark.parametrize("name", [*NINE, *SUMS])
def test_every_problem_has_a_right_answer_and_a_wrong_one_scores_less(
    name: str, style: str
) -> None:
    for task in tasks_of(name, prompt=style):
        problem = environment(name).problem(task)
        answer = problem.answer
        texts = [answer, f" {answer}", f"{answer}\n", "~" + answer, ""]
        scored = score_group(task, texts, "exact")
        assert scored.rewards == (1.0, 1.0, 1.0, 0.0, 0.0), problem
        assert problem.prompt


@pytest.mark.parametrize("name", [*NINE, *SUMS])
def test_a_terse_prompt_tells_problems_apart(name: str) -> None:
    """As many different prompts as full questions, so that it holds as much of the problem."""
    full = [environment(name).problem(task) for task in tasks_of(name, 200)]
    terse = [environment(name).problem(task) for task in tasks_of(name, 200, prompt="terse")]
    by_prompt: dict[str, str] = {}
    for problem in terse:
        if name not in ("propositional_logic", "fraction_simplification"):  # many right answers
            assert by_prompt.setdefault(problem.prompt, problem.answer) == problem.answer
    assert sum(len(p.prompt) for p in terse) < sum(len(p.prompt) for p in full)


@pytest.mark.parametrize("name", packaged_runs())
def test_packaged_runs_ask_what_fits_their_own_limits(name: str) -> None:
    run = load_run(Path(name), {})[0]
    for task in held_out_tasks(run):
        rule = run.answer_rule(task.environment, task.parameters)
        posed = pose(task, run.limits.prompt_chars_max, rule)
        assert len(posed.answer.encode()) < run.sampling.max_new_tokens  # in bytes, with EOS
        assert score_group(task, [posed.answer], run.reward, rule).rewards == (1.0,)


def test_no_constant_answer_gets_far_in_the_demo() -> None:
    run = load_run(Path("demo"), {})[0]
    tasks = held_out_tasks(run)
    answers = {pose(task, run.limits.prompt_chars_max).answer for task in tasks}
    passed = [
        sum(score_group(task, [answer], run.reward).rewards[0] for task in tasks)
        for answer in answers
    ]
    assert max(passed) / len(tasks) < 0.15


@pytest.mark.parametrize("index", [4312, 6064])
def test_an_item_that_cannot_be_made_is_drawn_again(index: int) -> None:
    """With one decimal place and few values, these two items divide by zero."""
    import reasoning_gym

    settings_ = {"min_num_decimal_places": 1, "max_num_decimal_places": 1, "min_terms": 6}
    (some,) = tasks_of("decimal_arithmetic", 1, **settings_)
    task = replace(some, seed=839049623885481768, index=index)
    with pytest.raises(ArithmeticError):
        reasoning_gym.create_dataset("decimal_arithmetic", seed=task.seed, **settings_)[index]
    assert environment("decimal_arithmetic").problem(task).answer


@pytest.mark.parametrize(
    "parameters",
    [{"min_var": 2}, {"min_vars": 0}, {"seed": 3}, {"size": 3}, {"prompt": "long"}],
)
def test_wrong_parameters_are_one_line(parameters: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="environment propositional_logic") as told:
        environment("propositional_logic").problem(
            tasks_of("propositional_logic", 1, **parameters)[0]
        )
    assert "\n" not in str(told.value)


# --- what strangers write --------------------------------------------------------------------


def problem_of(name: str, **parameters: object) -> Problem:
    return environment(name).problem(tasks_of(name, 1, **parameters)[0])


def test_an_answer_is_never_run_as_code(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    text = f"__import__('pathlib').Path({str(touched)!r}).touch() or [[0]]"
    for name in NINE:
        problem = problem_of(name)
        assert score_group(problem.task, [text], "partial").rewards[0] < 1.0
    assert not touched.exists()


def test_the_library_does_run_answers_as_code(tmp_path: Path) -> None:
    """Why the test above is worth having: the scorer that is replaced would have run it."""
    import reasoning_gym

    touched = tmp_path / "touched"
    dataset = reasoning_gym.create_dataset("binary_matrix", seed=1)
    dataset.score_answer(f"__import__('pathlib').Path({str(touched)!r}).touch()", dataset[0])
    assert touched.exists()


BOMBS = {
    "many names": "∨".join(f"{chr(97 + i % 26)}{i}" for i in range(40)),
    "joined names": "∨".join("P" * (i + 1) for i in range(18)),
    "invented name": "P∨x",
    "nesting": "(" * 96 + "P" + ")" * 90,
    "negations": "¬" * 190 + "P",
    "long": "P∨" * 30_000 + "Q",
    "big power": "9e999999999",
    "digits": "9" * 60,
    "many digits": "9" * 5000 + "/" + "9" * 5000,
    "latex": "\\frac{" * 5000,
    "nan": "nan",
    "infinity": "-Infinity",
    "signalling nan": "sNaN",
    "nul": "\0" * 64,
    "surrogates": "\ud800" * 16,
    "brackets": "[" * 5000,
}


@pytest.mark.parametrize("name", [*NINE, *SUMS])
def test_bombs_are_worth_nothing_and_cost_no_time(name: str) -> None:
    problem = problem_of(name)
    started = time.process_time()
    scored = score_group(problem.task, list(BOMBS.values()), "exact")
    assert scored.rewards == (0.0,) * len(BOMBS)
    assert time.process_time() - started < 1.0


# Of each kind of text one as long as may be, and for formulas those just within their bounds.
_N = FORMULA_OPERATORS_MAX
DEAREST = [
    *BOMBS.values(),
    *("¬" * length + "P" for length in (_N, 191)),
    *("∧".join("P" * (count + 1)) for count in (_N, 95)),
    "(" * _N + "∧".join("P" * (_N + 1)) + ")" * _N,
    "(" * 60 + "∧".join("P" * 36) + ")" * 60,
    "¬(" * _N + "P" + ")" * _N,
    "¬" * _N + "P" * 170,
    "¬" * _N + " " * 170 + "P",
    "¬" * 90 + " " * 100 + "P",
    ")" * 150 + "¬" * _N + "P",
    *(char * length for char in ("9", "a", "ß", " x", "+-", "0 1 ") for length in (64, 128, 1024)),
    "0 1 " * 16_000,
    "1" * 60 + "/" + "1" * 60,
    "\\frac{" + " " * 100 + "9}",
    "9e999999999999999",
    "1e-999999999999",
]
HARD: dict[str, dict[str, object]] = {
    "propositional_logic": {"max_vars": 6, "max_complexity": 4, "max_statements": 6}
}
COST_RATIO_MAX = 40.0  # of the dearest text to a right answer


def cost_s(problem: Problem, text: str) -> float:
    """Least CPU time of a few tries at one text."""
    taken = []
    for _ in range(3):
        started = time.process_time()
        score_group(problem.task, [text] * 4, "partial")
        taken.append((time.process_time() - started) / 4)
    return min(taken)


def cost_ratio(name: str, texts: Sequence[str] = DEAREST, **parameters: object) -> float:
    problem = problem_of(name, **parameters)
    # Scorers other than of formulas take microseconds: 0.05 ms is nothing that could be worth it.
    right_s = max(5e-5, cost_s(problem, problem.answer))
    return max(cost_s(problem, text) for text in texts) / right_s


@pytest.mark.parametrize("name", [*NINE, *SUMS])
def test_no_text_costs_a_scorer_much_more_than_a_right_answer(name: str) -> None:
    assert cost_ratio(name) < COST_RATIO_MAX
    if name in HARD:
        assert cost_ratio(name, DEAREST, **HARD[name]) < COST_RATIO_MAX


@pytest.mark.slow
def test_without_a_bound_on_formulas_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above."""
    monkeypatch.setattr("node.envs.gym.scorers.FORMULA_OPERATORS_MAX", 1_000)
    assert cost_ratio("propositional_logic", ["¬" * 191 + "P"]) > 3 * COST_RATIO_MAX


@pytest.mark.parametrize(
    "parameters", [{}, {"min_complexity": 5, "max_complexity": 5}, {"max_statements": 10}]
)
def test_the_bound_on_formulas_is_far_beyond_right_answers_and_lets_premises_be_copied(
    parameters: dict[str, object],
) -> None:
    for task in tasks_of("propositional_logic", 100, **parameters):
        problem = environment("propositional_logic").problem(task)
        assert 4 * sum(char in "∧∨¬→↔" for char in problem.answer) < FORMULA_OPERATORS_MAX
        texts = [text for text in problem.entry["metadata"]["premises"] if len(text) <= 192]
        scored = score_group(task, texts, "partial")
        # A conclusion from itself: right, or a tautology, or a mere variable.
        assert set(scored.rewards) <= {1.0, 0.25}


@settings(max_examples=300, deadline=None)
@given(st.data())
@pytest.mark.slow
def test_a_formula_within_the_bounds_is_worth_what_the_library_says(data: st.DataObject) -> None:
    import reasoning_gym

    problem = problem_of("propositional_logic")
    names = st.sampled_from(problem.entry["metadata"]["variables"])
    formulas = st.recursive(
        names,
        lambda inner: (
            inner.map("¬ {}".format)
            | st.tuples(inner, st.sampled_from("∧∨→↔"), inner).map("({0[0]} {0[1]}{0[2]})".format)
            | st.tuples(inner, st.sampled_from("∧∨→↔"), inner).map(" {0[0]}{0[1]} {0[2]}".format)
        ),
        max_leaves=5,
    )
    text = data.draw(formulas).strip()
    assume(sum(char in "∧∨¬→↔" for char in text) <= FORMULA_OPERATORS_MAX)
    dataset = reasoning_gym.create_dataset("propositional_logic", seed=1)
    expected = dataset.score_answer(text, problem.entry)
    assert environment("propositional_logic").score(problem, text) == expected


def test_a_formula_with_invented_names_would_pass_unguarded() -> None:
    import reasoning_gym

    problem = problem_of("propositional_logic", max_complexity=1)
    premise = problem.entry["metadata"]["premises"][0]
    hack = f"{premise}∨x"
    dataset = reasoning_gym.create_dataset("propositional_logic", seed=1)
    assert dataset.score_answer(hack, problem.entry) == 1.0
    assert score_group(problem.task, [hack, f"({premise})∨(P)"], "exact").rewards == (0.0, 1.0)


def test_tautologies_are_no_full_score() -> None:
    problem = problem_of("propositional_logic")
    assert score_group(problem.task, ["P∨¬P"], "exact").rewards == (0.0,)
    assert score_group(problem.task, ["P∨¬P"], "partial").rewards == (0.25,)


def test_a_score_does_not_depend_on_what_ran_before() -> None:
    coarse = {"precision": 4, "max_num_decimal_places": 2, "min_num_decimal_places": 2}
    problem = problem_of("decimal_arithmetic")
    near = f"{problem.answer}04" if "." in problem.answer else f"{problem.answer}.0004"
    before = score_group(problem.task, [near, problem.answer + "9"], "exact")
    problem_of("decimal_arithmetic", **coarse)
    assert score_group(problem.task, [near, problem.answer + "9"], "exact") == before


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(NINE), st.text(max_size=80) | st.text("PQ∧∨¬→↔() ", max_size=60))
def test_any_text_gets_a_number(name: str, text: str) -> None:
    problem = problem_of(name)
    (reward,) = score_group(problem.task, [text], "partial").rewards
    assert 0.0 <= reward <= 1.0


def test_the_first_datasets_keep_their_version() -> None:
    made = {ReasoningGym(name).version for name in (*NINE, *SUMS)}
    assert made == {f"reasoning-gym-0.1.25-r{ADAPTER_REVISION}"}


def test_the_library_is_not_imported_before_the_first_problem() -> None:
    code = (
        "import sys, node.config, node.verify.verifier; node.config.load_config({}, {});"
        "print('reasoning_gym' in sys.modules, 'torch' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["False", "False"]


def test_parameters_are_canonical() -> None:
    assert canonical_json({"b": 1, "a": [True, "x"]}) == '{"a":[true,"x"],"b":1}'
