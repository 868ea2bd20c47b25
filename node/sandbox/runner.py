"""Run Python that anybody may have written, and see what its function returns.

Beside whoever scores there is one process, the runner (`runner_main`): an interpreter of its own,
confined to its standard library, which is told neither a right answer nor any text. For each text
it forks a child, which reads the text's code and the inputs from a pipe of its own, and writes what
came out into another one. Comparing that with what should have come out is the caller's, in a
process that such code never runs in.

Work is counted in lines that run, which is the same on all machines, and not in seconds. A run
that takes between `LINES_MIN` and four times that is undecided, as some other machine or another
release of Python may find it on the other side; so are depth, memory and CPU time, which also bound
what no line counts (a regular expression, a power).

A text pays its CPU time, or a share of the time that went by where that is more: whoever waits
holds others up. More than `WALL_MAX_S` by the clock is undecided.
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
    is_starved,
)
from swarm.errors import ChildFailed, ConfigError

_PART_BYTES: Final = 4096  # which a pipe takes whole or not at all
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
    """The process, and the way to it."""

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
        """What a child wrote of a job, up to one byte more than it may, and how it ended; not the
        answer to a fork which ended before it came.

        Raises:
            RunnerFailed: the runner ended.
        """
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
            with suppress(BrokenPipeError):  # the child ended before it had read all
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
        """Its children end with it."""
        self.channel.close()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class _Account:
    """What texts paid, and the time that went by, of this process and its forks in one sum."""

    _SUMS: Final = struct.Struct("=dd")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def leave(self) -> None:
        """Have a sum of one's own from here on, out of reach of that which others share."""
        sums = self.sums
        self._memory.close()
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.add(*sums)

    @property
    def sums(self) -> tuple[float, float]:
        """Seconds that were paid for, and seconds of the clock."""
        paid_s, wall_s = self._SUMS.unpack_from(self._memory)
        return paid_s, wall_s

    def add(self, paid_s: float, wall_s: float) -> None:
        """One text more."""
        before = self.sums
        self._SUMS.pack_into(self._memory, 0, before[0] + paid_s, before[1] + wall_s)


class _Current:
    runner: _Runner | None = None
    left: _Runner | None = None  # kept, as its channel is closed by number
    account = _Account()
    paid_until_s = wall_until_s = float("inf")  # of the account
    cpu_s = wall_s = 0.0  # since what may be used was said
    waited = False


def start(trust: Trust = "auto") -> None:
    """Have a fresh runner. Forks of this process use it too, one at a time. Where this process
    confines itself later, it cannot have another one. `trust`: in what it may run code.

    Raises:
        NoSandbox: this machine has less.
        RunnerFailed: it does not start.
    """
    stop()
    _Current.runner = _Runner(trust)


def stop() -> None:
    """End the runner, if there is one."""
    runner, _Current.runner = _Current.runner, None
    if runner is not None:
        runner.end()


def leave() -> None:
    """Close this fork's way to the runner, which others go on using."""
    runner, _Current.runner = _Current.runner, None
    if runner is not None:
        os.close(runner.channel.fileno())
        _Current.left = runner
    _Current.account.leave()


def used_s() -> float:
    """Seconds that texts have paid for in all."""
    return _Current.account.sums[0]


def allow(paid_s: float, wall_s: float) -> None:
    """Let texts pay so much from here on, and so much time go by; what is beyond is undecided."""
    before = _Current.account.sums
    _Current.paid_until_s, _Current.wall_until_s = before[0] + paid_s, before[1] + wall_s
    _Current.cpu_s = _Current.wall_s = 0.0
    _Current.waited = False


def has_waited() -> bool:
    """Whether the time by the clock, of a text or of all, went by while they used less than half of
    it, on a machine that had a core for them."""
    return _Current.waited


def run(source: str, function: str, calls: Sequence[Sequence[Any]]) -> Ran:
    """Run a text's code and call its function with each list of arguments, of plain JSON values.

    Raises:
        NoSandbox: there is no runner, and none can be had here.
        RunnerFailed: it ended.
    """
    if _Current.runner is None:
        start()
    assert _Current.runner is not None
    paid_s, wall_s = _Current.account.sums
    left_s = min(WALL_MAX_S, _Current.wall_until_s - wall_s)
    if paid_s >= _Current.paid_until_s or left_s <= 0:
        _note_waiting(_Current.cpu_s, _Current.wall_s)
        return Ran("undecided")
    job = {"source": source, "function": function, "calls": [list(call) for call in calls]}
    said, (how, cpu_s, wall_s) = _Current.runner.ask(json.dumps(job).encode(), left_s)
    _Current.cpu_s += cpu_s
    _Current.wall_s += wall_s
    if how == BY_CLOCK:
        _note_waiting(cpu_s, wall_s)  # of this text, which may have had little left, and of all
        _note_waiting(_Current.cpu_s, _Current.wall_s)
    cpu_s = max(cpu_s, WALL_SHARE * wall_s)
    _Current.account.add(cpu_s, wall_s)
    if len(said) > RESULT_BYTES_MAX:  # on every machine
        return Ran("over", cpu_s=cpu_s)
    ended, results, lines = _understood(said)
    if how in (BY_FAULT, BY_CLOCK) or (how == NEAR and ended == "done"):
        ended = "undecided"
    if ended == "done" and len(results) != len(calls):
        ended = "over"  # it wrote into its own pipe
    found = tuple(tuple(each) if each else None for each in results) if ended == "done" else ()
    return Ran(ended, found, lines, cpu_s)


def _note_waiting(cpu_s: float, wall_s: float) -> None:
    if cpu_s < wall_s / 2 and not is_starved():
        _Current.waited = True


def _understood(said: bytes) -> tuple[Ended, list[Any], int]:
    """A child's word. One that left without any, or with another, was not to be helped."""
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
