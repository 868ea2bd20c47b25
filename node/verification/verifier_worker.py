"""The verifier's worker process, `python -m node.verification.verifier_worker`: one request at a
time.

Strangers' text is scored here and nowhere else. The process confines itself before anything else
(`node.sandbox`). The first request prepares: it imports what the run's environments need, which
takes seconds. The process then forks, and the fork serves. When one ends over a text, the next fork
takes milliseconds and has seen nobody's text, so that nothing has to be trusted that was
interrupted half-way.

Scorers that were not read line by line, and those that run what a text says, get a fork for each
request. It cannot reach the pipe of the answers, but has one of its own, which ends with it: what a
text brings to run there can speak for that text's own group at most, and for no other.

What runs texts' code is a process of its own (`node.sandbox.runner`). It confines itself, more
narrowly, so it starts before this process may start no other; where it ends, so does this one.

A fork bounds itself, by means that the kernel enforces whatever code is running: its memory by
`RLIMIT_AS`, the CPU time of a request by a timer whose signal ends it, and its wall-clock time by
another one, so that it does not outlive a parent that died. By which signal it ended tells the
parent whether the text had used up what it may use, or the machine had no time for us.

Each answer has its request's number: a fork may be killed just after it has answered.
"""

import mmap
import os
import resource
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, BinaryIO, Final

from node.environments.answers import AnswerRule
from node.environments.registry import runs_code
from node.environments.scoring import check_format, pose, replies, score_group
from node.sandbox import confinement, runner
from node.sandbox.bounds import IMPORTS_BYTES, memory_bound
from node.sandbox.confinement import NONE, Layers
from node.sandbox.namespaces import SCRATCH
from node.sandbox.runner import NoSandbox, RunnerFailed
from node.system.child_channel import HEADER, NUMBER, body_length, decode, encode
from swarm.errors import ConfigError, LocalProtocolError
from swarm.rollouts import Task

NICENESS: Final = 5  # the node's event loop comes first
OUT_OF_CPU: Final = -signal.SIGPROF  # exit statuses of a fork, as `os.waitstatus_to_exitcode` has
OUT_OF_TIME: Final = -signal.SIGALRM
APART_BYTES_MAX: Final = 64 * 2**20
_NUMBER: Final = struct.Struct("=Q")
_LATER_S: Final = 0.1
_INPUT_ENDED: Final = 77  # a fork's, and no scorer's that calls `exit`
_RUNNER_ENDED: Final = 78  # likewise

Request = Mapping[str, Any]


def main() -> None:
    """Serve requests until the input ends."""
    requests, answers = sys.stdin.buffer, _claim_stdout()
    os.nice(NICENESS)
    for each in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(each, signal.SIG_DFL)  # a parent may have had them ignored
    body = _read(requests)
    if not body:
        return
    prepare = decode(body)
    signal.setitimer(signal.ITIMER_REAL, prepare["wall_s"])
    try:
        if prepare["runs_code"]:
            runner.start(trusting=not prepare["confine"])
    except NoSandbox as error:
        _tell(answers, {"config": str(error), NUMBER: prepare[NUMBER]})
        return
    cell = _Cell.of(prepare)
    _tell(answers, {**_prepare(prepare, cell), NUMBER: prepare[NUMBER]})
    signal.setitimer(signal.ITIMER_REAL, 0)
    if prepare["apart"]:
        _serve_apart(requests, answers, cell)
        return
    at_work_on = _SharedNumber()
    # A frame is sent only after the answer to the one before: `requests` holds nothing unread here.
    while (status := _serve_in_fork(requests, answers, cell, at_work_on)) != _INPUT_ENDED:
        if status == _RUNNER_ENDED:
            return
        if number := at_work_on.get():  # else the next fork does what was to come
            _tell(answers, {"ended": status, NUMBER: number})
            at_work_on.set(0)


