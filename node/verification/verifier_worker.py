"""The verifier's worker process, `python -m node.verification.verifier_worker`: one request at a
time.

Strangers' text is scored here and nowhere else. The first request prepares: it imports what the
run's environments need, which takes seconds. The process then forks, and the fork serves. When one
ends over a text, the next fork takes milliseconds and has seen nobody's text, so that nothing has
to be trusted that was interrupted half-way.

A fork bounds itself, by means that the kernel enforces whatever code is running: its memory by
`RLIMIT_AS`, the CPU time of a request by a timer whose signal ends it, and its wall-clock time by
another one, so that it does not outlive a parent that died. By which signal it ended tells the
parent whether the text had used up what it may use, or the machine had no time for us.

Each answer has its request's number: a fork may be killed just after it has answered.
"""

import mmap
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from node.environments.answers import AnswerRule
from node.environments.scoring import check_format, pose, replies, score_group
from node.system.child_channel import HEADER, NUMBER, body_length, decode, encode
from swarm.errors import ConfigError
from swarm.rollouts import Task

NICENESS: Final = 5  # the node's event loop comes first
OUT_OF_CPU: Final = -signal.SIGPROF  # exit statuses of a fork, as `os.waitstatus_to_exitcode` has
OUT_OF_TIME: Final = -signal.SIGALRM
_NUMBER: Final = struct.Struct("=Q")
_INPUT_ENDED: Final = 77  # a fork's, and no scorer's that calls `exit`

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
    _tell(answers, {**_answer(prepare), NUMBER: prepare[NUMBER]})
    signal.setitimer(signal.ITIMER_REAL, 0)
    at_work_on = _SharedNumber()
    # A frame is sent only after the answer to the one before: `requests` holds nothing unread here.
    while (status := _serve_in_fork(requests, answers, prepare, at_work_on)) != _INPUT_ENDED:
        if number := at_work_on.get():  # else the next fork does what was to come
            _tell(answers, {"ended": status, NUMBER: number})
            at_work_on.set(0)


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
    requests: BinaryIO, answers: BinaryIO, prepare: Request, at_work_on: _SharedNumber
) -> int:
    """Let a fork serve; its exit status."""
    fork = os.fork()
    if fork == 0:
        status = 1
        try:
            _limit_memory(prepare["memory_bytes_max"])
            _serve(requests, answers, at_work_on)
            status = _INPUT_ENDED
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
        answer = _answer(request)
        for each in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(each, 0)  # before it tells: no half frame is followed by another
        used_s = time.process_time() - started
        _tell(answers, {**answer, NUMBER: request[NUMBER], "cpu_s": used_s})
        at_work_on.set(0)


def _answer(request: Request) -> dict[str, Any]:
    try:
        return {"ok": _OPERATIONS[request["op"]](request)}
    except ConfigError as error:
        return {"config": str(error)}
    except Exception as error:  # noqa: BLE001 - told to the parent, which knows whom to blame
        return {"failed": f"{type(error).__name__}: {error}"}


def _limit_memory(beyond_bytes: int) -> None:
    """Allow `beyond_bytes` more address space than is in use now, where the system tells that."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + beyond_bytes, used + beyond_bytes))


def _pose(request: Request) -> list[list[str]]:
    for rule, tasks in request.get("formats", ()):  # of the request that prepares
        check_format([Task(*task) for task in tasks], AnswerRule.from_values(rule))
    posed = (
        pose(Task(*task), request["prompt_chars_max"], AnswerRule.from_values(rule))
        for task, rule in zip(request["tasks"], request["answers"], strict=True)
    )
    return [[problem.prompt, problem.answer] for problem in posed]


def _score(request: Request) -> list[list[Any]]:
    """What was found of each group, and the CPU seconds that it took; only of the first ones where
    those took `enough_s`: who waits for another group need not wait for a whole batch of dear ones.
    """
    scores: list[list[Any]] = []
    began = before = time.process_time()
    for task, texts, rule in zip(
        request["tasks"], request["texts"], request["answers"], strict=True
    ):
        score = score_group(Task(*task), texts, request["rule"], AnswerRule.from_values(rule))
        now = time.process_time()
        forged = str(score.forgery or "")
        scores.append([score.prompt, score.rewards, score.scorer_errors, forged, now - before])
        if now - began >= request["enough_s"]:
            break
        before = now
    return scores


def _reply(request: Request) -> list[list[str | None]]:
    """What is said to the last turn of each transcript, task by task."""
    pairs = zip(request["tasks"], request["texts"], strict=True)
    return [replies(Task(*task), transcripts) for task, transcripts in pairs]


_OPERATIONS: Mapping[str, Callable[[Request], Any]] = {
    "pose": _pose,
    "score": _score,
    "reply": _reply,
}

if __name__ == "__main__":
    main()
