"""Groups of environments: a run that names one has all its members."""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from node.envs.gym.datasets import GROUPS
from node.envs.registry import environment, is_plug_in
from swarm.errors import ConfigError

_DIGEST_CHARS: Final = 8


def is_group(name: object) -> bool:
    """True if a group has the name, and no plug-in, which comes first."""
    return isinstance(name, str) and name in GROUPS and not is_plug_in(name)


def group_version(name: str) -> str:
    """A name that changes with the group's members and their versions."""
    told = "\n".join(f"{each} {environment(each).version}" for each in GROUPS[name])
    return f"{name}-{hashlib.sha256(told.encode()).hexdigest()[:_DIGEST_CHARS]}"


def expanded(entry: Any) -> list[Any]:
    """The entries of a run for one entry: of a group one for each member, by name, with an equal
    part of its weight. Its parameters are tables by member.

    Raises:
        ConfigError: there is no such member or version.
    """
    if not isinstance(entry, Mapping) or not is_group(entry.get("name")):
        return [entry]
    name, parameters = entry["name"], entry.get("parameters", {})
    members = GROUPS[name]
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"environment {name}: parameters must be a table")
    if unknown := sorted(set(parameters) - set(members)):
        raise ConfigError(
            f"environment {name}: has no member {unknown[0]}; its parameters are tables by member: "
            f"{', '.join(members)}"
        )
    if entry.get("version", "") not in ("", group_version(name)):
        raise ConfigError(
            f"environment {name}: this run needs version {entry['version']}, installed is "
            f"{group_version(name)}; install the former"
        )
    weight = entry.get("weight", 1.0)
    if isinstance(weight, int | float) and not isinstance(weight, bool):
        with suppress(OverflowError):  # the run's model refuses such a weight
            weight = weight / len(members)
    others = {key: value for key, value in entry.items() if key not in ("parameters", "version")}
    return [
        {**others, "name": each, "weight": weight, "parameters": parameters.get(each, {})}
        for each in members
    ]
