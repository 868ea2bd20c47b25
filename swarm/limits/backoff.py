"""Waits after failures in a row. Pure."""

from dataclasses import dataclass
from random import Random
from typing import Final

STEPS_MAX: Final = 64  # failures after which the wait grows no more: powers stay finite


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that grow by `factor` with each failure in a row, up to `most`, in any unit."""

    first: float
    most: float
    factor: float = 2.0

    def after(self, failures: int) -> float:
        """The wait after so many earlier failures."""
        return min(self.most, self.first * self.factor ** min(failures, STEPS_MAX))

    def spread(self, failures: int, rng: Random) -> float:
        """The same times 0.5 to 1.5, so that many who failed together return apart."""
        return self.after(failures) * (0.5 + rng.random())
