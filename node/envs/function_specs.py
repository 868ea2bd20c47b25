"""The functions that `python_function` asks for: a dozen templates of four kinds. Pure.

A template has a sentence, the body of a correct function, and values for the names in braces of
both: see `function_specs.toml`. No correct function comes near a limit of `node.sandbox.runner`.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from random import Random
from typing import Any, Final

KINDS: Final = ("lists", "strings", "numbers", "dicts")
_WORDS: Final = ("amber", "bread", "cloud", "level", "moon", "noon", "otter", "radar", "salt")
_GAPS: Final = (" ", " ", ", ", ". ", "-", " 7", " 42 ")


@dataclass(frozen=True, slots=True)
class Spec:
    signature: str
    about: str  # its arguments
    task: str
    source: str  # a correct one
    draw: Callable[[Random], list[Any]]  # arguments of one test


def draw_spec(rng: Random, kinds: Sequence[str] = KINDS) -> Spec:
    template = rng.choice([each for each in _TEMPLATES if each["kind"] in kinds])
    values = {name: rng.choice(_choices(told)) for name, told in template["values"].items()}
    argument, (about, draw) = template["argument"], _ARGUMENTS[template["argument"]]
    body = template["body"].format(**values).replace("\n", "\n    ")
    source = f"def solve({argument}):\n    {body}"
    return Spec(argument, about, template["task"].format(**values), source, draw)


def _number(rng: Random) -> int:
    return rng.randrange(-30, 60)


def _numbers(rng: Random) -> list[int]:
    return [rng.choice((_number(rng), rng.randrange(-5, 10))) for _ in range(rng.randrange(13))]


def _text(rng: Random) -> str:
    return "".join(
        rng.choice((str, str.capitalize, str.upper))(rng.choice(_WORDS)) + rng.choice(_GAPS)
        for _ in range(rng.randrange(8))
    )


def _counts(rng: Random) -> dict[str, int]:
    return {rng.choice(_WORDS): _number(rng) for _ in range(rng.randrange(9))}


_ARGUMENTS: Final[Mapping[str, tuple[str, Callable[[Random], list[Any]]]]] = {
    "xs": ("`xs` is a list of integers", lambda rng: [_numbers(rng)]),
    "s": ("`s` is a string", lambda rng: [_text(rng)]),
    "n": ("`n` is a positive integer", lambda rng: [rng.randrange(1, 120)]),
    "d": ("`d` is a dict from strings to integers", lambda rng: [_counts(rng)]),
}


def _choices(told: Any) -> Sequence[Any]:
    """The choices of a value in the file: texts, or a range's arguments."""
    return range(*told) if isinstance(told[0], int) else told


_TEMPLATES: Final[Sequence[Mapping[str, Any]]] = tomllib.loads(
    files(__package__).joinpath("function_specs.toml").read_text(encoding="utf-8")
)["template"]
