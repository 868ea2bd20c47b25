"""Groups as methods see them: numbers and texts, and nothing of where they are kept."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from swarm.rollouts import Completion

Advantages = list[tuple[float | None, ...]]
"""Of each group, of each completion; None: it is left out of the update."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """One group of G completions to one prompt. What is not known of all of them is empty."""

    rewards: tuple[float, ...]  # (G,)
    prompt: str = ""  # groups of one prompt may be compared
    source: str = ""  # who generated it; empty: this node
    lengths: tuple[int, ...] = ()  # (G,) tokens, or characters where some came without tokens
    texts: tuple[str, ...] = ()  # (G,)
    logprobs: tuple[float, ...] = ()  # (G,) means over tokens, of the policy that generated them
    contexts: tuple[str, ...] = ()  # (G,) what it was generated under: a hint, a nudge


def view_of(
    prompt: str, completions: Sequence[Completion], rewards: Sequence[float], source: str = ""
) -> GroupView:
    """A group as methods see it."""
    has_tokens = all(each.token_ids for each in completions)
    logprobs = tuple(fmean(each.logprobs or (math.nan,)) for each in completions)
    return GroupView(
        rewards=tuple(rewards),
        prompt=prompt,
        source=source,
        lengths=tuple(
            max(1, len(each.token_ids if has_tokens else each.text)) for each in completions
        ),
        texts=tuple(each.text for each in completions),
        logprobs=logprobs if all(map(math.isfinite, logprobs)) and any(logprobs) else (),
    )


def by_source(groups: Sequence[GroupView]) -> dict[str, list[int]]:
    """The places of each source's groups. What is made of a batch is made of these alone, so that
    one peer does not move what others' completions are worth."""
    found: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        found.setdefault(group.source, []).append(place)
    return found
