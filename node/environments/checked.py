"""Parameters of an environment that are a model: read, or refused in one line."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from swarm.errors import ConfigError

M = TypeVar("M", bound=BaseModel)


def wrong_parameters(environment: str, what: str) -> ConfigError:
    """The error for a run's wrong parameters."""
    return ConfigError(f"environment {environment}: {what}")


def checked(
    model: type[M],
    parameters: Mapping[str, Any],
    environment: str,
    *,
    more: Sequence[str] = (),
    hints: Mapping[str, str] | None = None,
) -> M:
    """The parameters as their model. `more`: names that are known besides the model's. `hints`:
    what to do about a parameter, by its name, in place of what the model says.

    Raises:
        ConfigError: one of them is wrong, unknown or missing.
    """
    try:
        return model.model_validate(dict(parameters))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    hint = (hints or {}).get(name, first["msg"].lower())
    if first["type"] == "extra_forbidden":
        known = ", ".join((*more, *model.model_fields))
        raise wrong_parameters(environment, f"{name}: no such parameter; known: {known}")
    if first["type"] == "missing":
        raise wrong_parameters(environment, f"{name}: is missing; {hint}")
    raise wrong_parameters(environment, f"{name} = {str(first['input'])[:80]!r}: {hint}")
