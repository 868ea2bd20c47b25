"""Tasks to problems and texts to rewards, where it is computed: in a worker or right here."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from node.tasks.base import Environment, Problem
from node.tasks.registry import environment
from swarm.errors import ConfigError
from swarm.rollouts import Task

PROBLEMS_CACHED_MAX = 1024

RewardRule = Literal["exact", "partial"]


@dataclass(frozen=True, slots=True)
class PosedProblem:
    """What a policy gets to see, and one right answer for supervised warm-up."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class GroupScore:
    """What a verifier finds out about one group."""

    prompt: str
    rewards: tuple[float, ...]
    scorer_errors: int  # texts on which the environment's scorer failed; they score 0


def pose(task: Task, prompt_chars_max: int) -> PosedProblem:
    """The problem of a task.

    Raises:
        ConfigError: the run's parameters make no problem, or one that is too long.
    """
    problem = _problem(task)
    if len(problem.prompt) > prompt_chars_max:
        raise ConfigError(
            f"environment {task.environment}: a prompt has {len(problem.prompt)} characters, "
            f"limits.prompt_chars_max is {prompt_chars_max}; raise it or make the problems smaller"
        )
    return PosedProblem(problem.prompt, problem.answer)


def score_group(task: Task, texts: Sequence[str], rule: RewardRule) -> GroupScore:
    """Rewards by the run's rule: `exact` is 1 for a full score, else 0; `partial` keeps fractions.

    Raises:
        ConfigError: the run's parameters make no problem.
    """
    problem = _problem(task)
    source = environment(task.environment)
    raw = [_raw_score(source, problem, text) for text in texts]
    kept = (0.0 if reward is None else reward for reward in raw)
    rewards = tuple(float(reward == 1.0) if rule == "exact" else reward for reward in kept)
    return GroupScore(problem.prompt, rewards, raw.count(None))


def _raw_score(source: Environment, problem: Problem, text: str) -> float | None:
    """The environment's own score; None where its scorer failed or left [0, 1]."""
    try:
        reward = float(source.score(problem, text))
    except Exception:  # noqa: BLE001 - the boundary where strangers' text meets foreign scorers
        return None
    return reward if 0.0 <= reward <= 1.0 else None  # nan is in no range


@functools.lru_cache(maxsize=PROBLEMS_CACHED_MAX)
def _problem(task: Task) -> Problem:
    source = environment(task.environment)
    if task.version != source.version:
        raise ConfigError(
            f"environment {task.environment}: version {task.version} is wanted, "
            f"{source.version} is installed; install the former"
        )
    return source.problem(task)
