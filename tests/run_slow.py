"""Run tests that use real sockets, processes and clocks: `python -m tests.run_slow [ARGUMENT...]`.

The arguments are pytest's. A busy machine can fail such a test once, so each test that fails runs
a second time, alone, when all others are done. A test that passes then is unstable: the run prints
its name below the output of its failure. The run fails if a test fails twice, or if more than
`UNSTABLE_MAX` tests fail.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

UNSTABLE_MAX = 3  # tests of one run; more failures than this have another cause than a busy machine
TESTS_FAILED = 1  # pytest's exit status; a higher one means that not all tests ran


def _failed_tests(cache: Path) -> list[str]:
    """Node IDs of the failed tests in this pytest cache, without the group that xdist appends."""
    record = cache / "v/cache/lastfailed"
    found = json.loads(record.read_text()) if record.exists() else {}
    return sorted({node.rpartition("@")[0] or node for node in found})


def run(arguments: Sequence[str]) -> int:
    """The exit status: 0 if every test passed, at once or when it was repeated alone."""
    with tempfile.TemporaryDirectory() as directory:
        pytest = [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={directory}"]
        status = subprocess.run([*pytest, *arguments], check=False).returncode
        failed = _failed_tests(Path(directory))
        if status != TESTS_FAILED or not failed:
            return status
        if len(failed) > UNSTABLE_MAX:
            print(f"{len(failed)} tests failed; up to {UNSTABLE_MAX} would have been repeated")
            return status
        print(f"\n{len(failed)} failed and will be repeated alone", flush=True)
        environment = {
            name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"
        }
        again = subprocess.run([*pytest, *failed], check=False, env=environment).returncode
    if again == 0:
        print("unstable (failed above, passed alone):", *failed, sep="\n  ")
    return again


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
