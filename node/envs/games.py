"""Built-in tasks: a sum for tests and simulations, a number to guess, a maze to walk through."""

import json
import random
import re
from collections import deque
from collections.abc import Mapping, Sequence
from random import Random

from node.envs.base import Problem
from swarm.errors import ConfigError
from swarm.rollouts import Task
from swarm.texts import printable

NAMES_MAX = 16**6


def named(rng: Random, prompt: str) -> str:
    """A prompt after a random number, since tasks are told apart by their prompts. Drawn last, so
    that it says nothing of the solution."""
    return f"{rng.randrange(NAMES_MAX):06x} {prompt}"


def numbers(task: Task, known: Mapping[str, tuple[int, int, int]]) -> dict[str, int]:
    """A task's whole-number parameters; ConfigError if one is unknown or out of bounds. `known`:
    default, least and most of each."""
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


SUM_CHARS_MAX = 16


class ScriptedSum:
    """Prompt `3+4=`, answer `7`. Parameter: `max`, the largest summand."""

    name = "scripted_sum"
    version = "1"

    def problem(self, task: Task) -> Problem:
        largest = numbers(task, {"max": (9, 1, 10**9)})["max"]
        rng = random.Random(task.seed + task.index)
        left, right = rng.randint(0, largest), rng.randint(0, largest)
        return Problem(task, f"{left}+{right}=", str(left + right), {})

    def score(self, problem: Problem, text: str) -> float:
        return float(len(text) <= SUM_CHARS_MAX and text.strip() == problem.answer)


TRIES_MAX = 16


class GuessNumber:
    """Prompt `1f03c2 guess 1-15 in 4:`. Parameters: `max`, the largest number, and `tries`."""

    name = "guess_number"
    version = "1"
    turns_max = TRIES_MAX
    tools: frozenset[str] = frozenset()

    def problem(self, task: Task) -> Problem:
        given = numbers(task, {"max": (15, 2, 1000), "tries": (4, 1, TRIES_MAX)})
        rng = random.Random(task.seed + task.index)
        secret = rng.randint(1, given["max"])
        prompt = named(rng, f"guess 1-{given['max']} in {given['tries']}:")
        return Problem(task, prompt, str(secret), {**given})

    def begin(self, problem: Problem) -> int:
        """The tries left."""
        return int(problem.entry["tries"])

    def reply(self, problem: Problem, state: int, text: str) -> tuple[int, str | None]:
        guess, secret, left = _number(text), int(problem.answer), state - 1
        if guess == secret or left == 0:
            return left, None
        if guess is None:
            return left, f"no number, {left} left"
        return left, f"{'higher' if secret > guess else 'lower'}, {left} left"

    def worth(self, problem: Problem, texts: Sequence[str]) -> float:
        """1 if the last guess is right, else 0."""
        within = 0 < len(texts) <= problem.entry["tries"]
        return float(within and _number(texts[-1]) == int(problem.answer))

    def of_turn(self, problem: Problem, texts: Sequence[str]) -> float:
        """1 for a number that no reply so far rules out."""
        *before, last = map(_number, texts)
        secret, guess = int(problem.answer), last or 0
        ruled_out = any(
            guess == each or (guess > each) != (secret > each) for each in before if each
        )
        return float(0 < guess <= problem.entry["max"] and not ruled_out)

    def score(self, problem: Problem, text: str) -> float:
        return self.worth(problem, (text,))

    def right(self, problem: Problem) -> tuple[str, ...]:
        """Halving; the last try guesses right in any case."""
        low, high, secret = 1, problem.entry["max"], int(problem.answer)
        found: list[str] = []
        while len(found) + 1 < problem.entry["tries"]:
            guess = (low + high) // 2
            found.append(str(guess))
            if guess == secret:
                return tuple(found)
            low, high = (guess + 1, high) if secret > guess else (low, guess - 1)
        return (*found, problem.answer)


