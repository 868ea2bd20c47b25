"""The adapter of classes that are written for TRL's `environment_factory`.

It alone imports them, at the first problem in the verifier's process. Descriptions of methods are
made by transformers from signature and docstring, as TRL does.
"""

import copy
import hashlib
import importlib
import inspect
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final

from node.envs.called_games import CalledGame
from node.envs.factory_rules import FactoryRules, rules_of
from node.envs.game_check import set_clock, set_dates, trail_of
from node.envs.method_calls import MethodCall, calls_in, described, plain, written
from node.envs.package_identity import PackageFindings
from node.envs.package_rules import LOADED_MAX, TASKS_MAX, awaited
from node.system.extras import extra_line
from swarm.errors import ConfigError

OVER: Final = "Done."  # the turn behind a solution's calls
_NOT_TOOLS: Final = frozenset({"reset", "get_reward"})
_DEFAULT_PROMPT: Final = ({"role": "user", "content": ""},)  # of rows without a column `prompt`

Row = Mapping[str, Any]


class FactoryGame(CalledGame):
    """One environment."""

    def __init__(self, source: "FactorySource", row: Row, name: str, seed: str) -> None:
        super().__init__()
        self._source = source
        self._row = row
        _seed(seed)
        self._environment = source.make()
        given = copy.deepcopy(dict(row))
        observation = awaited("reset", self._environment.reset(**given))
        self._messages = copy.deepcopy(_messages(row))
        if observation is not None:
            self._messages[-1]["content"] += plain(observation)
        said = [each["content"] for each in self._messages]
        if source.told:  # behind a system prompt, as chat templates have it
            said.insert(len(said) - 1 if len(said) > 1 else 0, source.told)
        self.prompt = "\n\n".join(filter(None, [name, *said]))

    def called(self, call: MethodCall) -> Any:
        if call.name not in self._source.methods:
            raise ValueError(f"Tool {call.name} not found.")
        if not isinstance(call.arguments, Mapping):
            raise TypeError("arguments must be an object")
        method = getattr(self._environment, call.name)
        return awaited(call.name, method(**copy.deepcopy(call.arguments)))

    def failure(self, error: BaseException) -> Any:
        return {"error": str(error)}

    def reward(self) -> float:
        """The sum of the environment's own reward and that of the reward function, as TRL adds
        them."""
        environment, function = self._environment, self._source.reward
        found: list[Any] = []
        if hasattr(type(environment), "get_reward"):
            found.append(awaited("get_reward", environment.get_reward()))
        if function is not None:
            columns = {name: [value] for name, value in self._row.items() if name != "prompt"}
            found += awaited(
                self._source.rules.reward,
                function(
                    prompts=[self._messages],
                    completions=[self.completion],
                    environments=[environment],
                    log_extra=_ignored,
                    log_metric=_ignored,
                    **columns,
                ),
            )
        elif not found:
            found.append(environment.reward)
        given = [float(each) for each in found if each is not None]
        if not given:
            raise ValueError("no reward")
        return sum(given)


def _ignored(*_values: Any) -> None:
    """TRL logs it."""


def _seed(text: str) -> None:
    """Seed the global generators, which environments draw from."""
    random.seed(text)  # noqa: TID251 - an environment's only chance
    if "numpy" in sys.modules:
        digest = hashlib.sha256(text.encode()).digest()
        sys.modules["numpy"].random.seed(int.from_bytes(digest[:4], "big"))


def _messages(row: Row) -> list[dict[str, Any]]:
    """The messages of a row's prompt; ValueError if they are not the user's alone."""
    told = row.get("prompt", _DEFAULT_PROMPT)
    if isinstance(told, str):
        return [{"role": "user", "content": told}]
    found = [dict(each) for each in told]
    roles = [each["role"] for each in found]
    if roles[-1:] != ["user"] or not set(roles) <= {"system", "user"}:
        raise ValueError("its prompt is more than a system prompt and the user's messages")
    return [{**each, "content": plain(each["content"])} for each in found]


