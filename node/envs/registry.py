"""The environments of this node: the built-in ones and those that entry points add."""

import difflib
import re
from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from pkgutil import resolve_name

from node.envs.base import ENTRY_POINT_GROUP, Environment, Interaction
from node.envs.code_turns import PythonQuestion, PythonRepair
from node.envs.factory_rules import NAME as FACTORY
from node.envs.games import GuessNumber, ScriptedSum, TextMaze
from node.envs.gym.datasets import GROUPS, OFFERED, REFUSED
from node.envs.gym.environment import LIBRARY, ReasoningGym
from node.envs.python_function import PythonFunction
from node.envs.taskset_rules import NAME as TASKSETS
from node.envs.taskset_rules import TOOLS_NAME, library_version
from node.envs.tool_use import CalculatorSum, FileLookup
from node.system.extras import install_line
from swarm.errors import ConfigError
from swarm.wire.messages import MADE_BY_CHARS_MAX

_RUN_CODE = frozenset({PythonFunction.name, PythonQuestion.name, PythonRepair.name})


_OWN: tuple[type[Environment], ...] = (
    ScriptedSum,
    PythonFunction,
    GuessNumber,
    TextMaze,
    CalculatorSum,
    FileLookup,
    PythonQuestion,
    PythonRepair,
)


def _built_in() -> dict[str, Callable[[], Environment]]:
    makers: dict[str, Callable[[], Environment]] = {
        name: partial(ReasoningGym, name) for name in OFFERED
    }
    # their imports are for those who need them
    makers["dataset"] = lambda: _made("node.envs.data.dataset:Dataset")
    makers[TASKSETS] = lambda: _made("node.envs.taskset:Taskset")
    makers[TOOLS_NAME] = lambda: _made("node.envs.taskset:TasksetWithTools")
    makers[FACTORY] = lambda: _made("node.envs.factory:EnvironmentFactory")
    return makers | {str(each.name): each for each in _OWN}


def _made(place: str) -> Environment:
    made: Environment = resolve_name(place)()
    return made


def _plugged_in() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def package_of(name: str) -> str | None:
    """The top-level module of a plug-in; None for built-in and unknown environments."""
    if not is_plug_in(name):
        return None
    return _plugged_in()[name].module.partition(".")[0]


def environment_names() -> tuple[str, ...]:
    return tuple(sorted({*_built_in(), *_plugged_in()}))


def is_known(name: str) -> bool:
    """True if there is an environment of that name; imports nothing."""
    return name in _built_in() or name in _plugged_in()


def is_plug_in(name: str) -> bool:
    """True if another package's code makes the environment."""
    return name not in _built_in() and name in _plugged_in()


def packages_of(names: Iterable[str]) -> dict[str, str]:
    """The versions of other packages that make these environments, by name."""
    found: dict[str, str] = {}
    plugged_in = _plugged_in()
    for name in names:
        if name in OFFERED:
            found |= {
                each: _word(version(each)) for each in (LIBRARY, OFFERED[name].made_with) if each
            }
        elif name not in _built_in() and (point := plugged_in.get(name)) and point.dist:
            found[_word(point.dist.name)] = _word(point.dist.version)
        elif name in (TASKSETS, TOOLS_NAME):
            found[TASKSETS] = _word(library_version())
    return found


def how_to_get(name: str, wanted: str) -> str:
    """Advice if another version of an environment is installed than a run needs."""
    if name == FACTORY and (python := re.match(r"python-([0-9.]+)-", wanted)):
        return f"run this node with Python {python[1]}"
    release = "take the release of swarm-node that has it, as those who made the run do"
    if name in OFFERED:
        _, _, of_library = wanted.partition(f"{LIBRARY}-")
        library, _, _ = of_library.rpartition("-r")
        if library and _word(library) == library and library != version(LIBRARY):
            return install_line(f"{LIBRARY}=={library}")
        return release
    return release if name in _built_in() else "install that version of the plug-in"


def _word(text: str) -> str:
    """A package's name or version in the characters of the wire."""
    return re.sub(r"[^a-z0-9._+-]", "-", text.lower())[:MADE_BY_CHARS_MAX]


def needs_sandbox(name: str) -> bool:
    """True if the environment runs strangers' code, or nobody read its scorer line by line."""
    return name in _RUN_CODE or is_unread(name)


def is_unread(name: str) -> bool:
    """True if nobody read its scorer line by line."""
    return name in (TASKSETS, TOOLS_NAME, FACTORY) or is_plug_in(name)


def runs_code(name: str) -> bool:
    """True if the environment of that name calls `node.sandbox.runner`."""
    return bool(getattr(environment(name), "runs_code", False))


@cache
def environment(name: str) -> Environment:
    """The environment of that name, built-in ones first; ConfigError if it is unknown, refused, or
    cannot be loaded."""
    if maker := _built_in().get(name):
        return maker()
    if point := _plugged_in().get(name):
        return _load(point)
    if reason := REFUSED.get(name):
        raise ConfigError(f"environment {name}: refused, because {reason}")
    if name in GROUPS:
        raise ConfigError(f"environment {name}: a group of {', '.join(GROUPS[name])}; name one")
    known = environment_names()
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    if name.isidentifier() and Path(name, "pyproject.toml").is_file():  # as `env new` writes it
        hint = f"{install_line(f'./{name}')} first; "
    raise ConfigError(
        f"environment {name}: no such environment; {hint}swarm-node env list shows all"
    )


def interaction(name: str) -> Interaction | None:
    """The environment of that name if its tasks have several turns; None: they have one."""
    found = environment(name)
    return found if isinstance(found, Interaction) else None


def _load(point: EntryPoint) -> Environment:
    try:
        made: Environment = point.load()()
    except Exception as error:  # a plug-in may fail in any way: told, not swallowed
        raise ConfigError(
            f"environment {point.name}: {point.value} cannot be loaded "
            f"({type(error).__name__}: {error}); repair or uninstall it"
        ) from error
    if made.name != point.name:
        raise ConfigError(f"environment {point.name}: calls itself {made.name}; names must agree")
    return made
