"""No run file makes a node work out a problem of any size, wherever problems are made."""

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node.envs import registry, scoring
from node.envs.gym.datasets import OFFERED
from node.envs.gym.environment import is_number, largest, settings_of
from node.envs.registry import environment
from node.envs.scoring import made, pose
from node.envs.trial import memory_for_problems, tasks_of
from node.hosting.models import resolve_model
from node.sandbox import confinement
from node.verify.verifier import ProcessVerifier, _WrongSettings
from node.verify.warm_up import asked_of, warm_up_problems
from swarm.errors import ChildFailed, ConfigError
from swarm.rollouts import Task
from tests.support import run as run_async
from tests.unit.greedy_environment import Greedy
from tests.unit.tasks_support import make_config, make_run

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
HUGE = 10**12
REFUSAL_CPU_S = 0.05
GROWTH_KIB = 65_536
NUMBERS = ("guess_number", "text_maze", "calculator_sum", "file_lookup")


def task_of(name: str, **parameters: Any) -> Task:
    return tasks_of(environment(name), json.dumps(parameters), 1)[0]


def refusal(name: str, **parameters: Any) -> str:
    """What is said of such parameters, in hardly any time and memory."""
    task = task_of(name, **parameters)
    held, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    gc.disable()  # a collection of what other tests left would count
    try:
        with pytest.raises(ConfigError) as told:
            environment(name).problem(task)
        assert time.process_time() - began < REFUSAL_CPU_S, (name, parameters)
    finally:
        gc.enable()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < GROWTH_KIB
    assert "\n" not in str(told.value)
    return str(told.value)


# --- what a run file may ask of a dataset ---------------------------------------------------------


@pytest.mark.parametrize("name", sorted(OFFERED))
def test_every_number_and_list_of_every_dataset_has_a_bound(name: str) -> None:
    made(environment(name), task_of(name))  # imports are not counted
    defaults = settings_of(name)
    for setting, usual in defaults.items():
        most = f"{setting} is {HUGE}, may be {largest(setting, defaults, OFFERED[name]):,} at most"
        assert most in refusal(name, **{setting: HUGE}) or not is_number(usual)
        for wrong in (-HUGE, 1e300, [HUGE], [[1, HUGE]], {"a": HUGE}):
            assert f"{setting} is " in refusal(name, **{setting: wrong})


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("number_sorting", "max_numbers", 2 * 10**9),
        ("chain_sum", "max_terms", 3 * 10**7),
        ("chain_sum", "max_digits", "9" * 4000),
        ("spell_backward", "data_file", "../../../../../../dev/zero"),
        ("modulo_grid", "max_divisor", 1),
    ],
)
def test_a_refusal_names_the_setting(name: str, setting: str, value: object) -> None:
    assert setting in refusal(name, **{setting: value})


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OFFERED))
def test_what_is_allowed_takes_little(name: str) -> None:
    """Each setting as large as it may be, by itself, and all together: a problem is made or
    refused."""
    defaults = settings_of(name)
    made(environment(name), task_of(name))
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    most = {
        setting: type(usual)(largest(setting, defaults, OFFERED[name]))
        for setting, usual in defaults.items()
        if is_number(usual)
    }
    together = {each: value for each, value in most.items() if each.startswith(("min_", "max_"))}
    for settings in (*({each: value} for each, value in most.items()), together):
        began = time.process_time()
        try:
            environment(name).problem(task_of(name, **settings))
        except ConfigError:
            continue
        finally:
            assert time.process_time() - began < 6.0, (name, settings)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < 4 * GROWTH_KIB


@pytest.mark.parametrize("name", [*NUMBERS, "scripted_sum", "python_function", "python_question"])
def test_environments_of_our_own_have_bounds(name: str) -> None:
    for setting in ("max", "tries", "size", "terms", "files", "tests", "length", "turns"):
        assert name in refusal(name, **{setting: HUGE})


def test_an_answer_that_no_completion_may_be_is_refused() -> None:
    task = task_of("chain_sum", min_terms=90, max_terms=90)
    assert pose(task, 8192, answer_chars_max=9)
    with pytest.raises(ConfigError, match=r"limits\.text_chars_max is 1; raise it or make the"):
        pose(task, 8192, answer_chars_max=1)
    with pytest.raises(ConfigError, match=r"limits\.prompt_chars_max is 9"):
        pose(task, 9)


