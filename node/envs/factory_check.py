"""A check of classes that are written for TRL's `environment_factory`: a few games of each.

Two processes play them (`package_identity.py`), and each verifier plays them again when it loads
the package. Arguments of calls are drawn from the methods' schemas.
"""

import datetime
import hashlib
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from node.envs import method_calls
from node.envs.factory_rules import FactoryRules, rules_of
from node.envs.factory_upstream import Game, Source
from node.envs.package_identity import Seen
from node.envs.package_rules import LOADED_MAX
from swarm.texts import printable

GAMES: Final = 8
GAME_TURNS: Final = 4
LATER_S: Final = 40 * 86_400 + 5 * 3600 + 11 * 60 + 17  # the clock of a check's second process


@lru_cache(maxsize=LOADED_MAX)
def loaded(parameters: str) -> Source:
    """The package of a run's parameters; ConfigError if what is installed plays otherwise."""
    rules = rules_of(parameters)
    source, seen = _looked(rules)
    rules.check_hash(rules.sha256, seen.sha256)
    return source


def check(rules: FactoryRules, again: bool = False) -> Seen:
    """The hash of package, rows, tools and a few games, and what they were. `again`: at another
    time, the last game first."""
    if again:
        _set_clock()
    return _looked(rules, again=again)[1]


def _looked(rules: FactoryRules, *, again: bool = False) -> tuple[Source, Seen]:
    with rules.foreign_code("cannot be loaded"):
        source = Source(rules)
    count = GAMES if source.rows is None else len(source.rows)
    numbers = range(0, count, max(1, count // GAMES))[:GAMES]
    found = {
        number: list(_played(source, number))
        for number in (reversed(numbers) if again else numbers)
    }
    trail = [each for number in numbers for each in found[number]]
    told: list[Any] = [
        rules.digest(),
        rules.model_dump(mode="json", exclude={"sha256"}),
        source.rows and list(map(dict, source.rows)),
        source.told,
        trail,
    ]
    return source, Seen(
        hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest(), trail
    )


# --- games of a check -----------------------------------------------------------------------------


def _played(source: Source, number: int) -> Iterator[tuple[str, str]]:
    """What one game said: a name of each part, and its digest."""
    row = None if source.rows is None else number
    game, rng = source.game(row, f"check/{number}"), random.Random(number)
    yield "prompts", _digest(game.prompt)
    words = game.prompt.replace(source.told, "").split()
    texts: list[str] = []
    for schema in rng.choices(source.schemas, k=GAME_TURNS) if source.schemas else ():
        function = schema["function"]
        arguments = {
            name: _value(told, rng, words)
            for name, told in function["parameters"]["properties"].items()
        }
        texts.append(method_calls.written(function["name"], arguments))
        yield f"replies of the tool {function['name']}", _digest(_taken(source, game, texts[-1]))
    yield "rewards", _digest(repr(_rewarded(source, game, texts)))
    if turns := source.right(row):
        game = source.game(row, f"check/{number}")
        for text in turns[: source.rules.turns - 1]:
            _taken(source, game, text)
        if (reward := _rewarded(source, game, turns)) != 1.0:
            raise source.rules.refusal(
                f"the solution of row {number + 1} is worth {reward:g} and not 1; correct it or "
                "the reward"
            )


def _taken(source: Source, game: Game, text: str) -> str:
    with source.rules.foreign_code(f"cannot answer {printable(text, 60)!r}"):
        return game.take(text) or ""


def _rewarded(source: Source, game: Game, texts: Sequence[str]) -> float:
    with source.rules.foreign_code("cannot tell a game's reward"):
        reward = game.reward(texts)
    if not 0.0 <= reward <= 1.0:
        raise source.rules.refusal(f"a game is worth {reward:g}; a reward is from 0 to 1")
    return reward


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _value(schema: Mapping[str, Any], rng: random.Random, words: Sequence[str]) -> Any:
    """A value that fits a schema."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    for each in schema.get("anyOf", ()):
        return _value(each, rng, words)
    kind = schema.get("type", "string")
    match kind if isinstance(kind, str) else kind[0]:
        case "integer":
            return rng.randint(-1, 9)
        case "number":
            return rng.choice((-1.0, 0.5, 2.0))
        case "boolean":
            return rng.random() < 0.5
        case "array":
            return [_value(schema.get("items", {}), rng, words) for _ in range(rng.randint(0, 2))]
        case "object":
            return {}
        case "null":
            return None
    return rng.choice(words) if words else "a"


def _set_clock() -> None:
    """Put this process's clock forward, for what asks `time` or `datetime`."""
    now = time.time  # noqa: TID251 - what is replaced
    later: dict[str, Any] = {
        "time": lambda: now() + LATER_S,
        "time_ns": lambda: int((now() + LATER_S) * 1e9),
    }
    for name in ("localtime", "gmtime", "ctime"):
        real = getattr(time, name)
        later[name] = lambda at=None, real=real: real(now() + LATER_S if at is None else at)
    written = time.strftime
    later["strftime"] = lambda form, at=None: written(form, at or time.localtime())
    for name, value in later.items():
        setattr(time, name, value)

    class Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, cls.__mro__[1])

    class Date(datetime.date, metaclass=Kind):
        @classmethod
        def today(cls) -> Any:
            return cls.fromtimestamp(now() + LATER_S)

    class Datetime(datetime.datetime, metaclass=Kind):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls.fromtimestamp(now() + LATER_S, tz)

        @classmethod
        def utcnow(cls) -> Any:
            return cls.fromtimestamp(now() + LATER_S, datetime.UTC).replace(tzinfo=None)

        today = now

    setattr(datetime, "date", Date)  # noqa: B010
    setattr(datetime, "datetime", Datetime)  # noqa: B010
