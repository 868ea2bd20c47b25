"""Sampling of producers: a node takes in the adverts of enough producers, not of all. Pure.

If every node passed on every advert, what each node sends in a round would grow with the swarm.
So a node takes in enough producers to choose from, others at random in each round of its own, and
passes on what it takes in: in a small swarm everybody hears of everything, in a large one each node
of some, and of others the next time. Nor does it ask for adverts that peers offer once it has heard
of enough: the larger the swarm, the more of what they offer is new to it.
"""

from random import Random

from swarm.identity import PeerId

REMEMBERED_MAX = 4_096  # producers of one round; beyond that, none is taken in


class ProducerSampler:
    """Draws anew in each round, with the chance that the number of producers asks for."""

    def __init__(self, enough: int) -> None:
        self._enough = enough
        self._before = 0  # producers heard in the round before
        self._taken: dict[PeerId, bool] = {}  # producers of this round, and whether taken in

    def wants(self, producer: PeerId, rng: Random) -> bool:
        """True if the producer's adverts are taken in and passed on in this round."""
        if producer not in self._taken:
            if len(self._taken) >= REMEMBERED_MAX:
                return False
            heard = max(self._before, len(self._taken) + 1)
            self._taken[producer] = heard <= self._enough or rng.random() < self._enough / heard
        return self._taken[producer]

    def asks(self) -> bool:
        """True until enough producers were heard in this round: adverts may have been lost."""
        return len(self._taken) < self._enough

    def next_round(self) -> None:
        """Draw anew from here on."""
        self._before = len(self._taken)
        self._taken.clear()
