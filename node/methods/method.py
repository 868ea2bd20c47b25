"""A method: a pure function, its class of settings, and its demands on a node."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Literal

# Those that a loop uses are a setting of that name
Family = Literal[
    "generate",
    "filter",
    "control",
    "draw",
    "external_rule",
    "replay",
    "reward",
    "advantage",
    "loss",
    "correction",
]


class Need(StrEnum):
    """Data without which a method cannot work."""

    LENGTHS = "lengths"  # of completions, in tokens
    LOGPROBS = "logprobs"  # of completions, on average over their tokens
    TEXTS = "texts"
    BEHAVIOUR = "behaviour"  # the log-prob of each token where it was generated
    CONTEXTS = "contexts"  # more than one way to be asked, or more than one source
    TURNS = "turns"  # rewards by turn
    PARTS = "parts"  # a task in parts that are rewarded each by itself
    REVISITS = "revisits"  # tasks that come again
    REFERENCE = "reference"  # a policy that is kept
    FEATURES = "features"  # a model's inner states
    JUDGE = "judge"  # a model that says what is wrong with a text
    ENTROPY = "entropy"  # of each token's distribution


@dataclass(frozen=True, slots=True)
class MethodSettings:
    """A method's settings. The first field, `kind`, is its name."""

    kind: str = ""

    def __str__(self) -> str:
        """As a user writes it: the name, and what is not its default."""
        name, *others = fields(self)
        set_to = [
            f"{each.name}={getattr(self, each.name)}"
            for each in others
            if getattr(self, each.name) != each.default
        ]
        return ", ".join([str(name.default), *set_to])


@dataclass(frozen=True, slots=True)
class KnownMethod:
    """One row of the library."""

    parameters: type[MethodSettings]  # its defaults are the method's, and stand nowhere else
    function: Callable[..., Any]
    family: Family
    source: str  # arXiv number, or the system whose code defines it
    needs: frozenset[Need] = frozenset()
    used_by: tuple[str, ...] = ()  # loops; none: the function and its worked example alone
    measured: str = ""  # what it brought, in words; empty: not measured

    @property
    def name(self) -> str:
        """By which it is chosen."""
        return str(fields(self.parameters)[0].default)

    @property
    def about(self) -> str:
        """A sentence."""
        return " ".join((inspect.getdoc(self.parameters) or "").partition("\n\n")[0].split())

    @property
    def defaults(self) -> dict[str, Any]:
        """Its parameters, without its name."""
        return {each.name: each.default for each in fields(self.parameters)[1:]}
