"""The environment `environment_factory`: a class with `reset`, methods as tools, and a reward.

This is the contract of TRL's argument of that name. A policy calls the methods in its turns, and a
receiver calls them again on an object of its own. So whatever a method returns must follow from the
row and the calls before. The global generators `random` and `numpy.random` are seeded by the task.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from node.envs.base import wrong_parameters
from node.envs.called_games import CalledGames, GameSource
from node.envs.factory_rules import NAME, rules_from, rules_of
from node.envs.package_identity import identify

# Raise it with each change of the tasks' order, a prompt, a reply or a reward: nodes of different
# revisions share nothing.
REVISION: Final = 1


class EnvironmentFactory(CalledGames):
    """Environments by TRL's contract. Parameters: factory, rows, reward, solution, turns and
    sha256, which docs/environments.md explains."""

    name = NAME
    # Errors that methods raise are replies, and their wording is Python's.
    version = f"python-{sys.version_info.major}.{sys.version_info.minor}-r{REVISION}"

    def settled(self, parameters: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
        rules = rules_from(parameters)
        if not rules.sha256:
            if folder is None:
                raise wrong_parameters(NAME, "no sha256; rules that travel have it")
            rules = rules.model_copy(update={"sha256": identify(rules)})
        return rules.model_dump(exclude_defaults=True)

    def reads(self, parameters: str) -> Sequence[Path]:
        return rules_of(parameters).places()

    def source(self, parameters: str) -> GameSource:
        from node.envs.factory_upstream import loaded

        return loaded(parameters)

    def turns(self, parameters: str) -> int:
        return rules_of(parameters).turns
