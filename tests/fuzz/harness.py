"""What every fuzz target shares: the oracles over one input, figures, and where a finding goes.

It imports nothing of the project, so that a run can instrument all of that first.
"""

import hashlib
import json
import resource
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

CPU_S_MAX = 0.100  # of this process for one input, so that a loaded machine is no finding
GROWTH_BYTES_MAX = 50 * 1024 * 1024  # of the peak memory since the warm-up
WARM_UP_RUNS = 2_000  # caches fill, modules load
REPEATS = 3  # of a slow input: a pass of the garbage collector is not its fault

Check = Callable[[bytes], None]
"""Judges one input; any exception is a finding."""


class Finding(Exception):
    """An input that broke an oracle."""


@dataclass(slots=True)
class Figures:
    """What is reported of a run."""

    executions: int = 0
    slowest_s: float = 0.0
    peak_bytes: int = 0
    warm_bytes: int = 0  # the peak at the end of the warm-up

    @property
    def growth_bytes(self) -> int:
        return self.peak_bytes - self.warm_bytes if self.warm_bytes else 0


def peak_memory_bytes() -> int:
    """The largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


class Watch:
    """Judges inputs under the limits on time and memory, and counts."""

    def __init__(
        self,
        check: Check,
        *,
        memory: Callable[[], int] = peak_memory_bytes,
        warm_up_runs: int = WARM_UP_RUNS,
    ) -> None:
        self._check = check
        self._memory = memory
        self._warm_up_runs = warm_up_runs
        self.figures = Figures()

    def judge(self, data: bytes) -> None:
        """Run the check once.

        Raises:
            Finding: it raised, took too long, or memory has grown too much.
        """
        taken_s = self._timed(data)
        if taken_s > max(self.figures.slowest_s, CPU_S_MAX / 4):
            taken_s = min(taken_s, *(self._timed(data) for _ in range(REPEATS)))
        figures = self.figures
        figures.executions += 1
        figures.slowest_s = max(figures.slowest_s, taken_s)
        figures.peak_bytes = self._memory()
        if figures.executions == self._warm_up_runs:
            figures.warm_bytes = figures.peak_bytes
        if taken_s > CPU_S_MAX:
            raise Finding(f"took {1000 * taken_s:.0f} ms of CPU")
        if figures.growth_bytes > GROWTH_BYTES_MAX:
            raise Finding(f"memory has grown by {figures.growth_bytes} bytes")

    def _timed(self, data: bytes) -> float:
        start_s = time.process_time()
        try:
            self._check(data)
        except Exception as error:  # noqa: BLE001  boundary: whatever comes out is the finding
            raise Finding("".join(traceback.format_exception(error))) from None
        return time.process_time() - start_s


def keep_finding(folder: Path, data: bytes, finding: Finding) -> Path:
    """Write the input and what it did; returns the input's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(data).hexdigest()[:16]
    path.write_bytes(data)
    path.with_suffix(".txt").write_text(str(finding))
    return path


def save_figures(path: Path, figures: Figures) -> None:
    path.write_text(json.dumps(asdict(figures)))


def load_figures(path: Path) -> Figures:
    return Figures(**json.loads(path.read_text()))
