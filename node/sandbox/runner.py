"""Run Python code from anybody and get its function's results.

The runner (`runner_main`) is one confined interpreter beside the scorer, with the standard library
only. It never sees texts or right answers. For each text it forks a child, which reads code and
inputs from one pipe and writes results to another. The caller compares them in its own process.

Work is counted in executed lines, equal on all machines. A run between `LINES_MIN` and four times
that is undecided, since other machines or Python releases may decide differently. So are runs near
the limits of depth, memory and CPU time, and runs over `WALL_MAX_S`. A text pays the larger of its
CPU time and a share of its wall time.
"""

import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from node.sandbox import confinement
from node.sandbox.confinement import Trust
from node.sandbox.runner_main import (
    ANSWER,
    BY_CLOCK,
    BY_FAULT,
    JOB,
    MODULE_FLAGS,
    NEAR,
    READY,
    RESULT_BYTES_MAX,
    WALL_MAX_S,
    WALL_SHARE,
    lacks_cpu,
)
from swarm.errors import ChildFailed, ConfigError

_PART_BYTES: Final = 4096  # written to a pipe atomically
HASH_SEED = "0"  # same order of sets on all nodes
Ended = Literal["done", "over", "undecided"]
"""`over`: exceeded a limit so far that it does so on all machines."""


class RunnerFailed(ChildFailed):
    """The runner itself ended; no text is to blame."""


class NoSandbox(ConfigError):
    """This machine has no sandbox for the runner."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The end of a text's code and each call's result as plain JSON; None: the call failed."""

    ended: Ended
    results: tuple[tuple[Any] | None, ...] = ()
    lines: int = 0
    cpu_s: float = 0.0


class _Runner:
    def __init__(self, trust: Trust) -> None:
        environ = {
            "PYTHONHASHSEED": HASH_SEED,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "LC_ALL": "C.UTF-8",
        }
        self.channel, its = socket.socketpair()
        with its:
            self.process = subprocess.Popen(
                [sys.executable, *MODULE_FLAGS, trust],
                stdin=its.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env=environ,
            )  # fmt: skip
        hello = self.channel.recv(len(READY))
        if hello != READY:
            self.end()
            if not hello:
                raise RunnerFailed("the runner of policies' code does not start")
            raise NoSandbox(f"code of policies is not run here: {confinement.NEEDED}")

    def ask(self, job: bytes, wall_s: float) -> tuple[bytes, tuple[int, float, float]]:
        """A child's output, up to one byte over its limit, and its ending. Skips answers to forks
        that ended early."""
        (number,) = struct.unpack("=Q", os.urandom(8))
        its_job, job_pipe = os.pipe()
        result_pipe, its_result = os.pipe()
        with (
            open(job_pipe, "wb", buffering=0) as write,
            open(result_pipe, "rb", buffering=0) as read,
        ):
            try:
                socket.send_fds(self.channel, [JOB.pack(number, wall_s)], [its_job, its_result])
            except OSError as error:
                raise RunnerFailed(f"the runner of policies' code ended ({error})") from None
            finally:
                os.close(its_job)
                os.close(its_result)
            with suppress(BrokenPipeError):  # the child ended before reading all
                for start in range(0, len(job), _PART_BYTES):
                    write.write(job[start : start + _PART_BYTES])
            write.close()
            said = b""
            while len(said) <= RESULT_BYTES_MAX and (part := read.read(RESULT_BYTES_MAX)):
                said += part
        return said, self._answer(number)

    def _answer(self, number: int) -> tuple[int, float, float]:
        while True:
            try:
                body = self.channel.recv(ANSWER.size, socket.MSG_WAITALL)
            except OSError:
                body = b""
            if len(body) < ANSWER.size:
                raise RunnerFailed("the runner of policies' code ended")
            of, ended, cpu_s, wall_s = ANSWER.unpack(body)
            if of == number:
                return ended, cpu_s, wall_s

    def end(self) -> None:
        self.channel.close()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class _Account:
    """Time that texts paid and wall time, summed over this process and its forks."""

    _SUMS: Final = struct.Struct("=dd")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def leave(self) -> None:
        """Use a sum of one's own from here on."""
        sums = self.sums
        self._memory.close()
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.add(*sums)

    @property
    def sums(self) -> tuple[float, float]:
        """(paid seconds, wall seconds)"""
        paid_s, wall_s = self._SUMS.unpack_from(self._memory)
        return paid_s, wall_s

    def add(self, paid_s: float, wall_s: float) -> None:
        before = self.sums
        self._SUMS.pack_into(self._memory, 0, before[0] + paid_s, before[1] + wall_s)


