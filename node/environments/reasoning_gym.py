"""Reasoning-gym datasets as environments. The only file that imports `reasoning_gym`.

The library takes more than a second and 100 MB to import, so it is imported at the first problem,
which belongs into the verifier's process. Only datasets whose scorer was read line by line are
offered, because a scorer is fed with strangers' text. What was found in them:

- `binary_matrix` calls `eval` on the answer: whoever can get a text scored runs code. Its scorer is
  never called; the answer is compared here.
- `propositional_logic` enumerates 2**n assignments over whatever names the answer invents, and
  accepts `P∨x` for an invented `x`. Answers with names that the premises lack score 0 here.
  Its parser walks a formula once for each operator and each pair of parentheses, four times over:
  191 negations take it 0.2 s. So formulas have a bound on both, and lose their spaces before.
  What is left is the dataset's own weakness: a copied premise is a right conclusion (always at
  complexity 2 and above), and with two variables at complexity 1 the constant `Q∨P` always passes.
- `calendar_arithmetic` overflows on large numbers, and `decimal_arithmetic` compares under the
  thread's decimal context, which making a problem changes. The context is fixed here.
- `fraction_simplification` gives 0.01 to anything and more to a right denominator alone. A run with
  `reward = "exact"` counts full scores only.
- `chain_sum` and `products` read any spelling of a number, `0012`, `1_2` and `1,2` among them for
  twelve. Only one spelling of each reaches them here, as of the format `last_number`.
- Some items cannot be made (division by zero) or come with an answer that their own scorer refuses.
  They are drawn again, in a way that all nodes agree on.
"""

import contextlib
import decimal
import functools
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from node.environments.answers import answer_in
from node.environments.base import Problem
from node.environments.terse_prompts import terse_prompt
from swarm.errors import ConfigError
from swarm.rollouts import Task

# Raise it when this file or `terse_prompts` changes a prompt, an answer, or what a text that some
# policy may write is worth: nodes of different revisions share nothing. A bound on what is parsed
# is no such change as long as it is far beyond all right answers and copied premises.
ADAPTER_REVISION = 1
LIBRARY = "reasoning-gym"
DRAWS_MAX = 8
DATASETS_CACHED_MAX = 64
_DRAW_STEP = 2**64  # beyond any seed plus index, so that a second draw is in no stream
_SCORE_PRECISION = 28  # decimal digits
_DEFAULT_TEXT_CHARS_MAX = 1024


@dataclass(frozen=True, slots=True)
class _Rules:
    """What is known about a dataset. `guard` says what of a text may reach its scorer; None:
    nothing, it scores 0."""

    text_chars_max: int = _DEFAULT_TEXT_CHARS_MAX  # longer answers score 0 unread
    guard: Callable[[Any, Mapping[str, Any], str], str | None] = lambda _dataset, _entry, text: text
    scorer: Callable[[Mapping[str, Any], str], float] | None = None  # instead of the dataset's


_FORMULA = re.compile(r"[A-Z∧∨¬→↔() ]+")
_LONG_NAME = re.compile(r"[A-Z]{2}")  # no premise has one
_OPERATORS = frozenset("∧∨¬→↔")
# The dataset's own answers have at most two operators and one pair of parentheses. A premise may be
# copied, so what its premises have is allowed where that is more.
FORMULA_OPERATORS_MAX = 12


def _plain_formula(dataset: Any, entry: Mapping[str, Any], text: str) -> str | None:
    """A formula without spaces, which mean nothing in it; None for what is none, is too deep to be
    parsed, or uses a variable that the premises lack."""
    from reasoning_gym.logic.propositional_logic import (
        Expression,
    )

    if not _FORMULA.fullmatch(text):
        return None
    text = text.replace(" ", "")
    if _LONG_NAME.search(text):
        return None
    premises: list[str] = entry["metadata"]["premises"]
    for count in (_operators, _parentheses):
        if count(text) > max(FORMULA_OPERATORS_MAX, *map(count, premises)):
            return None
    used = dataset._collect_variables([Expression.from_string(text)])
    return text if used <= set(entry["metadata"]["variables"]) else None


def _plain_number(_dataset: Any, _entry: Mapping[str, Any], text: str) -> str | None:
    return text if answer_in("last_number", text) == text else None


