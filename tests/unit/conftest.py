from collections.abc import Callable
from pathlib import Path
from textwrap import indent

import pytest

from tests.unit.verifier_trap import trap  # noqa: F401  a fixture

IN_WORKERS = """
import sys
if "verifier_worker" in " ".join(sys.orig_argv):
"""


@pytest.fixture
def in_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have each verifier worker begin with some code."""

    def begin(code: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(IN_WORKERS + indent(code, "    "))
        monkeypatch.syspath_prepend(str(tmp_path))

    return begin


@pytest.fixture
def busy_machine(in_workers: Callable[[str], None]) -> None:
    """Verifiers find no core free, so a text that was kept from its core counts as undecided. A
    probe finds one also just after a core was taken for a second."""
    in_workers("from node.sandbox import runner_main\nrunner_main.lacks_cpu = lambda: True")
