"""The parameters of `verifiers` and `verifiers_tools`: taskset, set-up and form of answers."""

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, Field, JsonValue

from node.envs.base import checked, wrong_parameters
from node.envs.called_games import TURNS_MAX
from node.envs.package_rules import MODULE, RULES_CACHED_MAX, TASKS_MAX, PackageRules, Sha256
from node.system.extras import extra_line
from swarm.errors import ConfigError

NAME: Final = "verifiers"
TOOLS_NAME: Final = "verifiers_tools"
HOLE: Final = "{}"  # where the answer goes in `reply`


class TasksetRules(PackageRules, BaseModel):
    environment = NAME

    taskset: Annotated[str, Field(pattern=f"^{MODULE}$")]
    """The module of an installed package, which exports one `Taskset`."""
    config: dict[str, JsonValue] = {}
    """The taskset's own configuration, without its `id`."""
    tasks: Annotated[int, Field(ge=1, le=TASKS_MAX)] | None = None
    """Number of tasks from the first one; None: all. A taskset without end needs it."""
    answer: Annotated[str, Field(min_length=1, max_length=64)] = "answer"
    """The field of a task's data that has a right answer."""
    reply: Annotated[str, Field(max_length=256)] = HOLE
    """The reply that the taskset sees, with the answer in place of `{}`."""
    sha256: Sha256 = ""
    """The hash of package, configuration and tasks."""

    @property
    def package(self) -> str:
        return self.taskset

    @property
    def label(self) -> str:
        return f"taskset {self.taskset}"

    def check_library(self) -> None:
        library_version()

    def reply_of(self, answer: str) -> str:
        """The part of a completion that the taskset sees."""
        return self.reply.replace(HOLE, answer)


class ToolTasksetRules(TasksetRules):
    environment = TOOLS_NAME

    turns: Annotated[int, Field(ge=1, le=TURNS_MAX)] = 8
    """The policy's turns at most. Calls in the last one are not made."""


R = TypeVar("R", bound=TasksetRules)


def rules_from(parameters: Mapping[str, Any]) -> TasksetRules:
    return _rules(TasksetRules, parameters)


def _rules(kind: type[R], parameters: Mapping[str, Any]) -> R:
    hints = {"taskset": "name the module of an installed taskset"}
    rules = checked(kind, parameters, kind.environment, hints=hints)
    if rules.reply.count(HOLE) != 1:
        raise wrong(f"reply = {rules.reply!r}: must have {HOLE} once, where the answer goes")
    if "id" in rules.config:
        raise wrong("config.id: is the parameter taskset; remove it")
    return rules


@lru_cache(maxsize=RULES_CACHED_MAX)
def rules_of(parameters: str) -> TasksetRules:
    return rules_from(json.loads(parameters))


def tool_rules_from(parameters: Mapping[str, Any]) -> ToolTasksetRules:
    return _rules(ToolTasksetRules, parameters)


@lru_cache(maxsize=RULES_CACHED_MAX)
def tool_rules_of(parameters: str) -> ToolTasksetRules:
    return tool_rules_from(json.loads(parameters))


def library_version() -> str:
    """The installed version of `verifiers`; ConfigError if there is none."""
    try:
        return version(NAME)
    except PackageNotFoundError:
        line = extra_line("verifiers")
        raise wrong(f"its library is missing: {line}") from None


def wrong(what: str) -> ConfigError:
    return wrong_parameters(NAME, what)
