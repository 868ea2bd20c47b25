"""A second, slow and simple judge of wire bytes, to hold the codec against.

It shares no code with `swarm.wire.codec`: MessagePack is read byte by byte, and the rules are taken
from the annotations of `swarm.wire.messages`. What one of the two accepts, the other must accept.
"""

import re
import struct
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal

from pydantic.fields import FieldInfo

from swarm.wire import messages
from swarm.wire import messages as steering
from swarm.wire.codec import VALUES_MAX
from swarm.wire.messages import NESTING_MAX, WireModel

Rules = dict[str, "Rule"]


class Refused(Exception):
    """The reference does not accept the bytes."""


# --- rules -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rule:
    """What one value must be. Lengths are characters, bytes or items; numbers are inclusive,
    but for `above`."""

    kind: type  # str, bytes, int, float, tuple, a wire model, or Literal's values as str
    optional: bool = False
    absent: bool = False  # it may be
    words: tuple[str, ...] | None = None
    pattern: str | None = None
    length_min: int = 0
    length_max: int | None = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    items: "Rule | None" = None


def kinds() -> list[type[WireModel]]:
    """Every wire type, nested ones included, by name."""
    found = [
        value
        for value in (vars(messages) | vars(steering)).values()
        if isinstance(value, type) and issubclass(value, WireModel) and value is not WireModel
    ]
    return sorted(found, key=lambda kind: kind.__name__)


