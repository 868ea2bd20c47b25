"""A test that fails once is repeated alone; one that fails twice, or too many, fail the run."""

import os
import subprocess
import sys
from pathlib import Path

from tests.run_slow import UNSTABLE_MAX

REPOSITORY = Path(__file__).parents[2]
TESTS = """
import pathlib
import pytest

@pytest.mark.parametrize("index", range({unstable}))
def test_unstable(index):
    seen = pathlib.Path(f"seen-{{index}}")
    before = seen.exists()
    seen.touch()
    assert before, "FIRST-TRY"

@pytest.mark.parametrize("index", range({broken}))
def test_broken(index):
    assert False

def test_good():
    with open("runs", "a") as runs:
        runs.write("x")
"""


def _run(directory: Path, unstable: int, broken: int) -> tuple[int, str]:
    (directory / "test_it.py").write_text(TESTS.format(unstable=unstable, broken=broken))
    command = [sys.executable, "-m", "tests.run_slow", "-n", "2", "--dist", "load"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, cwd=directory, env=environment, check=False, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def test_tests_that_fail_once_are_repeated_alone_and_reported_with_their_output(
    tmp_path: Path,
) -> None:
    status, output = _run(tmp_path, UNSTABLE_MAX, 0)
    assert status == 0, output
    assert "unstable" in output
    assert "test_unstable[0]" in output.rpartition("unstable (")[2]
    assert "FIRST-TRY" in output
    assert (tmp_path / "runs").read_text() == "x"  # what passed is not repeated


def test_a_test_that_fails_twice_fails_the_run(tmp_path: Path) -> None:
    status, output = _run(tmp_path, 1, 1)
    assert status == 1, output
    assert "unstable (" not in output


def test_more_failures_than_the_bound_fail_the_run_at_once(tmp_path: Path) -> None:
    status, output = _run(tmp_path, UNSTABLE_MAX + 1, 0)
    assert status == 1, output
    assert f"{UNSTABLE_MAX + 1} tests failed" in output


def test_a_run_that_passes_repeats_nothing(tmp_path: Path) -> None:
    status, output = _run(tmp_path, 0, 0)
    assert status == 0, output
    assert "repeated" not in output
