"""A user's own methods: a function or a stage in one file, or in a package that adds it.

A file is named as `PATH.py:NAME`, a package's method by its entry point in `swarm_node.methods`.
Its identity, a short hash of the file or the package's version, follows after `@`.
"""

import hashlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from traceback import extract_tb
from typing import Any, Final, get_type_hints

from node.methods.loss_settings import StaleLoss
from node.methods.method import Family, MethodSettings
from swarm.errors import ConfigError, SwarmError
from swarm.texts import first_line

ENTRY_POINT_GROUP: Final = "swarm_node.methods"
HASH_CHARS: Final = 8
DATA: Final[Mapping[str, int]] = {"advantage": 1, "loss": 1, "correction": 2}
"""Arguments of an own function before its settings, by family. Other families take stages."""
_FILE: Final = re.compile(r"([^@]+\.py):(\w+)")
_STAGE: Final = ("node.stages.stage", "Stage")


def added() -> dict[str, EntryPoint]:
    """Methods that packages add, by name; imports nothing."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def is_file(name: str) -> bool:
    return _FILE.fullmatch(name.partition("@")[0]) is not None


def names_file(value: Any) -> bool:
    """True if a setting, or an entry of it, may be a method in a file."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return any(map(names_file, value))
    return ".py:" in str(value)


def is_own(name: str) -> bool:
    """True if a name is of a user's own method; imports nothing."""
    return is_file(name) or name.partition("@")[0] in added()


def own_settings(name: str, family: Family) -> type[MethodSettings]:
    """The settings of an own method. This runs the user's code.

    Raises:
        ValueError: one line; it does not load, has changed, or is none of this family.
    """
    plain, _, wanted = name.partition("@")
    source = b""
    if in_file := _FILE.fullmatch(plain):
        try:
            source = Path(in_file[1]).read_bytes()
        except OSError as error:
            raise ValueError(f"{in_file[1]}: {error.strerror}") from None
        identity = hashlib.sha256(source).hexdigest()[:HASH_CHARS]
    else:
        package = added()[plain].dist
        identity = package.version if package else ""
    if wanted and wanted != identity:
        raise ValueError(f"{plain}: is {identity} here, not {wanted}")
    return _made(plain, source, f"{plain}@{identity}", family)


@cache
def _made(plain: str, source: bytes, kind: str, family: Family) -> type[MethodSettings]:
    try:
        found = _loaded(plain, source)
        if isinstance(found, type):
            return _of_stage(found, kind, family)
        return _of_function(found, kind, family)
    except Exception as error:  # boundary: a user's code
        raise ValueError(f"{plain}: {_line(error, plain)}") from error


def _loaded(plain: str, source: bytes) -> Any:
    in_file = _FILE.fullmatch(plain)
    if in_file is None:
        return added()[plain].load()
    module = types.ModuleType(f"own_method_{hashlib.sha256(source).hexdigest()}")
    module.__file__ = in_file[1]
    sys.modules[module.__name__] = module  # where dataclasses look for it
    exec(compile(source, in_file[1], "exec"), module.__dict__)
    if not hasattr(module, in_file[2]):
        raise ValueError(f"it has no {in_file[2]}")
    return getattr(module, in_file[2])


def _of_stage(found: type, kind: str, family: Family) -> type[MethodSettings]:
    settings = getattr(found, "Settings", MethodSettings)
    if _STAGE not in [(each.__module__, each.__name__) for each in found.__mro__]:
        raise ValueError("a class must be a subclass of node.stages.stage.Stage")
    if MethodSettings not in getattr(settings, "__mro__", ()):
        raise ValueError("its Settings must be a subclass of node.methods.method.MethodSettings")
    if family in ("loss", "correction"):
        raise ValueError(f"a {family} is a function and no stage")
    return _settings(kind, settings, {"own": found, "__doc__": found.__doc__})


def _of_function(found: Any, kind: str, family: Family) -> type[MethodSettings]:
    if family not in DATA or not callable(found):
        raise ValueError(f"{family} takes a {'function' if family in DATA else 'Stage'}")
    hints = get_type_hints(found, include_extras=True)
    parameters = list(inspect.signature(found).parameters.values())[DATA[family] :]
    base = StaleLoss if family == "loss" else MethodSettings
    if len(parameters) == 1:
        (only,) = parameters
        default = only.default if is_dataclass(only.default) else hints.get(only.name)
        if default is not None and is_dataclass(default):
            return _of_dataclass(found, default, kind, base)
    names = [each.name for each in parameters]
    for each in parameters:
        if each.default is each.empty or each.name not in hints:
            raise ValueError(f"its parameter {each.name} needs a type and a default")

    def call(*arguments: Any) -> Any:
        *data, set_to = arguments
        return found(*data, **{name: getattr(set_to, name) for name in names})

    body = {each.name: each.default for each in parameters}
    return _settings(kind, base, _body(found, call, {n: hints[n] for n in names}, body))


def _of_dataclass(
    found: Callable[..., Any], default: Any, kind: str, base: type[MethodSettings]
) -> type[MethodSettings]:
    """Settings by a dataclass, or by an object of one that has the defaults."""
    made_by = default if isinstance(default, type) else type(default)
    names = [each.name for each in fields(default)]
    hints = get_type_hints(made_by, include_extras=True)
    values = default if not isinstance(default, type) else made_by()

    def call(*arguments: Any) -> Any:
        *data, set_to = arguments
        return found(*data, made_by(**{name: getattr(set_to, name) for name in names}))

    body = {name: getattr(values, name) for name in names}
    return _settings(kind, base, _body(found, call, {n: hints[n] for n in names}, body))


def _body(
    found: Any, call: Callable[..., Any], types_of: dict[str, Any], values: dict[str, Any]
) -> dict[str, Any]:
    return {
        **values,
        "__annotations__": types_of,
        "__doc__": found.__doc__,
        "own": staticmethod(call),
    }


def _settings(kind: str, base: type[MethodSettings], body: dict[str, Any]) -> type[MethodSettings]:
    taken = {"kind", "needs", "roles", "own"} & set(body.get("__annotations__", ()))
    if taken:
        raise ValueError(f"its setting {min(taken)} needs another name")
    options = {"kind": kind, "roles": base.roles}
    body.setdefault("__doc__", None)
    return types.new_class("OwnMethod", (base,), options, lambda space: space.update(body))


@contextmanager
def told(set_to: MethodSettings) -> Iterator[None]:
    """Turn an exception of an own method into one line that names it.

    Raises:
        ConfigError: the method failed.
    """
    try:
        yield
    except SwarmError:
        raise
    except Exception as error:  # boundary: a user's code
        line = _line(error, set_to.kind.partition("@")[0])
        raise ConfigError(f"method {set_to}: {line}") from error


def _line(error: Exception, plain: str) -> str:
    """An error in one line, with its place in the method's file."""
    path = plain.rpartition(":")[0]
    places = [each.lineno for each in extract_tb(error.__traceback__) if each.filename == path]
    where = f" (line {places[-1]})" if places else ""
    name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"{name}{first_line(error)}{where}"
