"""Tests of an environment's fitness for strangers' text, in one process.

`python -m node.envs.trial`, which is a fresh process, reads what to try from its input and
writes what it finds, a line of JSON for each thing, before it goes on to the next: where a text
ends it, the last line names that text. It needs nothing but its pipes, and bounds itself.
"""

import contextlib
import hashlib
import importlib
import json
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from node.envs.base import Environment, Interaction, Problem, Settles
from node.envs.hostile_texts import around, hostile_texts, repeated
from node.envs.registry import environment
from node.envs.scoring import made
from node.sandbox.bounds import IMPORTS_BYTES, memory_bound, size_bytes
from swarm.errors import ConfigError
from swarm.rollouts import Task

TEXT_CPU_S: Final = 2.0  # of one text, before the process ends
MEMORY_BYTES: Final = 536_870_912  # beyond what the imports take
_KIB: Final = 1024
_INDEX_STEP: Final = 1009


@dataclass(frozen=True, slots=True)
class Scored:
    """The result of scoring one text."""

    reward: float | None  # None: the scorer failed
    cpu_s: float
    memory_bytes: int  # how much more the process has held at once
    error: str


def loaded(name: str) -> Environment:
    """The environment of that name, or what `module:attribute` makes.

    Raises:
        ConfigError: there is none, or it cannot be made.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        return environment(name)
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it: modules in the current directory
    try:
        made: Environment = getattr(importlib.import_module(module), attribute)()
    except Exception as error:  # foreign code may fail in any way: told, not swallowed
        raise ConfigError(f"{name}: cannot be made ({type(error).__name__}: {error})") from error
    return made


def tasks_of(source: Environment, parameters: str, count: int, seed: int = 0) -> list[Task]:
    """Tasks as a run would draw them, from a stream of this seed."""
    first = int.from_bytes(hashlib.sha256(f"{source.name} {seed}".encode()).digest()[:7], "big")
    return [
        Task(source.name, source.version, parameters, first, index * _INDEX_STEP)
        for index in range(count)
    ]


def parameters_text(text: str) -> str:
    """Parameters as a task has them.

    Raises:
        ConfigError: it is no JSON object.
    """
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise ConfigError(f'--parameters {text}: give a JSON object, such as {{"max": 9}}')
    return _as_text(table)


def _as_text(table: Mapping[str, Any]) -> str:
    return json.dumps(table, sort_keys=True, separators=(",", ":"))


def settled_text(name: str, text: str) -> str:
    """Parameters as a run has them once its file was read.

    Raises:
        ConfigError: they are wrong.
    """
    text = parameters_text(text)
    if ":" not in name:
        source = environment(name)
        if isinstance(source, Settles):
            return _as_text(source.settled(json.loads(text), Path.cwd()))
    return text


def memory_for_problems() -> AbstractContextManager[None]:
    """The memory that making problems may take, with what they import."""
    return memory_bound(size_bytes(), IMPORTS_BYTES + MEMORY_BYTES)


def told(problem: Problem) -> str:
    """A digest of what a problem asks and has for right."""
    return hashlib.sha256(f"{problem.prompt}\0{problem.answer}".encode()).hexdigest()


def scored(source: Environment, problem: Problem, text: str) -> Scored:
    """Score one text, and measure it; one that answers also has it as the first turn."""
    _forget_peak()
    before, began = _memory_bytes("VmRSS"), time.process_time()
    reward, error = _tried(partial(_as_first_turn, source, problem, text))
    cpu_s = time.process_time() - began
    return Scored(reward, cpu_s, _memory_bytes("VmHWM") - before, error)


def own_reward(source: Environment, problem: Problem) -> float | None:
    """The reward of the environment's own answer or turns; None: its scorer failed."""
    if not isinstance(source, Interaction):
        return scored(source, problem, problem.answer).reward
    return _tried(lambda: source.worth(problem, source.right(problem)))[0]


def _as_first_turn(source: Environment, problem: Problem, text: str) -> float:
    if not isinstance(source, Interaction):
        return source.score(problem, text)
    source.reply(problem, source.begin(problem), text)
    return source.worth(problem, (text,))


def _tried(score: Callable[[], float]) -> tuple[float | None, str]:
    """A reward, or what was raised in its place, which is part of what is looked for."""
    try:
        return float(score()), ""
    except Exception as raised:  # noqa: BLE001
        return None, f"{type(raised).__name__}: {raised}"[:200]


def texts_for(problem: Problem, marker: Path) -> Iterator[tuple[str, str, bool]]:
    """Names of hostile texts, the texts, and whether each must be worth less than 1."""
    yield "nothing", "", True
    for name, text in (*hostile_texts(marker), *around(problem.answer)):
        yield name, text, True
    for name, text in repeated(problem.answer):
        yield name, text, False


def _memory_bytes(what: str) -> int:
    """The memory of this process (`VmRSS`), or its peak since `_forget_peak` (`VmHWM`). On systems
    that report neither: the peak of its life."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition(f"{what}:")[2].split()[0]) * _KIB
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * _KIB


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _bound_memory() -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))


def try_all(asked: Mapping[str, Any], tell: Callable[[Mapping[str, Any]], None]) -> None:
    """Look at one environment, and tell each finding.

    Args:
        asked: `name`, `parameters` (JSON), `count` of tasks, `backwards`: whether they are made
            from the last to the first, `texts`: whether to score any, `marker`: what code would
            make.
    """
    source = loaded(asked["name"])
    tell({"name": source.name, "version": source.version})
    tasks = tasks_of(source, asked["parameters"], asked["count"])
    problems: dict[int, Problem] = {}
    with memory_for_problems():
        for at in sorted(range(len(tasks)), reverse=asked["backwards"]):
            problems[at] = made(source, tasks[at])
    in_order = [problems[at] for at in range(len(tasks))]
    tell({"posed": [told(each) for each in in_order], "threads": threading.active_count()})
    tell({"own": [own_reward(source, each) for each in in_order]})
    if not asked["texts"] or not in_order:
        return
    _bound_memory()
    marker = Path(asked["marker"])
    for what, text, must_fail in texts_for(in_order[0], marker):
        tell({"trying": what})
        signal.setitimer(signal.ITIMER_PROF, TEXT_CPU_S)  # its signal ends the process
        found = scored(source, in_order[0], text)
        again = scored(source, in_order[0], text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        tell(
            {
                "text": what,
                "must_fail": must_fail,
                "reward": found.reward,
                "again": again.reward,
                "error": found.error,
                "cpu_s": min(found.cpu_s, again.cpu_s),
                "memory_bytes": found.memory_bytes,
            }
        )


def main(arguments: Sequence[str] = ()) -> None:
    """See the top of this file."""
    out = sys.stdout
    sys.stdout = sys.stderr  # prints of environments are no findings

    def tell(finding: Mapping[str, Any]) -> None:
        out.write(json.dumps(finding) + "\n")
        out.flush()

    try:
        try_all(json.loads(sys.stdin.read()), tell)
    except ConfigError as error:
        tell({"refused": str(error)})
    tell({"done": True})


if __name__ == "__main__":
    main()
