"""Preference for foreign groups on tasks that a node hardly solves itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from node.methods.checked import probability
from node.methods.method import MethodSettings


@dataclass(frozen=True, slots=True)
class ByNeed(MethodSettings):
    """Others' groups are drawn the more often, the rarer the node solves such tasks itself."""

    kind: Literal["need"] = "need"
    floor: Annotated[float, Gt(0), Le(1)] = 0.1
    """The weight of a group on tasks that the node always solves, where one on tasks that it never
    solves has 1; not published."""
    looked_at: Annotated[int, Ge(1), Le(16)] = 4
    """So many times as many groups as are wanted are drawn alike, and the draw by need is from
    these; not published."""


def by_need(passes: Sequence[float], rng: Random, set_to: ByNeed) -> list[int]:
    """All places of `passes`, in the order of one draw after the other without replacement, each in
    proportion to 1 - p, at least `floor`. (Efraimidis and Spirakis, 2006.)

    Args:
        passes: how often the node itself solves tasks such as each group's, in [0, 1].

    Raises:
        ValueError: one is no probability.
    """
    weights = [max(set_to.floor, 1.0 - probability(each, "pass rate")) for each in passes]
    keys = [rng.expovariate(weight) for weight in weights]
    return sorted(range(len(keys)), key=keys.__getitem__)
