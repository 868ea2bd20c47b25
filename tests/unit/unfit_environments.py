"""Environments that are each unfit in one way, for `swarm-node env check` to find out."""

import os
import random
import threading
import time

from node.envs.base import Problem
from node.envs.games import ScriptedSum
from swarm.rollouts import Task


def is_dear(text: str) -> bool:
    """One of all hostile texts."""
    return len(text) == 100_000 and text[0] == "9"


class Hashed(ScriptedSum):
    """Its problems come from a set."""

    def problem(self, task: Task) -> Problem:
        word = "".join(list({"red", "green", "blue", "black", "white"})) + str(task.index)
        return Problem(task, word, word, {})


class Remembering(ScriptedSum):
    """A problem depends on how many there were before."""

    count = 0

    def problem(self, task: Task) -> Problem:
        self.count += 1
        return Problem(task, f"{self.count}", f"{self.count}", {})


class Wrong(ScriptedSum):
    """Its own answers are wrong."""

    def score(self, problem: Problem, text: str) -> float:
        return 0.0


class Slow(ScriptedSum):
    """One long text takes it long."""

    def score(self, problem: Problem, text: str) -> float:
        if is_dear(text):
            began = time.process_time()
            while time.process_time() - began < 0.15:
                pass
        return super().score(problem, text)


class Endless(ScriptedSum):
    """One text never ends."""

    def score(self, problem: Problem, text: str) -> float:
        while text.startswith("[["):
            pass
        return super().score(problem, text)


class Hungry(ScriptedSum):
    """It fills memory."""

    def score(self, problem: Problem, text: str) -> float:
        if is_dear(text):
            list(b"x" * 10_000_000)
        return super().score(problem, text)


class Coded(ScriptedSum):
    """It runs answers as code."""

    def score(self, problem: Problem, text: str) -> float:
        return float(eval(text, {}) == int(problem.answer))


class Lax(ScriptedSum):
    """It looks at the first word."""

    def score(self, problem: Problem, text: str) -> float:
        return float(text.split()[:1] == [problem.answer])


class Generous(ScriptedSum):
    """A reward is 2."""

    def score(self, problem: Problem, text: str) -> float:
        return 2.0 if "x" in text else super().score(problem, text)


class Moody(ScriptedSum):
    """A reward is by chance."""

    def score(self, problem: Problem, text: str) -> float:
        return 1.0 if text.strip() == problem.answer else random.SystemRandom().random() / 2


class Threaded(ScriptedSum):
    """It leaves a thread."""

    def __init__(self) -> None:
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class Leaving(ScriptedSum):
    """It ends its process."""

    def score(self, problem: Problem, text: str) -> float:
        if text.startswith("%"):
            os._exit(3)
        return super().score(problem, text)
