"""Tasks of the library `verifiers`, written by somebody else: refused by reason, or posed, scored,
shared, and scored again by a second node. The packages are in `tests/tasksets`."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import extra_env
from tests.integration.nodes import ENVIRON, MakeNode, NodeProcess, swarm_node
from tests.integration.test_join import peer_id

pytestmark = [pytest.mark.integration, pytest.mark.verifiers]

ROOT = Path(__file__).parents[2]
TASKSETS = ROOT / "tests" / "tasksets"
SUMS: dict[str, Any] = {"taskset": "endless_sums", "tasks": 100, "config": {"max_digits": 1}}
RUN = """
name = "theirs"
sampling = {max_new_tokens = 4}
held_out = {tasks = 20}
answer = {format = "last_number"}
[[environments]]
name = "verifiers"
parameters = {taskset = "endless_sums", tasks = 100, config = {max_digits = 1}}
"""
PROBE = """
def answer():
    try:
        open("/etc/hostname").close()
        return "it reads"
    except OSError:
        pass
    import socket
    try:
        socket.create_connection(("127.0.0.1", 9), 1).close()
        return "it connects"
    except PermissionError:
        return "nothing"
    except OSError as error:
        return type(error).__name__
"""


@pytest.fixture(scope="module")
def python() -> str:
    return str(extra_env.find("verifiers"))


def printed(python: str, folder: Path, code: str, *arguments: str) -> str:
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run(
        [python, "-c", code, *arguments], capture_output=True, text=True, check=False,
        env=ENVIRON | {"PYTHONPATH": path},
    )  # fmt: skip
    return done.stdout.strip() or done.stderr.splitlines()[-1]


def env(python: str, action: str, parameters: dict[str, Any], folder: Path = TASKSETS) -> Any:
    path = os.pathsep.join([str(folder), str(ROOT)])
    return swarm_node(
        "env", action, "verifiers", "--parameters", json.dumps(parameters),
        python=python, PYTHONPATH=path,
    )  # fmt: skip


def refused_for(done: Any) -> str:
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    return str(line)


# --- which are fit --------------------------------------------------------------------------------


CHECK = """
import json, sys
from node.envs.taskset_rules import rules_from
from node.envs.taskset_upstream import check
from swarm.errors import ConfigError
for each in json.loads(sys.argv[1]):
    try:
        print("fit", check(rules_from(each)).sha256)
    except ConfigError as error:
        print(error)
"""
FOUND: list[tuple[dict[str, Any], str]] = [
    ({"taskset": "tool_lookup"}, "it needs tool servers"),
    ({"taskset": "graded_essay", "answer": "question"}, "cannot grade its own answer"),
    ({"taskset": "endless_sums"}, "never ends; say by the parameter tasks"),
    ({"taskset": "date_shift"}, "say by the parameter reply how it wants an answer"),
    ({"taskset": "roman_sums", "config": {"nonsense": 1}}, "Extra inputs are not permitted"),
    ({"taskset": "roman_sums", "answer": "solution"}, "name one by the parameter answer"),
    ({"taskset": "json"}, "exports no Taskset"),
    ({"taskset": "two_kinds"}, "its tasks are of several types or configurations"),
    ({"taskset": "two_kinds", "config": {"strict": True}}, "adds them up in a way of its own"),
    ({"taskset": "roman_sums"}, "fit"),
    ({"taskset": "date_shift", "reply": "<answer>{}</answer>"}, "fit"),
    (SUMS, "fit"),
]


def test_what_strangers_could_not_score_again_is_refused_by_reason(python: str) -> None:
    said = printed(python, TASKSETS, CHECK, json.dumps([each for each, _ in FOUND])).splitlines()
    assert [why in line for (_, why), line in zip(FOUND, said, strict=True)] == [True] * len(FOUND)


def test_what_one_reply_decides_is_posed(python: str) -> None:
    done = env(python, "show", {"taskset": "date_shift", "reply": "<answer>{}</answer>"})
    assert done.returncode == 0, done.stderr
    assert "verifiers, version verifiers-0.4.0-r" in done.stdout
    assert "a right answer" in done.stdout


# --- tools ----------------------------------------------------------------------------------------


LOOKUP = {"taskset": "tool_lookup", "reply": "Answer: {}"}
PLAY = """
import json, re, sys
from node.envs.method_calls import written
from node.envs.replay_turns import replies
from node.envs.taskset import TasksetWithTools
from node.envs.taskset_rules import tool_rules_from
from node.envs.taskset_upstream import check
from swarm.errors import ConfigError
from swarm.rollouts import Task
rules = json.loads(sys.argv[1])
try:
    check(tool_rules_from({"taskset": "roman_sums"}))
except ConfigError as error:
    print(error)
