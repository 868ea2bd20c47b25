"""`swarm-node env`: list, show, try and check environments, and write a new one.

`env check` tests an environment in two fresh processes (`node.envs.trial`) with unlike hash seeds.
"""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, Final

import trio

from node.config import NodeConfig
from node.envs.base import Environment, Interaction, Problem
from node.envs.groups import group_version, is_group
from node.envs.gym.datasets import GROUPS, OFFERED, REFUSED
from node.envs.gym.environment import is_number, largest, settings_of
from node.envs.registry import environment_names, is_plug_in
from node.envs.scoring import made
from node.envs.trial import TEXT_CPU_S, loaded, memory_for_problems, scored, settled_text, tasks_of
from node.system.extras import install_line
from node.verify.verifier import ProcessVerifier
from swarm.errors import ChildFailed, ConfigError, first_of
from swarm.rollouts import Task
from swarm.texts import listed, printable

CHECKED_TASKS: Final = 16
CHECK_WALL_S: Final = 300
CPU_MAX_S: Final = 0.1  # of one text: a group of sixteen has two seconds of a verifier
MEMORY_MAX_BYTES: Final = 67_108_864  # for one text
NAMED_MAX: Final = 3  # texts that a line names
_MIB: Final = 1_048_576


@dataclass(frozen=True, slots=True)
class Fitness:
    """The result of one check."""

    is_fit: bool
    line: str


def check_environment(name: str, parameters: str, say: Callable[[str], None]) -> bool:
    """Say whether an environment may score text from strangers; True if it may."""
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
    code = "it runs an answer as code" if ran_code else "no text runs as code"
    verdicts = [*_on_problems(one, other), *_on_texts(one), Fitness(not ran_code, code)]
    for verdict in verdicts:
        say(f"{'ok  ' if verdict.is_fit else 'FAIL'}  {verdict.line}")
    failed = sum(not verdict.is_fit for verdict in verdicts)
    say(f"not fit for strangers: {failed} of {len(verdicts)}" if failed else "fit for strangers")
    return not failed


def _look(ask: Mapping[str, Any], hash_seed: str) -> list[dict[str, Any]]:
    """The findings of a fresh process, and how it ended if it did not finish."""
    child = subprocess.Popen(
        [sys.executable, "-m", "node.envs.trial"],
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
        else "its own answers are worth 1"
        if own
        else "it knows no answers of its own",
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
    if texts:
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
    return listed([each["text"] for each in texts if is_meant(each)], NAMED_MAX)


# The package that `swarm-node env new` writes.


def template(name: str) -> dict[str, str]:
    """The files of a new package, by path."""
    made = {f"{name}.py": "new_environment.py", "pyproject.toml": "new_environment.toml"}
    made[f"test_{name}.py"] = "new_environment_test.py"
    texts = {path: files("node.commands") / f"{source}.txt" for path, source in made.items()}
    return {
        path: Template(text.read_text(encoding="utf-8")).substitute(name=name)
        for path, text in texts.items()
    }


# `swarm-node env`: which environments there are, what one asks, and a package to begin with.

Say = Callable[[str], None]
Answerer = Callable[[str, bool], str]  # what was said so far, whether one line is enough
SHOWN_CHARS_MAX: Final = 4000
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,39}")


def check_tasks(config: NodeConfig) -> None:
    """Make a problem of each environment of the run. ConfigError: it has no such parameters."""

    async def make() -> None:
        async with ProcessVerifier.open(config) as verifier:
            await verifier.problems([])

    try:
        trio.run(make)
    except* ConfigError as group:
        raise first_of(group) from None


def list_environments(say: Say) -> None:
    """Say all environments by group, the plug-ins, and the refused ones with the reason."""
    for group, members in GROUPS.items():
        say(f"{group} ({group_version(group)}): {', '.join(members)}")
    others = [name for name in environment_names() if name not in OFFERED]
    say(f"in no group: {', '.join(each for each in others if not is_plug_in(each))}")
    plugged = [each for each in others if is_plug_in(each)]
    say(f"plugged in: {', '.join(plugged) or 'none'}")
    say("refused:")
    for name, reason in sorted(REFUSED.items()):
        say(f"  {name}: {reason}")


def show_environment(name: str, parameters: str, say: Say) -> None:
    if is_group(name):
        say(f"{name}: a group, version {group_version(name)}, of {', '.join(GROUPS[name])}")
        return
    source = loaded(name)
    say(f"{source.name}, version {source.version}")
    if rules := OFFERED.get(name):
        say(f"scorer: {rules.scored_by}")
        if rules.note:
            say(f"  because of the library's: {rules.note}")
        say(f"a longer text than {rules.text_chars_max} characters is worth 0")
        say("parameters:")
        defaults = settings_of(name)
        for setting, default in defaults.items():
            least = rules.settings_min.get(setting)
            bounds = "" if least is None else f", at least {least:g}"
            if is_number(default):
                bounds += f", at most {largest(setting, defaults, rules):,}"
            say(f"  {setting}: {printable(str(default), 100)}{bounds}")
    else:
        say(f"scorer: that of {type(source).__module__}")
        told = inspect.getdoc(type(source)) or "it says nothing of its parameters"
        say(printable(" ".join(told.split()), 500))
    problem = _made(source, tasks_of(source, settled_text(name, parameters), 1)[0])
    _say_text(say, "a problem of it", problem.prompt)
    if problem.answer:
        _say_text(say, "a right answer", problem.answer)
    else:
        say("--- it knows no right answer of its own")


