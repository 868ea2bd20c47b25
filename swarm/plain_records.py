"""Dataclasses as records of plain values, and back. A `Moment` is on a clock that starts anew
with each process; a record holds its age."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, PlainSerializer, TypeAdapter, ValidationError, ValidationInfo
from pydantic_core.core_schema import SerializationInfo

from swarm.errors import LocalProtocolError

T = TypeVar("T")


def _ago(at: float, info: SerializationInfo[float]) -> float:
    return (info.context or 0.0) - at


def _at(ago_s: float, info: ValidationInfo[float]) -> float:
    return (info.context or 0.0) - ago_s


Moment = Annotated[float, PlainSerializer(_ago), AfterValidator(_at)]
_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def record_of(value: Any, now: float = 0.0, without: Collection[str] = ()) -> dict[str, Any]:
    """A dataclass as plain values, without the fields in `without`."""
    record: dict[str, Any] = _adapter(type(value)).dump_python(
        value, exclude=set(without), context=now
    )
    return record


def restored(kind: type[T], record: Any, now: float = 0.0, **given: Any) -> T:
    """The dataclass that `record_of` wrote, or LocalProtocolError. `given`: fields that are not
    in the record."""
    what = f"no record of {kind.__name__}"
    if not isinstance(record, Mapping):
        raise LocalProtocolError(what)
    values = {**record, **given}
    if wrong := values.keys() ^ {each.name for each in fields(kind) if each.init}:  # type: ignore[arg-type]
        raise LocalProtocolError(f"{what}: {', '.join(sorted(map(str, wrong)))}")
    try:
        found: T = _adapter(kind).validate_python(values, context=now)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise LocalProtocolError(f"{what}: {first['type']} at {where}") from None
    return found
