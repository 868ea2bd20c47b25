"""Learning rate and warm-up for users who set none. Free of torch.

Adam moves each weight by about the rate, so the rate that suits a small model ruins a large one."""

from dataclasses import dataclass
from typing import Final

TINY_PARAMETERS_MAX: Final = 10_000_000
WHOLE_PARAMETERS_MAX: Final = 1_000_000_000
TINY_RATE: Final = 1e-4
ADAPTER_RATE: Final = 1e-4
WHOLE_RATE: Final = 1e-5
LARGE_RATE: Final = 2e-6
WARM_UP_UPDATES: Final = 10  # not of tiny models; Adam's second moment is young until then


@dataclass(frozen=True, slots=True)
class DefaultRate:
    """The settings of a trainer that suit one policy."""

    learning_rate: float
    warm_up_updates: int
    why: str  # what decided the rate, in words

    def __str__(self) -> str:
        return (
            f"learning rate {self.learning_rate:g} ({self.why}), "
            f"warm-up {self.warm_up_updates} updates"
        )

    def warmth(self, updates: int) -> float:
        """The share of the rate that the update after so many takes: it rises to 1 in a line."""
        if updates >= self.warm_up_updates:
            return 1.0
        return (updates + 1) / self.warm_up_updates


def suited(
    parameters: int,
    adapter_parameters: int,
    learning_rate: float | None,
    warm_up_updates: int | None,
) -> DefaultRate:
    """The settings given; for those that are None, values that suit a model of so many parameters.
    `adapter_parameters` 0: the model itself is trained."""
    rate, what, warm_up = _of(parameters, adapter_parameters)
    return DefaultRate(
        rate if learning_rate is None else learning_rate,
        warm_up if warm_up_updates is None else warm_up_updates,
        what if learning_rate is None else f"as set, for {what}",
    )


def _of(parameters: int, adapter_parameters: int) -> tuple[float, str, int]:
    if adapter_parameters:
        what = f"an adapter of {_counted(adapter_parameters)} parameters"
        return ADAPTER_RATE, what, WARM_UP_UPDATES
    counted = f"of {_counted(parameters)} parameters"
    if parameters <= TINY_PARAMETERS_MAX:
        return TINY_RATE, f"a tiny model {counted}", 0
    if parameters <= WHOLE_PARAMETERS_MAX:
        return WHOLE_RATE, f"a whole model {counted}", WARM_UP_UPDATES
    return LARGE_RATE, f"a large whole model {counted}", WARM_UP_UPDATES


def _counted(count: int) -> str:
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return str(count)
