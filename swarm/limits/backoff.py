"""How long to wait after failures in a row. Pure."""

from dataclasses import dataclass
from random import Random
from typing import Final

STEPS_MAX: Final = 64  # failures after which the wait grows no more: powers stay finite


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that grow by `factor` with each failure in a row, up to `most`. In any one unit."""

    first: float
    most: float
    factor: float = 2.0

    def after(self, failures: int) -> float:
        """The wait before the next try, when so many failed before the last one."""
        return min(self.most, self.first * self.factor ** min(failures, STEPS_MAX))

    def spread(self, failures: int, rng: Random) -> float:
        """The same times 0.5 to 1.5, so that many who failed together do not return together."""
        return self.after(failures) * (0.5 + rng.random())
