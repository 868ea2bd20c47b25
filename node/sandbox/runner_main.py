"""The runner process: forks a child for each text and never reads the text.

`python -m node.sandbox.runner_main TRUST` with a `confinement.Trust`; standard library only. Input
is a socket. A job is a number, a wall-time limit and two pipes for the child's input and result. So
the forking process holds no text or result, and a child finds nothing of earlier jobs.

The answer repeats the job's number and gives what was measured outside the child: how it ended, CPU
time, wall time.
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
JOB: Final = struct.Struct("=Qd")  # number, wall seconds
ANSWER: Final = struct.Struct("=QBdd")  # number, ending, CPU s, wall s
READY, REFUSED = b"1", b"0"  # first byte from a runner
IN_ORDER, NEAR, BY_FAULT, BY_CLOCK = range(4)
"""A child's ending: by itself; by itself near a limit of CPU time or memory; by a limit or fault;
by wall time."""

BAND: Final = 4  # hard limit as a multiple of the undecided threshold
LINES_MIN: Final = 10_000  # executed lines, all calls together
DEPTH_MIN: Final = 200  # nested calls
CPU_MIN_S: Final = 0.25
MEMORY_MIN_BYTES: Final = 64 * 2**20
WALL_MAX_S: Final = 1.0  # wall time per text
WALL_SHARE: Final = 0.25  # a text pays at least this share of its wall time
RESULT_BYTES_MAX: Final = 262_144
VALUES_MAX: Final = 10_000  # per result
VALUES_DEEP_MAX: Final = 20
INTEGER_BITS_MAX: Final = 2048
TEXT_CHARS_MAX: Final = 32_768  # per string in a result
# Imported beforehand: the cost of importing differs between releases.
_READY: Final = (
    "array", "bisect", "collections.abc", "copy", "dataclasses", "datetime", "decimal", "enum",
    "fractions", "functools", "heapq", "itertools", "math", "operator", "random", "re",
    "statistics", "string", "textwrap", "types", "typing", "unicodedata",
)  # fmt: skip
_PAUSE_S: Final = 0.002  # polling for a child's end
_PROBE_CPU_S: Final = 0.02
_PROBE_FACTOR_MAX: Final = 1.5  # wall time / CPU time of a process with a core to itself
_OUT: Final = 3  # a child's only open file besides three to /dev/null
_TRACING: Final = frozenset(
    {"sys.settrace", "sys.setprofile"}
)  # audit events; and `sys.monitoring`

Trace = Callable[[FrameType, str, Any], Any]


def main() -> None:
    """Serve until the other end closes."""
    channel = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    library = [Path(sysconfig.get_path(each)) for each in ("stdlib", "platstdlib")]
    layers = confinement.confine(confinement.view_of_library(library))
    trust: confinement.Trust = sys.argv[1]  # type: ignore[assignment]
    if not layers.suffice(trust):
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
    """Run the job in a child. Returns its ending, CPU seconds and wall seconds."""
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
    """A child's exit status, resource use, and True if it ended in time; else it is killed."""
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


def lacks_cpu() -> bool:
    """True if this machine has no core for this process: a short computation takes too long. Load
    by others is then to blame."""
    began, before_s = time.perf_counter(), time.process_time()
    while (used_s := time.process_time() - before_s) < _PROBE_CPU_S:
        pass
    return time.perf_counter() - began > _PROBE_FACTOR_MAX * used_s


# --- in a child -----------------------------------------------------------------------------------


def _begin(job: int, result: int, *, has_filter: bool) -> Mapping[str, Any]:
    """Confine this child and write its result."""
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
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # refused by the filter from here on
    if has_filter:
        confinement.lock(memory_bytes, alone=True)
    else:
        confinement.limit(memory_bytes)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(each, mode, closefd=False) for each, mode in enumerate("rww")
    )
    random.seed(0)  # noqa: TID251 - that of the code, which is worth the same everywhere
    return json.loads(read)  # type: ignore[no-any-return]


class _Work:
    """Counts executed lines by Python's trace: a cheap first limit, equal on all machines. The
    count is an iterator, so code cannot reset it; CPU time bounds what escapes it."""

    def __init__(self) -> None:
        self._depth = self.deepest = 0
        self.lacked_memory = False
        self._lines = itertools.count(1)
        self._within = partial(_within, self, self._lines.__next__)

    def enter(self, frame: FrameType, event: str, detail: Any) -> Trace | None:
        """Trace a new frame; our own frames are not counted."""
        if frame.f_code.co_filename == __file__:
            return None
        self._depth += 1
        if self._depth > self.deepest:
            self.deepest = self._depth
            if self._depth >= BAND * DEPTH_MIN:
                _stop(0)
        return self._within

    def leave(self) -> None:
        self._depth -= 1

    def lines(self) -> int:
        """Executed lines; call once."""
        return next(self._lines) - 1


def _within(work: _Work, line: Callable[[], int], frame: FrameType, event: str, detail: Any) -> Any:
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
    _write_result("over", [], lines)
    os._exit(0)


def _keep_counting() -> None:
    """End this child if its code touches tracing."""
    del sys.gettrace, sys.getprofile  # would give the text our counter

    def audit(event: str, _: tuple[Any, ...]) -> None:
        if event in _TRACING or event.startswith("sys.monitoring"):
            _stop(0)

    sys.addaudithook(audit)


def _work(job: Mapping[str, Any]) -> None:
    calls = job["calls"]
    try:
        code = compile(job["source"], "<answer>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        _write_result("done", [None] * len(calls), 0)
        return
    except (MemoryError, RecursionError):
        _write_result("undecided", [], 0)
        return
    for name in [each for each in sys.modules if each.partition(".")[0] == "node"]:
        del sys.modules[name]  # the code can import none of ours
    work = _Work()
    results: list[list[Any] | None] = [None] * len(calls)
    names: dict[str, Any] = {"__name__": "answer"}
    sys.settrace(work.enter)
    _keep_counting()
    # Anything it raises, `SystemExit` included, is a wrong answer.
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
    # Another machine might reach a limit.
    lines = work.lines()
    is_near = work.lacked_memory or lines >= LINES_MIN or work.deepest >= DEPTH_MIN
    _write_result("undecided" if is_near else "done", results, lines)


def _write_result(ended: str, results: Sequence[Any], lines: int) -> None:
    said = memoryview(json.dumps([ended, results, lines]).encode())
    while said:
        said = said[os.write(_OUT, said) :]


def _plain(value: Any) -> Any:
    """Copy to plain JSON values, so that the code's own `__eq__` stays behind.

    Raises:
        TypeError: not plain, or too much.
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
