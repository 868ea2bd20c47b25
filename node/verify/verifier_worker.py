"""The verifier's worker process, `python -m node.verify.verifier_worker`: one request at a time.

The process confines itself (`node.sandbox`). The first request imports the run's environments,
which takes seconds. Then a fork serves; if a text ends it, the next fork has seen no text.

Scorers that nobody read line by line get a fork for each text (`_serve_apart`). Its parent never
held a text, and its pipe ends with it, so code in a text speaks for that text alone.

Code of texts runs in another process (`node.sandbox.runner`). It starts before this process is
confined, and this process ends with it.

The kernel bounds each fork: memory by `RLIMIT_AS`, CPU and wall-clock time by timers. The signal
that ended a fork tells the parent whether its text used up its time or the machine was busy. Each
answer has its request's number, because a fork may be killed just after it has answered.
"""

import ctypes
import mmap
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, BinaryIO, Final

from node.envs.answers import AnswerRule
from node.envs.registry import is_unread, runs_code
from node.envs.scoring import check_format, pose, replies, score_group
from node.sandbox import confinement, runner
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
WAITED: Final = 1000  # no exit status: it let time go by, on a machine with a free core
APART_BYTES_MAX: Final = 64 * 2**20  # of one fork's answer
_LATER_S: Final = 0.1  # grace beyond a limit, and between looks at a fork's CPU time
_TIMER_MIN_S: Final = 1e-3  # a timer of 0 s is disarmed
_PART_BYTES: Final = 65_536  # one read of a fork's answer
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.0002, 0.02  # between looks whether a fork has ended
_ALL_CPU_TIME: Final = 2  # clock of all threads of a process, kernel time included
_INPUT_ENDED: Final = 77  # exit statuses that no scorer's `exit` has
_RUNNER_ENDED: Final = 78

Request = Mapping[str, Any]


def main() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # prints of environments go nowhere
    os.nice(NICENESS)
    for each in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(each, signal.SIG_DFL)  # a parent may have ignored them
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
    # Number of the request that a fork works on, shared with the fork; 0: none.
    at_work_on = ctypes.c_uint64.from_buffer(mmap.mmap(-1, mmap.PAGESIZE))
    serve = partial(_serve, requests, answers, cell, at_work_on)
    # A frame is sent only after the answer to the one before: `requests` holds nothing unread here.
    while (status := _status_of(_fork(serve))) != _INPUT_ENDED:
        if status == _RUNNER_ENDED:
            return
        if number := at_work_on.value:  # else the next fork reads the request
            _tell(answers, {"ended": status, NUMBER: number})
            at_work_on.value = 0


@dataclass(frozen=True, slots=True)
class _Confinement:
    layers: Layers
    memory_bytes_max: int  # beyond this process's address space
    sizes: int | None  # open file with the size of the address space; None: unknown

    @classmethod
    def of(cls, prepare: Request) -> "_Confinement":
        sizes = None
        with suppress(OSError):  # opened while it is in view
            sizes = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        layers = NONE
        if prepare["trust"] != "off":
            more = map(Path, prepare["read"])
            layers = confinement.confine(
                confinement.view_of_python(map(Path, prepare["hidden"]), more)
            )
        return cls(layers, prepare["memory_bytes_max"], sizes)

    def size_bytes(self) -> int | None:
        if self.sizes is None:
            return None
        return int(os.pread(self.sizes, 256, 0).split()[0]) * resource.getpagesize()

    def lock(self) -> None:
        """Restrict a fork to computing in bounded memory."""
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


def _read(requests: BinaryIO) -> bytes:
    """The next frame without its header; empty: the input ended."""
    header = _read_whole(requests, HEADER.size)
    return _read_whole(requests, body_length(header)) if len(header) == HEADER.size else b""


def _read_whole(pipe: BinaryIO, size: int) -> bytes:
    """`size` bytes, or fewer if the input ended."""
    found = bytearray()
    while len(found) < size and (part := pipe.read(size - len(found))):
        found += part
    return bytes(found)


def _tell(answers: BinaryIO, answer: Mapping[str, Any]) -> None:
    answers.write(encode(answer))
    answers.flush()


def _fork(work: Callable[[], int]) -> int:
    """Start a fork that ends with the status that `work` returns. Returns its process id."""
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


def _serve(
    requests: BinaryIO, answers: BinaryIO, cell: _Confinement, at_work_on: ctypes.c_uint64
) -> int:
    """Serve in a fork until the input ends."""
    cell.lock()
    while body := _read(requests):
        started = time.process_time()
        request = decode(body)
        at_work_on.value = request[NUMBER]
        signal.setitimer(signal.ITIMER_REAL, request["wall_s"])
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        paid_s = runner.used_s()
        runner.allow(*request["run_s"])
        answer = _answer(request)
        paid_s = runner.used_s() - paid_s
        for each in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(each, 0)  # before the answer, so that no half frame is sent
        used_s = time.process_time() - started + paid_s
        _tell(answers, {**answer, NUMBER: request[NUMBER], "cpu_s": used_s})
        at_work_on.value = 0
    return _INPUT_ENDED


# --- a fork for each text -------------------------------------------------------------------------


def _serve_apart(requests: BinaryIO, answers: BinaryIO, cell: _Confinement) -> None:
    """Let one fork after the other supervise a request. This process reads none, so later forks
    find nothing of earlier requests."""
    while not _status_of(_fork(partial(_supervise, requests, answers, cell))):
        pass


def _supervise(requests: BinaryIO, answers: BinaryIO, cell: _Confinement) -> int:
    """Answer one request. Another fork reads its texts into a pipe, from which the fork that works
    on a text reads it."""
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
    """Read a request and pass it on, with counts in place of its texts. The texts follow one by
    one, or all at once if their code runs in the runner alone."""
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
            _write_all(pipe.fileno(), encode(frame))
    return 0


