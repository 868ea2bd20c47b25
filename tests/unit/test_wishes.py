"""Wishes of several that write at the same time: none is lost."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coordinator.overrides import drain, read_depth, read_drained, set_depth
from swarm.storage import write_whole

WRITERS = 4
DRAINS = 25
CHILD = """
import sys
from pathlib import Path
from coordinator.overrides import drain
for n in range({drains}):
    drain(Path(sys.argv[1]), f"child-{{n}}", undo=False)
"""


def test_threads_and_another_process_lose_no_drain(tmp_path: Path) -> None:
    directory = tmp_path / "data"  # the first makes it

    def work(writer: int) -> None:
        for n in range(DRAINS):
            drain(directory, f"{writer}-{n}", undo=False)
            set_depth(directory, 1)

    child = subprocess.Popen([sys.executable, "-c", CHILD.format(drains=DRAINS), directory])
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(work, range(WRITERS)))
    assert child.wait(timeout=120) == 0
    whose = [*(str(writer) for writer in range(WRITERS)), "child"]
    assert read_drained(directory) == {f"{who}-{n}" for who in whose for n in range(DRAINS)}
    assert read_depth(directory) == 1


def test_a_file_that_several_write_is_one_of_theirs(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = {bytes([writer]) * 100_000 for writer in range(WRITERS)}

    def work(content: bytes) -> None:
        for _ in range(DRAINS):
            write_whole(path, content)
            assert path.read_bytes() in contents

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(work, contents))
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_whole(tmp_path / "directory", "content")
    assert [each.name for each in tmp_path.iterdir()] == ["directory"]
