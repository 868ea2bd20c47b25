"""Dataclasses as plain values and back."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest

from swarm.errors import LocalProtocolError
from swarm.plain_records import Moment, record_of, restored


@dataclass(frozen=True, slots=True)
class Inner:
    name: bytes
    at: Moment | None


@dataclass(slots=True)
class Outer:
    of_process: object
    inner: tuple[Inner, ...] = ()
    counts: Counter[int] = field(default_factory=Counter)


VALUE = Outer("here", (Inner(b"a", 5.0), Inner(b"b", None)), Counter({3: 2}))


def packed(value: Outer, now: float) -> Any:
    data = msgpack.packb(record_of(value, now, {"of_process"}))
    return msgpack.unpackb(data, strict_map_key=False)


def test_a_value_comes_back_and_its_moments_are_as_long_ago_on_another_clock() -> None:
    record = packed(VALUE, now=7.0)
    assert record["inner"][0] == {"name": b"a", "at": 2.0}
    again = restored(Outer, record, 100.0, of_process="there")
    assert again == Outer("there", (Inner(b"a", 98.0), Inner(b"b", None)), Counter({3: 2}))


@pytest.mark.parametrize(
    "wrong", [None, [], {"counts": 3}, {"other": 1}, {"inner": [{"name": b"a"}]}]
)
def test_anything_else_is_refused(wrong: Any) -> None:
    record = {**packed(VALUE, 0.0), **wrong} if isinstance(wrong, dict) else wrong
    with pytest.raises(LocalProtocolError, match="no record of Outer"):
        restored(Outer, record, of_process="here")


def test_a_field_that_is_missing_is_not_made_up() -> None:
    record = packed(VALUE, 0.0)
    del record["counts"]
    with pytest.raises(LocalProtocolError, match="no record of Outer: counts"):
        restored(Outer, record, of_process="here")
