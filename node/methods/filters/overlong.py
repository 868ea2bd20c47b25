"""Less for completions that come near the bound on their length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from node.methods.checked import whole
from node.methods.method import MethodSettings


@dataclass(frozen=True, slots=True)
class Overlong(MethodSettings):
    """Completions lose the more, the deeper they reach into the last tokens that they may have."""

    kind: Literal["overlong"] = "overlong"
    tokens_max: Annotated[int, Ge(1)] = 20_480
    buffer: Annotated[int, Ge(1)] = 4_096
    """Of these tokens, the last ones, in which a penalty grows."""
    factor: Annotated[float, Ge(0)] = 1.0
    """The penalty of the longest."""


def overlong(lengths: Sequence[int], set_to: Overlong) -> tuple[float, ...]:
    """Reward offset of each completion (DAPO, arXiv 2503.14476): 0 up to tokens_max - buffer
    tokens, then linear down to -factor at `tokens_max` and beyond.

    Raises:
        ValueError: a length is negative, or the buffer is longer than a completion may be.
    """
    if set_to.buffer > set_to.tokens_max:
        raise ValueError(f"buffer {set_to.buffer}: over tokens_max {set_to.tokens_max}")
    free = set_to.tokens_max - set_to.buffer
    return tuple(
        0.0 - set_to.factor * min(1.0, max(0, whole(each, "length") - free) / set_to.buffer)
        for each in lengths
    )
