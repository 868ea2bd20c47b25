"""A vLLM worker that samples a few tokens and then waits, where a file says so.

For tests of what comes in the middle of completions: however fast or slow the machine is, none of
these has ended before. The file lies in the server's own temporary directory; another one beside it
says that the worker waits.
"""

import os
import threading
from pathlib import Path
from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.integration.failing_worker import HOLD, WAITS, FailingExtension

STEPS_BEFORE = 8  # each makes a token of every completion that the server has by then
_LOOK_S = 0.002


class HoldingExtension(FailingExtension):
    """As `FailingExtension`; the module is what holds."""


class _Hold:
    def __init__(self, directory: Path) -> None:
        self._hold, self._waits = directory / HOLD, directory / WAITS
        self._steps = 0  # since there is such a file

    def pass_through(self) -> None:
        """Return when a step may be made."""
        while self._hold.exists() and self._steps == STEPS_BEFORE:
            self._waits.touch()
            threading.Event().wait(_LOOK_S)
        self._waits.unlink(missing_ok=True)
        self._steps = self._steps + 1 if self._hold.exists() else 0


_HOLD = _Hold(Path(os.environ["TMPDIR"]))
_execute = GPUModelRunner.execute_model


def _execute_held(self: Any, scheduled: Any, *args: Any, **options: Any) -> Any:
    if scheduled.total_num_scheduled_tokens:
        _HOLD.pass_through()
    return _execute(self, scheduled, *args, **options)


GPUModelRunner.execute_model = _execute_held
