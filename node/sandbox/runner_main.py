"""The runner's process: forks a child for each text, and never learns what is in any of them.

`python -m node.sandbox.runner_main TRUST`, of the standard library alone; TRUST is a
`confinement.Trust`. Its input is a socket. A job comes over it as a number, seconds of the clock
and two pipes: the child reads the job from the first one and writes its result into the second.
So the process that forks holds no text, input or result, and a child finds nothing of the jobs
before. It holds no key, no right answer and no other pipe.

Answered is what was measured outside of the child: how it ended, its CPU time, the time that went
by. The answer has its job's number: who asked for the one before may have ended meanwhile.
"""

import itertools
import json
import os
import random
import resource
import signal
import socket
import struct
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil, isfinite
from pathlib import Path
from types import FrameType
from typing import Any, Final

from node.sandbox import confinement

MODULE_FLAGS: Final = ("-s", "-S", "-P", "-B", "-m", "node.sandbox.runner_main")
JOB: Final = struct.Struct("=Qd")  # number, seconds of the clock
ANSWER: Final = struct.Struct("=QBdd")  # number, how it ended, CPU s, clock s
READY, REFUSED = b"1", b"0"  # the first byte that a runner sends
IN_ORDER, NEAR, BY_FAULT, BY_CLOCK = range(4)
"""How a child ended: by itself; so, but near to a limit of CPU time or memory; by a limit or a
fault; by the clock."""

BAND: Final = 4  # a limit is this many times the least that is undecided
LINES_MIN: Final = 10_000  # of Python that run, in all calls together
DEPTH_MIN: Final = 200  # of calls in calls
CPU_MIN_S: Final = 0.25
MEMORY_MIN_BYTES: Final = 64 * 2**20
WALL_MAX_S: Final = 1.0  # by the clock, for one text
WALL_SHARE: Final = 0.25  # of the time that went by, which a text pays where it used less CPU time
RESULT_BYTES_MAX: Final = 262_144
VALUES_MAX: Final = 10_000  # in one result
VALUES_DEEP_MAX: Final = 20
INTEGER_BITS_MAX: Final = 2048
TEXT_CHARS_MAX: Final = 32_768  # of one text in it
# What code of a few lines imports. To import it is work as well, and other in each release.
_READY: Final = (
    "array", "bisect", "collections.abc", "copy", "dataclasses", "datetime", "decimal", "enum",
    "fractions", "functools", "heapq", "itertools", "math", "operator", "random", "re",
    "statistics", "string", "textwrap", "types", "typing", "unicodedata",
)  # fmt: skip
_PAUSE_S: Final = 0.002  # between looks whether a child has ended, where no signal tells
_PROBE_CPU_S: Final = 0.02
_PROBE_FACTOR_MAX: Final = 1.5  # times its CPU time that a process with a core to itself takes
_OUT: Final = 3  # a child's only file besides three that lead nowhere
_TRACING: Final = frozenset({"sys.settrace", "sys.setprofile"})  # audited; and `sys.monitoring`

Trace = Callable[[FrameType, str, Any], Any]


def main() -> None:
    """Serve until nobody is at the other end."""
    channel = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    library = [Path(sysconfig.get_path(each)) for each in ("stdlib", "platstdlib")]
    layers = confinement.confine(confinement.view_of_library(library))
    if not layers.suffice(confinement.trust_of(sys.argv[1])):
        channel.send(REFUSED)
        return
    for name in _READY:
        __import__(name)
    sys.path[:] = [each for each in sys.path if Path(each) in library or "dynload" in each]
    channel.send(READY)
    while True:
        message, pipes, _, _ = socket.recv_fds(channel, JOB.size, 2)
        if len(message) < JOB.size or len(pipes) < 2:
            return
        number, wall_s = JOB.unpack(message)
        found = _in_child(pipes[0], pipes[1], wall_s, has_filter=layers.calls)
        channel.send(ANSWER.pack(number, *found))


def _in_child(
    job: int, result: int, wall_s: float, *, has_filter: bool
) -> tuple[int, float, float]:
    """How a child ended that works on the job in one pipe, its CPU seconds, and those of the
    clock."""
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        try:
            _work(_begin(job, result, has_filter=has_filter))
        finally:
            os._exit(0)
    os.close(job)
    os.close(result)
    status, usage, in_time = _wait_until(child, began + wall_s)
    took_s = time.perf_counter() - began
    cpu_s = usage.ru_utime + usage.ru_stime
    ended = IN_ORDER
    if not in_time:
        ended = BY_CLOCK
    elif os.WIFSIGNALED(status):
        ended = BY_FAULT
    elif cpu_s >= CPU_MIN_S or usage.ru_maxrss * 1024 - before_bytes >= MEMORY_MIN_BYTES:
        ended = NEAR
    return ended, cpu_s, took_s


def _wait_until(child: int, until: float) -> tuple[int, resource.struct_rusage, bool]:
    """The exit status of a child, what it used, and whether it ended in time. One that did not is
    ended."""
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            return status, usage, True
        left_s = until - time.perf_counter()
        if left_s <= 0:
            break
        if sys.platform == "linux":
            signal.sigtimedwait({signal.SIGCHLD}, left_s)
        else:
            time.sleep(min(_PAUSE_S, left_s))  # noqa: TID251 - there is no event loop here
    os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    return status, usage, False


def is_starved() -> bool:
    """Whether this machine has no core for a process such as this one: it computes for a moment and
    looks at the clock. So nobody is blamed for what other load on the machine does."""
    began, before_s = time.perf_counter(), time.process_time()
    while (used_s := time.process_time() - before_s) < _PROBE_CPU_S:
        pass
    return time.perf_counter() - began > _PROBE_FACTOR_MAX * used_s


