"""Which environments this node has: the built-in ones and those that entry points add."""

import difflib
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points

from node.environments.base import ENTRY_POINT_GROUP, Environment
from node.environments.reasoning_gym import DATASETS, ReasoningGym
from node.environments.scripted import ScriptedSum
from swarm.errors import ConfigError


def _built_in() -> dict[str, Callable[[], Environment]]:
    makers: dict[str, Callable[[], Environment]] = {
        name: partial(ReasoningGym, name) for name in DATASETS
    }
    makers[ScriptedSum.name] = ScriptedSum
    return makers


def _plugged_in() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def environment_names() -> tuple[str, ...]:
    """All names that `environment` knows, sorted."""
    return tuple(sorted({*_built_in(), *_plugged_in()}))


def is_plug_in(name: str) -> bool:
    """Whether the environment of that name would be made by code of another package."""
    return name not in _built_in() and name in _plugged_in()


@cache
def environment(name: str) -> Environment:
    """The environment of that name. A built-in one cannot be replaced by an entry point.

    Raises:
        ConfigError: unknown, or what its entry point names cannot be loaded.
    """
    if maker := _built_in().get(name):
        return maker()
    if point := _plugged_in().get(name):
        return _load(point)
    known = environment_names()
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"environment {name}: no such environment; {hint}known: {', '.join(known)}")


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
