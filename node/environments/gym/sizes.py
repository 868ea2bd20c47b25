"""Bounds of a dataset's settings. A run's settings may come from anybody, and a dataset makes as
many numbers as it is told to, so every number in them has a bound: what `Rules` says, or a multiple
of what the dataset has by itself."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from node.environments.gym.datasets import Rules
from swarm.texts import printable

GROWTH: Final = 16  # times the default, of what says how much there is of something
VALUE_MAX: Final = 1_000_000  # of what says how large a number in a problem is
_VALUES: Final = ("value", "real", "imag", "coord", "target", "factor", "base")
_SHOWN_CHARS: Final = 40
_ENDS: Final = ("min_", "max_")


def check_sizes(settings: Mapping[str, Any], defaults: Mapping[str, Any], rules: Rules) -> None:
    """
    Args:
        settings: those that a run gives.
        defaults: all that the dataset has, with their values.

    Raises:
        ValueError: one of them is too large, or no number where the dataset has one.
    """
    for name, value in settings.items():
        if name not in defaults:
            raise ValueError(f"{name}: no such parameter; known: {', '.join(defaults)}")
        if is_number(defaults[name]) and not is_number(value):
            raise ValueError(f"{name} is {_shown(value)}, must be a number")
        most = largest(name, defaults, rules)
        for number in _numbers(value):
            if not abs(number) <= most:
                raise ValueError(f"{name} is {_shown(value)}, may be {most:,} at most")


def largest(name: str, defaults: Mapping[str, Any], rules: Rules) -> float:
    """The largest number that a setting may be or hold, whatever its sign."""
    stem = name.removeprefix(_ENDS[0]).removeprefix(_ENDS[1])
    kin = [name, *(f"{end}{stem}" for end in _ENDS if stem != name)]
    told = [rules.settings_max[each] for each in kin if each in rules.settings_max]
    if told:
        return max(told)
    usual = max([1, *(abs(each) for key in kin for each in _numbers(defaults.get(key)))])
    return max(GROWTH * usual, VALUE_MAX if stem.endswith(_VALUES) else 0)


def is_number(value: Any) -> bool:
    """True if it is one that counts or measures something."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(value: Any) -> Iterator[float]:
    """All numbers in plain data."""
    if is_number(value):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _numbers(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _numbers(each)


def _shown(value: Any) -> str:
    return printable(str(value), _SHOWN_CHARS)