@cache
def rules(kind: type[WireModel]) -> Rules:
    """The rule of each field."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        name: replace(_rule(hints[name]), absent=not field.is_required())
        for name, field in kind.model_fields.items()
    }


def _rule(annotation: Any, limits: dict[str, Any] | None = None) -> Rule:
    limits = limits or {}
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _rule(arguments[0], limits | _limits(arguments[1:]))
    if origin in (typing.Union, UnionType):
        (inner,) = [argument for argument in arguments if argument is not NoneType]
        found = _rule(inner, limits)
        values = {field.name: getattr(found, field.name) for field in fields(found)}
        return Rule(**values | {"optional": NoneType in arguments})
    if origin is Literal:
        return Rule(str, words=arguments)
    if origin is tuple:
        assert arguments[1] is ..., annotation
        return Rule(tuple, items=_rule(arguments[0]), **limits)
    assert isinstance(annotation, type), annotation
    return Rule(annotation, **limits)


def _limits(metadata: tuple[Any, ...]) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    for item in metadata:
        for limit in item.metadata if isinstance(item, FieldInfo) else (item,):
            limits |= dict(_limit(limit))
    return limits


def _limit(limit: Any) -> Iterator[tuple[str, Any]]:
    names = {"min_length": "length_min", "max_length": "length_max", "ge": "least", "le": "most"}
    for theirs, ours in {**names, "gt": "above", "pattern": "pattern"}.items():
        if getattr(limit, theirs, None) is not None:
            yield ours, getattr(limit, theirs)
    if getattr(limit, "lt", None) is not None:
        yield "most", limit.lt - 1


def conform(tree: Any, kind: type[WireModel]) -> None:
    """Check a tree against the rules of a wire type.

    Raises:
        Refused: it breaks one.
    """
    if not isinstance(tree, dict):
        raise Refused(f"{kind.__name__} is a map")
    known = rules(kind)
    lacking = {name for name in known.keys() - tree.keys() if not known[name].absent}
    if lacking or not tree.keys() <= known.keys():
        raise Refused(f"fields {sorted(tree.keys() ^ known.keys())[:3]}")
    for name in tree:
        _conform(tree[name], known[name], f"{kind.__name__}.{name}")


def _conform(value: Any, rule: Rule, where: str) -> None:
    if value is None and rule.optional:
        return
    if issubclass(rule.kind, WireModel):
        conform(value, rule.kind)
        return
    wanted = list if rule.kind is tuple else rule.kind
    if type(value) is not wanted:
        raise Refused(f"{where} is a {type(value).__name__}")
    if rule.words is not None and value not in rule.words:
        raise Refused(f"{where} is another word")
    if wanted in (int, float):
        _conform_number(value, rule, where)
        return
    if len(value) < rule.length_min or (
        rule.length_max is not None and len(value) > rule.length_max
    ):
        raise Refused(f"{where} has a length of {len(value)}")
    if rule.pattern is not None and not re.fullmatch(rule.pattern, value):
        raise Refused(f"{where} holds other characters")
    for item in value if rule.items is not None else ():
        _conform(item, rule.items, where)


def _conform_number(value: float, rule: Rule, where: str) -> None:
    if value != value or value in (float("inf"), float("-inf")):
        raise Refused(f"{where} is not finite")
    too_low = rule.least is not None and value < rule.least
    too_high = rule.most is not None and value > rule.most
    if too_low or too_high or (rule.above is not None and value <= rule.above):
        raise Refused(f"{where} is {value}")


# --- MessagePack -----------------------------------------------------------------------------

_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_SIZED = {
    0xC4: (">B", bytes),
    0xC5: (">H", bytes),
    0xC6: (">I", bytes),
    0xD9: (">B", str),
    0xDA: (">H", str),
    0xDB: (">I", str),
    0xDC: (">H", list),
    0xDD: (">I", list),
    0xDE: (">H", dict),
    0xDF: (">I", dict),
}


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self.values = 0

    def take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        if len(taken) != count:
            raise Refused("cut short")
        self._at += count
        return taken

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    @property
    def at_end(self) -> bool:
        return self._at == len(self._data)


def read(data: bytes) -> Any:
    """The one value in `data`: maps as dicts, arrays as lists.

    Raises:
        Refused: against PROTOCOL.md's common ground.
    """
    source = _Bytes(data)
    tree = _read(source, 0)
    if not source.at_end:
        raise Refused("bytes after the message")
    return tree


def _read(source: _Bytes, depth: int) -> Any:
    code = source.number(">B")
    if code <= 0x7F:
        return code
    if code >= 0xE0:
        return code - 0x100
    if code in _CONSTANTS:
        return _CONSTANTS[code]
    if code in _NUMBERS:
        return source.number(_NUMBERS[code])
    kind, size = _head(source, code)
    if kind is bytes:
        return source.take(size)
    if kind is str:
        return _text(source.take(size))
    if depth >= NESTING_MAX:
        raise Refused("nested too deep")
    source.values += 1 + size
    if source.values > VALUES_MAX:
        raise Refused("too many values")
    if kind is list:
        return [_read(source, depth + 1) for _ in range(size)]
    return _map(source, size, depth)


def _head(source: _Bytes, code: int) -> tuple[type, int]:
    """Type and length of what has one."""
    if code <= 0x8F:
        return dict, code & 0x0F
    if code <= 0x9F:
        return list, code & 0x0F
    if code <= 0xBF:
        return str, code & 0x1F
    if code not in _SIZED:
        raise Refused("extension type, or no type at all")
    form, kind = _SIZED[code]
    return kind, source.number(form)


def _map(source: _Bytes, size: int, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(size):
        key = _read(source, depth + 1)
        if not isinstance(key, str) or key in found:
            raise Refused("a key that is no text, or twice there")
        found[key] = _read(source, depth + 1)
    return found


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Refused("not UTF-8") from None


# --- records ---------------------------------------------------------------------------------


def conform_columns(group: dict[str, Any]) -> None:
    """Check the columns of a group.

    Raises:
        Refused: they break a rule.
    """
    buckets = _columns(group.get("counters", b""), 3)
    if any(successes > tries for _, tries, successes in buckets) or not _ascends(
        [bucket for bucket, _, _ in buckets]
    ):
        raise Refused("counters of nothing")
    for completion in group["completions"]:
        _conform_turns(completion)
        _conform_versions(completion)
        ids, logprobs = completion["token_ids"], completion["logprobs"]
        if len(ids) != len(logprobs) or len(ids) % 4:
            raise Refused("uneven columns")
        for (value,) in struct.iter_unpack("<f", logprobs):
            if not -float("inf") < value <= 0.001:
                raise Refused("a log-prob out of range")


def _conform_turns(completion: dict[str, Any]) -> None:
    tokens = len(completion["token_ids"]) // 4
    turns = _columns(completion.get("segments", b""), 3)
    told = [(author, count > 0) for author, _, count in turns]
    if any(each not in ((0, True), (1, False)) for each in told):
        raise Refused("a turn of nobody")
    sums = (sum(chars for _, chars, _ in turns), sum(count for _, _, count in turns))
    if turns and sums != (len(completion["text"]), tokens):
        raise Refused("turns that are not the text's")
    splices = [at for (at,) in _columns(completion.get("splices", b""), 1)]
    if splices and not (_ascends([0, *splices]) and splices[-1] <= tokens):
        raise Refused("splices out of order")


def _conform_versions(completion: dict[str, Any]) -> None:
    spans = _columns(completion.get("spans", b""), 2)
    if not spans:
        return
    versions = [version for version, _ in spans]
    if versions != sorted(versions) or versions[0] != completion["policy_version"]:
        raise Refused("spans of other versions")
    counts = [count for _, count in spans]
    if 0 in counts or sum(counts) != len(completion["token_ids"]) // 4:
        raise Refused("spans of other tokens")


def _columns(data: bytes, width: int) -> list[tuple[int, ...]]:
    if len(data) % (4 * width):
        raise Refused("an odd column")
    return list(struct.iter_unpack(f"<{width}I", data))


def _ascends(numbers: list[int]) -> bool:
    return sorted(set(numbers)) == numbers
