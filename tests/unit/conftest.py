from pathlib import Path

import pytest

from tests.unit.verifier_trap import trap  # noqa: F401  a fixture

BUSY = """
import sys
if "verifier_worker" in " ".join(sys.orig_argv):
    from node.sandbox import runner_main
    runner_main.lacks_cpu = lambda: True
"""


@pytest.fixture
def busy_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifiers find no core free, so a text that was kept from its core counts as undecided. A
    probe finds one also just after a core was taken for a second."""
    (tmp_path / "sitecustomize.py").write_text(BUSY)
    monkeypatch.syspath_prepend(str(tmp_path))