rules["sha256"] = check(tool_rules_from(rules)).sha256
source = TasksetWithTools()
problem = source.problem(Task(source.name, source.version, json.dumps(rules), 1, 3))
(code, *_) = re.findall(r"P-[0-9]+", problem.prompt)
turns = [
    written("catalog_get_part", {"code": code}) + written("catalog_list_shelf", {"shelf": "Z"}),
    written("catalog_get_part", {"shelf": 1}),
    written("get_part", {"code": code}),
    *source.right(problem),
]
print(json.dumps([replies(source, problem, turns), source.worth(problem, turns)]))
print(json.dumps([source.worth(problem, turns[:1]), source.worth(problem, ["Answer: -1"])]))
"""


def test_a_tasksets_tools_run_in_the_process_that_scores(python: str) -> None:
    no_tools, played, others = printed(python, TASKSETS, PLAY, json.dumps(LOOKUP)).splitlines()
    assert "has no tools; name the environment verifiers" in no_tools
    said, reward = json.loads(played)
    assert '"stock":' in said[0]
    assert said[0].count("<tool_response>") == 2
    assert "Field required" in said[1]
    assert "pydantic" not in said[1]  # which names its version
    assert said[2:] == ["<tool_response>\nerror: unknown tool 'get_part'\n</tool_response>", None]
    assert [reward, *json.loads(others)] == [1.0, 0.0, 0.0]


def test_tools_that_reply_otherwise_elsewhere_are_refused(python: str, tmp_path: Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(TASKSETS / "tool_lookup", folder / "tool_lookup")
    file = folder / "tool_lookup" / "servers" / "tool.py"
    sound = "return [p.code for p in self.parts.values() if p.shelf == shelf.strip().upper()]"
    text = file.read_text()
    assert sound in text
    file.write_text(text.replace(sound, "return sorted({*'abcdefgh'}, key=hash)"))
    for place, why in ((TASKSETS, None), (folder, "replies of the tool catalog_list_shelf")):
        path = os.pathsep.join([str(place), str(ROOT)])
        done = swarm_node(
            "env", "show", "verifiers_tools", "--parameters", json.dumps(LOOKUP),
            python=python, PYTHONPATH=path,
        )  # fmt: skip
        if why is None:
            assert '"name": "catalog_get_part"' in done.stdout, done.stderr
        else:
            assert f"two processes make unlike {why}" in refused_for(done)


# --- two processes --------------------------------------------------------------------------------


def changed(tmp_path: Path, old: str, new: str) -> Path:
    """The sums, with one line of them another."""
    folder = tmp_path / "changed"
    shutil.copytree(TASKSETS / "endless_sums", folder / "endless_sums")
    file = folder / "endless_sums" / "taskset.py"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    return folder


@pytest.mark.parametrize(
    "source", ["random.SystemRandom()", "random.Random(hash(f'{self.config.seed}:{i}'))"]
)
def test_tasks_that_differ_from_process_to_process_are_refused(
    python: str, tmp_path: Path, source: str
) -> None:
    folder = changed(tmp_path, 'random.Random(f"{self.config.seed}:{i}")', source)
    assert "two processes make unlike tasks" in refused_for(env(python, "show", SUMS, folder))


def test_another_package_is_another_hash(python: str, tmp_path: Path) -> None:
    folder = changed(tmp_path, "End your reply", "End the reply")
    done = env(python, "show", {**SUMS, "sha256": "0" * 64}, folder)
    assert "install the package that the run's founder has" in refused_for(done)


IDENTIFY = """
import json, sys
from node.envs.package_identity import identify
from node.envs.taskset_rules import rules_from
print(identify(rules_from(json.loads(sys.argv[1]))))
"""
UNCONFINED = """
from endless_sums.taskset import answer
print(answer())
"""


@pytest.mark.parametrize("when", ["loaded", "scored"])
def test_a_taskset_reads_and_reaches_nothing(python: str, tmp_path: Path, when: str) -> None:
    """When its tasks are made, or when a reply is scored."""
    folder = changed(tmp_path, "class EndlessSumsData", f"{PROBE}\n\nclass EndlessSumsData")
    file = folder / "endless_sums" / "taskset.py"
    where = {"loaded": "            yield", "scored": "        return float(last"}[when]
    indent = where[: len(where) - len(where.lstrip())]
    told = f"{indent}if answer() != 'nothing':\n{indent}    raise OSError(answer())\n{where}"
    text = file.read_text()
    assert where in text
    file.write_text(text.replace(where, told, 1))
    assert len(printed(python, folder, IDENTIFY, json.dumps(SUMS))) == 64  # a hash
    assert printed(python, folder, UNCONFINED) == "it reads"  # the probe finds out


def _run_file(tmp_path: Path) -> Path:
    run_file = tmp_path / "theirs.toml"
    run_file.write_text(RUN)
    return run_file


# --- two nodes ------------------------------------------------------------------------------------


@pytest.mark.long
def test_two_nodes_train_on_each_others_groups_of_foreign_tasks(
    make_node: MakeNode, python: str, tmp_path: Path
) -> None:
    run_file = _run_file(tmp_path)
    path = os.pathsep.join([str(TASKSETS), str(ROOT)])
    cache = tmp_path / "cache"
    done = swarm_node(
        "prepare", "--run", run_file, python=python, PYTHONPATH=path,
        SWARM_NODE_CACHE_DIR=str(cache),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    def node(name: str, run: str, *flags: str) -> NodeProcess:
        made = make_node(name, *flags)
        made.run_file, made.cache_dir = Path(run), cache
        made.python, made.environ = python, {"PYTHONPATH": path}
        return made

    first = node("a", str(run_file)).start()
    address = first.address()
    run_id = first.until(first.status).run_id
    asked = node("c", run_id, "--peer", address).start()
    assert asked.process.wait(60) == 2
    assert "the installed taskset 'endless_sums'" in asked.said()

    second = node("b", run_id, "--peer", address, "--yes").start()
    ids = [peer_id(first), peer_id(second)]
    first.until(lambda: ids[1] in first.sources())  # what each scored again, and trained on
    second.until(lambda: ids[0] in second.sources())
    assert any(record.own_reward > 0 for record in first.rounds())
