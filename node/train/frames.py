"""Values between the node and its trainer's processes, and in records of rounds, as MessagePack. A
dataclass is a map with its name; sequences come back as tuples. Weights go through files."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import msgpack

from node.interfaces.engine import Context, Outcome, Recorded, Request, Sampling
from node.interfaces.trainer import LagFigures, PolicyInfo, TrainingGroup, TrainReport
from node.methods.drafts import Draft
from node.methods.generation import Speculative
from swarm.errors import LocalProtocolError
from swarm.rollouts import (
    Author,
    Completion,
    FinishReason,
    RolloutGroup,
    ScoredGroup,
    Task,
    Turn,
)

_NAME: Final = "!"  # a key that is no field
_MADE: Final[Mapping[str, Callable[..., Any]]] = {
    each.__name__: each
    for each in (
        Completion,
        Context,
        Draft,
        LagFigures,
        Outcome,
        PolicyInfo,
        Recorded,
        Request,
        RolloutGroup,
        Sampling,
        ScoredGroup,
        Speculative,
        Task,
        TrainingGroup,
        TrainReport,
        Turn,
    )
} | {"Path": Path, "frozenset": frozenset}
_ENUMS: Final[Mapping[str, type[Any]]] = {"finish_reason": FinishReason, "author": Author}


def pack(value: Any) -> bytes:
    """Plain values, paths, sets of names, and the dataclasses above, in any nesting.
    LocalProtocolError for others."""
    try:
        packed: bytes = msgpack.packb(value, default=_record, unicode_errors="surrogatepass")
    except (OverflowError, TypeError, ValueError) as error:
        raise LocalProtocolError(f"no value for a trainer's process: {error}") from None
    return packed


def unpack(data: bytes) -> Any:
    """The inverse of `pack`."""
    return msgpack.unpackb(data, object_hook=_value, use_list=False, unicode_errors="surrogatepass")


def _record(value: Any) -> dict[str, Any]:
    if isinstance(value, Path):
        return {_NAME: "Path", "": str(value)}
    if isinstance(value, frozenset):
        return {_NAME: "frozenset", "": sorted(value)}
    name = type(value).__name__
    if name not in _MADE:
        raise TypeError(f"{name} is not known here")
    return {_NAME: name} | {each.name: getattr(value, each.name) for each in fields(value)}


def _value(record: dict[str, Any]) -> Any:
    if _NAME not in record:
        return record
    make = _MADE[record.pop(_NAME)]
    if "" in record:
        return make(record[""])
    for name, kind in _ENUMS.items():
        if name in record:
            record[name] = kind(record[name])
    return make(**record)
