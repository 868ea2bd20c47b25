"""Which foreign groups a round trains on: the sampling rule of SAPO (arXiv 2509.08721, §5)."""

from collections.abc import Sequence
from random import Random

from swarm.exchange import informative
from swarm.pool import Candidate
from swarm.rollouts import GroupId


def draw_foreign(candidates: Sequence[Candidate], count: int, rng: Random) -> list[GroupId]:
    """Drop groups without advantage, then draw uniformly without replacement over what is left.

    Neither the producer, nor its id, nor the order of arrival weighs in. Fewer than `count`
    survivors are all drawn.
    """
    survivors = sorted(c.group_id for c in candidates if informative(c.rewards))
    return rng.sample(survivors, min(count, len(survivors)))
