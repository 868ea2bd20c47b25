"""A run whose scorers do what the text says, and a verifier that allows it little."""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from node.config import RunConfig
from node.envs import registry, scoring
from node.envs.base import Problem
from node.verify.verifier import STARVED_FACTOR, ProcessVerifier
from swarm.rollouts import Task
from tests.support import run as run_async
from tests.unit.tasks_support import make_config, make_run

CPU_LIMIT_S = 0.3
WALL_LIMIT_S = STARVED_FACTOR * CPU_LIMIT_S
BUSY_S = {"busy": 0.05}  # CPU seconds
STUCK_ONCE = "stuck once: "  # and a path, which is made when work begins
_HELD: list[bytearray] = []


def _be_careless(text: str) -> None:
    if text.startswith("a" * 20):
        re.fullmatch(r"(a+)+b", text)  # each letter more doubles the time
    if text.startswith("9" * 20):
        int(text) ** int(text)
    if text.startswith("["):
        json.loads(text)
    if text.startswith("("):
        eval(text)


def _end(text: str) -> None:
    if text == "die":
        os._exit(3)
    if text == "leave":
        sys.exit(0)
    if text == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)


class Trap:
    """Does what the text says, as a careless scorer might."""

    name = "trap"
    version = "1"

    def problem(self, task: Task) -> Problem:
        return Problem(task, "?", "good", {})

    def score(self, problem: Problem, text: str) -> float:
        if text == "loop":
            while True:
                pass
        if text == "sleep":
            threading.Event().wait()
        if text == "memory":
            _HELD.append(bytearray(2**31))
        _be_careless(text)
        _end(text)
        if text.startswith(STUCK_ONCE) and not (begun := Path(text[len(STUCK_ONCE) :])).exists():
            begun.touch()
            threading.Event().wait()
        if text in BUSY_S:
            started = time.process_time()
            while time.process_time() - started < BUSY_S[text]:
                pass
        if text == "print":
            print("{}")  # noqa: T201 - into the pipe of the answers, were it not claimed
        return 1.0 if text in ("good", "print") else 0.0


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunConfig]:
    """A run with `trap`, installed where this process and its children look."""
    package = tmp_path / "trap-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: trap\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        f"[swarm_node.environments]\ntrap = {__name__}:Trap\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for cached in (registry.environment, scoring._problem):
        cached.cache_clear()
    yield make_run({"name": "trap"})
    for cached in (registry.environment, scoring._problem):
        cached.cache_clear()


def with_process(
    run: RunConfig,
    body: Callable[[ProcessVerifier], Awaitable[None]],
    cpu_limit_s: float = CPU_LIMIT_S,
) -> None:
    """Run the body with a verifier that allows little. The trap is a plug-in, and is served as if
    it were built in: the sandbox has tests of its own."""

    async def main() -> None:
        config = make_config(run, verify_cpu_s=cpu_limit_s, verify_sandbox="off")
        async with ProcessVerifier.open(config) as verifier:
            await body(verifier)

    run_async(main)


def fork_of(verifier: ProcessVerifier) -> psutil.Process:
    """The process that scores strangers' text."""
    assert verifier._foreign._channel is not None
    (fork,) = psutil.Process(verifier._foreign._channel.process.pid).children()
    return fork
