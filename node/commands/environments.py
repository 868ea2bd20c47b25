"""`swarm-node env`: which environments there are, what one asks, and a package to begin with."""

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from node.commands.environment_template import template
from node.environments.base import Environment, Interaction, Problem
from node.environments.groups import group_version, is_group
from node.environments.gym.datasets import GROUPS, OFFERED, REFUSED
from node.environments.gym.environment import settings_of
from node.environments.gym.sizes import is_number, largest
from node.environments.registry import environment_names, is_plug_in
from node.environments.scoring import made
from node.environments.trial import loaded, memory_for_problems, scored, settled_text, tasks_of
from node.system.extras import install_line
from swarm.errors import ConfigError
from swarm.rollouts import Task
from swarm.texts import printable

Say = Callable[[str], None]
Answerer = Callable[[str, bool], str]  # what was said so far, whether one line is enough
SHOWN_CHARS_MAX: Final = 4000
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,39}")


def list_environments(say: Say) -> None:
    """Say which there are, by group, which come from plug-ins, and which are refused."""
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
    """Say what one environment is, with a problem of it.

    Raises:
        ConfigError: there is no such environment, or no such problem.
    """
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
            bounds = ""
            if setting in rules.settings_min:
                bounds = f", at least {rules.settings_min[setting]:g}"
            if is_number(default):
                bounds += f", at most {largest(setting, defaults, rules):,}"
            say(f"  {setting}: {printable(str(default), 100)}{bounds}")
    else:
        say(f"scorer: that of {type(source).__module__}")
        told = inspect.getdoc(type(source)) or "it says nothing of its parameters"
        say(printable(" ".join(told.split()), 500))
    problem = _made(source, tasks_of(source, settled_text(name, parameters), 1)[0])
    _say_text(say, "a problem of it", problem.prompt)
    _say_text(say, "a right answer", problem.answer)


def try_environment(name: str, parameters: str, seed: int, answered: Answerer, say: Say) -> None:
    """Pose a problem, and say what an answer is worth, or all turns where it answers.

    Raises:
        ConfigError: there is no such environment, or no such problem.
    """
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
    """What is answered, turn by turn, until it is over."""
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


# --- a model that answers -----------------------------------------------------------------------


def model_that_answers(model: str, max_new_tokens: int, say: Say) -> Answerer:
    """What a model says to a prompt: `tiny`, which is made first, `smollm2`, or a directory.

    Raises:
        ConfigError: there is no such model.
        ChildFailed: it could not be made.
    """
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


# --- one of your own ----------------------------------------------------------------------------


def new_environment(directory: Path, say: Say) -> None:
    """Write a package with an environment, to be changed.

    Raises:
        ConfigError: something is there, or the name is none for a package.
    """
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
