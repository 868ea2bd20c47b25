"""Checks answers of a verifier's worker, which may run other people's code."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from node.envs.replay_turns import Said
from swarm.errors import ChildFailed, Reject


class WorkEnded(ChildFailed):
    """The work itself ended the process, or failed in it."""


class GroupVerdict(NamedTuple):
    """The result for a group, in the order in which a worker sends it."""

    prompt: str
    rewards: Sequence[float | None]  # None: undecided
    scorer_errors: int
    forgery: str  # a `Reject`, or nothing
    cpu_s: float  # that its texts paid
    waited: bool  # True: they idled on a machine with a free core

    def ends_group(self, is_foreign: bool) -> bool:
        """True if the rest of the group need not be scored."""
        return bool(self.forgery) or (is_foreign and None in self.rewards)

    def is_sound(self, texts: int) -> bool:
        """Check every field's type and range. May raise TypeError instead."""
        return (
            type(self.prompt) is str
            and len(self.rewards) == texts
            and all(each is None or 0.0 <= each <= 1.0 for each in self.rewards)
            and type(self.scorer_errors) is int
            and (self.forgery == "" or self.forgery in frozenset(Reject))
            and 0.0 <= self.cpu_s < math.inf
            and type(self.waited) is bool
        )


def checked_scores(said: Any, texts: Sequence[Sequence[Said]]) -> list[GroupVerdict]:
    """The results for groups, or for the first of them; WorkEnded if they have another form."""
    try:
        scores = [GroupVerdict(*each) for each in said]
        sound = (0 < len(scores) <= len(texts) or not texts) and all(
            scored.is_sound(len(group)) for scored, group in zip(scores, texts, strict=False)
        )
    except TypeError:
        sound = False
    if not sound:
        raise WorkEnded("a verifier says of groups what it cannot")
    return scores


def checked_replies(
    said: Any, transcripts: Sequence[Sequence[Sequence[str]]]
) -> list[list[str | None]]:
    """The replies for all tasks, or for the first of them; WorkEnded if they have another form."""
    try:
        replies = [list(each) for each in said]
    except TypeError:
        replies = []
    counts = [len(each) for each in transcripts[: len(replies)]]
    if (
        not replies
        or [len(each) for each in replies] != counts
        or not all(reply is None or type(reply) is str for each in replies for reply in each)
    ):
        raise WorkEnded("a verifier says to transcripts what it cannot")
    return replies
