"""A control: GRPO's advantages, with others' rewards in random order within each group. What others
share then says what they wrote, and no more which of it was right."""

from collections.abc import Sequence
from random import Random
from typing import Any

from node.methods.advantages import grpo_advantages


def advantage(groups: Sequence[Any]) -> list[tuple[float, ...]]:
    """One number for each completion; the order follows from the group's id."""
    found = []
    for each in groups:
        rewards = list(each.rewards)
        if not each.own:
            Random(each.group_id).shuffle(rewards)
        found.append(tuple(grpo_advantages(rewards)))
    return found
