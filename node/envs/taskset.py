"""The environment `verifiers`: the tasks of a taskset that somebody else wrote.

Each producer goes through all tasks in an order of its own before one comes again. A reply is one
turn of text. Tasksets that grade by another model, by tools, or on a machine of their own are
refused: a stranger could not compute their rewards.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from node.envs.base import Problem
from node.envs.data.dataset import shuffled
from node.envs.package_identity import identify
from node.envs.taskset_rules import NAME, library_version, rules_from, rules_of, wrong
from swarm.rollouts import Task

# Raise it with each change of the tasks' order, a prompt or a reward: nodes of different revisions
# share nothing.
REVISION: Final = 1


class Taskset:
    """A taskset of the library `verifiers`; its parameters are those of `TasksetRules`."""

    name = NAME

    @property
    def version(self) -> str:
        return f"verifiers-{library_version()}-r{REVISION}"

    def settled(self, parameters: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
        rules = rules_from(parameters)
        if not rules.sha256:
            if folder is None:
                raise wrong("no sha256; rules that travel have it")
            library_version()
            rules = rules.model_copy(update={"sha256": identify(rules)})
        return rules.model_dump(exclude_defaults=True)

    def reads(self, parameters: str) -> Sequence[Path]:
        return rules_of(parameters).places()

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
