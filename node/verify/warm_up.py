"""Problems of a run, with their right answers, to warm a policy on.

A process of its own makes them, `python -m node.verify.warm_up`, in the sandbox and under a
verifier's memory limit, because run and environments may be a stranger's. It reads the request from
its input, and writes a line of JSON for each problem.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

from node.config import NodeConfig, RunConfig
from node.envs.scoring import PosedProblem, pose, right_turns
from node.interfaces.prompts import Prompt
from node.sandbox import confinement, runner
from node.sandbox.bounds import IMPORTS_BYTES, PROBLEM_CPU_S, SCORING_BYTES, size_bytes
from node.verify.assignment import assigned_task, held_out_tasks
from node.verify.confinement_settings import confinement_of, worker_environ
from swarm.errors import ChildFailed, ConfigError
from swarm.rollouts import Task

PRODUCER: Final = "warm-up"  # no valid peer id: its tasks are in nobody's stream
CPU_S: Final = 1800  # of all problems together; they take a minute
LINE_BYTES_MAX: Final = 64 * 2**20
REASON_CHARS_MAX: Final = 2000
_MODULE: Final = "node.verify.warm_up"

Asked = Mapping[str, Any]
Turns = list[tuple[str, str]]
Problem = tuple[str, Turns]  # a prompt as plain text, and the right turns with the replies to them


def asked_of(config: NodeConfig, environments: Collection[str] | None = None) -> dict[str, Any]:
    """The process's input, for problems of these environments; None: of all."""
    return {
        "run": config.run.model_dump(mode="json"),
        "environments": None if environments is None else sorted(environments),
        "memory_bytes_max": SCORING_BYTES,
        **confinement_of(config),
    }


def warm_up_problems(asked: Asked) -> Generator[Problem, None, None]:
    """Problems without end, none of them held out. The process ends with the iterator.

    Raises:
        ConfigError: the run's parameters make no problem, or one that takes too much.
        ChildFailed: the process ended for another reason.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", _MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=worker_environ(confined=asked["trust"] != "off"),
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with suppress(BrokenPipeError), closing(child.stdin):
            child.stdin.write(json.dumps(asked).encode())
        with child.stdout:
            while (line := child.stdout.readline(LINE_BYTES_MAX)).endswith(b"\n"):
                yield _read(line)
        raise _why_ended(child.wait())
    finally:
        child.kill()
        child.wait()


def _read(line: bytes) -> Problem:
    try:
        told = json.loads(line)
        if isinstance(told, dict):
            raise ConfigError(str(told["refused"])[:REASON_CHARS_MAX])
        prompt, turns = told
        return str(prompt), [(str(text), str(reply)) for text, reply in turns]
    except (KeyError, RecursionError, TypeError, ValueError):
        raise ChildFailed("what makes the problems to warm up on writes none") from None


def _why_ended(status: int) -> Exception:
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return ConfigError(
            "making the problems to warm up on took more CPU time or memory than there is for it; "
            "make the problems smaller or name another --model"
        )
    return ChildFailed(f"making the problems to warm up on failed with status {status}")


# --- the process ----------------------------------------------------------------------------------


def main() -> None:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of environments are no problems
    asked = json.loads(sys.stdin.buffer.read())

    def tell(what: Any) -> None:
        out.write(json.dumps(what).encode() + b"\n")
        out.flush()

    try:
        _confine(asked)
        run = RunConfig.model_validate(asked["run"])
        for problem in _problems(run, asked["environments"]):
            tell(problem)
    except ConfigError as error:
        tell({"refused": str(error)})
    except BrokenPipeError:
        os._exit(0)  # nobody wants more


def _confine(asked: Asked) -> None:
    if asked["runs_code"]:
        runner.start(asked["trust"])
    before = size_bytes()  # while it is in view
    if asked["trust"] != "off":
        hidden, read = (map(Path, asked[key]) for key in ("hidden", "read"))
        layers = confinement.confine(confinement.view_of_python(hidden, read))
        if asked["apart"] and not layers.suffice(asked["trust"]):
            raise ConfigError(confinement.NEEDED)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 10))
    if before is not None:
        most = before + IMPORTS_BYTES + asked["memory_bytes_max"]
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _problems(run: RunConfig, environments: Collection[str] | None) -> Iterator[Problem]:
    def posed(task: Task) -> PosedProblem:
        rule = run.answer_rule(task.environment, task.parameters)
        limits = run.limits
        return pose(task, limits.prompt_chars_max, rule, limits.text_chars_max)

    held_out = {Prompt.read(posed(task).prompt).question for task in held_out_tasks(run)}
    for index in count():
        task = assigned_task(run, PRODUCER, index)
        if environments is not None and task.environment not in environments:
            continue
        problem = posed(task)
        if Prompt.read(problem.prompt).question in held_out:
            continue
        runner.allow(PROBLEM_CPU_S, PROBLEM_CPU_S)
        yield Prompt.read(problem.prompt).plain, right_turns(task) or [(problem.answer, "")]


if __name__ == "__main__":
    main()
