"""The environments `verifiers` and `verifiers_tools`: tasks of a taskset that somebody else wrote.

Each producer goes through all tasks in an order of its own before one comes again. In `verifiers` a
reply is one turn of text; in `verifiers_tools` the taskset's tool servers run in the process that
scores. Tasksets that grade by another model or on a machine of their own are refused: a stranger
could not compute their rewards.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from node.envs.base import Problem
from node.envs.called_games import CalledGames, GameSource
from node.envs.data.dataset import shuffled
from node.envs.package_identity import identify
from node.envs.taskset_rules import (
    NAME,
    TOOLS_NAME,
    TasksetRules,
    library_version,
    rules_from,
    rules_of,
    tool_rules_from,
    tool_rules_of,
    wrong,
)
from swarm.rollouts import Task

# Raise it with each change of the tasks' order, a prompt or a reward: nodes of different revisions
# share nothing.
REVISION: Final = 1


class Taskset:
    """A taskset of the library `verifiers`. Parameters: taskset, config, tasks, answer, reply and
    sha256, which docs/environments.md explains."""

    name = NAME

    @property
    def version(self) -> str:
        return f"verifiers-{library_version()}-r{REVISION}"

    def settled(self, parameters: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
        rules = self._rules(parameters)
        if not rules.sha256:
            if folder is None:
                raise wrong("no sha256; rules that travel have it")
            rules = rules.model_copy(update={"sha256": identify(rules)})
        return rules.model_dump(exclude_defaults=True)

    def _rules(self, parameters: Mapping[str, Any]) -> TasksetRules:
        return rules_from(parameters)

    def reads(self, parameters: str) -> Sequence[Path]:
        return self._rules(json.loads(parameters)).places()

    def problem(self, task: Task) -> Problem:
        from node.envs.taskset_upstream import loaded

        tasks = loaded(task.parameters)
        epoch, place = divmod(task.index, len(tasks))
        chosen = tasks[shuffled(place, len(tasks), task.seed, epoch)]
        return Problem(task, chosen.prompt, chosen.answer, {"place": chosen.place})

    def score(self, problem: Problem, text: str) -> float:
        from node.envs.taskset_upstream import loaded

        parameters, place = problem.task.parameters, problem.entry["place"]
        reply = rules_of(parameters).reply_of(text)
        reward: float = loaded(parameters)[place].worth(reply)
        return reward


class TasksetWithTools(CalledGames, Taskset):
    """A taskset with tools. Parameters: taskset, config, tasks, answer, reply, turns and sha256,
    which docs/environments.md explains."""

    name = TOOLS_NAME

    def _rules(self, parameters: Mapping[str, Any]) -> TasksetRules:
        return tool_rules_from(parameters)

    def source(self, parameters: str) -> GameSource:
        from node.envs.taskset_upstream import loaded_with_tools

        return loaded_with_tools(parameters)

    def turns(self, parameters: str) -> int:
        return tool_rules_of(parameters).turns
