"""`swarm-node env check`: whether strangers' text may be given to an environment.

It is looked at in two fresh processes (`node.environments.trial`) with unlike hash seeds.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from node.environments.trial import TEXT_CPU_S, settled_text
from swarm.errors import ConfigError

CHECKED_TASKS: Final = 16
CHECK_WALL_S: Final = 300
CPU_MAX_S: Final = 0.1  # of one text: a group of sixteen has two seconds of a verifier
MEMORY_MAX_BYTES: Final = 67_108_864  # for one text
NAMED_MAX: Final = 3  # texts that a line names
_MIB: Final = 1_048_576


@dataclass(frozen=True, slots=True)
class Fitness:
    """One thing that was looked at."""

    is_fit: bool
    line: str


def check_environment(name: str, parameters: str, say: Callable[[str], None]) -> bool:
    """Say of an environment whether strangers' text may be given to it; whether it may.

    Raises:
        ConfigError: there is no such environment, or it cannot make such problems.
    """
    parameters = settled_text(name, parameters)
    with tempfile.TemporaryDirectory() as room:
        marker = Path(room) / "made"
        ask = {"name": name, "parameters": parameters, "count": CHECKED_TASKS}
        ask["marker"] = str(marker)
        one = _look({**ask, "backwards": False, "texts": True}, "1")
        other = _look({**ask, "backwards": True, "texts": False}, "2")
        ran_code = marker.exists()
    who = next(each for each in one if "name" in each)
    say(f"{who['name']}, version {who['version']}")
    verdicts = [*_on_problems(one, other), *_on_texts(one)]
    verdicts.append(
        Fitness(not ran_code, "it runs an answer as code" if ran_code else "no text runs as code")
    )
    for verdict in verdicts:
        say(f"{'ok  ' if verdict.is_fit else 'FAIL'}  {verdict.line}")
    failed = sum(not verdict.is_fit for verdict in verdicts)
    say(f"not fit for strangers: {failed} of {len(verdicts)}" if failed else "fit for strangers")
    return not failed


def _look(ask: Mapping[str, Any], hash_seed: str) -> list[dict[str, Any]]:
    """What a fresh process finds, and how it ended where it did not come to its end."""
    child = subprocess.Popen(
        [sys.executable, "-m", "node.environments.trial"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        out, _ = child.communicate(json.dumps(ask), timeout=CHECK_WALL_S)
    except subprocess.TimeoutExpired:
        child.kill()
        out, _ = child.communicate()
    found = []
    for line in out.splitlines():
        with suppress(ValueError):  # a line that was not written to its end
            found.append(json.loads(line))
    if refused := next((each["refused"] for each in found if "refused" in each), None):
        raise ConfigError(refused)
    if not found or found[-1] != {"done": True}:
        found.append({"ended": child.returncode})
    if not any("own" in each for each in found):
        raise ConfigError(f"environment {ask['name']}: making its problems ended its process")
    return found


def _on_problems(
    one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]
) -> Iterator[Fitness]:
    posed, posed_again = (
        next(each for each in looked if "posed" in each) for looked in (one, other)
    )
    count = len(posed["posed"])
    differing = sum(a != b for a, b in zip(posed["posed"], posed_again["posed"], strict=True))
    yield Fitness(
        not differing,
        f"{differing} of {count} problems are others in another process: draw from "
        "random.Random(task.seed + task.index) alone, from no set, and keep nothing between them"
        if differing
        else f"{count} problems are the same in two processes, in either order",
    )
    unlike = len(set(posed["posed"]))
    hint = ": draw from the task's seed and index" if unlike < 2 else ""
    yield Fitness(unlike > 1, f"{unlike} of {count} problems are unlike{hint}")
    own = next(each["own"] for each in one if "own" in each)
    wrong = sum(reward != 1.0 for reward in own)
    yield Fitness(
        not wrong,
        f"{wrong} of {count} own answers are worth less than 1: mend the answer or the score"
        if wrong
        else "its own answers are worth 1",
    )
    threads = posed["threads"]
    yield Fitness(
        threads == 1,
        "no thread is left"
        if threads == 1
        else f"{threads - 1} threads run on: a verifier forks after this; start none",
    )


def _on_texts(found: Sequence[Mapping[str, Any]]) -> Iterator[Fitness]:
    texts = [each for each in found if "text" in each]
    if ended := next((each for each in found if "ended" in each), None):
        last = next((each["trying"] for each in reversed(found) if "trying" in each), "nothing")
        how = (
            f"took over {TEXT_CPU_S:g} s of CPU"
            if ended["ended"] == -signal.SIGPROF
            else f"ended its process with status {ended['ended']}"
        )
        yield Fitness(False, f"the text {last} {how}: bound the length of what is looked at")
    if not texts:
        return
    yield from _on_costs(texts)
    yield from _on_rewards(texts)


def _on_costs(texts: Sequence[Mapping[str, Any]]) -> Iterator[Fitness]:
    slow = max(texts, key=lambda each: each["cpu_s"])
    yield Fitness(
        slow["cpu_s"] <= CPU_MAX_S,
        f"of {len(texts)} hostile texts the dearest takes {slow['cpu_s'] * 1000:.2f} ms of CPU, "
        f"{CPU_MAX_S * 1000:g} may be: {slow['text']}",
    )
    large = max(texts, key=lambda each: each["memory_bytes"])
    yield Fitness(
        large["memory_bytes"] <= MEMORY_MAX_BYTES,
        f"the largest takes {large['memory_bytes'] / _MIB:.0f} MiB more, "
        f"{MEMORY_MAX_BYTES // _MIB} may be: {large['text']}",
    )


def _on_rewards(texts: Sequence[Mapping[str, Any]]) -> Iterator[Fitness]:
    outside = _names(texts, lambda each: not (each["reward"] is None or 0 <= each["reward"] <= 1))
    yield Fitness(not outside, f"out of [0, 1]: {outside}" if outside else "rewards are in [0, 1]")
    passing = _names(texts, lambda each: each["must_fail"] and each["reward"] == 1)
    yield Fitness(
        not passing,
        f"worth 1: {passing}; what no scorer sees could be taught there, judge the whole text"
        if passing
        else "none of them is worth 1",
    )
    moody = _names(texts, lambda each: each["reward"] != each["again"])
    yield Fitness(
        not moody, f"another reward the second time: {moody}" if moody else "a text has one reward"
    )
    if failing := _names(texts, lambda each: each["reward"] is None):
        yield Fitness(True, f"its scorer fails, which counts as 0, on: {failing}")


def _names(
    texts: Sequence[Mapping[str, Any]], is_meant: Callable[[Mapping[str, Any]], bool]
) -> str:
    found = [each["text"] for each in texts if is_meant(each)]
    more = len(found) - NAMED_MAX
    return ", ".join(found[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