def _number(text: str) -> int | None:
    """A number in one spelling, so that no zeros or blanks are learned."""
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,8}", text) else None


STEPS_MAX = 32
STEPS: Mapping[str, tuple[int, int]] = {"n": (-1, 0), "e": (0, 1), "s": (1, 0), "w": (0, -1)}

Cell = tuple[int, int]  # row, column
State = tuple[Cell, int]  # where the policy is, and the steps that are left


class TextMaze:
    """A square of rooms with one way between any two, from the upper left to the lower right; each
    turn is one step. Parameters: `size`, rooms in a row, and `steps`, the most steps."""

    name = "text_maze"
    version = "1"
    turns_max = STEPS_MAX
    tools: frozenset[str] = frozenset()

    def problem(self, task: Task) -> Problem:
        given = numbers(task, {"size": (3, 2, 5), "steps": (STEPS_MAX, 1, STEPS_MAX)})
        size = given["size"]
        rng = random.Random(task.seed + task.index)
        doors = _doors(size, rng)
        way = "".join(_way(doors, size))
        prompt = f"maze {size}x{size}, go to {size},{size}. You are at {_told(doors, (0, 0))}:"
        return Problem(task, named(rng, prompt), way, {**given, "doors": doors})

    def begin(self, problem: Problem) -> State:
        return (0, 0), int(problem.entry["steps"])

    def reply(self, problem: Problem, state: State, text: str) -> tuple[State, str | None]:
        cell, left = _moved(problem, state[0], text), state[1] - 1
        if cell == _goal(problem) or left == 0:
            return (cell, left), None
        return (cell, left), _told(problem.entry["doors"], cell)

    def worth(self, problem: Problem, texts: Sequence[str]) -> float:
        cell: Cell = (0, 0)
        for text in texts[: problem.entry["steps"]]:
            cell = _moved(problem, cell, text)
        return float(cell == _goal(problem))

    def score(self, problem: Problem, text: str) -> float:
        return self.worth(problem, (text,))

    def right(self, problem: Problem) -> tuple[str, ...]:
        return tuple(problem.answer)


def _goal(problem: Problem) -> Cell:
    return problem.entry["size"] - 1, problem.entry["size"] - 1


def _moved(problem: Problem, cell: Cell, text: str) -> Cell:
    return _beyond(cell, text) if (cell, text) in problem.entry["doors"] else cell


def _beyond(cell: Cell, step: str) -> Cell:
    down, right = STEPS[step]
    return cell[0] + down, cell[1] + right


def _told(doors: frozenset[tuple[Cell, str]], cell: Cell) -> str:
    ways = "".join(step for step in STEPS if (cell, step) in doors)
    return f"{cell[0] + 1},{cell[1] + 1}, open {ways}"


def _doors(size: int, rng: random.Random) -> frozenset[tuple[Cell, str]]:
    """A random tree over all rooms, each door from both sides."""
    back = dict(zip(STEPS, "swne", strict=True))
    seen, path, doors = {(0, 0)}, [(0, 0)], set()
    while path:
        near = [
            (step, beyond)
            for step in STEPS
            if (beyond := _beyond(path[-1], step)) not in seen
            and min(beyond) >= 0
            and max(beyond) < size
        ]
        if not near:
            path.pop()
            continue
        step, beyond = rng.choice(near)
        doors |= {(path[-1], step), (beyond, back[step])}
        seen.add(beyond)
        path.append(beyond)
    return frozenset(doors)


def _way(doors: frozenset[tuple[Cell, str]], size: int) -> list[str]:
    ways: dict[Cell, list[str]] = {(0, 0): []}
    waiting = deque(ways)
    while waiting:
        cell = waiting.popleft()
        for step in STEPS:
            beyond = _beyond(cell, step)
            if (cell, step) in doors and beyond not in ways:
                ways[beyond] = [*ways[cell], step]
                waiting.append(beyond)
    return ways[size - 1, size - 1]
