"""Tests of an environment's fitness for strangers' text, in one process.

`python -m node.envs.trial` reads a request from its input and writes a line of JSON for each
finding at once: if a text ends the process, the last line names it. It bounds itself.
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
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from node.envs.base import Environment, Interaction, Problem, Settles
from node.envs.registry import environment
from node.envs.scoring import made
from node.sandbox.bounds import IMPORTS_BYTES, memory_bound, size_bytes
from swarm.errors import ConfigError
from swarm.rollouts import Task

TEXT_CPU_S: Final = 2.0  # of one text, after which the process ends
MEMORY_BYTES: Final = 536_870_912  # beyond the imports
_KIB: Final = 1024
_INDEX_STEP: Final = 1009


@dataclass(frozen=True, slots=True)
class Scored:
    reward: float | None  # None: the scorer failed
    cpu_s: float
    memory_bytes: int  # growth of the process's peak
    error: str


def loaded(name: str) -> Environment:
    """The environment of that name, or of `module:attribute`; ConfigError if it cannot be made."""
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
    """Tasks as a run draws them, from a stream of this seed."""
    first = int.from_bytes(hashlib.sha256(f"{source.name} {seed}".encode()).digest()[:7], "big")
    return [
        Task(source.name, source.version, parameters, first, index * _INDEX_STEP)
        for index in range(count)
    ]


def settled_text(name: str, text: str) -> str:
    """Parameters as a run has them once its file was read; ConfigError if they are wrong."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise ConfigError(f'--parameters {text}: give a JSON object, such as {{"max": 9}}')
    if ":" not in name:
        source = environment(name)
        if isinstance(source, Settles):
            table = source.settled(table, Path.cwd())
    return json.dumps(table, sort_keys=True, separators=(",", ":"))


def memory_for_problems() -> AbstractContextManager[None]:
    """Limit the memory for making problems, imports included."""
    return memory_bound(size_bytes(), IMPORTS_BYTES + MEMORY_BYTES)


def told(problem: Problem) -> str:
    """A digest of a problem's prompt and answer."""
    return hashlib.sha256(f"{problem.prompt}\0{problem.answer}".encode()).hexdigest()


def scored(source: Environment, problem: Problem, text: str) -> Scored:
    """Score one text, and measure that. An `Interaction` gets it as the first turn."""
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


def has_own(source: Environment, problem: Problem) -> bool:
    """True if the environment knows a right answer, or right turns."""
    return not isinstance(source, Interaction) or bool(source.right(problem))


def _as_first_turn(source: Environment, problem: Problem, text: str) -> float:
    if not isinstance(source, Interaction):
        return source.score(problem, text)
    source.reply(problem, source.begin(problem), text)
    return source.worth(problem, (text,))


def _tried(score: Callable[[], float]) -> tuple[float | None, str]:
    """A reward, or the error, which is a finding."""
    try:
        return float(score()), ""
    except Exception as raised:  # noqa: BLE001
        return None, f"{type(raised).__name__}: {raised}"[:200]


def texts_for(problem: Problem, marker: Path) -> Iterator[tuple[str, str, bool]]:
    """Names of hostile texts, the texts, and whether each must be worth less than 1."""
    yield "nothing", "", True
    for name, text in (*hostile_texts(marker), *around(problem.answer)):
        yield name, text, True
    for name, text in repeated(problem.answer) if problem.answer else ():
        yield name, text, False


def _memory_bytes(what: str) -> int:
    """The memory of this process (`VmRSS`), or its peak since `_forget_peak` (`VmHWM`); the peak of
    its life on systems that report neither."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition(f"{what}:")[2].split()[0]) * _KIB
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * _KIB


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def try_all(asked: Mapping[str, Any], tell: Callable[[Mapping[str, Any]], None]) -> None:
    """Test one environment, and report each finding.

    Args:
        asked: `name`, `parameters` (JSON), `count` of tasks, `backwards`: make the last one first,
            `texts`: score hostile texts, `marker`: the file that code in them would make.
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
    tell({"own": [own_reward(source, each) for each in in_order if has_own(source, each)]})
    if not asked["texts"] or not in_order:
        return
    if (used := size_bytes()) is not None:
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
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


# Texts that try to make a scorer run code, run long, fill memory or err.

LENGTHS: Final = (64, 128, 256, 1024, 4096, 16_384, 100_000)  # around the bounds that scorers have
BEHIND: Final = " and so on"
_TEXTS: Final[Mapping[str, list[str]]] = tomllib.loads(
    files(__package__).joinpath("hostile_texts.toml").read_text(encoding="utf-8")
)
_HALF: Final = "\ud800" * 16  # surrogates, which no TOML has


def hostile_texts(marker: Path) -> Iterator[tuple[str, str]]:
    """Names and texts that are worth less than 1 for any question. `marker`: the file that code in
    them would make."""
    for each in _TEXTS["code"]:
        yield "code", each.format(path=str(marker))
    for each in (*_TEXTS["single"], _HALF):
        yield ascii(each)[:24], each
    for each in _TEXTS["repeated"]:
        for length in LENGTHS:
            text = (each * (length // len(each)))[:length]
            yield f"{each!a} up to {length}", text
            if each in ("[", "(", "{"):
                closing = {"[": "]", "(": ")", "{": "}"}[each]
                yield (
                    f"{each + closing!a} {length} deep",
                    each * (length // 2) + closing * (length // 2),
                )


def around(answer: str) -> Iterator[tuple[str, str]]:
    """Names and texts with a right answer and more, worth less than 1."""
    yield "a word behind the answer", answer + BEHIND
    yield "a line behind the answer", answer + "\nand so on"
    yield "a word before the answer", "I say " + answer
    yield "many words behind the answer", answer + BEHIND * 10_000
    yield "many words before the answer", BEHIND * 10_000 + answer
    yield "many lines behind the answer", answer + "\nso" * 10_000


def repeated(answer: str) -> Iterator[tuple[str, str]]:
    """Names and texts of a repeated right answer, the slowest that pass a guard. One may be right,
    if steps may follow a reached goal."""
    for joint in ("", " ", "\n", ",", ", ", " → "):
        for length in LENGTHS:
            text = joint.join([answer] * max(2, length // (len(answer) + len(joint))))
            yield f"the answer again, with {joint!a}, up to {length}", text


def main() -> None:
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
