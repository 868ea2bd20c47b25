"""The verifier's worker process, `python -m node.verify.verifier_worker`: one request at a
time.

Strangers' text is scored here and nowhere else. The process confines itself before anything else
(`node.sandbox`). The first request prepares: it imports what the run's environments need, which
takes seconds. The process then forks, and the fork serves. When one ends over a text, the next fork
takes milliseconds and has seen nobody's text, so that nothing has to be trusted that was
interrupted half-way.

Scorers that were not read line by line get a fork for each text (`_serve_apart`), which finds
nothing of other texts: what forks it never held one. It cannot reach the pipe of the answers, but
has one of its own, which ends with it: what a text brings to run there can speak for that text at
most.

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
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, BinaryIO, Final

from node.envs.answers import AnswerRule
from node.envs.registry import is_unread, runs_code
from node.envs.scoring import check_format, pose, replies, score_group
from node.sandbox import confinement, runner
from node.sandbox import confinement as scratch
from node.sandbox.bounds import IMPORTS_BYTES, memory_bound
from node.sandbox.confinement import NONE, Layers
from node.sandbox.namespaces import SCRATCH
from node.sandbox.runner import NoSandbox, RunnerFailed
from node.sandbox.runner_main import lacks_cpu
from node.system.child_process import HEADER, NUMBER, body_length, decode, encode
from node.verify.worker_answers import GroupVerdict
from swarm.errors import ConfigError, LocalProtocolError
from swarm.rollouts import Task

NICENESS: Final = 5  # the node's event loop comes first
OUT_OF_CPU: Final = -signal.SIGPROF  # exit statuses of a fork, as `os.waitstatus_to_exitcode` has
OUT_OF_TIME: Final = -signal.SIGALRM
WAITED: Final = 1000  # no exit status: it let time go by, on a machine that had a core for it
APART_BYTES_MAX: Final = 64 * 2**20
_NUMBER: Final = struct.Struct("=Q")
_LATER_S: Final = 0.1
_PART_BYTES: Final = 65_536
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.0002, 0.02  # between looks whether a fork has ended
_ALL_CPU_TIME: Final = 2  # a process's clock: of all its threads, in and out of the kernel
_TOLD: Final = ("ok", "config", "failed")
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
            runner.start(prepare["trust"])
    except NoSandbox as error:
        _tell(answers, {"config": str(error), NUMBER: prepare[NUMBER]})
        return
    cell = _Confinement.of(prepare)
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
class _Confinement:
    """The confinement of this process and its forks."""

    layers: Layers
    memory_bytes_max: int  # beyond what this process has
    sizes: int | None  # where the kernel tells how much that is; None: it does not

    @classmethod
    def of(cls, prepare: Request) -> "_Confinement":
        """Confine this process, if the settings say so."""
        sizes = None
        with suppress(OSError):  # of this process, and looked up before that is out of sight
            sizes = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        layers = NONE
        if prepare["trust"] != "off":
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
            confinement.lock(memory_bytes)
        elif memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def _prepare(request: Request, cell: _Confinement) -> dict[str, Any]:
    if request["apart"] and not cell.layers.suffice(request["trust"]):
        return {"config": confinement.NEEDED}
    with memory_bound(cell.size_bytes(), IMPORTS_BYTES + cell.memory_bytes_max):
        return _answer(request)


def _runs_code(request: Request) -> bool:
    return any(runs_code(Task(*task).environment) for task in request["tasks"])


def _is_unread(request: Request) -> bool:
    return any(is_unread(Task(*task).environment) for task in request["tasks"])


def _claim_stdout() -> BinaryIO:
    """The answers' pipe; prints of environments go nowhere."""
    pipe = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    return pipe


def _read(requests: BinaryIO) -> bytes:
    """The next frame without its header; empty where the input ended."""
    header = _read_whole(requests, HEADER.size)
    return _read_whole(requests, body_length(header)) if len(header) == HEADER.size else b""


def _read_whole(pipe: BinaryIO, size: int) -> bytes:
    """So many bytes, or fewer where the input ended. A pipe without a buffer gives what it has."""
    found = bytearray()
    while len(found) < size and (part := pipe.read(size - len(found))):
        found += part
    return bytes(found)


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


