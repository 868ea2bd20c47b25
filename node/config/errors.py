"""How a wrong setting is told: one line with the setting as it was written, its value, the fix."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from swarm.errors import ConfigError
from swarm.telemetry.broker_address import without_password
from swarm.texts import printable

_VALUE_CHARS_MAX = 80
_SECRETS = frozenset({"invite"})  # never shown
_BROKERS = frozenset({"telemetry"})  # shown without what may be a password

_PROBLEMS: Mapping[str, str] = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "literal_error": "must be {expected}",
    "finite_number": "must be a finite number",
    "missing": "is missing",
    "extra_forbidden": "no such setting",
    "value_error": "{error}",
}
_KINDS: Mapping[str, str] = {
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    "string": "must be a text",
    "tuple": "must be a list",
    "model": "must be a table",
    "path": "must be a path",
}


_SHORT_FLAGS: Mapping[str, str] = {
    "dht": "no-dht",
    "lan": "no-lan",
    "relay": "no-relay",
    "upnp": "no-upnp",
    "peers": "peer",
    "local_groups": "local",
    "external_groups": "external",
}


def flag_of(field: str) -> str:
    """The command-line flag of a field of `NodeConfig`."""
    return "--" + _SHORT_FLAGS.get(field, field).replace("_", "-")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a setting came from, and so how it is written."""

    kind: Literal["flag", "environ", "file"]
    prefix: str = ""
    label: str = ""

    @classmethod
    def in_flags(cls) -> "Source":
        return cls("flag")

    @classmethod
    def in_environ(cls, prefix: str) -> "Source":
        return cls("environ", prefix)

    @classmethod
    def in_file(cls, label: str, prefix: str = "") -> "Source":
        return cls("file", prefix, label)

    def written(self, field: str) -> str:
        """The setting's name in the words of its source."""
        if self.kind == "flag":
            return flag_of(field)
        return self.prefix + (field.upper() if self.kind == "environ" else field)

    def assigned(self, field: str, value: str) -> str:
        """What to type to give the setting that value."""
        return {"flag": "{} {}", "environ": "{}={}", "file": "{} = {}"}[self.kind].format(
            self.written(field), value
        )

    def message(self, field: str, value: Any, problem: str, fix: str | None) -> str:
        """The whole line. `value` None: there was none."""
        where = f" in {self.label}" if self.label else ""
        shown = self.written(field) if value is None else self.assigned(field, _short(value))
        hint = f"; try {self.assigned(field, fix)}" if fix is not None else ""
        return f"{shown}{where}: {problem}{hint}"


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ",".join(_short(entry) for entry in value)[:_VALUE_CHARS_MAX]
    return printable(str(value), _VALUE_CHARS_MAX)


def config_error(
    error: ValidationError, model: type[BaseModel], source_of: Callable[[str], Source]
) -> ConfigError:
    """The first of pydantic's complaints as one line. `source_of` knows a top-level field's."""
    detail = error.errors(include_url=False)[0]
    location = detail["loc"] or ("settings",)
    source = source_of(str(location[0]))
    field = ".".join(str(part) for part in location)
    if detail["type"] == "extra_forbidden":
        line = source.message(field, None, "no such setting", None)
        return ConfigError(f"{line}; {_near(location, model, source)}")
    if source.kind != "file" and len(location) > 1:
        field = str(location[0])  # entries of a list are given one by one, or with commas
    if detail["type"] == "missing":
        return ConfigError(source.message(field, None, "is missing; add it", None))
    fix = _default(model, location) or _bound(detail)
    value = _shown(str(location[0]), detail["input"])
    return ConfigError(source.message(field, value, _problem(detail), fix))


def _shown(field: str, value: Any) -> Any:
    if field in _BROKERS and value is not None:
        return without_password(str(value))
    return None if field in _SECRETS else value


def _bound(detail: ErrorDetails) -> str | None:
    """The nearest allowed value, where the complaint names it."""
    context = detail.get("ctx", {})
    nearest = context.get("ge", context.get("le"))
    return None if nearest is None else str(nearest)


def _problem(detail: ErrorDetails) -> str:
    kind = detail["type"]
    if kind in _PROBLEMS:
        return _PROBLEMS[kind].format(**detail.get("ctx", {}))
    return _KINDS.get(kind.split("_")[0], detail["msg"].lower())


def _model_at(model: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel]:
    """The model that the location leads to, through fields and entries of tuples."""
    for part in location:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        for candidate in (annotation, *get_args(annotation)):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                model = candidate
    return model


def _near(location: tuple[int | str, ...], model: type[BaseModel], source: Source) -> str:
    name, names = str(location[-1]), sorted(_model_at(model, location[:-1]).model_fields)
    close = difflib.get_close_matches(name, names, 1)
    if not close:
        return f"known: {', '.join(names)}"
    return f"did you mean {close[0] if source.kind == 'file' else source.written(close[0])}?"


def _default(model: type[BaseModel], location: tuple[int | str, ...]) -> str | None:
    """A value that is right: the default, where the field has one that can be written."""
    names = [part for part in location if isinstance(part, str)]
    owner = _model_at(model, tuple(names[:-1]))
    found = owner.model_fields.get(names[-1]) if names else None
    if found is None or found.default in (PydanticUndefined, None, (), "", "{}"):
        return None
    return None if isinstance(found.default, BaseModel) else _short(found.default)
