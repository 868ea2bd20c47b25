"""The output of `swarm-node config`: all settings with their sources."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import BaseModel

from node.config.described import groups_of, written
from node.config.errors import Source, shown
from node.config.node import NodeConfig, loss_of

SUITED: Final = ("learning_rate", "warm_up_updates")  # None: by the policy, once it is loaded


def explained(
    config: NodeConfig, sources: Mapping[str, Source], *, is_learner: bool | None = None
) -> list[str]:
    """A line for each setting: name, value, source. No secrets. `is_learner`: says the loss where
    none is set; None: it is unknown."""
    lines = []
    for name, value in _own(config):
        source = sources[name].name if name in sources else "default"
        if name in SUITED and value is None:
            source = "suited to the model, which is looked at when it is loaded"
        if name == "loss" and value is None and is_learner is not None:
            value = loss_of(config, is_learner=is_learner)
            source = "run" if config.run.training.loss else "default of the role"
        lines.append(_line(name, value, source))
    file = sources["run"].name
    for path, value, is_set in _leaves("run", config.run):
        lines.append(_line(path, value, file if is_set else "default"))
    return [*lines, _line("run.id", config.run.run_id, "follows from the run")]


def effective(config: NodeConfig, *, is_learner: bool) -> dict[str, str | float | None]:
    """All settings as they hold, of the run and of this machine, by name. No secrets."""
    found = dict(_own(config)) | {"loss": loss_of(config, is_learner=is_learner)}
    found |= {path: value for path, value, _ in _leaves("run", config.run)}
    found["run.id"] = config.run.run_id
    return {
        name: value if value is None or isinstance(value, int | float) else written(value)
        for name, value in found.items()
    }


def _own(config: NodeConfig) -> Iterator[tuple[str, Any]]:
    """The settings of this machine; a secret is named and not shown."""
    for name in (each.name for _, settings in groups_of(NodeConfig) for each in settings):
        value = getattr(config, name)
        if name == "invite" and value is not None:
            value = "an invitation"
        if name != "run":
            yield name, shown(name, value) or value


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