# --- under which limits problems are made ---------------------------------------------------------


def forget() -> None:
    for cached in (registry.environment, scoring._problem):
        cached.cache_clear()


@pytest.fixture
def greedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`greedy` is installed where this process and its children look."""
    package = tmp_path / "path" / "greedy-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: greedy\nVersion: 1\n")
    point = f"greedy = {Greedy.__module__}:Greedy"
    (package / "entry_points.txt").write_text(f"[swarm_node.environments]\n{point}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    forget()
    yield
    forget()


def test_a_problem_that_takes_long_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "PROBLEM_CPU_S", 0.2)
    with pytest.raises(ConfigError, match=r"^environment greedy with .*takes over 0.2 s of CPU"):
        made(Greedy(), Task("greedy", "1", '{"spins":true}', 1, 0))
    assert made(Greedy(), Task("greedy", "1", "{}", 1, 0)).answer == "nothing"


def test_a_problem_that_takes_much_memory_is_one_line() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with memory_for_problems(), pytest.raises(ConfigError, match="takes more memory than there is"):
        made(Greedy(), Task("greedy", "1", f'{{"bytes":{2**40}}}', 1, 0))
    assert resource.getrlimit(resource.RLIMIT_AS) == before


needs_sandbox = pytest.mark.skipif(
    not confinement.found().is_sandbox, reason="no sandbox on this machine"
)
SIZES = ({"bytes": 3 * 2**30}, {"bytes": 2**40})


@pytest.mark.slow
@needs_sandbox
@pytest.mark.parametrize("parameters", SIZES)
def test_a_verifier_refuses_problems_beyond_its_memory(
    parameters: dict[str, int], greedy: None, tmp_path: Path
) -> None:
    config = make_config(make_run({"name": "greedy", "parameters": parameters}))

    async def main() -> None:
        async with ProcessVerifier.open(config) as verifier:
            # before it serves, so that no stranger's group is to blame for it
            with pytest.raises(_WrongSettings, match="takes more memory than there is"):
                await verifier.problems([task_of("greedy", **parameters)])

    run_async(main)


@pytest.mark.slow
@needs_sandbox
@pytest.mark.parametrize("parameters", SIZES)
def test_what_warms_tiny_refuses_them_too(
    parameters: dict[str, int], greedy: None, tmp_path: Path
) -> None:
    run = make_run({"name": "greedy", "parameters": parameters})
    config = make_config(run, model="tiny", cache_dir=tmp_path / "cache")
    with pytest.raises(ConfigError, match="takes more memory than there is"):
        resolve_model(config, lambda line: None)


@pytest.mark.slow
@needs_sandbox
def test_what_warms_tiny_imports_other_peoples_code_in_the_sandbox_alone(
    greedy: None, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    answers = {}
    for sandbox in ("auto", "off"):
        run = make_run({"name": "greedy", "parameters": {"file": str(secret)}})
        config = make_config(run, verify_sandbox=sandbox)
        problems = warm_up_problems(asked_of(config))
        prompt, turns = next(problems)
        problems.close()
        assert prompt.endswith("?")
        answers[sandbox] = turns
    assert answers == {"auto": [("nothing", "")], "off": [("secret", "")]}


@pytest.mark.slow
@needs_sandbox
def test_warming_up_has_a_problem_s_turns_and_none_that_is_held_out() -> None:
    run = make_run({"name": "guess_number", "parameters": {"max": 3, "tries": 2}})
    problems = warm_up_problems(asked_of(make_config(run)))
    _, turns = next(problems)
    problems.close()
    assert [reply == "" for _, reply in turns] == [False] * (len(turns) - 1) + [True]
    with pytest.raises(StopIteration):
        next(problems)


@pytest.mark.slow
def test_who_writes_into_the_pipe_of_problems_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.verify.warm_up._MODULE", "this")
    with pytest.raises(ChildFailed, match="writes none"):
        next(warm_up_problems(asked_of(make_config(make_run()))))
