"""From scored groups to the batch of an update, for the loops that train."""

import hashlib
from collections.abc import Sequence
from math import isfinite
from random import Random

from node.interfaces.trainer import TrainingGroup, training_group
from node.methods.samplers import kept_completions
from swarm.rollouts import VerifiedGroup


def seed_of(*parts: object) -> int:
    """A seed of 56 bits from what identifies a draw."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def foreign_group(
    scored: VerifiedGroup, worth: Sequence[float | None], group_size: int, rng: Random
) -> TrainingGroup:
    """A foreign group with at most `group_size` completions. Token weights count rows: a group of
    64 would outweigh eight groups of 8. `worth`: the advantages within the whole group."""
    group = scored.group
    kept = kept_completions(len(group.completions), max(2, group_size), rng)
    return training_group(
        scored.prompt,
        [group.completions[at] for at in kept],
        [worth[at] for at in kept],
        own_tokens=False,
        source=scored.source,
        tokenizer=group.tokenizer,
    )


def finite(value: float | None) -> float | None:
    """The value; None where it is unknown or no number."""
    return value if value is not None and isfinite(value) else None