@dataclass(frozen=True, slots=True)
class _Cell:
    """What this process and its forks are confined by."""

    layers: Layers
    memory_bytes_max: int  # beyond what this process has
    sizes: int | None  # where the kernel tells how much that is; None: it does not

    @classmethod
    def of(cls, prepare: Request) -> "_Cell":
        """Confine this process, if the settings say so."""
        sizes = None
        with suppress(OSError):  # of this process, and looked up before that is out of sight
            sizes = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        layers = NONE
        if prepare["confine"]:
            more = map(Path, prepare["read"])
            layers = confinement.confine(
                confinement.view_of_python(map(Path, prepare["hidden"]), more)
            )
        return cls(layers, prepare["memory_bytes_max"], sizes)

    def size_bytes(self) -> int | None:
        """The address space of this process; None: unknown."""
        if self.sizes is None:
            return None
        return int(os.pread(self.sizes, 256, 0).split()[0]) * resource.getpagesize()

    def lock(self) -> None:
        """Leave a fork nothing but to compute, in bounded memory."""
        memory_bytes = None
        if self.sizes is not None and (size_bytes := self.size_bytes()) is not None:
            memory_bytes = size_bytes + self.memory_bytes_max
            os.close(self.sizes)
        if self.layers.calls:
            confinement.lock(threads=True, memory_bytes=memory_bytes)
        elif memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def _prepare(request: Request, cell: _Cell) -> dict[str, Any]:
    if request["apart"] and request["confine"] and not cell.layers.is_sandbox:
        return {"config": confinement.NEEDED}
    with memory_bound(cell.size_bytes(), IMPORTS_BYTES + cell.memory_bytes_max):
        return _answer(request)


def _runs_code(request: Request) -> bool:
    return any(runs_code(Task(*task).environment) for task in request["tasks"])


def _claim_stdout() -> BinaryIO:
    """The answers' pipe; prints of environments go nowhere."""
    pipe = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    return pipe


def _read(requests: BinaryIO) -> bytes:
    """The next frame without its header; empty where the input ended."""
    header = requests.read(HEADER.size)
    return requests.read(body_length(header)) if len(header) == HEADER.size else b""


def _tell(answers: BinaryIO, answer: Mapping[str, Any]) -> None:
    answers.write(encode(answer))
    answers.flush()


