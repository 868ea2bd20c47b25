"""Settings of importance weights, free of torch. Functions are in `weighing.py`. rho is a token's
probability before the update over that where it was generated. Weights are within one completion,
so that no peer changes another's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from annotated_types import Ge, Gt, Le

from node.methods.method import MethodSettings

Positive = Annotated[float, Gt(0)]
Probability = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True, slots=True)
class Truncated(MethodSettings):
    """A token's loss counts by rho, and by no more than a bound (TIS)."""

    kind: Literal["truncated"] = "truncated"
    weight_max: Positive = 2.0


@dataclass(frozen=True, slots=True)
class IcePop(MethodSettings):
    """A token's loss counts by rho within a band, and not at all outside."""

    kind: Literal["icepop"] = "icepop"
    weight_min: Positive = 0.5
    weight_max: Positive = 5.0


@dataclass(frozen=True, slots=True)
class Masked(MethodSettings):
    """A token counts in full where rho is within a band, and not at all outside: rejection
    of tokens, as verl has it. With rho itself for a weight it is `icepop`."""

    kind: Literal["masked"] = "masked"
    weight_min: Positive = 0.5
    weight_max: Positive = 2.0


@dataclass(frozen=True, slots=True)
class Veto(MethodSettings):
    """A completion with any token that has become all but impossible is left out."""

    kind: Literal["veto"] = "veto"
    weight_min: Positive = 1e-4


@dataclass(frozen=True, slots=True)
class Geometric(MethodSettings):
    """A completion is left out where the geometric mean of rho is outside of a band."""

    kind: Literal["geometric"] = "geometric"
    weight_min: Positive = 0.999
    weight_max: Positive = 1.001


@dataclass(frozen=True, slots=True)
class K3(MethodSettings):
    """A completion is left out where the mean of rho - log rho - 1 is above a bound."""

    kind: Literal["k3"] = "k3"
    divergence_max: Positive = 0.01


@dataclass(frozen=True, slots=True)
class Opsm(MethodSettings):
    """A wrong completion is left out where the policy has moved away from it (OPSM)."""

    kind: Literal["opsm"] = "opsm"
    moved_max: Annotated[float, Ge(0)] = 1e-4
    """In nats a token, on average."""


CORRECTIONS: Final[Mapping[str, type[MethodSettings]]] = {
    "truncated": Truncated,
    "icepop": IcePop,
    "masked": Masked,
    "veto": Veto,
    "geometric": Geometric,
    "k3": K3,
    "opsm": Opsm,
}
