"""A dataset of reasoning-gym as an environment."""

import functools
import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from node.environments.base import Problem
from node.environments.gym.datasets import OFFERED
from node.environments.gym.sizes import check_sizes
from node.environments.gym.terse_prompts import terse_prompt
from node.environments.gym.upstream import build, config_of, quiet_and_exact
from swarm.errors import ConfigError
from swarm.rollouts import Task

# Raise it when this room changes a prompt, an answer, or what a text that some policy may write is
# worth: nodes of different revisions share nothing. A bound on what is parsed is no such change as
# long as it is far beyond all right answers and copied premises; nor is a further dataset.
ADAPTER_REVISION = 1
LIBRARY = "reasoning-gym"
DRAWS_MAX = 8
DATASETS_CACHED_MAX = 128
_RESERVED = ("seed", "size", "data_file")
_DRAW_STEP = 2**64  # beyond any seed plus index, so that a second draw is in no stream
# What the library raises where an item cannot be made.
_NOT_MADE = (
    ArithmeticError,
    AssertionError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class ReasoningGym:
    """One dataset. Its parameters are the dataset's own, and `prompt`: `full` or `terse`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._rules = OFFERED[name]
        made_with = self._rules.made_with
        self.version = f"reasoning-gym-{version(LIBRARY)}-r{ADAPTER_REVISION}"
        if made_with:
            self.version += f"-{made_with}-{version(made_with)}"

    def problem(self, task: Task) -> Problem:
        style, settings = _settings(self.name, task.parameters)
        failure = "its answers do not pass its own scorer"
        for draw in range(DRAWS_MAX):
            seed = task.seed + draw * _DRAW_STEP
            dataset, index = self._dataset(task, settings, seed)
            try:
                with quiet_and_exact():
                    entry = dataset[index]
            except _NOT_MADE as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            prompt = terse_prompt(self.name, entry) if style == "terse" else entry["question"]
            problem = Problem(task, prompt, self._rules.answer(entry), entry)
            if self.score(problem, problem.answer) == 1.0:
                return problem
        raise ConfigError(
            f"environment {self.name} with {task.parameters}: no problem in {DRAWS_MAX} draws "
            f"({failure}); change its parameters"
        )

    def _dataset(self, task: Task, settings: Mapping[str, Any], seed: int) -> tuple[Any, int]:
        """The dataset that has the problem, and at which index."""
        if self._rules.size:
            return _build(self.name, {**settings, "size": self._rules.size}, seed + task.index), 0
        if not self._rules.is_shared:
            return _build(self.name, settings, seed), task.index
        dataset = _kept_dataset(self.name, task.parameters)
        dataset.seed = seed
        return dataset, task.index

    def score(self, problem: Problem, text: str) -> float:
        text = text.strip()
        if not text or len(text) > self._rules.text_chars_max:
            return 0.0
        if self._rules.scorer is not None:
            return self._rules.scorer(problem.entry, text)
        dataset = _kept_dataset(self.name, problem.task.parameters)
        guard = self._rules.guard
        guarded = text if guard is None else guard(dataset, problem.entry, text)
        if guarded is None:
            return 0.0
        with quiet_and_exact():
            return float(dataset.score_answer(guarded, problem.entry))


@functools.lru_cache(maxsize=len(OFFERED))
def settings_of(name: str) -> Mapping[str, Any]:
    """The settings that a run may give a dataset, with what they are by default."""
    found = vars(config_of(name, 0, {}))
    return {key: value for key, value in found.items() if key not in _RESERVED}


def _settings(name: str, parameters: str) -> tuple[str, dict[str, Any]]:
    """The prompt style and the dataset's own settings."""
    settings = json.loads(parameters)
    style = settings.pop("prompt", "full")
    if style not in ("full", "terse"):
        raise ConfigError(f"environment {name}: prompt is {style!r}; write full or terse")
    for reserved in _RESERVED:
        if reserved in settings:
            raise ConfigError(f"environment {name}: {reserved} is not yours to set; remove it")
    return style, settings


def _build(name: str, settings: Mapping[str, Any], seed: int) -> Any:
    try:
        given = {key: value for key, value in settings.items() if key not in _RESERVED}
        check_sizes(given, settings_of(name), OFFERED[name])
        config = config_of(name, seed, settings)
        _check_bounds(name, config)
        return build(name, config)
    except (AssertionError, TypeError, ValueError) as error:  # how the library refuses settings
        raise ConfigError(
            f"environment {name} with {json.dumps(dict(settings))}: {error}; correct its parameters"
        ) from error


def _check_bounds(name: str, config: Any) -> None:
    rules = OFFERED[name]
    for setting, most in rules.settings_max.items():
        if (value := getattr(config, setting)) > most:
            raise ValueError(f"{setting} is {value}, may be {most} at most")
    for setting, least in rules.settings_min.items():
        if (value := getattr(config, setting)) < least:
            raise ValueError(f"{setting} is {value}, must be {least} at least")


@functools.lru_cache(maxsize=DATASETS_CACHED_MAX)
def _kept_dataset(name: str, parameters: str) -> Any:
    """For scorers, which read the settings and never the seed, and for those that may be shared."""
    return _build(name, _settings(name, parameters)[1], seed=0)
