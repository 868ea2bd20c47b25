"""A method: a pure function, its class of settings, and its demands on a node."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, dataclass_transform

from annotated_types import Ge, Gt, Le

# Types of settings that several methods have.
Share = Annotated[float, Ge(0), Le(1)]
PositiveShare = Annotated[float, Gt(0), Le(1)]
Count = Annotated[int, Ge(1)]
NonNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]

# A family with methods that a loop uses is a setting of that name.
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
    "preference",
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


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class MethodSettings:
    """A method's settings. Subclasses become frozen dataclasses; `kind` is the method's name. A
    comment "ours" marks a default that the method's source does not publish."""

    kind: ClassVar[str] = ""

    def __init_subclass__(cls, kind: str = "") -> None:
        cls.kind = kind
        dataclass(frozen=True)(cls)

    def __str__(self) -> str:
        """The method's name and the settings that are not at their defaults, as a user types it."""
        values = ((each, getattr(self, each.name)) for each in fields(self))
        changed = [f"{each.name}={value}" for each, value in values if value != each.default]
        return ", ".join([self.kind, *changed])


@dataclass(frozen=True, slots=True)
class KnownMethod:
    """One row of the list of methods."""

    parameters: type[MethodSettings]
    function: Callable[..., Any]
    family: Family
    source: str  # arXiv number, or the system whose code defines it
    needs: frozenset[Need] = frozenset()
    used_by: tuple[str, ...] = ()  # loops that call it
    measured: str = ""  # result in words; empty: not measured

    @property
    def name(self) -> str:
        return self.parameters.kind

    @property
    def about(self) -> str:
        """The first sentence of the settings' docstring."""
        return " ".join((inspect.getdoc(self.parameters) or "").partition("\n\n")[0].split())

    @property
    def defaults(self) -> dict[str, Any]:
        return {each.name: each.default for each in fields(self.parameters)}
