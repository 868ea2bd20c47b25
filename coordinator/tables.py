"""TOML files as pydantic models, with one line for an error."""

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from coordinator.model.capacity import WORKERS_MAX
from swarm.errors import ConfigError
from swarm.texts import printable

SHOWN_CHARS_MAX = 60  # of a value in a message
FILE_BYTES_MAX = 1_048_576

Entry = TypeVar("Entry", bound=Any)  # a dataclass with `name` and `count`
_Location = list[int | str]

_UNKNOWN: Final = frozenset({"extra_forbidden", "unexpected_keyword_argument"})
_PROBLEMS: Final[Mapping[str, str]] = {
    "greater_than_equal": "must be at least {ge:g}",
    "greater_than": "must be above {gt:g}",
    "less_than_equal": "must be at most {le:g}",
    "bool_type": "must be true or false",
    "string_type": "must be a text",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "too_long": "must be at most {max_length} {entries}",
    "string_too_long": "must not be longer than {max_length} characters",
    "dataclass_type": "must be a table",
}
_ENTRIES: Final[Mapping[str, str]] = {
    "workers": "tables, each under [[workers]]",
    "peers": "addresses",
    "setup": "commands",
    "delta_bytes": "[steps, bytes]",
}


class Tables(BaseModel):
    """A whole file. Its dataclasses raise `WrongSetting` for their ranges."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


FileTables = TypeVar("FileTables", bound=Tables)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the file's path to errors."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_tables(path: Path) -> dict[str, Any]:
    """
    Raises:
        ConfigError: the file cannot be read, or is no TOML.
    """
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{error.strerror or error}") from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"more than {FILE_BYTES_MAX} bytes")
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError:
        raise ConfigError("is no text in UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"no TOML: {error}") from None


def checked(model: type[FileTables], tables: Mapping[str, Any]) -> FileTables:
    """
    Raises:
        ConfigError: a setting is missing, unknown or wrong; one line.
    """
    try:
        # no setting is a date: a table is refused everywhere
        text = json.dumps(tables, default=lambda date: {"date": str(date)})
        return model.model_validate_json(text)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        first = min(faults, key=lambda each: each["type"] not in _UNKNOWN)
        raise ConfigError(_line(first, model, tables)) from None


def numbered(entry: Entry, number: int, room: int) -> list[Entry]:
    """The workers of one entry: one, or `count` of them with numbers.

    Raises:
        ConfigError: the count is not above 0, or there is no `room` for so many.
    """
    if entry.count is None:
        return [entry]
    if not 1 <= entry.count <= room:
        raise ConfigError(
            f"workers {number}: count = {entry.count}: must be a whole number above 0, and all "
            f"workers together at most {WORKERS_MAX}"
        )
    names = [f"{entry.name}-{n}" for n in range(1, entry.count + 1)]
    return [replace(entry, name=name, count=None) for name in names]


def shown(value: object) -> str:
    """A value for a message."""
    return printable(str(value), SHOWN_CHARS_MAX)


def _line(fault: ErrorDetails, model: type[Tables], tables: Mapping[str, Any]) -> str:
    kind, location = fault["type"], list(fault["loc"])
    if not location:
        return "is too deeply nested"
    if kind == "value_error":
        said = str(fault["ctx"]["error"]).replace(".0:", ":", 1)  # a whole number became a float
        return f"{_place(location)}: {said}"
    if kind in _UNKNOWN:
        names = _names(model, location[:-1])
        close = difflib.get_close_matches(str(location[-1]), names, 1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"
        return f"{_place(location)}: no such setting; {hint}"
    if kind == "missing" and not isinstance(location[-1], int):
        return f"{_place(location) if location[1:] else f'[{location[0]}]'} is missing"
    problem = _PROBLEMS.get(kind, "must be a list of {entries}")
    while isinstance(location[-1], int):
        location.pop()
        if kind != "string_too_long":
            problem = "must be a list of {entries}"
    entries = _ENTRIES.get(str(location[-1]), "texts")
    problem = problem.format(entries=entries, **fault.get("ctx", {}))
    value: Any = tables
    for part in location:
        value = value[part]
    return f"{_place(location)} = {shown(value)}: {problem}"


def _place(location: _Location) -> str:
    """`workers 1: name` for the name of the first of the workers."""
    text = ""
    for part in location:
        text += f" {part + 1}" if isinstance(part, int) else f": {shown(part)}"
    return text.removeprefix(": ")


def _names(model: type[Tables], location: _Location) -> list[str]:
    """The settings that a table may have, as a file writes them."""
    whole = model.model_json_schema()
    found = whole
    for part in location:
        found = found["items"] if isinstance(part, int) else found["properties"][part]
        found = found.get("anyOf", [found])[0]
        found = whole["$defs"][found["$ref"].rpartition("/")[2]] if "$ref" in found else found
    return list(found["properties"])
