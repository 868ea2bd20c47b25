"""The parameters of other people's tasks, where their library is not needed."""

from pathlib import Path
from typing import Any

import pytest

from node.config import RunConfig
from node.envs.registry import environment, needs_sandbox
from node.envs.taskset import Taskset
from node.envs.taskset_rules import library_version, rules_from
from node.hosting.run_data import _checked
from swarm.errors import ConfigError

RULES: dict[str, Any] = {"taskset": "endless_sums", "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"taskset": "os.path"}, "taskset = 'os.path'"),
        ({"taskset": ""}, "taskset = ''"),
        ({"colour": 1}, "colour: no such parameter; known: taskset, config"),
        ({"reply": "it is"}, "must have {} once"),
        ({"reply": "{}{}"}, "must have {} once"),
        ({"tasks": 0}, "tasks = '0'"),
        ({"tasks": 100_001}, "tasks = '100001'"),
        ({"sha256": "ab"}, "sha256 = 'ab'"),
        ({"config": {"id": "other"}}, "config.id: is the parameter taskset"),
    ],
)
def test_wrong_parameters_are_one_line(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=r"^environment verifiers: ") as caught:
        rules_from({**RULES, **change})
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_taskset_must_be_named() -> None:
    with pytest.raises(ConfigError, match="taskset: is missing"):
        rules_from({})


def test_rules_that_travel_have_a_hash() -> None:
    with pytest.raises(ConfigError, match="no sha256"):
        Taskset().settled({"taskset": "endless_sums"}, None)
    assert Taskset().settled(RULES, None) == RULES


def test_a_reply_has_the_answer_in_its_place() -> None:
    rules = rules_from({**RULES, "reply": "<answer>{}</answer>"})
    assert rules.reply_of("{}") == "<answer>{}</answer>"


def test_it_is_for_a_sandbox_alone() -> None:
    assert needs_sandbox("verifiers")
    assert environment("verifiers").name == "verifiers"


def test_without_the_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.envs.taskset_rules.NAME", "no-such-library")
    with pytest.raises(ConfigError, match=r"pip install verifiers=="):
        library_version()


def test_a_package_is_known_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "my_tasks_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    rules = rules_from({"taskset": package.name})
    first = rules.digest()
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.pyc").write_bytes(b"compiled")
    assert rules.digest() == first
    (package / "rows.json").write_text("[]")
    second = rules.digest()
    (package / "rows.json").rename(package / "other.json")
    assert len({first, second, rules.digest()}) == 3
    with pytest.raises(ConfigError, match="taskset no_such_tasks: is not installed"):
        rules_from({"taskset": "no_such_tasks"}).digest()


def test_a_peer_s_rules_are_agreed_to_before_its_taskset_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Taskset, "version", "verifiers-0.4.0-r1")
    run = RunConfig.model_validate(
        {"name": "far", "environments": [{"name": "verifiers", "parameters": RULES}]}
    )
    with pytest.raises(ConfigError, match="the installed taskset 'endless_sums'"):
        _checked(run.as_json(), run.run_id, lambda question: False)
    assert _checked(run.as_json(), run.run_id, lambda question: True) == run
