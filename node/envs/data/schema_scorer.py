"""Texts that are JSON by a schema of the item. The only file that imports `jsonschema`.

Only words of JSON Schema are allowed whose work is bounded by the sizes of schema and text: no
references (`$ref`), no regular expressions (`pattern`), no comparison of all pairs (`uniqueItems`).
The product of both sizes has a bound.
"""

import functools
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from node.envs.base import values_in
from node.envs.data.items import Item, canonical_json
from node.envs.data.scorers import ItemScorer, Settings, installed

SCHEMA_CHARS_MAX: Final = 16_384
TEXT_CHARS_MAX: Final = 8_192
DEPTH_MAX: Final = 16
WORK_MAX: Final = 20_000  # values of a text times values of a schema
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_READ_MAX: Final = 64

# Words by content: a value, one schema, schemas by name, or a list of schemas.
_VALUES: Final = frozenset(
    {
        "$schema", "title", "description", "type", "enum", "const", "required", "minimum",
        "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minItems",
        "maxItems", "minProperties", "maxProperties",
    }
)  # fmt: skip
_ONE: Final = frozenset({"items", "additionalProperties", "not", "contains", "propertyNames"})
_NAMED: Final = frozenset({"properties"})
_LISTED: Final = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})


class JsonSchemaScorer(ItemScorer):
    """JSON that fits the schema in the column `rule`; the answer is an example."""

    needs = frozenset({"rule"})

    def __init__(self, settings: Settings) -> None:
        found = installed("json_schema", "jsonschema", "schema")
        self.engine = f"jsonschema-{found.partition('.')[0]}"

    def prepare(self) -> None:
        import jsonschema

        del jsonschema

    def own_answer(self, item: Item) -> str:
        _validator(item["rule"])
        answer: str = item["answer"].strip()
        if not self.score(item, answer):
            raise ValueError("an answer that does not fit its schema")
        return answer

    def score(self, item: Item, text: str) -> float:
        if len(text) > TEXT_CHARS_MAX:
            return 0.0
        try:
            validator, size = _validator(item["rule"])
            value = _json(text)
        except ValueError:
            return 0.0
        if size * sum(1 for _ in values_in(value)) > WORK_MAX:
            return 0.0
        return float(validator.is_valid(value))


def _json(text: str) -> Any:
    """Parse JSON; ValueError if it is none, names a field twice, or is nested too deeply."""
    if _depth(text) > DEPTH_MAX:
        raise ValueError(f"nested deeper than {DEPTH_MAX}")
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except json.JSONDecodeError:
        raise ValueError("no JSON") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _depth(text: str) -> int:
    depth = deepest = 0
    for char in _QUOTED.sub("", text):
        depth += (char in "[{") - (char in "]}")
        deepest = max(deepest, depth)
    return deepest


@functools.lru_cache(maxsize=_READ_MAX)
def _validator(text: str) -> tuple[Any, int]:
    """The validator of a schema, and the number of values in the schema; ValueError if it is none
    or has a word that is not allowed."""
    from jsonschema import Draft202012Validator, SchemaError

    if len(text) > SCHEMA_CHARS_MAX:
        raise ValueError(f"a schema of over {SCHEMA_CHARS_MAX} characters")
    schema = _json(text)
    _check(schema)
    if isinstance(schema, Mapping):
        schema = {word: value for word, value in schema.items() if word != "$schema"}
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"a schema that is none: {error.message[:80]}") from None
    return Draft202012Validator(schema), sum(1 for _ in values_in(schema))


def _check(schema: Any) -> None:
    """Raise ValueError if the schema has a word that is not allowed."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise ValueError("a schema that is no object")  # noqa: TRY004 - as all faults of items
    for word, value in schema.items():
        inner: list[Any] = []
        if word in _ONE:
            inner = [value]
        elif word in _NAMED and isinstance(value, Mapping):
            inner = list(value.values())
        elif word in _LISTED and isinstance(value, list):
            inner = value
        elif word not in _VALUES:
            raise ValueError(f"a schema with {canonical_json(word)[:40]}, which is not taken")
        for each in inner:
            _check(each)