class _SharedNumber:
    """The number of the request that a fork is at work on, for who forked it; 0: none."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _NUMBER.size)

    def get(self) -> int:
        """The number."""
        return int(_NUMBER.unpack_from(self._memory)[0])

    def set(self, number: int) -> None:
        """Note another one."""
        _NUMBER.pack_into(self._memory, 0, number)


def _serve_in_fork(
    requests: BinaryIO, answers: BinaryIO, cell: _Cell, at_work_on: _SharedNumber
) -> int:
    """Let a fork serve; its exit status."""
    fork = os.fork()
    if fork == 0:
        status = 1
        try:
            cell.lock()
            _serve(requests, answers, at_work_on)
            status = _INPUT_ENDED
        except RunnerFailed:
            status = _RUNNER_ENDED
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])


def _serve(requests: BinaryIO, answers: BinaryIO, at_work_on: _SharedNumber) -> None:
    while body := _read(requests):
        started = time.process_time()
        request = decode(body)
        at_work_on.set(request[NUMBER])
        signal.setitimer(signal.ITIMER_REAL, request["wall_s"])
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        ran_s = runner.used_s()
        runner.allow(request["run_s"])
        answer = _answer(request)
        ran_s = runner.used_s() - ran_s
        for each in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(each, 0)  # before it tells: no half frame is followed by another
        used_s = time.process_time() - started + ran_s
        _tell(answers, {**answer, NUMBER: request[NUMBER], "cpu_s": used_s})
        at_work_on.set(0)


# --- a fork for each request ----------------------------------------------------------------------


def _serve_apart(requests: BinaryIO, answers: BinaryIO, cell: _Cell) -> None:
    while body := _read(requests):
        request = decode(body)
        signal.setitimer(signal.ITIMER_REAL, request["wall_s"])  # ends the fork as well
        answer = _answer_apart(request, answers, cell)
        if cell.layers.view:
            _clear(SCRATCH)  # the next request finds nothing of this one
        signal.setitimer(signal.ITIMER_REAL, 0)
        _tell(answers, {**answer, NUMBER: request[NUMBER]})


def _answer_apart(request: Request, answers: BinaryIO, cell: _Cell) -> dict[str, Any]:
    """What a fork says, which is believed in nothing but what it is asked for.

    Raises:
        RunnerFailed: what would run the texts' code ended.
    """
    ran_s = runner.used_s()
    ours, its = os.pipe()
    fork = os.fork()
    if fork == 0:
        status = 1
        try:
            for each in (sys.stdin.fileno(), answers.fileno(), ours):
                os.close(each)
            cell.lock()
            if not _runs_code(request):
                runner.leave()  # it is not for a plug-in to upset
            cpu_s = ceil(request["cpu_s"] + _LATER_S)  # for who disarms the timer
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
            signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
            runner.allow(request["run_s"])
            frame = memoryview(encode(_answer(request)))
            while frame:
                frame = frame[os.write(its, frame) :]
            status = 0
        except RunnerFailed:
            status = _RUNNER_ENDED
        finally:
            os._exit(status)
    os.close(its)
    with open(ours, "rb") as pipe:
        said = pipe.read(APART_BYTES_MAX)
    _, ended, usage = os.wait4(fork, 0)
    used_s = usage.ru_utime + usage.ru_stime
    status = os.waitstatus_to_exitcode(ended)
    if status == _RUNNER_ENDED and _runs_code(request):
        raise RunnerFailed("the runner of policies' code ended")
    if status:
        by_limit = status in (-signal.SIGXCPU, -signal.SIGKILL) and used_s >= request["cpu_s"]
        return {"ended": OUT_OF_CPU if by_limit else status}
    used_s += runner.used_s() - ran_s
    try:
        answer = decode(said[HEADER.size :])
    except (LocalProtocolError, ValueError):
        answer = {"failed": "it answers in no known form"}
    told: dict[str, Any] = {key: answer[key] for key in ("ok", "config", "failed") if key in answer}
    return {**told, "cpu_s": used_s}


def _clear(folder: Path) -> None:
    for each in folder.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each, ignore_errors=True)
        else:
            each.unlink(missing_ok=True)


# --- requests -------------------------------------------------------------------------------------


def _answer(request: Request) -> dict[str, Any]:
    try:
        return {"ok": _OPERATIONS[request["op"]](request)}
    except RunnerFailed:
        raise
    except ConfigError as error:
        return {"config": str(error)}
    except Exception as error:  # noqa: BLE001 - told to the parent, which knows whom to blame
        return {"failed": f"{type(error).__name__}: {error}"}


def _pose(request: Request) -> list[list[str]]:
    for rule, tasks in request.get("formats", ()):  # of the request that prepares
        check_format([Task(*task) for task in tasks], AnswerRule.from_values(rule))
    posed = (
        pose(
            Task(*task),
            request["prompt_chars_max"],
            AnswerRule.from_values(rule),
            request["text_chars_max"],
        )
        for task, rule in zip(request["tasks"], request["answers"], strict=True)
    )
    return [[problem.prompt, problem.answer] for problem in posed]


def _score(request: Request) -> list[list[Any]]:
    """What was found of each group, and the CPU seconds that it took; only of the first ones where
    those took `enough_s`: who waits for another group need not wait for a whole batch of dear ones.
    """
    scores: list[list[Any]] = []
    began = before = _used_s()
    for task, texts, rule in zip(
        request["tasks"], request["texts"], request["answers"], strict=True
    ):
        runner.allow(request["run_s"])  # to each group: no group's code uses up another's
        score = score_group(
            Task(*task),
            texts,
            request["rule"],
            AnswerRule.from_values(rule),
            until_undecided=request["foreign"],
        )
        now = _used_s()
        forged = str(score.forgery or "")
        scores.append([score.prompt, score.rewards, score.scorer_errors, forged, now - before])
        if now - began >= request["enough_s"]:
            break
        before = now
    return scores


def _used_s() -> float:
    """CPU seconds of this process, and of what runs texts' code."""
    return time.process_time() + runner.used_s()


def _reply(request: Request) -> list[list[str | None]]:
    """What is said to the last turn of each transcript, task by task; only of the first ones where
    those took `enough_s`."""
    found: list[list[str | None]] = []
    began = _used_s()
    for task, transcripts in zip(request["tasks"], request["texts"], strict=True):
        runner.allow(request["run_s"])
        found.append(replies(Task(*task), transcripts))
        if _used_s() - began >= request["enough_s"]:
            break
    return found


_OPERATIONS: Mapping[str, Callable[[Request], Any]] = {
    "pose": _pose,
    "score": _score,
    "reply": _reply,
}

if __name__ == "__main__":
    main()
