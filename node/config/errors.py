"""Errors of settings: one line with the setting as it was written, its value, and the fix."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from node.config.described import settings_of, with_unit, written
from node.config.node import NodeConfig
from node.system.child_environment import ENVIRON_PREFIX
from swarm.errors import ConfigError
from swarm.telemetry.broker_address import without_password
from swarm.texts import printable

_VALUE_CHARS_MAX = 80

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


@dataclass(frozen=True, slots=True)
class Source:
    """The place that a setting came from, and its spelling there."""

    name: str
    template: str  # of a name and a value
    prefix: str = ""

    @classmethod
    def in_file(cls, label: str, prefix: str = "") -> "Source":
        """A table of a file; `prefix` is the table's name with its dot."""
        return cls(label, "{} = {}", prefix)

    @property
    def is_file(self) -> bool:
        """True if settings have their own names there, and lists have entries."""
        return self not in (FLAGS, ENVIRON)

    def written(self, field: str) -> str:
        if self == FLAGS:
            setting = settings_of(NodeConfig).get(field)
            return setting.option if setting else "--" + field.replace("_", "-")
        return self.prefix + (field.upper() if self == ENVIRON else field)

    def message(self, field: str, value: Any, problem: str, fix: str | None) -> str:
        """The whole error line. `value` None: no value was given."""
        name = self.written(field)
        shown = name if value is None else self.template.format(name, _short(value))
        where = f" in {self.name}" if self.is_file else ""
        hint = f"; try {self.template.format(name, fix)}" if fix else ""
        return f"{shown}{where}: {problem}{hint}"


FLAGS: Final = Source("flag", "{} {}")
ENVIRON: Final = Source("environment", "{}={}", ENVIRON_PREFIX)


def _short(value: Any) -> str:
    return printable(written(value), _VALUE_CHARS_MAX)


def config_error(
    error: ValidationError, model: type[BaseModel], source_of: Callable[[str], Source]
) -> ConfigError:
    """The first of pydantic's errors as one line. `source_of`: of a top-level field."""
    detail = error.errors(include_url=False)[0]
    location = detail["loc"] or ("settings",)
    source = source_of(str(location[0]))
    field = ".".join(str(part) for part in location)
    if detail["type"] == "extra_forbidden":
        line = source.message(field, None, "no such setting", None)
        return ConfigError(f"{line}; {_near(location, model, source)}")
    if not source.is_file and len(location) > 1:
        field = str(location[0])  # entries of a list are given one by one, or with commas
    if detail["type"] == "missing":
        return ConfigError(source.message(field, None, "is missing; add it", None))
    fix = _default(model, location) or _bound(detail)
    value = shown(str(location[0]), detail["input"])
    return ConfigError(source.message(field, value, _problem(detail), fix))


def shown(field: str, value: Any) -> Any:
    """A value for messages; None if it is secret."""
    if field == "telemetry" and value is not None:
        return without_password(str(value))
    return None if field == "invite" else value


def _bound(detail: ErrorDetails) -> str | None:
    """The nearest allowed value, if the error names it."""
    context = detail.get("ctx", {})
    nearest = context.get("ge", context.get("le"))
    return None if nearest is None else str(nearest)


def _problem(detail: ErrorDetails) -> str:
    kind = detail["type"]
    if kind in _PROBLEMS:
        return _PROBLEMS[kind].format(**detail.get("ctx", {}))
    words = _KINDS.get(kind.split("_")[0], detail["msg"].lower())
    is_time = with_unit(str(detail["loc"][-1]), "number") == "number, s"
    return f"{words} of seconds" if is_time and words.endswith("number") else words


def _model_at(model: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel]:
    """The model at a location, through fields and entries of tuples."""
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
    return f"did you mean {close[0] if source.is_file else source.written(close[0])}?"


def _default(model: type[BaseModel], location: tuple[int | str, ...]) -> str | None:
    """The default, if the field has one that can be typed."""
    names = [part for part in location if isinstance(part, str)]
    found = _model_at(model, tuple(names[:-1])).model_fields.get(names[-1]) if names else None
    if found is None or found.default in (PydanticUndefined, "{}"):
        return None
    return None if isinstance(found.default, BaseModel) else written(found.default)
