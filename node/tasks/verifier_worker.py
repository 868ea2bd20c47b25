"""The verifier's worker process: `python -m node.tasks.verifier_worker`, one request at a time.

Strangers' text is scored here and nowhere else. The process bounds itself: its memory by
`RLIMIT_AS` once its imports are done, its time by an interval timer whose signal ends it, so that
it does not outlive a parent that died while a scorer looped. Frames are lines of JSON.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from node.tasks.scoring import pose, score_group
from swarm.errors import ConfigError
from swarm.rollouts import Task

FRAME_BYTES_MAX: Final = 64 * 2**20
NICENESS: Final = 5  # the node's event loop comes first

Request = Mapping[str, Any]


def encode(message: Mapping[str, Any]) -> bytes:
    """One frame: a line."""
    return json.dumps(message).encode() + b"\n"


def main() -> None:
    """Serve requests until the input ends."""
    requests, answers = sys.stdin.buffer, _claim_stdout()
    os.nice(NICENESS)
    while line := requests.readline(FRAME_BYTES_MAX):
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["time_limit_s"])
        answers.write(encode(_answer(request)))
        answers.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


def _claim_stdout() -> BinaryIO:
    """The answers' pipe; prints of environments go nowhere."""
    pipe = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    return pipe


def _answer(request: Request) -> dict[str, Any]:
    try:
        return {"ok": _OPERATIONS[request["op"]](request)}
    except ConfigError as error:
        return {"config": str(error)}
    except Exception as error:  # noqa: BLE001 - told to the parent, which knows whom to blame
        return {"failed": f"{type(error).__name__}: {error}"}


def _prepare(request: Request) -> None:
    """Import what the run's environments need, try each of them, then close the memory."""
    _pose(request)
    _limit_memory(request["memory_bytes_max"])


def _limit_memory(beyond_bytes: int) -> None:
    """Allow `beyond_bytes` more address space than is in use now, where the system tells that."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + beyond_bytes, used + beyond_bytes))


def _pose(request: Request) -> list[list[str]]:
    posed = (pose(Task(*task), request["prompt_chars_max"]) for task in request["tasks"])
    return [[problem.prompt, problem.answer] for problem in posed]


def _score(request: Request) -> list[list[Any]]:
    scores = (
        score_group(Task(*task), texts, request["rule"])
        for task, texts in zip(request["tasks"], request["texts"], strict=True)
    )
    return [[score.prompt, score.rewards, score.scorer_errors] for score in scores]


_OPERATIONS: Mapping[str, Callable[[Request], Any]] = {
    "prepare": _prepare,
    "pose": _pose,
    "score": _score,
}

if __name__ == "__main__":
    main()