def _fork(work: Callable[[], int]) -> int:
    """Have a fork do this, and end with the status that it comes to; the fork's process id."""
    fork = os.fork()
    if fork:
        return fork
    status = 1
    try:
        status = work()
    except RunnerFailed:
        status = _RUNNER_ENDED
    finally:
        os._exit(status)


def _status_of(fork: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])


def _serve_in_fork(
    requests: BinaryIO, answers: BinaryIO, cell: _Confinement, at_work_on: _SharedNumber
) -> int:
    """Let a fork serve; its exit status."""

    def serve() -> int:
        cell.lock()
        _serve(requests, answers, at_work_on)
        return _INPUT_ENDED

    return _status_of(_fork(serve))


def _serve(requests: BinaryIO, answers: BinaryIO, at_work_on: _SharedNumber) -> None:
    while body := _read(requests):
        started = time.process_time()
        request = decode(body)
        at_work_on.set(request[NUMBER])
        signal.setitimer(signal.ITIMER_REAL, request["wall_s"])
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        paid_s = runner.used_s()
        runner.allow(*request["run_s"])
        answer = _answer(request)
        paid_s = runner.used_s() - paid_s
        for each in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(each, 0)  # before it tells: no half frame is followed by another
        used_s = time.process_time() - started + paid_s
        _tell(answers, {**answer, NUMBER: request[NUMBER], "cpu_s": used_s})
        at_work_on.set(0)


# --- a fork for each text -------------------------------------------------------------------------


def _serve_apart(requests: BinaryIO, answers: BinaryIO, cell: _Confinement) -> None:
    """Let one fork after the other supervise a request. This process reads none, so that what is
    forked from it later finds nothing of those before."""
    while not _status_of(_fork(partial(_supervise, requests, answers, cell))):
        pass


