"""Which foreign groups a round trains on: the sampling rule of SAPO (arXiv 2509.08721, §5), with a
bound on what any one producer can make of a batch."""

from collections import Counter
from collections.abc import Sequence
from random import Random

from swarm.exchange import informative
from swarm.identity import PeerId
from swarm.pool import Candidate
from swarm.rollouts import GroupId


def draw_foreign(
    candidates: Sequence[Candidate],
    count: int,
    rng: Random,
    per_producer_max: int | None = None,
) -> list[GroupId]:
    """Drop groups without advantage, then draw uniformly without replacement over what is left.

    Neither the producer, nor its id, nor the order of arrival weighs in, but that no producer
    gets more than `per_producer_max` places (None: any number). The rest of its places stays
    empty: whoever offers most would have them otherwise. With a single producer there is nothing
    to choose from and no bound. Fewer than `count` survivors are all drawn.
    """
    survivors = sorted(
        (c for c in candidates if informative(c.rewards)), key=lambda each: each.group_id
    )
    if per_producer_max is None or len({c.producer for c in survivors}) < 2:
        return [c.group_id for c in rng.sample(survivors, min(count, len(survivors)))]
    places: Counter[PeerId] = Counter()
    drawn: list[GroupId] = []
    for candidate in rng.sample(survivors, len(survivors)):
        if len(drawn) < count and places[candidate.producer] < per_producer_max:
            places[candidate.producer] += 1
            drawn.append(candidate.group_id)
    return drawn


def kept_completions(completions: int, kept_max: int, rng: Random) -> list[int]:
    """Which completions of a foreign group go into the batch, by their places: all, or a uniform
    sample of `kept_max`. Their advantages are those that they have in the whole group, so that a
    large group weighs no more than one of our own and says the same on average."""
    if completions <= kept_max:
        return list(range(completions))
    return sorted(rng.sample(range(completions), kept_max))
