"""The right part of a wrong answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from node.methods.method import MethodSettings

StepJudge = Callable[[Sequence[str]], int | None]
"""Of the steps of an answer, the place of the first wrong one; None: none is."""


@dataclass(frozen=True, slots=True)
class Salvage(MethodSettings):
    """A wrong answer is begun again after its last right step."""

    kind: Literal["salvage"] = "salvage"
    steps_min: Annotated[int, Ge(1)] = 1
    """A beginning with fewer right steps is not worth it; not published."""
    steps_max: Annotated[int, Ge(1)] = 256
    """An answer with more steps is not given to the judge; not published."""


@dataclass(frozen=True, slots=True)
class SalvagedAnswer:
    """The beginning of an answer, to be gone on with by whoever knows how."""

    prefix: str
    steps: int  # that it has
    dropped: str  # the rest


def steps_of(text: str) -> tuple[str, ...]:
    """A text cut after each run of blank lines. The steps put together are the text."""
    steps: list[list[str]] = []
    says, is_over = False, True  # the step so far; a blank line came after what it says
    for line in text.splitlines(keepends=True):
        is_blank = not line.strip()
        if is_over and (not steps or not is_blank):
            steps.append([])
            says = False
        steps[-1].append(line)
        says = says or not is_blank
        is_over = says and is_blank
    return tuple(map("".join, steps))


def salvage(text: str, judge: StepJudge, set_to: Salvage) -> SalvagedAnswer | None:
    """The steps of a wrong answer up to the first that a judge finds wrong (SCOPE, arXiv
    2602.24110). What is put in its place is not of the policy: it needs a mask, or weights of its
    own. None: the judge finds none wrong, too few are right, or there are too many to ask about.

    Raises:
        ValueError: the judge names a step that there is not.
    """
    steps = steps_of(text)
    if not steps or len(steps) > set_to.steps_max:
        return None
    wrong = judge(steps)
    if wrong is None:
        return None
    if not 0 <= wrong < len(steps):
        raise ValueError(f"the judge finds step {wrong} wrong of {len(steps)}")
    if wrong < set_to.steps_min:
        return None
    return SalvagedAnswer("".join(steps[:wrong]), wrong, "".join(steps[wrong:]))
