"""Where namespaces are not allowed, the summary says so."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NO_RIGHT = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]


@pytest.mark.netns
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
def test_summary_counts_what_is_not_allowed_here() -> None:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/netns/test_lab.py"]
    done = subprocess.run(
        [*NO_RIGHT, sys.executable, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert " not run " in done.stdout
    assert "x network namespaces are not allowed here" in done.stdout
    assert "passed" not in done.stdout
