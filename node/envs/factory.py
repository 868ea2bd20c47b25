"""The environment `environment_factory`: a class with `reset`, methods as tools, and a reward.

This is the contract of TRL's argument of that name. A policy calls the methods in its turns, and a
receiver calls them again on an object of its own. So whatever a method returns must follow from the
row and the calls before. The global generators `random` and `numpy.random` are seeded by the task.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from node.envs.base import Problem, wrong_parameters
from node.envs.data.dataset import shuffled
from node.envs.factory_rules import NAME, TURNS_MAX, rules_from, rules_of
from node.envs.package_identity import identify
from swarm.rollouts import Task

# Raise it with each change of the tasks' order, a prompt, a reply or a reward: nodes of different
# revisions share nothing.
REVISION: Final = 1


class EnvironmentFactory:
    """Environments by TRL's contract; its parameters are those of `FactoryRules`."""

    name = NAME
    # Errors that methods raise are replies, and their wording is Python's.
    version = f"python-{sys.version_info.major}.{sys.version_info.minor}-r{REVISION}"
    turns_max = TURNS_MAX
    tools = frozenset({"methods"})

    def __init__(self) -> None:
        self._live: tuple[Task, tuple[str, ...], Any] | None = (
            None  # the newest game, and its turns
        )

    def settled(self, parameters: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
        rules = rules_from(parameters)
        if not rules.sha256:
            if folder is None:
                raise wrong_parameters(NAME, "no sha256; rules that travel have it")
            rules = rules.model_copy(update={"sha256": identify(rules)})
        return rules.model_dump(exclude_defaults=True)

    def reads(self, parameters: str) -> Sequence[Path]:
        return rules_of(parameters).places()

    def problem(self, task: Task) -> Problem:
        from node.envs.factory_check import loaded

        source = loaded(task.parameters)
        number: int | None = None
        if source.rows is not None:
            epoch, place = divmod(task.index, len(source.rows))
            number = shuffled(place, len(source.rows), task.seed, epoch)
        self._live = None  # a new game seeds the global generators
        game = source.game(number, _seed(task))
        right = source.right(number)
        return Problem(task, game.prompt, right[-1] if right else "", {"number": number})

    def begin(self, problem: Problem) -> tuple[str, ...]:
        """The turns so far."""
        return ()

    def reply(
        self, problem: Problem, state: tuple[str, ...], text: str
    ) -> tuple[tuple[str, ...], str | None]:
        rules, game = rules_of(problem.task.parameters), self._game(problem, state)
        said = (*state, text)
        if len(said) >= rules.turns:
            return said, None
        self._live = None  # until the turn is over
        reply = game.take(text)
        self._live = problem.task, said, game
        return said, reply

    def worth(self, problem: Problem, texts: Sequence[str]) -> float:
        """The environment's reward after all calls of these turns."""
        rules = rules_of(problem.task.parameters)
        return float(self._game(problem, tuple(texts[: rules.turns - 1]), new=True).reward(texts))

    def score(self, problem: Problem, text: str) -> float:
        return self.worth(problem, (text,))

    def right(self, problem: Problem) -> tuple[str, ...]:
        from node.envs.factory_check import loaded

        return loaded(problem.task.parameters).right(problem.entry["number"])

    def _game(self, problem: Problem, said: tuple[str, ...], *, new: bool = False) -> Any:
        """The game after these turns: the newest one if it is there, else played again."""
        from node.envs.factory_check import loaded

        if not new and self._live is not None and self._live[:2] == (problem.task, said):
            return self._live[2]
        self._live = None
        game = loaded(problem.task.parameters).game(problem.entry["number"], _seed(problem.task))
        for text in said:
            game.take(text)
        return game


def _seed(task: Task) -> str:
    return f"{task.seed}/{task.index}"