class FactorySource:
    """A package that was loaded."""

    def __init__(self, rules: FactoryRules) -> None:
        self.rules = rules
        module = importlib.import_module(rules.module)
        self.make: Callable[[], Any] = getattr(module, rules.factory.partition(":")[2])
        self.reward: Any = getattr(module, rules.reward) if rules.reward else None
        self.rows: list[Row] | None = _rows(getattr(module, rules.rows)) if rules.rows else None
        probe = self.make()
        functions = dict(inspect.getmembers(type(probe), predicate=inspect.isfunction))
        if "reset" not in functions:
            raise ValueError("it has no method reset")
        names = [each for each in functions if each not in _NOT_TOOLS and not each.startswith("_")]
        self.methods = frozenset(names)
        self.schemas = [_schema(getattr(probe, name)) for name in names]
        self.told = described(self.schemas)
        prompts = [json.dumps(row.get("prompt")) for row in self.rows or ()]
        self._is_named = len(set(prompts)) < len(prompts) or not prompts

    @property
    def count(self) -> int:
        """Number of rows; without any all games are of one kind."""
        return len(self.rows or (1,))

    def game(self, number: int, seed: str) -> FactoryGame:
        """The game of a row, or of a task without rows; ConfigError if it cannot begin."""
        row: Row = {"prompt": list(_DEFAULT_PROMPT)}
        what, told = "a game", seed
        if self.rows is not None:
            row, what, told = self.rows[number], f"the game of row {number + 1}", str(number)
        name = ""
        if self._is_named:  # since tasks are told apart by their prompts
            name = f"Task {hashlib.sha256(told.encode()).hexdigest()[:12]}."
        with self.rules.foreign_code(f"{what} cannot begin"):
            return FactoryGame(self, row, name, seed)

    def right(self, number: int) -> tuple[str, ...]:
        """Turns that reach a full score; none if the row names none."""
        if self.rows is None or not self.rules.solution:
            return ()
        told = self.rows[number].get(self.rules.solution) or ()
        turns = [
            each if isinstance(each, str) else written(each["name"], each["arguments"])
            for each in told
        ]
        if turns and calls_in(turns[-1]) and len(turns) < self.rules.turns:
            turns.append(OVER)
        return tuple(turns)


def _rows(value: Any) -> list[Row]:
    found = list(itertools.islice(value() if callable(value) else value, TASKS_MAX + 1))
    if not found:
        raise ValueError("it has no rows")
    if len(found) > TASKS_MAX:
        raise ValueError(f"it has over {TASKS_MAX} rows")
    for at, row in enumerate(found):
        try:
            json.dumps(row, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"row {at + 1} is no plain table: {error}") from None
        if not isinstance(row, Mapping):
            raise ValueError(f"row {at + 1} is no table of columns")  # noqa: TRY004 - of a user's
        _messages(row)
    return found


def _schema(method: Callable[..., Any]) -> dict[str, Any]:
    try:
        from transformers.utils import chat_template_utils as library
    except ImportError:
        line = extra_line("torch")
        raise ConfigError(f"its methods are described by transformers: {line}") from None
    with _without_torch(library):
        found: dict[str, Any] = library.get_json_schema(method)
    return found


@contextmanager
def _without_torch(library: Any) -> Iterator[None]:
    """Keep transformers from importing torch for a type that no text has."""
    before = library.is_torch_available
    library.is_torch_available = lambda: False
    try:
        yield
    finally:
        library.is_torch_available = before


@lru_cache(maxsize=LOADED_MAX)
def loaded(parameters: str) -> FactorySource:
    """The package of a run's parameters; ConfigError if what is installed plays otherwise."""
    rules = rules_of(parameters)
    source, seen = _looked(rules)
    rules.check_hash(rules.sha256, seen.sha256)
    return source


def check(rules: FactoryRules, again: bool = False) -> PackageFindings:
    """The hash of package, rows, tools and a few games, and what they were. `again`: at another
    time, the last game first."""
    if again:
        set_clock()  # before the package takes names of it
    return _looked(rules, again=again)[1]


def _looked(rules: FactoryRules, *, again: bool = False) -> tuple[FactorySource, PackageFindings]:
    with rules.foreign_code("cannot be loaded"):
        source = FactorySource(rules)
    if again:
        set_dates(rules.package)
    trail = trail_of(source, rules.turns, again=again)
    told: list[Any] = [
        rules.digest(),
        rules.model_dump(mode="json", exclude={"sha256"}),
        source.rows and list(map(dict, source.rows)),
        source.told,
        trail,
    ]
    sha256 = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    return source, PackageFindings(sha256, trail)