def _write_all(pipe: int, frame: bytes) -> None:
    left = memoryview(frame)
    while left:
        left = left[os.write(pipe, left) :]


@dataclass(frozen=True, slots=True)
class _Forks:
    requests: BinaryIO
    answers: BinaryIO
    cell: _Confinement
    texts: BinaryIO

    def ask(self, request: Request, texts: Callable[[], Any]) -> dict[str, Any]:
        """The answer of a fork that works on `texts` within the request's limits. Only its form is
        believed. Raises RunnerFailed if the runner ended."""
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
            confinement.clear(SCRATCH)  # the next text finds nothing of this one
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
            os.close(each.fileno())  # this fork reads no other text
        os.close(ours)
        self.cell.lock()
        if not _runs_code(request):
            runner.leave()  # a plug-in must not reach it
        cpu_s = ceil(request["cpu_s"] + _LATER_S)  # if the text's code disarms the timer
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        runner.allow(*request["run_s"])
        _write_all(its, encode(_answer(request)))
        return 0

    def next_text(self) -> Any:
        """Read the next text from the pipe; called in a fork."""
        return decode(_read(self.texts))["text"]

    def skip(self, count: int) -> None:
        """Skip the next texts. A fork reads them, so that this process holds none."""

        def read() -> int:
            for _ in range(count):
                _read(self.texts)
            return 0

        os.waitpid(_fork(read), 0)


def _read_until(pipe: BinaryIO, fork: int, until: float, cpu_s: float) -> tuple[bytes, bool]:
    """A fork's output, and whether it closed its pipe in time. While the machine is busy, a fork
    gets more time, within that of the request. One that disarmed its timer ends by its CPU time."""
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
    """The CPU seconds of a child that has not been waited for; 0 if the system does not tell."""
    if sys.platform != "linux":
        return 0.0
    return time.clock_gettime((~fork << 3) | _ALL_CPU_TIME)  # as `clock_getcpuclockid` makes it


def _end_of(fork: int, until: float) -> tuple[int, resource.struct_rusage, bool]:
    """The exit status of a fork, its resource use, and whether it ended by itself: it may have
    closed its pipe and gone on."""
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
    """Merged answers of forks, one for each text. Groups after those that used `enough_s` are left
    out."""
    rows: list[Any] = []
    used_s = took_s = 0.0
    for place, count in enumerate(request["counts"]):
        of_one = {**request, "tasks": [request["tasks"][place]]}
        if "answers" in request:
            of_one["answers"] = [request["answers"][place]]
        found: list[Any] = []
        before_s = used_s
        for number in range(max(1, count)):  # one without a text is still posed
            texts = (lambda: [[forks.next_text()]]) if count else (lambda: [[]])
            of_one["cpu_s"] = max(_TIMER_MIN_S, request["cpu_s"] - used_s)
            of_one["apart_s"] = max(_TIMER_MIN_S, request["apart_s"] - took_s)
            answer = forks.ask(of_one, texts)
            if "ok" not in answer:
                waited = answer.get("ended") == OUT_OF_TIME and used_s < took_s / 2
                return {"ended": WAITED} if waited else answer
            used_s += answer["cpu_s"]
            took_s += answer["took_s"]
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


def _merged(found: Sequence[Any], op: str, count: int, cpu_s: float) -> list[Any]:
    """The result for a group of `count` texts, from results of its first texts. Raises TypeError if
    one has another form."""
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
    except Exception as error:  # noqa: BLE001 - the parent decides whom to blame
        return {"failed": f"{type(error).__name__}: {error}"}


def _pose(request: Request) -> list[list[str]]:
    """Prompt and right answer of each task, or, as a third text, why it has none. The request that
    prepares raises `ConfigError` for an environment without any."""
    rules = map(AnswerRule.from_values, request["answers"])
    tasks = zip((Task(*task) for task in request["tasks"]), rules, strict=True)
    if "formats" not in request:
        return [_posed(request, task, rule) for task, rule in tasks]
    for rule, samples in request["formats"]:
        check_format([Task(*task) for task in samples], AnswerRule.from_values(rule))
    for task, rule in tasks:
        samples = [replace(task, index=n) for n in range(SAMPLE_TRIES)]
        if all(failures := [_posed(request, each, rule)[2] for each in samples]):
            raise ConfigError(failures[0])
    return []


def _posed(request: Request, task: Task, rule: AnswerRule) -> list[str]:
    try:
        problem = pose(task, request["prompt_chars_max"], rule, request["text_chars_max"])
    except ConfigError as error:
        return ["", "", str(error)]
    return [problem.prompt, problem.answer, ""]


def _score(request: Request) -> list[list[Any]]:
    """A `GroupVerdict` of each group. Groups after those that used `enough_s` are left out, so that
    others need not wait for a whole slow batch."""
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
    """CPU seconds of this process and of texts' code in the runner."""
    return time.process_time() + runner.used_s()


def _reply(request: Request) -> list[list[str | None]]:
    """Replies to the last turn of each transcript, task by task, as far as `enough_s` goes."""
    found: list[list[str | None]] = []
    began = _used_s()
    for task, transcripts in zip(request["tasks"], request["texts"], strict=True):
        runner.allow(*request["run_s"])
        found.append(replies(Task(*task), transcripts))
        if _used_s() - began >= request["enough_s"]:
            break
    return found


SAMPLE_TRIES: Final = 4  # tasks of an environment; one that poses none of them is refused
_OPERATIONS: Mapping[str, Callable[[Request], Any]] = {
    "pose": _pose,
    "score": _score,
    "reply": _reply,
}

if __name__ == "__main__":
    main()
