"""The runner's process: forks a child for each text, and never runs a text's code itself.

`python -m node.sandbox.runner_main`, of the standard library alone. It is given the code and its
inputs, and says what came out; it holds no key, no right answer and no pipe but the one to who
scores. A child has one pipe, to write its result into, and neither files nor processes nor threads.

Frames are a length, of four bytes, and JSON, both ways. An answer has its job's number: who asked
for the one before may have ended meanwhile.

With the argument `trusting` it also runs code where nothing, or too little, confines it.
"""

import json
import os
import random
import resource
import select
import signal
import struct
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from math import ceil, isfinite
from pathlib import Path
from types import FrameType
from typing import Any, Final

from node.sandbox import confinement

MODULE_FLAGS: Final = ("-s", "-S", "-P", "-B", "-m", "node.sandbox.runner_main")
TRUSTING: Final = "trusting"
LENGTH: Final = struct.Struct("=I")

BAND: Final = 4  # a limit is this many times the least that is undecided
LINES_MIN: Final = 10_000  # of Python that run, in all calls together
DEPTH_MIN: Final = 200  # of calls in calls
CPU_MIN_S: Final = 0.25
MEMORY_MIN_BYTES: Final = 64 * 2**20
WALL_MAX_S: Final = 4.0  # for who waits for something; used up as if it were CPU time
RESULT_BYTES_MAX: Final = 262_144
ANSWER_BYTES_MAX: Final = 16 * RESULT_BYTES_MAX  # once more as JSON, in its widest spelling
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
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.0002, 0.05  # between looks whether a child has ended
_OUT: Final = 3  # a child's only file besides three that lead nowhere

Trace = Callable[[FrameType, str, Any], Any]


def main() -> None:
    """Serve until the input ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    library = [Path(sysconfig.get_path(each)) for each in ("stdlib", "platstdlib")]
    layers = confinement.confine(confinement.view_of_library(library))
    is_refused = not layers.is_sandbox and TRUSTING not in sys.argv[1:]
    for name in _READY:
        __import__(name)
    sys.path[:] = [each for each in sys.path if Path(each) in library or "dynload" in each]
    used_s = 0.0
    while len(header := requests.read(LENGTH.size)) == LENGTH.size:
        job = json.loads(requests.read(*LENGTH.unpack(header)))
        answer: dict[str, Any] = {}
        if is_refused:
            answer = {"why": confinement.NEEDED}
        elif "source" in job:
            answer = _in_child(job, has_filter=layers.calls)
            used_s += answer["cpu_s"]
        body = json.dumps({**answer, "used_s": used_s, "number": job["number"]}).encode()
        answers.write(LENGTH.pack(len(body)) + body)
        answers.flush()


def _in_child(job: Mapping[str, Any], *, has_filter: bool) -> dict[str, Any]:
    """What a child makes of a job; of its own word nothing but results and lines is taken."""
    ours, its = os.pipe()
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    child = os.fork()
    if child == 0:
        try:
            _be_a_child(its, has_filter=has_filter)
            _work(job)
        finally:
            os._exit(0)
    os.close(its)
    began = time.perf_counter()
    until = began + WALL_MAX_S
    said, was_closed = _read_until(ours, until)
    os.close(ours)
    is_too_much = len(said) > RESULT_BYTES_MAX
    status, usage, in_time = _wait_until(child, until if was_closed else 0.0)
    cpu_s = usage.ru_utime + usage.ru_stime
    ended, results, lines = _understood(said)
    if is_too_much:  # on every machine
        ended, results, in_time = "over", [], True
    elif (
        not in_time
        or os.WIFSIGNALED(status)
        or (
            ended == "done"
            and (cpu_s >= CPU_MIN_S or usage.ru_maxrss * 1024 - before_bytes >= MEMORY_MIN_BYTES)
        )
    ):  # by a clock, or a fault that others may not have
        ended = "undecided"
    used_s = cpu_s if in_time else max(cpu_s, WALL_MAX_S)
    if not has_filter:  # nothing refuses to wait: whoever holds others up pays some of that
        used_s = max(used_s, (time.perf_counter() - began) / BAND)
    return {"ended": ended, "results": results, "lines": lines, "cpu_s": used_s}


def _read_until(pipe: int, until: float) -> tuple[bytes, bool]:
    """All that is written there, and whether the other end was closed in time."""
    said = b""
    while (left_s := until - time.perf_counter()) > 0 and len(said) <= RESULT_BYTES_MAX:
        if not select.select([pipe], [], [], left_s)[0]:
            break
        part = os.read(pipe, RESULT_BYTES_MAX)
        if not part:
            return said, True
        said += part
    return (said if len(said) > RESULT_BYTES_MAX else b""), False


def _wait_until(child: int, until: float) -> tuple[int, resource.struct_rusage, bool]:
    """The exit status of a child, what it used, and whether it ended in time: it may have closed
    its pipe and gone on. One that did not is ended."""
    pause_s = _PAUSE_MIN_S
    while time.perf_counter() < until:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            return status, usage, True
        time.sleep(pause_s)  # noqa: TID251 - there is no event loop here
        pause_s = min(2 * pause_s, _PAUSE_MAX_S)
    os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    return status, usage, False


def _understood(said: bytes) -> tuple[str, list[Any], int]:
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


# --- in a child -----------------------------------------------------------------------------------


def _be_a_child(its: int, *, has_filter: bool) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for each in (0, 1, 2):
        os.dup2(nowhere, each)
    os.dup2(its, _OUT)
    os.closerange(_OUT + 1, confinement.OPEN_FILES_MAX)
    memory_bytes = (BAND + 1) * MEMORY_MIN_BYTES
    cpu_s = BAND * CPU_MIN_S
    resource.setrlimit(resource.RLIMIT_CPU, (ceil(cpu_s) + 1, ceil(cpu_s) + 1))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # which the filter refuses from here on
    if has_filter:
        confinement.lock(threads=False, memory_bytes=memory_bytes)
    else:
        confinement.limit(memory_bytes)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(each, mode, closefd=False) for each, mode in enumerate("rww")
    )
    random.seed(0)  # noqa: TID251 - that of the code, which is worth the same everywhere


class _Work:
    """Counts what runs, by the trace of Python."""

    def __init__(self) -> None:
        self.lines = self.depth = self.deepest = 0
        self.lacked_memory = False

    def enter(self, frame: FrameType, event: str, detail: Any) -> Trace | None:
        """Of a new frame; one of ours counts for nothing."""
        if frame.f_code.co_filename == __file__:
            return None
        self.depth += 1
        if self.depth > self.deepest:
            self.deepest = self.depth
            if self.depth >= BAND * DEPTH_MIN:
                self.stop()
        return self.within

    def within(self, frame: FrameType, event: str, detail: Any) -> Trace:
        """Of what happens in one."""
        if event == "line":
            self.lines += 1
            if self.lines >= BAND * LINES_MIN:
                self.stop()
        elif event == "return":
            self.depth -= 1
        elif event == "exception" and issubclass(detail[0], MemoryError):
            self.lacked_memory = True
        return self.within

    def stop(self) -> None:
        """End the child: an exception could be caught."""
        _say("over", [], self.lines)
        os._exit(0)

    @property
    def is_undecided(self) -> bool:
        """Whether another machine might have come to a limit."""
        return self.lacked_memory or self.lines >= LINES_MIN or self.deepest >= DEPTH_MIN


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
    was_traced = sys.gettrace() == work.enter
    sys.settrace(None)
    if not was_traced:
        _say("over", [], work.lines)
    else:
        _say("undecided" if work.is_undecided else "done", results, work.lines)


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
