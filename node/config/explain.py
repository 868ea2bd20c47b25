"""The output of `swarm-node config`: all settings with their sources."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import BaseModel

from node.config.described import groups_of, written
from node.config.errors import Source, shown
from node.config.node import NodeConfig

SUITED: Final = ("learning_rate", "warm_up_updates")  # None: by the policy, once it is loaded


def explained(config: NodeConfig, sources: Mapping[str, Source]) -> list[str]:
    """A line for each setting: name, value, source. No secrets."""
    lines = []
    for name in (each.name for _, settings in groups_of(NodeConfig) for each in settings):
        value = getattr(config, name)
        source = sources[name].name if name in sources else "default"
        if name in SUITED and value is None:
            source = "suited to the model, which is looked at when it is loaded"
        if name == "invite" and value is not None:
            value = "an invitation"
        if name != "run":
            lines.append(_line(name, shown(name, value) or value, source))
    file = sources["run"].name
    for path, value, is_set in _leaves("run", config.run):
        lines.append(_line(path, value, file if is_set else "default"))
    return [*lines, _line("run.id", config.run.run_id, "follows from the run")]


def _line(name: str, value: Any, source: str) -> str:
    text = written(value) or "none"
    shown = text if text.isprintable() else json.dumps(text)  # a system prompt may have lines
    return f"{name} = {shown}  ({source})"


def _leaves(prefix: str, model: BaseModel) -> Iterator[tuple[str, Any, bool]]:
    """(name, value, whether it was set) of each setting in a tree of models."""
    for name, value in model:
        path = f"{prefix}.{name}"
        if isinstance(value, BaseModel):
            yield from _leaves(path, value)
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for place, each in enumerate(value):
                yield from _leaves(f"{path}[{place}]", each)
        else:
            yield path, value, name in model.model_fields_set
