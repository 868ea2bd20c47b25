"""A dataset of reasoning-gym as an environment.

A terse prompt is for policies that read bytes and know no English: the question without its
instructions. Answer and scorer stay the same.
"""

import datetime
import functools
import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, Final

from node.envs.base import Problem, values_in
from node.envs.gym.datasets import OFFERED, Rules
from node.envs.gym.upstream import build, config_of, quiet_and_exact
from swarm.errors import ConfigError
from swarm.rollouts import Task
from swarm.texts import printable

Metadata = Mapping[str, Any]


def terse_prompt(name: str, entry: Mapping[str, Any]) -> str:
    """The short form of an entry's question; the question itself where there is none."""
    question: str = entry["question"]
    if name == "decimal_arithmetic":
        return question.rsplit("\n", 1)[-1].removesuffix(" = ?") + "="
    shorten = _SHORT.get(name)
    return (shorten and shorten(entry["metadata"])) or question


def _expression(meta: Metadata) -> str:
    return f"{meta['expression'].replace(' ', '')}="


def _grid(row: list[int]) -> str:
    return " ".join(map(str, row))


def _arc(meta: Metadata) -> str:
    shown = [f"{_grid(pair['input'])} > {_grid(pair['output'])}" for pair in meta["train_examples"]]
    return "\n".join([*shown, f"{_grid(meta['test_example']['input'])} > "])


_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def _calendar(meta: Metadata) -> str | None:
    """Weekday offsets and leap years have a short form, the others none."""
    if meta["task"] == "is_leap_year":
        return f"{meta['year']} leap? "
    if meta["task"] == "weekday_offset":
        start = datetime.date.fromisoformat(meta["start_date"])
        return f"{_WEEKDAYS[start.weekday()]} {meta['offset_days']:+d}="
    return None


_SHORT: Mapping[str, Callable[[Metadata], str | None]] = {
    "base_conversion": lambda m: f"{m['source_repr']} {m['source_base']}>{m['target_base']}=",
    "basic_arithmetic": _expression,
    "arc_1d": _arc,
    "bf": lambda meta: f"{meta['bf_program'].strip()}\n=",
    "propositional_logic": lambda meta: "; ".join(meta["premises"]) + " |- ",
    "fraction_simplification": lambda meta: f"{meta['numerator']}/{meta['denominator']}=",
    "calendar_arithmetic": _calendar,
    "binary_matrix": lambda meta: "\n".join(map(_grid, meta["matrix"])) + "\n=\n",
    "chain_sum": _expression,
    "products": _expression,
    "gcd": lambda meta: f"gcd {','.join(map(str, meta['numbers']))}=",
}


# Every number in a run's settings, which may come from anybody, has a bound: that of `Rules`, or a
# multiple of the dataset's default.

GROWTH: Final = 16  # bound of counts, as a multiple of the default
VALUE_MAX: Final = 1_000_000  # bound of numbers in problems
_VALUES: Final = ("value", "real", "imag", "coord", "target", "factor", "base")
_SHOWN_CHARS: Final = 40
_ENDS: Final = ("min_", "max_")


def check_sizes(settings: Mapping[str, Any], defaults: Mapping[str, Any], rules: Rules) -> None:
    """Check a run's settings against the dataset's defaults.

    Raises:
        ValueError: one is unknown, too large, or no number where the dataset has one.
    """
    for name, value in settings.items():
        if name not in defaults:
            raise ValueError(f"{name}: no such parameter; known: {', '.join(defaults)}")
        if is_number(defaults[name]) and not is_number(value):
            raise ValueError(f"{name} is {_shown(value)}, must be a number")
        most = largest(name, defaults, rules)
        for number in filter(is_number, values_in(value)):
            if not abs(number) <= most:
                raise ValueError(f"{name} is {_shown(value)}, may be {most:,} at most")


def largest(name: str, defaults: Mapping[str, Any], rules: Rules) -> float:
    """The largest number that a setting may be or hold, whatever its sign."""
    stem = name.removeprefix(_ENDS[0]).removeprefix(_ENDS[1])
    kin = [name, *(f"{end}{stem}" for end in _ENDS if stem != name)]
    told = [rules.settings_max[each] for each in kin if each in rules.settings_max]
    if told:
        return max(told)
    found = (each for key in kin for each in values_in(defaults.get(key)) if is_number(each))
    usual: float = max([1, *map(abs, found)])
    return max(GROWTH * usual, VALUE_MAX if stem.endswith(_VALUES) else 0)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return printable(str(value), _SHOWN_CHARS)


# Raise it with each change of a prompt, an answer or a reward: nodes of different revisions share
# nothing. A further dataset, or a bound far beyond all right answers, is no such change.
ADAPTER_REVISION = 1
LIBRARY = "reasoning-gym"
DRAWS_MAX = 8
DATASETS_CACHED_MAX = 128
_RESERVED = ("seed", "size", "data_file")
_DRAW_STEP = 2**64  # beyond any seed plus index, so that a second draw is in no stream
# Errors of the library if an item cannot be made.
_NOT_MADE = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)


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
    """The settings that a run may give a dataset, with their defaults."""
    found = vars(config_of(name, 0, {}))
    return {key: value for key, value in found.items() if key not in _RESERVED}


def _settings(name: str, parameters: str) -> tuple[str, dict[str, Any]]:
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
        _check_bounds(OFFERED[name], config)
        return build(name, config)
    except (AssertionError, TypeError, ValueError) as error:  # how the library refuses settings
        raise ConfigError(
            f"environment {name} with {json.dumps(dict(settings))}: {error}; correct its parameters"
        ) from error


def _check_bounds(rules: Rules, config: Any) -> None:
    for bounds, sign, words in ((rules.settings_max, 1, "may"), (rules.settings_min, -1, "must")):
        for setting, bound in bounds.items():
            if sign * (value := getattr(config, setting)) > sign * bound:
                end = "most" if sign > 0 else "least"
                raise ValueError(f"{setting} is {value}, {words} be {bound} at {end}")


@functools.lru_cache(maxsize=DATASETS_CACHED_MAX)
def _kept_dataset(name: str, parameters: str) -> Any:
    """A dataset for scorers, which never read the seed, and for datasets that are shared."""
    return _build(name, _settings(name, parameters)[1], seed=0)
