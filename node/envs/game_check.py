"""A few games of a package, played to find out whether they are the same everywhere.

Two processes play them (`package_identity.py`), and each verifier plays them again when it loads
the package. Arguments of calls are drawn from the tools' schemas.
"""

import datetime
import hashlib
import random
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from node.envs import method_calls
from node.envs.called_games import CalledGame, GameSource
from swarm.texts import printable

GAMES: Final = 8
GAME_TURNS: Final = 4
LATER_S: Final = 40 * 86_400 + 5 * 3600 + 11 * 60 + 17  # the clock of a check's second process


def trail_of(source: GameSource, turns: int, *, again: bool) -> list[tuple[str, str]]:
    """Names and digests of what a few games said; ConfigError if one cannot be played. `again`: the
    last game first."""
    count = source.count
    numbers = [number * count // GAMES for number in range(GAMES)]
    order = list(enumerate(numbers))
    found = {
        at: list(_played(source, turns, number, f"check/{at}"))
        for at, number in (reversed(order) if again else order)
    }
    return [each for at in range(GAMES) for each in found[at]]


def _played(
    source: GameSource, turns_max: int, number: int, seed: str
) -> Iterator[tuple[str, str]]:
    """A name and a digest of each part of one game."""
    game, rng = source.game(number, seed), random.Random(seed)
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
    if turns := source.right(number):
        game = source.game(number, seed)
        for text in turns[: turns_max - 1]:
            _taken(source, game, text)
        if (reward := _rewarded(source, game, turns)) != 1.0:
            raise source.rules.refusal(
                f"the right turns of task {number + 1} are worth {reward:g} and not 1; the "
                "parameters say which they are"
            )


def _taken(source: GameSource, game: CalledGame, text: str) -> str:
    with source.rules.foreign_code(f"cannot answer {printable(text, 60)!r}"):
        return game.take(text) or ""


def _rewarded(source: GameSource, game: CalledGame, texts: Sequence[str]) -> float:
    with source.rules.foreign_code("cannot tell a game's reward"):
        reward = game.end(texts)
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


def set_clock() -> None:
    """Put this process's clock forward, for what asks `time`."""
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


def set_dates(package: str) -> None:
    """Let a package's modules have dates by `set_clock`. Other modules keep theirs: code in C
    depends on how large these classes are."""
    shown = types.ModuleType("datetime")
    shown.__dict__.update(vars(datetime) | {"date": _LaterDate, "datetime": _LaterDatetime})
    later = {datetime: shown, datetime.date: _LaterDate, datetime.datetime: _LaterDatetime}
    for name, module in tuple(sys.modules.items()):
        if name.partition(".")[0] == package:
            for key, value in tuple(vars(module).items()):
                if isinstance(value, type | types.ModuleType) and value in later:
                    setattr(module, key, later[value])


class _Kind(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.__mro__[1])


class _LaterDate(datetime.date, metaclass=_Kind):
    @classmethod
    def today(cls) -> Any:
        return cls.fromtimestamp(time.time())  # noqa: TID251 - of `set_clock`


class _LaterDatetime(datetime.datetime, metaclass=_Kind):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return cls.fromtimestamp(time.time(), tz)  # noqa: TID251 - of `set_clock`

    @classmethod
    def utcnow(cls) -> Any:
        return cls.now(datetime.UTC).replace(tzinfo=None)

    today = now
