"""Run Python that anybody may have written, and see what its function returns.

Beside whoever scores there is one process, the runner (`runner_main`): an interpreter of its own,
confined to its standard library, which was never told a right answer. For each text it forks a
child, which runs the text's code on the inputs and passes on what came out. Comparing that with
what should have come out is the caller's, in a process that such code never runs in.

Work is counted in lines that run, which is the same on all machines, and not in seconds. A run
that takes between `LINES_MIN` and four times that is undecided, as some other machine or another
release of Python may find it on the other side; so are depth, memory and CPU time, which also bound
what no line counts (a regular expression, a power).
"""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from node.sandbox.runner_main import ANSWER_BYTES_MAX, LENGTH, MODULE_FLAGS, TRUSTING
from swarm.errors import ChildFailed, ConfigError

HASH_SEED = "0"  # sets are in the same order on all nodes
Ended = Literal["done", "over", "undecided"]
"""`over`: a limit was exceeded so far that it is on all machines."""


class RunnerFailed(ChildFailed):
    """The runner itself ended: no text is to blame, and none was found to be worth anything."""


class NoSandbox(ConfigError):
    """This machine has none for the runner."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a text's code ended, and what each call came to; None: it failed. Plain JSON values."""

    ended: Ended
    results: tuple[tuple[Any] | None, ...] = ()
    lines: int = 0
    cpu_s: float = 0.0


class _Runner:
    """The process, and what of its time may be used."""

    def __init__(self, *, trusting: bool) -> None:
        environ = {
            "PYTHONHASHSEED": HASH_SEED,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "LC_ALL": "C.UTF-8",
        }
        self.process = subprocess.Popen(
            [sys.executable, *MODULE_FLAGS, *([TRUSTING] if trusting else [])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ,
        )  # fmt: skip
        self.used_s = 0.0
        hello = self.ask({})
        if "why" in hello:
            self.end()
            raise NoSandbox(f"code of policies is not run here: {hello['why']}")

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """One answer to one question, and not to that of a fork which ended before it came.

        Raises:
            RunnerFailed: the runner ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        number = time.perf_counter_ns()
        body = json.dumps({**job, "number": number}).encode()
        try:
            self.process.stdin.write(LENGTH.pack(len(body)) + body)
            self.process.stdin.flush()
            answer: dict[str, Any] = {}
            while answer.get("number") != number:
                answer = json.loads(_body(self.process.stdout))
        except (OSError, ValueError, struct.error) as error:
            raise RunnerFailed(f"the runner of policies' code ended ({error})") from None
        self.used_s = answer["used_s"]
        return answer

    def end(self) -> None:
        """Its children end with it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def _body(pipe: IO[bytes]) -> bytes:
    """
    Raises:
        ValueError, struct.error: what comes is no frame: the rest of one that a fork began to read.
    """
    (size,) = LENGTH.unpack(pipe.read(LENGTH.size))
    if size > ANSWER_BYTES_MAX:
        raise ValueError(f"{size} bytes")
    return pipe.read(size)


class _Current:
    runner: _Runner | None = None
    left: _Runner | None = None  # kept, as its pipes are closed by number
    until_s: float | None = None  # of the runner's CPU time; None: no bound


def start(*, trusting: bool = False) -> None:
    """Have a fresh runner. Forks of this process use it too, one at a time. Where this process
    confines itself later, it cannot have another one. `trusting`: confined or not.

    Raises:
        NoSandbox: this machine has none, and there is no trust.
        RunnerFailed: it does not start.
    """
    stop()
    _Current.runner = _Runner(trusting=trusting)


def stop() -> None:
    """End the runner, if there is one."""
    runner, _Current.runner = _Current.runner, None
    if runner is not None:
        runner.end()


def leave() -> None:
    """Close this fork's way to the runner, which others go on using."""
    runner, _Current.runner = _Current.runner, None
    if runner is not None:
        for pipe in (runner.process.stdin, runner.process.stdout):
            if pipe is not None:
                os.close(pipe.fileno())
        _Current.left = runner


def used_s() -> float:
    """CPU seconds of all that the runner ran; 0 without one."""
    return _Current.runner.ask({})["used_s"] if _Current.runner else 0.0


def allow(seconds: float) -> None:
    """Use so much of its CPU time from here on; what is beyond that is undecided."""
    if _Current.runner is not None:
        _Current.until_s = _Current.runner.ask({})["used_s"] + seconds


def run(source: str, function: str, calls: Sequence[Sequence[Any]]) -> Ran:
    """Run a text's code and call its function with each list of arguments, of plain JSON values.

    Raises:
        NoSandbox: there is no runner, and none can be had here.
        RunnerFailed: it ended.
    """
    if _Current.runner is None:
        start()
    assert _Current.runner is not None
    if _Current.until_s is not None and _Current.runner.used_s >= _Current.until_s:
        return Ran("undecided")
    said = _Current.runner.ask(
        {"source": source, "function": function, "calls": [list(call) for call in calls]}
    )
    results = [tuple(each) if each else None for each in said["results"]]
    cpu_s, lines = float(said["cpu_s"]), int(said["lines"])
    ended: Ended = said["ended"]
    if ended == "done" and len(results) != len(calls):
        ended = "over"  # it wrote into its own pipe
    return Ran(ended, tuple(results) if ended == "done" else (), lines, cpu_s)
