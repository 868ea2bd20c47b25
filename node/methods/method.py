"""A method: a pure function, its class of settings, and its demands on a node."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Literal, dataclass_transform

from annotated_types import Ge, Gt, Le

# Types of settings that several methods have.
Share = Annotated[float, Ge(0), Le(1)]
PositiveShare = Annotated[float, Gt(0), Le(1)]
Count = Annotated[int, Ge(1)]
NonNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]

# Each family is a setting of a node, in the order of a round's stages.
Family = Literal[
    "control",
    "generate",
    "draw",
    "external_rule",
    "reward",
    "replay",
    "filter",
    "advantage",
    "loss",
    "preference",
    "correction",
]
Role = Literal["node", "learner"]
BOTH: Final[tuple[Role, ...]] = ("node", "learner")
NODE: Final[tuple[Role, ...]] = ("node",)
LEARNER: Final[tuple[Role, ...]] = ("learner",)


class Need(StrEnum):
    """Data without which a method cannot work."""

    LENGTHS = "lengths"  # of completions, in tokens
    LOGPROBS = "logprobs"  # of completions, on average over their tokens
    TEXTS = "texts"
    BEHAVIOUR = "behaviour"  # the log-prob of each token where it was generated
    CONTEXTS = "contexts"  # more than one way to be asked, or more than one source
    TURNS = "turns"  # rewards by turn
    REVISITS = "revisits"  # tasks that come again
    REFERENCE = "reference"  # a policy that is kept
    FEATURES = "features"  # the trainer's hidden states
    HIDDEN = "hidden"  # the engine's hidden states
    ENTROPY = "entropy"  # of each token's distribution
    REQUESTS = "requests"  # an engine that takes widths, lengths and temperatures of single prompts
    BEGINNINGS = "beginnings"  # an engine that continues given tokens
    RUNNERS_UP = "runners_up"  # an engine that tells the second likeliest tokens
    DRAFTS = "drafts"  # an engine that keeps what it would still say of earlier completions
    NOISE = "noise"  # an engine that samples under noisy weights
    ONE_TURN = "one_turn"  # tasks without turns
    PEERS = "peers"  # others' groups


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class MethodSettings:
    """A method's settings. Subclasses become frozen dataclasses; `kind` is the method's name. A
    comment "ours" marks a default that the method's source does not publish."""

    kind: ClassVar[str] = ""
    needs: ClassVar[frozenset[Need]] = frozenset()
    roles: ClassVar[tuple[Role, ...]] = BOTH
    decides: ClassVar[frozenset[str]] = frozenset()  # what only one method of a node may decide
    own: ClassVar[Any] = None  # of a user's own method: its function, or the class of its stage

    def __init_subclass__(
        cls,
        kind: str = "",
        needs: Iterable[Need] = (),
        roles: tuple[Role, ...] = BOTH,
        decides: Iterable[str] = (),
    ) -> None:
        cls.kind, cls.needs, cls.roles = kind, cls.needs | frozenset(needs), roles
        cls.decides = frozenset(decides)
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
    function_test: str  # file in tests/unit with the tests of the function
    loop_test: str  # the same of the method in a round
    measured: str = ""  # result in words; empty: not measured

    @property
    def name(self) -> str:
        return self.parameters.kind

    @property
    def needs(self) -> frozenset[Need]:
        return self.parameters.needs

    @property
    def roles(self) -> tuple[Role, ...]:
        return self.parameters.roles

    @property
    def about(self) -> str:
        """The first sentence of the settings' docstring."""
        return " ".join((inspect.getdoc(self.parameters) or "").partition("\n\n")[0].split())

    @property
    def defaults(self) -> dict[str, Any]:
        return {each.name: each.default for each in fields(self.parameters)}