class _Current:
    runner: _Runner | None = None
    left: _Runner | None = None  # kept: its channel is closed by number
    account = _Account()
    paid_until_s = wall_until_s = float("inf")  # limits on the account
    cpu_s = wall_s = 0.0  # since the last `allow`
    waited = False


def start(trust: Trust = "auto") -> None:
    """Start a new runner. Forks of this process use it too, one at a time. A confined process
    cannot start another. `trust`: where it may run code.

    Raises:
        NoSandbox: the machine offers less.
        RunnerFailed: it does not start.
    """
    stop()
    _Current.runner = _Runner(trust)


def stop() -> None:
    runner, _Current.runner = _Current.runner, None
    if runner is not None:
        runner.end()


def leave() -> None:
    """Close this fork's channel to the runner; other forks keep theirs."""
    runner, _Current.runner = _Current.runner, None
    if runner is not None:
        os.close(runner.channel.fileno())
        _Current.left = runner
    _Current.account.leave()


def used_s() -> float:
    """Seconds that texts have paid in all."""
    return _Current.account.sums[0]


def allow(paid_s: float, wall_s: float) -> None:
    """Set the time that texts may pay and wait from here on; beyond it, runs are undecided."""
    before = _Current.account.sums
    _Current.paid_until_s, _Current.wall_until_s = before[0] + paid_s, before[1] + wall_s
    _Current.cpu_s = _Current.wall_s = 0.0
    _Current.waited = False


def has_waited() -> bool:
    """True if a wall-time limit passed with less than half of it used, on a machine with a free
    core."""
    return _Current.waited


def run(source: str, function: str, calls: Sequence[Sequence[Any]]) -> RunResult:
    """Run a text's code and call its function with each list of arguments (plain JSON).

    Raises:
        NoSandbox: there is no runner, and none can be started.
        RunnerFailed: it ended.
    """
    if _Current.runner is None:
        start()
    assert _Current.runner is not None
    paid_s, wall_s = _Current.account.sums
    left_s = min(WALL_MAX_S, _Current.wall_until_s - wall_s)
    if paid_s >= _Current.paid_until_s or left_s <= 0:
        _record_waiting(_Current.cpu_s, _Current.wall_s)
        return RunResult("undecided")
    job = {"source": source, "function": function, "calls": [list(call) for call in calls]}
    said, (how, cpu_s, wall_s) = _Current.runner.ask(json.dumps(job).encode(), left_s)
    _Current.cpu_s += cpu_s
    _Current.wall_s += wall_s
    if how == BY_CLOCK:
        _record_waiting(cpu_s, wall_s)  # for this text and for all
        _record_waiting(_Current.cpu_s, _Current.wall_s)
    cpu_s = max(cpu_s, WALL_SHARE * wall_s)
    _Current.account.add(cpu_s, wall_s)
    if len(said) > RESULT_BYTES_MAX:  # on every machine
        return RunResult("over", cpu_s=cpu_s)
    ended, results, lines = _understood(said)
    if how in (BY_FAULT, BY_CLOCK) or (how == NEAR and ended == "done"):
        ended = "undecided"
    if ended == "done" and len(results) != len(calls):
        ended = "over"  # the code wrote into the pipe
    found = tuple(tuple(each) if each else None for each in results) if ended == "done" else ()
    return RunResult(ended, found, lines, cpu_s)


def _record_waiting(cpu_s: float, wall_s: float) -> None:
    if cpu_s < wall_s / 2 and not lacks_cpu():
        _Current.waited = True


def _understood(said: bytes) -> tuple[Ended, list[Any], int]:
    """Parse a child's output; malformed output counts as a failed run."""
    try:
        ended, results, lines = json.loads(said)
        if (
            ended in ("done", "over", "undecided")
            and type(lines) is int
            and all(each is None or (type(each) is list and len(each) == 1) for each in results)
        ):
            return ended, results, lines
    except (ValueError, TypeError, RecursionError):
        pass
    return "over", [], 0