# --- in a child -----------------------------------------------------------------------------------


def _begin(job: int, result: int, *, has_filter: bool) -> Mapping[str, Any]:
    """Confine this child to what it computes, and say what that is."""
    with open(job, "rb") as pipe:
        read = pipe.read()
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(result, _OUT)
    for each in (0, 1, 2):
        os.dup2(nowhere, each)
    os.closerange(_OUT + 1, confinement.OPEN_FILES_MAX)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    memory_bytes = (BAND + 1) * MEMORY_MIN_BYTES
    cpu_s = BAND * CPU_MIN_S
    resource.setrlimit(resource.RLIMIT_CPU, (ceil(cpu_s) + 1, ceil(cpu_s) + 1))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # which the filter refuses from here on
    if has_filter:
        confinement.leave_alone(memory_bytes)
    else:
        confinement.limit(memory_bytes)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(each, mode, closefd=False) for each, mode in enumerate("rww")
    )
    random.seed(0)  # noqa: TID251 - that of the code, which is worth the same everywhere
    return json.loads(read)  # type: ignore[no-any-return]


class _Work:
    """Counts what runs, by the trace of Python: a first bound, cheap and the same on all machines.
    What a text can reach of it turns no count back: lines are counted by an iterator. What it may
    still keep from being counted, by way of its own frames, is bounded by CPU time."""

    def __init__(self) -> None:
        self._depth = self.deepest = 0
        self.lacked_memory = False
        self._lines = itertools.count(1)
        self._within = partial(_within, self, self._lines.__next__)

    def enter(self, frame: FrameType, event: str, detail: Any) -> Trace | None:
        """Of a new frame; one of ours counts for nothing."""
        if frame.f_code.co_filename == __file__:
            return None
        self._depth += 1
        if self._depth > self.deepest:
            self.deepest = self._depth
            if self._depth >= BAND * DEPTH_MIN:
                _stop(0)
        return self._within

    def leave(self) -> None:
        """The frame that was entered last is done."""
        self._depth -= 1

    def lines(self) -> int:
        """How many ran, to be asked once."""
        return next(self._lines) - 1


def _within(work: _Work, line: Callable[[], int], frame: FrameType, event: str, detail: Any) -> Any:
    """Of what happens in a frame of the text's."""
    if event == "line":
        if (lines := line()) >= BAND * LINES_MIN:
            _stop(lines)
    elif event == "return":
        work.leave()
    elif event == "exception" and issubclass(detail[0], MemoryError):
        work.lacked_memory = True
    return frame.f_trace


def _stop(lines: int) -> None:
    """End the child: an exception could be caught."""
    _say("over", [], lines)
    os._exit(0)


def _keep_counting() -> None:
    """Let this child end with the first look at who traces it, or try to trace in its place."""
    del sys.gettrace, sys.getprofile  # by which a text would reach what counts it

    def audit(event: str, _: tuple[Any, ...]) -> None:
        if event in _TRACING or event.startswith("sys.monitoring"):
            _stop(0)

    sys.addaudithook(audit)


def _work(job: Mapping[str, Any]) -> None:
    calls = job["calls"]
    try:
        code = compile(job["source"], "<answer>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        _say("done", [None] * len(calls), 0)
        return
    except (MemoryError, RecursionError):
        _say("undecided", [], 0)
        return
    _forget()
    work = _Work()
    results: list[list[Any] | None] = [None] * len(calls)
    names: dict[str, Any] = {"__name__": "answer"}
    sys.settrace(work.enter)
    _keep_counting()
    # Whatever such code raises, to exit among it, is an answer that is wrong.
    try:
        exec(code, names)
        function = names[job["function"]]
        for place, arguments in enumerate(calls):
            try:
                results[place] = [_plain(function(*arguments))]
            except BaseException:  # noqa: BLE001
                continue
    except BaseException:  # noqa: BLE001
        results = [None] * len(calls)
    # Another machine might have come to a limit.
    lines = work.lines()
    is_near = work.lacked_memory or lines >= LINES_MIN or work.deepest >= DEPTH_MIN
    _say("undecided" if is_near else "done", results, lines)


def _forget() -> None:
    """Leave code that looks around nothing of ours to import."""
    for name in [each for each in sys.modules if each.partition(".")[0] == "node"]:
        del sys.modules[name]


def _say(ended: str, results: Sequence[Any], lines: int) -> None:
    said = memoryview(json.dumps([ended, results, lines]).encode())
    while said:
        said = said[os.write(_OUT, said) :]


def _plain(value: Any) -> Any:
    """A copy in plain JSON values: what compares as the code's own objects like stays behind.

    Raises:
        TypeError: it is none, or too much.
    """
    left = VALUES_MAX

    def copy(value: Any, deep: int) -> Any:
        nonlocal left
        left -= 1
        kind = type(value)
        if left < 0 or deep > VALUES_DEEP_MAX:
            raise TypeError("too much")
        if value is None or kind is bool or (kind is str and len(value) <= TEXT_CHARS_MAX):
            return value
        if kind is int and value.bit_length() <= INTEGER_BITS_MAX:
            return value
        if kind is float and isfinite(value):
            return value
        if kind in (list, tuple):
            return [copy(each, deep + 1) for each in value]
        if kind is dict and all(type(key) is str for key in value):
            return {key: copy(each, deep + 1) for key, each in value.items()}
        raise TypeError(f"no plain value: {kind}")

    return copy(value, 0)


if __name__ == "__main__":
    main()
