"""Every wire type, found by itself: what its annotations allow passes, the next value does not.

A new message is held to all of this without a line here; it needs an entry in `tests/wire`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import RemoteProtocolError
from swarm.wire import codec
from swarm.wire.messages import MANIFEST_BYTES_MAX, WireModel
from tests.wire_reference import Refused, Rule, conform, kinds, read, rules

KINDS = kinds()
BYTES_MAX = 2 * MANIFEST_BYTES_MAX
WIRE = Path(__file__).parents[1] / "wire"
ITEMS_DRAWN_MAX = 3
LENGTH_DRAWN_MAX = 90
PRINTABLE = st.characters(min_codepoint=0x21, max_codepoint=0x7E)
OTHER_TYPES: dict[type, tuple[Any, ...]] = {
    str: (b"want", 1, None, ["w"], {"w": 1}, True),
    bytes: ("a" * 32, 1, None, [1] * 32, True),
    int: (True, False, 1.0, "1", b"1", None, [1]),
    bool: (0, 1, "true", None),
    float: (1, True, "1.0", None, [1.0]),
    tuple: ("ab", b"ab", 1, None, {"0": b""}, {}),
    dict: ([], "a", None, 1),
}


def is_accepted(tree: Any, kind: type[WireModel]) -> bool:
    """Whether the codec takes it; the reference must agree."""
    data = msgpack.packb(tree)
    try:
        codec.decode(data, kind, BYTES_MAX)
        accepted = True
    except RemoteProtocolError:
        accepted = False
    try:
        conform(read(data), kind)
    except Refused:
        assert not accepted, f"{kind.__name__}: only the codec accepts it"
    else:
        assert accepted, f"{kind.__name__}: only the reference accepts it"
    return accepted


# --- a tree for each type, made from its rules -----------------------------------------------


def smallest(rule: Rule) -> Any:
    """The smallest value that a rule allows."""
    if issubclass(rule.kind, WireModel):
        return plain(rule.kind)
    if rule.words is not None:
        return rule.words[0]
    if rule.kind is bool:
        return False
    if rule.kind is str:
        return "a" * rule.length_min
    if rule.kind is bytes:
        return bytes(rule.length_min)
    if rule.kind is tuple:
        assert rule.items is not None
        return [smallest(rule.items)] * rule.length_min
    return lowest(rule)


def lowest(rule: Rule) -> float:
    if rule.kind is float:
        return 0.5 if rule.above is not None else float(rule.least or 0)
    return int(rule.least) if rule.least is not None else int(rule.above or 0) + 1


def plain(kind: type[WireModel]) -> dict[str, Any]:
    return {name: smallest(rule) for name, rule in rules(kind).items()}


def values(rule: Rule) -> st.SearchStrategy[Any]:
    """Whatever a rule allows, up to a length that is quick to draw."""
    return st.none() | _values(rule) if rule.optional else _values(rule)


def _values(rule: Rule) -> st.SearchStrategy[Any]:
    if issubclass(rule.kind, WireModel):
        return trees(rule.kind)
    if rule.words is not None:
        return st.sampled_from(rule.words)
    if rule.kind is bool:
        return st.booleans()
    if rule.kind is int:
        return st.integers(int(lowest(rule)), int(rule.most or 0))
    if rule.kind is float:
        least = rule.above if rule.above is not None else rule.least
        return st.floats(
            least,
            rule.most,
            exclude_min=rule.above is not None,
            allow_nan=False,
            allow_infinity=False,
        )
    longest = min(rule.length_max or 0, max(rule.length_min, LENGTH_DRAWN_MAX))
    if rule.kind is bytes:
        return st.binary(min_size=rule.length_min, max_size=longest)
    if rule.kind is str:
        return _texts(rule, longest)
    assert rule.items is not None
    most = min(longest, max(rule.length_min, ITEMS_DRAWN_MAX))
    return st.lists(values(rule.items), min_size=rule.length_min, max_size=most)


def _texts(rule: Rule, longest: int) -> st.SearchStrategy[str]:
    if rule.pattern is not None:
        matching = st.from_regex(rule.pattern, fullmatch=True, alphabet=PRINTABLE)
        return matching.filter(lambda text: rule.length_min <= len(text) <= longest)
    alphabet = st.characters(exclude_categories=("Cs",))
    return st.text(alphabet, min_size=rule.length_min, max_size=longest)


def trees(kind: type[WireModel]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({name: values(rule) for name, rule in rules(kind).items()})


# --- borders ---------------------------------------------------------------------------------


def borders(rule: Rule) -> Iterator[tuple[str, Any, bool]]:
    """(what, value, whether it is allowed) at every limit of a rule."""
    if rule.optional:
        yield "nothing", None, True
    if rule.words is not None:
        yield from (("word", word, True) for word in rule.words)
        yield "other word", rule.words[0] + "s", False
    elif rule.kind is bool:
        yield from (("either", value, True) for value in (False, True))
    elif rule.kind in (int, float):
        yield from _number_borders(rule)
    elif not issubclass(rule.kind, WireModel):
        yield from _length_borders(rule)


def _number_borders(rule: Rule) -> Iterator[tuple[str, Any, bool]]:
    assert rule.most is not None
    most = rule.kind(rule.most)
    yield "most", most, True
    yield "over", most * 1.000001 if rule.kind is float else most + 1, False
    if rule.least is not None:
        yield "least", rule.kind(rule.least), True
        yield "under", rule.kind(rule.least - 1), False
    if rule.above is not None:
        yield "bound", rule.kind(rule.above), False
    if rule.kind is float:
        for value in (float("nan"), float("inf"), float("-inf"), -1.0):
            yield "not finite", value, False


def _length_borders(rule: Rule) -> Iterator[tuple[str, Any, bool]]:
    assert rule.length_max is not None

    def of(length: int) -> Any:
        if rule.kind is tuple:
            assert rule.items is not None
            return [smallest(rule.items)] * length
        return "a" * length if rule.kind is str else bytes(length)

    yield "longest", of(rule.length_max), True
    yield "too long", of(rule.length_max + 1), False
    yield "shortest", of(rule.length_min), True
    if rule.length_min:
        yield "too short", of(rule.length_min - 1), False
    if rule.pattern is not None:
        for text in ("a b", "a\n", "\u00e4", "\x7f", "\n"):
            yield "other characters", text, False
    if rule.kind is str and rule.pattern is None and rule.length_max >= 4:
        yield "characters, not bytes", "\U0001f600" * rule.length_max, True


def fields() -> list[tuple[type[WireModel], str]]:
    return [(kind, name) for kind in KINDS for name in rules(kind)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_tree_is_accepted(kind: type[WireModel]) -> None:
    assert is_accepted(plain(kind), kind)


@pytest.mark.parametrize(("kind", "name"), fields())
def test_each_field_up_to_its_limit_and_no_further(kind: type[WireModel], name: str) -> None:
    rule = rules(kind)[name]
    for what, value, allowed in borders(rule):
        assert is_accepted(plain(kind) | {name: value}, kind) == allowed, what
    for what, value, allowed in borders(rule.items) if rule.items is not None else ():
        assert is_accepted(plain(kind) | {name: [value]}, kind) == allowed, f"item: {what}"


@pytest.mark.parametrize(("kind", "name"), fields())
def test_each_field_has_all_its_limits(kind: type[WireModel], name: str) -> None:
    rule = rules(kind)[name]
    for each in [rule] if rule.items is None else [rule, rule.items]:
        if each.kind in (str, bytes, tuple):
            assert each.length_max is not None or each.words is not None
        elif each.kind in (int, float):
            assert each.most is not None
            assert each.least is not None or each.above is not None
        else:
            assert each.kind in KINDS or each.kind is bool


@pytest.mark.parametrize(("kind", "name"), fields())
def test_no_field_takes_another_type(kind: type[WireModel], name: str) -> None:
    rule = rules(kind)[name]
    wanted = dict if issubclass(rule.kind, WireModel) else rule.kind
    for other in OTHER_TYPES[wanted]:
        allowed = other is None and rule.optional
        assert is_accepted(plain(kind) | {name: other}, kind) == allowed, repr(other)


@pytest.mark.parametrize(("kind", "name"), fields())
def test_no_field_may_be_missing_or_twice_there(kind: type[WireModel], name: str) -> None:
    tree = plain(kind)
    value = tree.pop(name)
    assert is_accepted(tree, kind) == rules(kind)[name].absent
    pairs = [*tree.items(), (name, value), (name, value)]
    twice = msgpack.Packer().pack_map_pairs(pairs)
    with pytest.raises(RemoteProtocolError, match="twice"):
        codec.decode(twice, kind, BYTES_MAX)


def test_optional_fields_are_these() -> None:
    found = {(kind.__name__, name) for kind, name in fields() if rules(kind)[name].absent}
    group = ("engine", "precision", "attempt", "context", "counters")
    completion = ("segments", "spans", "propensity", "splices")
    assert found == {
        ("ChunkRequest", "most"),
        ("Hello", "trained"),
        *(("GroupBody", name) for name in group),
        *(("CompletionBody", name) for name in completion),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_no_unknown_field(kind: type[WireModel]) -> None:
    for name in ("extra", "", "Type", "__class__"):
        assert not is_accepted(plain(kind) | {name: None}, kind)
    assert not is_accepted([*plain(kind).values()], kind)


@given(st.sampled_from(KINDS).flatmap(lambda kind: st.tuples(st.just(kind), trees(kind))))
def test_round_trip(case: tuple[type[WireModel], dict[str, Any]]) -> None:
    kind, tree = case
    assert is_accepted(tree, kind)
    message = codec.decode(msgpack.packb(tree), kind, BYTES_MAX)
    encoded = codec.encode(message)
    told, left = read(msgpack.packb(tree)), read(encoded)
    for name in told.keys() - left.keys():  # an optional field says nothing by its default
        assert told.pop(name) == kind.model_fields[name].default
    assert left == told
    assert codec.decode(encoded, kind, BYTES_MAX) == message


@given(st.sampled_from(KINDS).flatmap(lambda kind: st.tuples(st.just(kind), trees(kind))))
def test_no_other_kind_accepts_it(case: tuple[type[WireModel], dict[str, Any]]) -> None:
    kind, tree = case
    for other in KINDS:
        if other is not kind and rules(other).keys() != rules(kind).keys():
            assert not is_accepted(tree, other)


# --- golden bytes ----------------------------------------------------------------------------


def golden_trees() -> list[Any]:
    found = [read(path.read_bytes()) for path in sorted(WIRE.glob("*.bin"))]
    return found + [read(tree["payload"]) for tree in found if "payload" in tree]


@pytest.mark.parametrize("kind", KINDS)
def test_golden_bytes_hold_every_kind(kind: type[WireModel]) -> None:
    """A message as a whole, any other type somewhere inside one."""
    inside = golden_trees()
    for tree in inside:
        children = tree.values() if isinstance(tree, dict) else tree
        inside.extend(each for each in children if isinstance(each, dict | list))
    assert any(is_accepted(tree, kind) for tree in inside)