def _operators(formula: str) -> int:
    return sum(char in _OPERATORS for char in formula)


def _parentheses(formula: str) -> int:
    return max(formula.count("("), formula.count(")"))


def _same_words(entry: Mapping[str, Any], text: str) -> float:
    return 1.0 if text.split() == str(entry["answer"]).split() else 0.0


DATASETS: Mapping[str, _Rules] = {
    "base_conversion": _Rules(),
    "basic_arithmetic": _Rules(),
    "arc_1d": _Rules(),
    "bf": _Rules(),
    "propositional_logic": _Rules(text_chars_max=192, guard=_plain_formula),
    "fraction_simplification": _Rules(text_chars_max=128),
    "decimal_arithmetic": _Rules(text_chars_max=64),
    "calendar_arithmetic": _Rules(text_chars_max=64),
    "binary_matrix": _Rules(text_chars_max=65_536, scorer=_same_words),
    "chain_sum": _Rules(text_chars_max=64, guard=_plain_number),
    "products": _Rules(text_chars_max=64, guard=_plain_number),
    "gcd": _Rules(text_chars_max=64),
}


class ReasoningGym:
    """One dataset. Its parameters are the dataset's own, and `prompt`: `full` or `terse`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = f"reasoning-gym-{version(LIBRARY)}-r{ADAPTER_REVISION}"
        self._rules = DATASETS[name]

    def problem(self, task: Task) -> Problem:
        style, settings = _settings(self.name, task.parameters)
        failure = "its answers do not pass its own scorer"
        for draw in range(DRAWS_MAX):
            dataset = _build(self.name, settings, task.seed + draw * _DRAW_STEP)
            try:
                with _quiet_and_exact():
                    entry = dataset[task.index]
            except (ArithmeticError, ValueError) as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            prompt = terse_prompt(self.name, entry) if style == "terse" else entry["question"]
            problem = Problem(task, prompt, _answer(entry), entry)
            if self.score(problem, problem.answer) == 1.0:
                return problem
        raise ConfigError(
            f"environment {self.name} with {task.parameters}: no problem in {DRAWS_MAX} draws "
            f"({failure}); change its parameters"
        )

    def score(self, problem: Problem, text: str) -> float:
        text = text.strip()
        if not text or len(text) > self._rules.text_chars_max:
            return 0.0
        if self._rules.scorer is not None:
            return self._rules.scorer(problem.entry, text)
        dataset = _dataset_for_scoring(self.name, problem.task.parameters)
        guarded = self._rules.guard(dataset, problem.entry, text)
        if guarded is None:
            return 0.0
        with _quiet_and_exact():
            return float(dataset.score_answer(guarded, problem.entry))


@contextlib.contextmanager
def _quiet_and_exact() -> Iterator[None]:
    """One decimal context whatever ran before, and none of the library's progress dots."""
    precise = decimal.localcontext(decimal.Context(prec=_SCORE_PRECISION))
    with precise, contextlib.redirect_stdout(io.StringIO()):
        yield


def _answer(entry: Mapping[str, Any]) -> str:
    """A right answer; datasets with many of them keep an example in the metadata."""
    answer = entry["answer"]
    return str(entry["metadata"]["example_answer"] if answer is None else answer).strip()


def _settings(name: str, parameters: str) -> tuple[str, dict[str, Any]]:
    """The prompt style and the dataset's own settings."""
    settings = json.loads(parameters)
    style = settings.pop("prompt", "full")
    if style not in ("full", "terse"):
        raise ConfigError(f"environment {name}: prompt is {style!r}; write full or terse")
    for reserved in ("seed", "size"):
        if reserved in settings:
            raise ConfigError(f"environment {name}: {reserved} is not yours to set; remove it")
    return style, settings


def _build(name: str, settings: Mapping[str, Any], seed: int) -> Any:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, seed=seed, **settings)
    except (AssertionError, TypeError, ValueError) as error:  # how the library refuses settings
        raise ConfigError(
            f"environment {name} with {json.dumps(dict(settings))}: {error}; correct its parameters"
        ) from error


@functools.lru_cache(maxsize=DATASETS_CACHED_MAX)
def _dataset_for_scoring(name: str, parameters: str) -> Any:
    """Scorers read the settings and never the seed."""
    return _build(name, _settings(name, parameters)[1], seed=0)
