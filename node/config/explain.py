"""All settings as they hold, each with where it came from: what `swarm-node config` prints."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import BaseModel

from node.config.errors import Source
from node.config.node import NodeConfig
from swarm.telemetry.broker_address import without_password

SUITED: Final = ("learning_rate", "warm_up_updates")  # None: by the policy, once it is loaded
_DEFAULT, _SUITED = "default", "suited to the model, which is looked at when it is loaded"


def explained(config: NodeConfig, sources: Mapping[str, Source]) -> list[str]:
    """A line for each setting: name, value, source. No secrets."""
    lines = []
    for name in NodeConfig.model_fields:
        if name == "run":
            continue
        value = getattr(config, name)
        source = _source(sources.get(name))
        if name in SUITED and value is None:
            source = _SUITED
        lines.append(_line(name, _shown(name, value), source))
    label = sources["run"].label
    lines += [
        _line(name, _text(value), label if is_set else _DEFAULT)
        for name, value, is_set in _tree("run", config.run)
    ]
    return [*lines, _line("run.id", config.run.run_id, "follows from the run")]


def _line(name: str, value: str, source: str) -> str:
    return f"{name} = {value}  ({source})"


def _source(source: Source | None) -> str:
    if source is None:
        return _DEFAULT
    return {"flag": "flag", "environ": "environment", "file": source.label}[source.kind]


def _tree(prefix: str, model: BaseModel) -> Iterator[tuple[str, Any, bool]]:
    """(name, value, whether it was set) of a model's leaves."""
    for name in type(model).model_fields:
        value, path = getattr(model, name), f"{prefix}.{name}"
        if isinstance(value, BaseModel):
            yield from _tree(path, value)
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for place, each in enumerate(value):
                yield from _tree(f"{path}[{place}]", each)
        else:
            yield path, value, name in model.model_fields_set


def _shown(name: str, value: Any) -> str:
    if name == "invite" and value is not None:
        return "an invitation"
    if name == "telemetry" and value is not None:
        return without_password(str(value))
    return _text(value)


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(_text, value)) or "none"
    text = str(value)
    return text if text.isprintable() else json.dumps(text)  # a system prompt may have lines
