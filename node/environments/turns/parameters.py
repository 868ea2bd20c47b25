"""Parameters of tasks, whole numbers within bounds, and prompts that are a task's own."""

import json
from collections.abc import Mapping
from random import Random

from swarm.errors import ConfigError
from swarm.rollouts import Task
from swarm.texts import printable

NAMES_MAX = 16**6


def named(rng: Random, prompt: str) -> str:
    """A prompt with a number of its own before it: tasks are told apart by their prompts, and those
    of a game would all begin alike. Drawn last, it says nothing of what is to be found."""
    return f"{rng.randrange(NAMES_MAX):06x} {prompt}"


def numbers(task: Task, known: Mapping[str, tuple[int, int, int]]) -> dict[str, int]:
    """A task's parameters. `known`: of each its default, least and most.

    Raises:
        ConfigError: another parameter, or one out of its bounds.
    """
    given = json.loads(task.parameters)
    for name, value in given.items():
        if name not in known:
            raise ConfigError(
                f"environment {task.environment}: no parameter {name}; known: {', '.join(known)}"
            )
        _, least, most = known[name]
        if type(value) is not int or not least <= value <= most:
            raise ConfigError(
                f"environment {task.environment}: {name} = {printable(str(value), 40)}: "
                f"a number from {least} to {most}"
            )
    return {name: given.get(name, default) for name, (default, _, _) in known.items()}
