"""The environment `dataset`: the questions and answers of whoever founded a run.

A producer goes through all items before one of them comes again, in an order of its own and another
one each time; where a run has other environments too, those of its indices that fall to them are
left out.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from node.environments.base import Problem
from node.environments.data import store
from node.environments.data.items import Item
from node.environments.data.rules import NAME, rules_of, settled
from node.environments.data.scorers import LETTERS
from node.environments.data.shuffle import shuffled
from swarm.errors import ConfigError
from swarm.rollouts import Task

# Raise it when this room changes which item is whose, a prompt, or what a text that some policy may
# write is worth: nodes of different revisions share nothing.
REVISION: Final = 1


class Dataset:
    """Items by their hash, scored by name; its parameters are those of `rules.DataRules`."""

    name = NAME
    version = f"dataset-r{REVISION}"

    def settled(self, parameters: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
        return settled(parameters, folder)

    def reads(self, parameters: str) -> list[Path]:
        return [store.path_of(rules_of(parameters).sha256)]

    def problem(self, task: Task) -> Problem:
        rules = rules_of(task.parameters)
        items = rules.items()
        rules.judge.prepare()
        epoch, place = divmod(task.index, len(items))
        chosen = shuffled(place, len(items), task.seed, epoch)
        item = rules.columns.item(items.row(chosen))
        try:
            answer = rules.judge.own_answer(item)
        except ValueError as error:
            raise ConfigError(f"environment {NAME}: item {chosen + 1}: {error}") from None
        return Problem(task, prompt_of(item), answer, item)

    def score(self, problem: Problem, text: str) -> float:
        return rules_of(problem.task.parameters).judge.score(problem.entry, text)


def prompt_of(item: Item) -> str:
    """The question, and below it the choices, if there are any, each after its letter."""
    question: str = item["question"]
    choices = item.get("choices")
    if choices is None:
        return question
    return "\n".join([question, *(f"{LETTERS[at]}. {text}" for at, text in enumerate(choices))])
