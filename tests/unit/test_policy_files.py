"""Where a policy lies on its way to an engine, and that nothing of it stays."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from node.engines import policy_files as module
from node.engines.policy_files import PolicyFiles, policy_files, remove_abandoned
from node.engines.scripted import ScriptedPolicy
from node.interfaces.trainer_spec import Precision
from swarm.errors import ChildFailed
from tests.support import run

ROOT = Path(__file__).parents[2]
SMALL, HUGE = 1000, 2**60  # bytes


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    path = tmp_path / "memory"
    path.mkdir()
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.mkdir()
    return path


async def export(files: PolicyFiles) -> tuple[Path, Path]:
    trainer = ScriptedPolicy()
    return await files.export(trainer, 3), await files.export(trainer, 4)


def test_it_lies_in_memory_and_goes(memory: Path, data: Path) -> None:
    with policy_files(data, SMALL, memory) as files:
        one, other = run(export, files)
        assert one.parent.parent == memory
        assert (one.name, (one / "skill").exists()) == ("policy-3", True)
        run(files.keep_only, other)
        assert not one.exists()
        assert other.exists()
        remove_abandoned(memory)  # as a node beside this one does
        assert other.exists()
    assert list(memory.iterdir()) == []
    assert list(data.iterdir()) == []


def test_without_room_it_lies_with_the_data(memory: Path, data: Path) -> None:
    (data / "policy-1").mkdir()  # of an earlier process
    with policy_files(data, HUGE, memory) as files:
        assert list(data.iterdir()) == []
        one, _ = run(export, files)
        assert one.parent == data
        assert list(memory.iterdir()) == []
    assert list(data.iterdir()) == []


def test_what_a_killed_node_leaves_goes_with_the_next(memory: Path, data: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from node.engines.policy_files import policy_files\n"
        f"with policy_files(Path({str(data)!r}), {SMALL}, Path({str(memory)!r})) as files:\n"
        "    (files.parent / 'policy-1').mkdir()\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as node:
        assert node.stdout is not None
        assert node.stdout.readline() == b"ready\n"
        remove_abandoned(memory)
        assert len(list(memory.iterdir())) == 1
        os.kill(node.pid, signal.SIGKILL)
    assert len(list(memory.iterdir())) == 1
    remove_abandoned(memory)
    assert list(memory.iterdir()) == []


def test_what_others_planted_in_shared_memory_is_left_alone(memory: Path, tmp_path: Path) -> None:
    mark = f"swarm-policy-{os.getuid()}-"
    precious = tmp_path / "precious"
    precious.write_text("kept")
    elsewhere = tmp_path / "elsewhere"  # a link instead of a directory
    elsewhere.mkdir()
    (elsewhere / "lock").write_text("kept")
    (memory / f"{mark}link").symlink_to(elsewhere)
    linked = memory / f"{mark}linked-lock"  # a link instead of a lock
    linked.mkdir()
    (linked / "lock").symlink_to(precious)
    abandoned = memory / f"{mark}abandoned"
    abandoned.mkdir()
    (abandoned / "lock").touch()
    remove_abandoned(memory)
    assert precious.read_text() == "kept"
    assert (elsewhere / "lock").read_text() == "kept"
    assert linked.exists()
    assert not abandoned.exists()


def test_a_directory_of_another_user_is_left_alone(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = memory / f"swarm-policy-{os.getuid() + 1}-theirs"
    theirs.mkdir()
    (theirs / "lock").write_text("kept")
    monkeypatch.setattr(os, "getuid", lambda: theirs.stat().st_uid + 1)
    remove_abandoned(memory)
    assert (theirs / "lock").read_text() == "kept"


class CutShort(ScriptedPolicy):
    """A trainer that finds no room in a directory, which it has filled by then."""

    def __init__(self, memory: Path, fill: Callable[[], None]) -> None:
        super().__init__()
        self._memory, self._fill = memory, fill

    async def export(self, directory: Path, precision: Precision = "float32") -> None:
        await super().export(directory)
        if self._memory in directory.parents:
            self._fill()
            raise ChildFailed("trainer: OSError: no space left on device")


def test_what_finds_memory_filled_since_the_start_lies_with_the_data(
    memory: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [2**40]
    monkeypatch.setattr(module, "_has_room", lambda _, size_bytes: room[0] >= size_bytes)
    with policy_files(data, SMALL, memory) as files:
        assert run(files.export, ScriptedPolicy(), 1).parent.parent == memory
        with pytest.raises(ChildFailed):  # a failure that room has no part in
            run(files.export, CutShort(memory, lambda: None), 2)
        filling = CutShort(memory, lambda: room.__setitem__(0, 0))
        there = run(files.export, filling, 3)  # fills up while it is written
        assert there.parent == data
        later = run(files.export, ScriptedPolicy(), 4)  # is full before
        assert later.parent == data
        assert list(memory.glob("*/*.partial")) == []
        room[0] = 2**40
        back = run(files.export, ScriptedPolicy(), 5)
        assert back.parent.parent == memory
        run(files.keep_only, later)
        assert [path.name for path in data.iterdir()] == ["policy-4"]
    assert list(memory.iterdir()) == list(data.iterdir()) == []
