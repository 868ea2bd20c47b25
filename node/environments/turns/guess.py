"""A number to be guessed: the task says whether it is higher or lower."""

import random
import re
from collections.abc import Sequence

from node.environments.base import Problem
from node.environments.turns.parameters import named, numbers
from swarm.rollouts import Task

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
        """The tries that are left."""
        return int(problem.entry["tries"])

    def reply(self, problem: Problem, state: int, text: str) -> tuple[int, str | None]:
        guess, secret, left = _number(text), int(problem.answer), state - 1
        if guess == secret or left == 0:
            return left, None
        if guess is None:
            return left, f"no number, {left} left"
        return left, f"{'higher' if secret > guess else 'lower'}, {left} left"

    def worth(self, problem: Problem, texts: Sequence[str]) -> float:
        """1 where the last guess is right, 0 else: others before it would have ended it."""
        within = 0 < len(texts) <= problem.entry["tries"]
        return float(within and _number(texts[-1]) == int(problem.answer))

    def score(self, problem: Problem, text: str) -> float:
        return self.worth(problem, (text,))

    def right(self, problem: Problem) -> tuple[str, ...]:
        """Halving. Where that takes too many tries, the last one guesses right all the same."""
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
    """In its one spelling: zeros or blanks around it would be taught along."""
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,8}", text) else None
