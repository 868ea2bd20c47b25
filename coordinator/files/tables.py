"""TOML tables as frozen dataclasses, with one clear line for what is wrong in a file."""

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from swarm.errors import ConfigError
from swarm.texts import printable

SHOWN_CHARS_MAX = 60

FILE_BYTES_MAX = 1_048_576
MBIT = 1e6 / 8  # bytes a second

Model = TypeVar("Model")
# how a file says what a model keeps in other units
_LINKS = {"up_mbit_per_s": "up_bytes_per_s", "down_mbit_per_s": "down_bytes_per_s"}
FILE_NAMES = {own: said for said, own in _LINKS.items()}


def read_tables(path: Path) -> dict[str, Any]:
    """The tables of a file.

    Raises:
        ConfigError: it cannot be read, or is no TOML; without the path.
    """
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{error.strerror or error}") from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"more than {FILE_BYTES_MAX} bytes")
    try:
        return parse_tables(content.decode())
    except UnicodeDecodeError:
        raise ConfigError("is no text in UTF-8") from None


def parse_tables(text: str) -> dict[str, Any]:
    """
    Raises:
        ConfigError: no TOML.
    """
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"no TOML: {error}") from None


def list_of(tables: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of tables; none if it is not there.

    Raises:
        ConfigError: it is something else.
    """
    listed = tables.get(name, [])
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise ConfigError(f"{name}: must be a list of tables, each under [[{name}]]")
    return [dict(each) for each in listed]


def counted(table: dict[str, Any], where: str, room: int, most: int) -> int | None:
    """How many of one kind a table stands for, which is taken out of it; None: it does not say.

    Raises:
        ConfigError: no whole number, or more than there is `room` for of the `most`.
    """
    if "count" not in table:
        return None
    count = table.pop("count")
    if type(count) is not int or not 1 <= count <= room:
        raise ConfigError(
            f"{where}: count = {shown(count)}: must be a whole number above 0, and all workers "
            f"together at most {most}"
        )
    return count


def table_of(tables: Mapping[str, Any], name: str, default: Any = None) -> dict[str, Any]:
    """One table, or the default.

    Raises:
        ConfigError: it is not there and has no default, or is no table.
    """
    found = tables.get(name, default)
    if not isinstance(found, dict):
        raise ConfigError(f"[{name}]: is missing" if found is None else f"{name}: must be a table")
    return dict(found)


def made(
    model: type[Model],
    table: dict[str, Any],
    where: str,
    others: tuple[str, ...] = (),
    read: Mapping[str, Any] | None = None,
) -> Model:
    """A dataclass from its table: names, then types, then what it says itself of ranges.

    Args:
        where: of the file the table is, for messages.
        others: names that the table may have had besides, for messages.
        read: values that were taken out of the table and read already.

    Raises:
        ConfigError: a setting that is missing, unknown or wrong; one line.
    """
    fields = {each.name: each for each in dataclasses.fields(model)}  # type: ignore[arg-type]
    names: list[str] = [FILE_NAMES.get(name, name) for name in fields]
    known(table, (*names, *others), f"{where}: ")
    values: dict[str, Any] = dict(read or {})
    for said, value in table.items():
        name = _LINKS.get(said, said)
        values[name] = _typed(str(fields[name].type), value, f"{where}: {said}")
        if said in _LINKS:
            values[name] *= MBIT
    for name, each in fields.items():
        if name not in values and each.default is dataclasses.MISSING:
            raise ConfigError(f"{where}: {FILE_NAMES.get(name, name)} is missing")
    try:
        return model(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {_in_file_units(str(error))}") from None


def _in_file_units(message: str) -> str:
    """A complaint about a link in the units that the file has."""
    for said, own in _LINKS.items():
        if message.startswith(f"{own} = "):
            value, _, rest = message.removeprefix(f"{own} = ").partition(":")
            return f"{said} = {float(value) / MBIT:g}:{rest}"
    return message


def _typed(kind: str, value: Any, where: str) -> Any:
    """The value, if it is of the kind that the field's annotation names."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind.startswith("tuple[str"):
        return _texts(value, where)
    if "tuple" in kind:
        return _pairs(value, where)
    if "bool" in kind:
        good, wanted = isinstance(value, bool), "true or false"
    elif "str" in kind:
        good, wanted = isinstance(value, str), "a text"
    elif "int" in kind:
        good, wanted = type(value) is int, "a whole number"
    else:
        good, wanted = is_number, "a number"
    if not good:
        raise ConfigError(f"{where} = {shown(value)}: must be {wanted}")
    return value


def _texts(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"{where} = {shown(value)}: must be a list of texts")
    return tuple(value)


def _pairs(value: Any, where: str) -> tuple[tuple[int, int], ...]:
    good = isinstance(value, list) and all(
        isinstance(each, list) and len(each) == 2 and all(type(part) is int for part in each)
        for each in value
    )
    if not good:
        raise ConfigError(f"{where} = {shown(value)}: must be a list of [steps, bytes]")
    return tuple((each[0], each[1]) for each in value)


def known(table: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    """
    Raises:
        ConfigError: the table has a setting of another name.
    """
    for key in table:
        if key not in names:
            close = difflib.get_close_matches(key, names, 1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"
            raise ConfigError(f"{where}{shown(key)}: no such setting; {hint}")


def shown(value: object) -> str:
    """A value as a message may quote it."""
    return printable(str(value), SHOWN_CHARS_MAX)
