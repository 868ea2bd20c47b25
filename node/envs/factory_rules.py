"""The parameters of the environment `environment_factory`: a class, its rows and its reward."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field

from node.envs.base import checked
from node.envs.called_games import TURNS_MAX
from node.envs.package_rules import MODULE, RULES_CACHED_MAX, PackageRules, Sha256

NAME: Final = "environment_factory"
_ATTRIBUTE: Final = "[A-Za-z_][A-Za-z0-9_]{0,63}"

Attribute = Annotated[str, Field(pattern=f"^({_ATTRIBUTE})?$")]


class FactoryRules(PackageRules, BaseModel):
    environment = NAME

    factory: Annotated[str, Field(pattern=rf"^{MODULE}(\.{MODULE}){{0,7}}:{_ATTRIBUTE}$")]
    """`module:Class` of an installed package; or a callable that makes environments."""
    rows: Attribute = ""
    """The name in that module of a list of rows, or of a function that returns one. Empty: the
    environment makes its tasks itself, from the global `random`."""
    reward: Attribute = ""
    """The name in that module of a reward function. Empty: the environment's own reward counts."""
    solution: Attribute = ""
    """The column with turns that reach a full score; empty: none are known."""
    turns: Annotated[int, Field(ge=1, le=TURNS_MAX)] = 8
    """The policy's turns at most. Calls in the last one are not made."""
    sha256: Sha256 = ""
    """The hash of package, rows, tools and a few games."""

    @property
    def module(self) -> str:
        return self.factory.partition(":")[0]

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    @property
    def label(self) -> str:
        return self.factory


def rules_from(parameters: Mapping[str, Any]) -> FactoryRules:
    hints = {"factory": "name the class of an installed package as module:Class"}
    return checked(FactoryRules, parameters, NAME, hints=hints)


@lru_cache(maxsize=RULES_CACHED_MAX)
def rules_of(parameters: str) -> FactoryRules:
    return rules_from(json.loads(parameters))
