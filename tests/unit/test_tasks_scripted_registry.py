"""The dependency-free environment, the registry and the reward rules."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from node.envs import registry, scoring
from node.envs.base import Problem
from node.envs.registry import environment, environment_names
from node.envs.scoring import pose, score_group
from node.verify.assignment import assigned_task, sample_tasks
from swarm.errors import ConfigError
from swarm.rollouts import Task
from tests.unit.tasks_support import ALICE, NINE, make_run

TASK = sample_tasks(make_run())[0]


class Moody:
    """Scores as the text says, however wrong that is."""

    name = "moody"
    version = "1"

    def problem(self, task: Task) -> Problem:
        return Problem(task, "?", "1.0", {})

    def score(self, problem: Problem, text: str) -> float:
        return float(text)


class Logic(Moody):
    """Called as a group is."""

    name = "logic"


@pytest.fixture
def moody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Task]:
    """A task of `moody`, which an installed distribution brings along."""
    package = tmp_path / "moody-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: moody\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        "[swarm_node.environments]\n"
        f"moody = {__name__}:Moody\n"
        "broken = no_such_module:Thing\n"
        f"misnamed = {__name__}:Moody\n"
        f"logic = {__name__}:Logic\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.environment.cache_clear()
    scoring._problem.cache_clear()
    yield sample_tasks(make_run({"name": "moody"}))[0]
    registry.environment.cache_clear()
    scoring._problem.cache_clear()


def test_sums_are_right_and_wrong_answers_are_not() -> None:
    task = assigned_task(make_run(), ALICE, 3)
    posed = pose(task, 100)
    left, right = posed.prompt.removesuffix("=").split("+")
    assert posed.answer == str(int(left) + int(right))
    texts = [posed.answer, f" {posed.answer}", f"{posed.answer}\n", "", "x", "9" * 10_000]
    assert score_group(task, texts, "exact").rewards == (1.0, 1.0, 1.0, 0.0, 0.0, 0.0)


def test_wrong_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="scripted_sum"):
        pose(replace(TASK, parameters='{"maximum":3}'), 100)


def test_an_unknown_environment_is_told_with_a_near_one_and_where_all_are() -> None:
    with pytest.raises(
        ConfigError, match=r"propositonal.*did you mean propositional_logic"
    ) as told:
        environment("propositonal")
    assert str(told.value).endswith("swarm-node env list shows all")
    assert set(NINE) < set(environment_names())


@pytest.mark.usefixtures("moody")
def test_a_plug_in_comes_before_a_group_of_its_name() -> None:
    assert [each.name for each in make_run({"name": "logic"}).environments] == ["logic"]
    assert environment("logic").version == "1"


def test_an_installed_distribution_adds_an_environment(moody: Task) -> None:
    assert "moody" in environment_names()
    assert pose(moody, 100).prompt == "?"


@pytest.mark.parametrize("name", ["broken", "misnamed"])
def test_a_plug_in_that_does_not_work_is_named(moody: Task, name: str) -> None:
    with pytest.raises(ConfigError, match=f"environment {name}"):
        environment(name)


def test_the_run_says_what_partial_credit_is_worth(moody: Task) -> None:
    assert score_group(moody, ["1", "0.99", "0"], "exact").rewards == (1.0, 0.0, 0.0)
    assert score_group(moody, ["1", "0.99", "0"], "partial").rewards == (1.0, 0.99, 0.0)


def test_a_scorer_that_fails_or_leaves_the_range_gives_zero_and_is_counted(moody: Task) -> None:
    scored = score_group(moody, ["nan", "inf", "-1", "1.5", "no number", "1"], "partial")
    assert scored.rewards == (0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    assert scored.scorer_errors == 5
    assert all(math.isfinite(reward) for reward in scored.rewards)


def test_another_version_of_an_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="version 0 is wanted"):
        pose(replace(TASK, version="0"), 100)


def test_a_prompt_over_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompt_chars_max"):
        pose(TASK, 3)
