"""Numbers of groups that methods compare."""

import math
from collections.abc import Sequence
from statistics import fmean

from swarm.rollouts import ScoredGroup

Advantages = list[tuple[float | None, ...]]
"""One tuple for each group, one entry for each completion; None: it is left out of the update."""


def lengths(group: ScoredGroup) -> tuple[int, ...]:
    """Tokens of each completion, at least 1; characters where any of them came without tokens."""
    completions = group.group.completions
    has_tokens = all(each.token_ids for each in completions)
    return tuple(max(1, len(each.token_ids if has_tokens else each.text)) for each in completions)


def mean_logprobs(group: ScoredGroup) -> tuple[float, ...]:
    """Mean log-prob of each completion's tokens where it was generated. Empty where one is not
    finite or all are zero: some engines fill in zeros."""
    means = tuple(fmean(each.logprobs or (math.nan,)) for each in group.group.completions)
    return means if all(map(math.isfinite, means)) and any(means) else ()


def by_source(groups: Sequence[ScoredGroup]) -> dict[str, list[int]]:
    """Places of each source's groups. Figures of a batch are taken within one source, so that no
    peer changes the advantages of another one's completions."""
    found: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        found.setdefault(group.source, []).append(place)
    return found


def by_task(groups: Sequence[ScoredGroup]) -> list[list[int]]:
    """Places of each task's groups. Groups of one prompt are of one task."""
    found: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        found.setdefault(group.prompt or f"\x00{place}", []).append(place)
    return list(found.values())
