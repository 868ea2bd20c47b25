"""A task that fails is left out and named; a failure that comes again and again ends the node."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from node.envs import scoring
from node.envs.base import Problem
from node.envs.games import ScriptedSum
from node.run.node import Notes
from node.run.progress import Progress
from node.run.role import SAME_FAILURES_MAX, Deaths, TrainingRole
from node.verify import verifier_worker
from node.verify.held_out import HeldOutGuard
from node.verify.verifier import ProcessVerifier
from node.verify.worker_answers import WorkEnded
from swarm.errors import CannotHeal, ChildFailed, ConfigError
from swarm.rollouts import Task
from tests.support import run
from tests.unit.tasks_support import ALICE, make_config, make_run


class Fussy(ScriptedSum):
    """Fails to pose some tasks."""

    bad = frozenset({1, 4})

    def problem(self, task: Task) -> Problem:
        if task.index in self.bad:
            raise KeyError(f"no item {task.index}")
        return Problem(task, f"{task.seed} {task.index}", "1", {})


class Broken(Fussy):
    bad = frozenset(range(100))


class Deadly(ProcessVerifier):
    """Its worker is this process; some tasks end it."""

    deadly: frozenset[int] = frozenset()

    async def _call_own(self, request: Mapping[str, Any], limits: Any) -> Any:
        if any(task[4] in self.deadly for task in request["tasks"]):
            raise WorkEnded("a verifier ended with status 139")
        return verifier_worker._OPERATIONS[request["op"]](request)


@pytest.fixture
def verifier(monkeypatch: pytest.MonkeyPatch) -> Deadly:
    monkeypatch.setattr(scoring, "environment", lambda name: Fussy())
    monkeypatch.setattr(scoring, "interaction", lambda name: None)
    scoring._problem.cache_clear()
    return Deadly(make_config(make_run()))


def test_a_task_that_its_environment_fails_to_pose_is_left_out(verifier):
    guard = HeldOutGuard(make_run(), verifier)
    found, position = run(lambda: guard.assignments(ALICE, 0, 6))
    assert [each.task.index for each in found] == [0, 2, 3, 5, 6, 7]
    assert position == 8
    assert all(each.prompt for each in found)
    note = verifier.counters.note
    assert note is not None
    assert "left out" in note
    assert "no item 1" in note


def test_a_task_that_ends_the_verifier_is_left_out(verifier):
    verifier.deadly = frozenset({3})
    guard = HeldOutGuard(make_run(), verifier)
    found, _ = run(lambda: guard.assignments(ALICE, 0, 4))
    assert [each.task.index for each in found] == [0, 2, 5, 6]
    verifier.deadly = frozenset({2})
    tasks = [each.task for each in found]
    assert run(lambda: verifier.score(tasks, [["x"]] * 4)) == [(0.0,), (None,), (0.0,), (0.0,)]
    assert run(lambda: verifier.replies(tasks, [[["x"]]] * 4)) == [[None]] * 4
    assert {task.index for task in verifier.counters.left_out} >= {2, 3}


def test_an_environment_that_poses_nothing_is_refused_at_the_start(verifier, monkeypatch):
    prepare = verifier._prepare
    assert verifier_worker._pose(prepare) == []
    monkeypatch.setattr(scoring, "environment", lambda name: Broken())
    scoring._problem.cache_clear()
    with pytest.raises(ConfigError, match=r"cannot be posed .*no item 0"):
        verifier_worker._pose(prepare)


def test_the_same_failure_at_the_same_step_is_not_tried_again(tmp_path: Path) -> None:
    deaths = Deaths(tmp_path, Notes())
    for step in range(4):  # at another step each: it may be the machine
        assert "is restarted" in deaths.count("it", ChildFailed("no room"), step, went_on=True)
    for address in range(SAME_FAILURES_MAX - 1):
        deaths.count("it", ChildFailed(f"NaN at 0x{address}"), 9, went_on=True)
    with pytest.raises(CannotHeal, match="it failed 3 times alike after round 9: NaN at 0x7"):
        deaths.count("it", ChildFailed("NaN at 0x7"), 9, went_on=True)


class NeverSaves(TrainingRole):
    """Does rounds, and fails to save them."""

    starts = 0

    async def _once(self, leaving: Any) -> None:
        self.starts += 1
        self._progress = Progress(round=10)
        raise ChildFailed("trainer, save: ValueError: a weight is not finite")


def test_a_role_ends_after_three_such_failures(tmp_path: Path) -> None:
    async def tell(_: object) -> None:
        return

    role = NeverSaves.__new__(NeverSaves)
    role._world = SimpleNamespace(restarts_trainer=True)  # type: ignore[assignment]
    role._config = SimpleNamespace(data_dir=tmp_path)  # type: ignore[assignment]
    role._node = SimpleNamespace(notes=Notes())  # type: ignore[assignment]
    role._listener = SimpleNamespace(tell=tell)  # type: ignore[assignment]
    role._progress = Progress()

    async def main() -> None:
        await role.run(trio.Event())

    with pytest.raises(CannotHeal, match="a weight is not finite"):
        run(main)
    assert role.starts == SAME_FAILURES_MAX