def _supervise(requests: BinaryIO, answers: BinaryIO, cell: _Confinement) -> int:
    """Answer one request. Its texts are read by a fork beside this one, and come by a pipe from
    which each is read by the fork that works on it."""
    texts_pipe, into = os.pipe()
    with open(texts_pipe, "rb", buffering=0) as texts:
        reader = _fork(partial(_relay, requests, texts, into))
        os.close(into)
        header = _read(texts)
        if not header:
            return _INPUT_ENDED
        request = decode(header)
        signal.setitimer(signal.ITIMER_REAL, request["wall_s"])  # ends its forks as well
        forks = _Forks(requests, answers, cell, texts)
        if request["op"] == "pose":
            answer = forks.ask(request, list)
        elif _is_unread(request):
            answer = _answer_by_text(request, forks)
        else:
            answer = forks.ask(request, forks.next_text)
    os.waitpid(reader, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    _tell(answers, {**answer, NUMBER: request[NUMBER]})
    return 0


def _relay(requests: BinaryIO, texts: BinaryIO, into: int) -> int:
    """Read a request and pass it on. The request goes first, with counts in place of its texts. The
    texts follow one by one, or all at once where their code runs in the runner alone."""
    texts.close()
    body = _read(requests)
    if not body:
        return 0
    request = decode(body)
    apart: list[Any] = []
    groups = request.pop("texts", None)
    if groups is not None:
        request["counts"] = [len(group) for group in groups]
        is_apart = _is_unread(request)
        apart = [text for group in groups for text in group] if is_apart else [groups]
    with suppress(BrokenPipeError), open(into, "wb", buffering=0) as pipe:
        for frame in (request, *({"text": each} for each in apart)):
            _write_all(pipe, encode(frame))
    return 0


def _write_all(pipe: BinaryIO, frame: bytes) -> None:
    left = memoryview(frame)
    while left:
        left = left[pipe.write(left) :]


@dataclass(frozen=True, slots=True)
class _Forks:
    """Forks of one that supervises, in its limits."""

    requests: BinaryIO
    answers: BinaryIO
    cell: _Confinement
    texts: BinaryIO

    def ask(self, request: Request, texts: Callable[[], Any]) -> dict[str, Any]:
        """A fork's answer. Only its form is believed. The fork works within the limits of the
        request on `texts`, and gets no others.

        Raises:
            RunnerFailed: what would run the texts' code ended.
        """
        paid_s = runner.used_s()
        ours, its = os.pipe()
        began = time.perf_counter()
        fork = _fork(partial(self._work, request, texts, ours, its))
        os.close(its)
        with open(ours, "rb", buffering=0) as pipe:
            said, is_all = _read_until(pipe, fork, began + request["apart_s"], request["cpu_s"])
        ended, usage, by_itself = _end_of(fork, began + request["apart_s"] if is_all else began)
        in_time = is_all and by_itself
        took_s = time.perf_counter() - began
        used_s = usage.ru_utime + usage.ru_stime + runner.used_s() - paid_s
        status = os.waitstatus_to_exitcode(ended)
        if self.cell.layers.view:
            scratch.clear(SCRATCH)  # the next text finds nothing of this one
        if status == _RUNNER_ENDED and _runs_code(request):
            raise RunnerFailed("the runner of policies' code ended")
        if not in_time and used_s < request["cpu_s"]:
            return {"ended": WAITED if used_s < took_s / 2 else OUT_OF_TIME}
        if status:
            by_limit = status in (-signal.SIGXCPU, -signal.SIGKILL) and used_s >= request["cpu_s"]
            return {"ended": OUT_OF_CPU if by_limit else status}
        try:
            answer = decode(said[HEADER.size :])
        except (LocalProtocolError, ValueError):
            answer = {"failed": "it answers in no known form"}
        told: dict[str, Any] = {
            key: answer[key] for key in ("ok", "config", "failed") if key in answer
        }
        return {**told, "cpu_s": used_s, "took_s": took_s}

    def _work(self, request: Request, texts: Callable[[], Any], ours: int, its: int) -> int:
        request = {**request, "texts": texts()}
        for each in (self.requests, self.answers, self.texts):
            os.close(each.fileno())  # what is next in them is nobody's here
        os.close(ours)
        self.cell.lock()
        if not _runs_code(request):
            runner.leave()  # it is not for a plug-in to upset
        cpu_s = ceil(request["cpu_s"] + _LATER_S)  # for who disarms the timer
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        runner.allow(*request["run_s"])
        frame = memoryview(encode(_answer(request)))
        while frame:
            frame = frame[os.write(its, frame) :]
        return 0

    def next_text(self) -> Any:
        """Read the next text from the pipe, in a fork."""
        return decode(_read(self.texts))["text"]

    def skip(self, count: int) -> None:
        """Let nobody work on the next texts. They are read where nothing is forked from."""

        def read() -> int:
            for _ in range(count):
                _read(self.texts)
            return 0

        os.waitpid(_fork(read), 0)


def _read_until(pipe: BinaryIO, fork: int, until: float, cpu_s: float) -> tuple[bytes, bool]:
    """All that a fork writes, and whether it closed its pipe in time. A machine that has no core
    for it gives it more: that is our own affair, and bounded by the time of the whole request. One
    that disarmed its timer is out of time once it has used its CPU time."""
    said = bytearray()
    began = time.perf_counter()
    while len(said) <= APART_BYTES_MAX:
        left_s = until - time.perf_counter()
        if left_s <= 0:
            if not lacks_cpu():
                return bytes(said), False
            until += max(_LATER_S, until - began)
        elif not select.select([pipe], [], [], min(left_s, _LATER_S))[0]:
            if _cpu_s_of(fork) >= cpu_s + _LATER_S:
                return bytes(said), False
        else:
            part = pipe.read(_PART_BYTES)
            if not part:
                return bytes(said), True
            said += part
    return bytes(said), False


def _cpu_s_of(fork: int) -> float:
    """The CPU seconds of a child that has not been waited for; 0 where its system does not tell."""
    if sys.platform != "linux":
        return 0.0
    return time.clock_gettime((~fork << 3) | _ALL_CPU_TIME)  # as `clock_getcpuclockid` makes it


def _end_of(fork: int, until: float) -> tuple[int, resource.struct_rusage, bool]:
    """The exit status of a fork, what it used, and whether it ended by itself: it may have closed
    its pipe and gone on."""
    pause_s = _PAUSE_MIN_S
    while True:
        ended, status, usage = os.wait4(fork, os.WNOHANG)
        if ended:
            return status, usage, True
        if time.perf_counter() > until:
            break
        time.sleep(pause_s)  # noqa: TID251 - there is no event loop here
        pause_s = min(2 * pause_s, _PAUSE_MAX_S)
    os.kill(fork, signal.SIGKILL)
    _, status, usage = os.wait4(fork, 0)
    return status, usage, False


def _answer_by_text(request: Request, forks: _Forks) -> dict[str, Any]:
    """Merged answers of forks, each for one text. Groups after the first that used `enough_s` are
    left out."""
    rows: list[Any] = []
    used_s = 0.0
    limits = _Left(request["cpu_s"], request["apart_s"])
    for place, count in enumerate(request["counts"]):
        of_one = {**request, "tasks": [request["tasks"][place]]}
        if "answers" in request:
            of_one["answers"] = [request["answers"][place]]
        found: list[Any] = []
        before_s = used_s
        for number in range(max(1, count)):  # one without a text is still posed
            texts = (lambda: [[forks.next_text()]]) if count else (lambda: [[]])
            answer = forks.ask({**of_one, **limits.for_next()}, texts)
            if "ok" not in answer:
                waited = answer.get("ended") == OUT_OF_TIME and limits.have_waited()
                return {"ended": WAITED} if waited else answer
            used_s += answer["cpu_s"]
            limits.use(answer["cpu_s"], answer["took_s"])
            try:
                (said,) = answer["ok"]
                found.append(GroupVerdict(*said) if request["op"] == "score" else said)
                row = _merged(found, request["op"], count, used_s - before_s)
                is_enough = request["op"] == "score" and found[-1].ends_group(request["foreign"])
            except (TypeError, ValueError):
                return {"failed": "it answers in no known form"}
            if is_enough:
                forks.skip(count - number - 1)
                break
        rows.append(row)
        if used_s >= request["enough_s"]:
            break
    return {"ok": rows, "cpu_s": used_s}


@dataclass(slots=True)
class _Left:
    """The rest of a request's CPU time and wall-clock time for its forks."""

    cpu_s: float
    apart_s: float
    used_s: float = 0.0
    took_s: float = 0.0

    def use(self, used_s: float, took_s: float) -> None:
        """One fork is done."""
        self.used_s += used_s
        self.took_s += took_s

    def have_waited(self) -> bool:
        """True if less than half of the elapsed time was CPU time."""
        return self.used_s < self.took_s / 2

    def for_next(self) -> dict[str, float]:
        """Never nothing: a timer for no time is none."""
        least = 1e-3
        return {
            "cpu_s": max(least, self.cpu_s - self.used_s),
            "apart_s": max(least, self.apart_s - self.took_s),
        }


def _merged(found: Sequence[Any], op: str, count: int, cpu_s: float) -> list[Any]:
    """The result for a group of so many texts, from results of its first texts.

    Raises:
        TypeError: some of it has no such form.
    """
    if op == "reply":
        return [reply for replies_to_one in found for reply in replies_to_one]
    scores: Sequence[GroupVerdict] = found
    last = scores[-1]
    if last.forgery:
        return [last.prompt, [0.0] * count, 0, last.forgery, cpu_s, False]
    rewards = [reward for score in scores for reward in score.rewards]
    rewards += [None] * (count - len(rewards))
    errors = sum(score.scorer_errors for score in scores)
    return [last.prompt, rewards, errors, "", cpu_s, any(score.waited is True for score in scores)]


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
    """A `GroupVerdict` of each group; only of the first ones where those took `enough_s`: who waits
    for another group need not wait for a whole batch of dear ones.
    """
    scores: list[list[Any]] = []
    began = before = _used_s()
    for task, texts, rule in zip(
        request["tasks"], request["texts"], request["answers"], strict=True
    ):
        runner.allow(*request["run_s"])  # to each group: no group's code uses up another's
        score = score_group(
            Task(*task),
            texts,
            request["rule"],
            AnswerRule.from_values(rule),
            until_undecided=request["foreign"],
        )
        now = _used_s()
        forged = str(score.forgery or "")
        used_s = now - before
        found = (score.prompt, score.rewards, score.scorer_errors, forged, used_s)
        scores.append([*found, runner.has_waited()])
        if now - began >= request["enough_s"]:
            break
        before = now
    return scores


def _used_s() -> float:
    """CPU seconds of this process, and of what runs texts' code."""
    return time.process_time() + runner.used_s()


def _reply(request: Request) -> list[list[str | None]]:
    """Replies to the last turn of each transcript, task by task. Tasks after the first that used
    `enough_s` are left out."""
    found: list[list[str | None]] = []
    began = _used_s()
    for task, transcripts in zip(request["tasks"], request["texts"], strict=True):
        runner.allow(*request["run_s"])
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
