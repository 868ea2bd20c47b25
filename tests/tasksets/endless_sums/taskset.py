"""An unending stream of sums of two numbers."""

import itertools
import random
import re
from collections.abc import Iterator
from decimal import Decimal

import verifiers.v1 as vf
from pydantic import Field

# Digits with or without thousands separators. A minus sign counts only where it does
# not follow a digit, so that "12-5" ends in 5.
NUMBER_RE = re.compile(r"(?:(?<!\d)-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def last_number(text: str) -> Decimal | None:
    """The last number in the text, or None if it has none."""
    found = NUMBER_RE.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


class EndlessSumsData(vf.TaskData):
    """One sum and its answer."""

    a: int
    b: int
    answer: int


class EndlessSumsTask(vf.Task[EndlessSumsData]):
    """Scores the last number of the reply."""

    @vf.reward
    async def equal(self, trace: vf.Trace) -> float:
        """1.0 when the last number in the reply equals the sum."""
        return float(last_number(trace.last_reply) == self.data.answer)


class EndlessSumsConfig(vf.TasksetConfig):
    """Which sums to generate."""

    seed: int = 0
    """Seed of the stream. The task at a position depends only on seed and position."""
    max_digits: int = Field(4, ge=1, le=30)
    """Most digits of a number to add."""


class EndlessSumsTaskset(vf.Taskset[EndlessSumsTask, EndlessSumsConfig]):
    """Sums without end. Take as many as you need."""

    INFINITE = True

    def load(self) -> Iterator[EndlessSumsTask]:
        for i in itertools.count():
            rng = random.Random(f"{self.config.seed}:{i}")
            a, b = (rng.randrange(10 ** rng.randint(1, self.config.max_digits)) for _ in range(2))
            yield EndlessSumsTask(
                EndlessSumsData(
                    prompt=f"What is {a} + {b}? End your reply with the result.",
                    a=a,
                    b=b,
                    answer=a + b,
                ),
                self.config.task,
            )
