"""This release and the one before in one swarm, each in a process of its own, on loopback."""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

BEFORE = "3f4cf48"  # the last commit of the release before
HERE = Path(__file__).parents[2]
CHILD = Path(__file__).parent / "release_child.py"
GREETING = "/swarm/hello/1.1.0"
PIECES = "/swarm/rollouts/1.1.0"
LINES_MAX = 120  # of half a second each


@pytest.fixture(scope="module")
def release_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the release before, without what is not code."""
    ask = ["git", "-C", str(HERE), "archive", BEFORE, "swarm", "node"]
    found = subprocess.run(ask, capture_output=True, check=False)
    if found.returncode:
        pytest.skip(f"NOT TESTED: the release before ({BEFORE}) is not in this tree's history")
    directory = tmp_path_factory.mktemp("release")
    with tarfile.open(fileobj=BytesIO(found.stdout)) as archive:
        archive.extractall(directory, filter="data")
    return directory


class Child:
    """A node of some release."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.first = self.line()

    def line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the node ended"
        told: dict[str, Any] = json.loads(line)
        return told

    def until_accepted(self, groups: int) -> dict[str, Any]:
        for _ in range(LINES_MAX):
            told = self.line()
            if told["accepted"] >= groups:
                return told
        raise AssertionError(told)


@contextmanager
def child(release: Path, seed: str, directory: Path, *bootstrap: str) -> Iterator[Child]:
    with subprocess.Popen(
        [sys.executable, str(CHILD), seed, str(directory), *bootstrap],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(release)},
    ) as process:
        try:
            yield Child(process)
        finally:
            process.kill()


def test_nodes_of_both_releases_meet_and_take_each_others_groups(
    release_before: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        old = stack.enter_context(child(release_before, "o", tmp_path))
        assert old.first["release"] == str(release_before)
        address = old.first["address"]
        new = stack.enter_context(child(HERE, "n", tmp_path, address))
        assert new.first["release"] == str(HERE)
        newer = stack.enter_context(child(HERE, "m", tmp_path, address, new.first["address"]))
        # three of each other node, and what only this release's nodes take of each other
        told = {"old": old.until_accepted(6)}
        told |= {"new": new.until_accepted(7), "newer": newer.until_accepted(7)}
        for name, said in told.items():
            assert said["rejected"] == {}, name
            assert len(said["peers"]) == 2, name
        assert PIECES not in told["old"]["asked"]
        assert told["new"]["asked"][GREETING]
        assert told["newer"]["asked"][PIECES]
        for _ in range(6):  # what the old one must not be sent would be counted by now
            said = old.line()
        assert said["accepted"] == 6
        assert said["rejected"] == {}