def try_environment(name: str, parameters: str, seed: int, answered: Answerer, say: Say) -> None:
    """Pose a problem and say the reward of the answer."""
    source = loaded(name)
    problem = _made(source, tasks_of(source, settled_text(name, parameters), 1, seed)[0])
    _say_text(say, f"{source.name}, problem {seed}", problem.prompt)
    if isinstance(source, Interaction):
        texts = _turns(source, problem, answered, say)
        say(f"worth {source.worth(problem, texts)}")
        _say_text(say, "the environment's own turns", "\n".join(source.right(problem)))
        return
    found = scored(source, problem, answered(problem.prompt, False).removesuffix("\n"))
    worth = f"nothing; its scorer failed ({found.error})" if found.reward is None else found.reward
    say(f"worth {worth}")
    _say_text(say, "the environment's own answer", problem.answer)


def _made(source: Environment, task: Task) -> Problem:
    with memory_for_problems():
        return made(source, task)


def _turns(source: Interaction, problem: Problem, answered: Answerer, say: Say) -> list[str]:
    """The answers, turn by turn, until the task ends."""
    texts: list[str] = []
    said, state = problem.prompt, source.begin(problem)
    while len(texts) < source.turns_max:
        texts.append(answered(said, True).removesuffix("\n"))
        state, reply = source.reply(problem, state, texts[-1])
        if reply is None:
            break
        _say_text(say, "it answers", reply)
        said += f"{texts[-1]}{reply}"
    return texts


def _say_text(say: Say, what: str, text: str) -> None:
    say(f"--- {what}:")
    for line in text[:SHOWN_CHARS_MAX].split("\n"):
        say(printable(line, SHOWN_CHARS_MAX))
    if len(text) > SHOWN_CHARS_MAX:
        say(f"… {len(text) - SHOWN_CHARS_MAX} characters more")


def model_that_answers(model: str, max_new_tokens: int, say: Say) -> Answerer:
    """Completions by a model: `tiny`, which is made first, `smollm2`, or a directory."""
    from node.config import load_config
    from node.hosting.models import resolve_model

    directory = resolve_model(load_config({"model": model, "yes": True}, os.environ), say)

    def answered(prompt: str, _one_line: bool) -> str:
        command = [sys.executable, "-m", "node.policies.chat", directory, "--once"]
        command += ["--max-new-tokens", str(max_new_tokens)]
        done = subprocess.run(command, input=prompt, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"--model {model}: it could not answer; name another one")
        _say_text(say, f"what {model} says", done.stdout)
        return done.stdout

    return answered


def new_environment(directory: Path, say: Say) -> None:
    name = directory.name
    if not _NAME.fullmatch(name):
        near = re.sub("[^a-z0-9_]", "_", name.lower())
        hint = f"; {near} would do" if _NAME.fullmatch(near) else ""
        raise ConfigError(
            f"{name}: must be up to 40 lower-case letters, digits and underscores{hint}"
        )
    if directory.exists():
        raise ConfigError(f"{directory} is there already; name a directory that is not")
    try:
        for path, text in template(name).items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}") from None
    say(f"{directory}: change {name}.py, then {install_line(f'./{directory.name}')}")
    say(f"then look at it with: swarm-node env check {name}")


# A model directory on its way to a model hub. Only what the user names goes there.

ERROR_CHARS_MAX = 200
_REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")


def check_repository(name: str) -> None:
    if not _REPOSITORY.fullmatch(name):
        raise ConfigError(f"--push {name}: no repository's name; write OWNER/NAME")


def push(directory: Path, repository: str, message: str, say: Callable[[str], None]) -> None:
    """Upload a model directory to a hub. A new repository is private. The hub's library finds the
    user's token: `HF_TOKEN`, or what `hf auth login` stored."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # made at first use

    hub = HfApi()
    try:
        hub.create_repo(repository, private=True, exist_ok=True)
        done = hub.upload_folder(repo_id=repository, folder_path=directory, commit_message=message)
    except (httpx.HTTPError, HFValidationError, OSError) as error:
        lines = str(error).split("\n") or [type(error).__name__]
        said = printable(lines[0], ERROR_CHARS_MAX)
        raise ChildFailed(
            f"{repository}: not uploaded ({said}); the model is in {directory}"
        ) from error
    say(f"{repository}: uploaded, {done.commit_url}")
