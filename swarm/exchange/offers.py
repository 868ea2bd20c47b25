"""The table of groups on offer, and the choice of groups to fetch. Pure. A producer that did not
deliver rests, longer each time, and its offers with it, unless others delivered in its place. It
is unproven until a fetch brings something."""

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from random import Random

from swarm.identity import PeerId
from swarm.limits.address_blocks import OriginPath
from swarm.limits.backoff import Backoff
from swarm.limits.bounded_table import BoundedTable
from swarm.rollouts import GroupId
from swarm.wire.messages import AdvertBody


@dataclass(frozen=True, slots=True)
class OfferLimits:
    """Bounds on the table; a producer over its own bound loses its oldest offers."""

    producers_max: int = 1024
    groups_per_producer_max: int = 128
    rounds_max: int = 4  # a producer's newest rounds that stay on offer
    choice_per_producer_max: int = 32  # a producer's newest offers, of which is chosen
    attempts_max: int = 5  # fetches tried before an offer is given up
    rest_s_max: float = 600.0


@dataclass(slots=True)
class Offer:
    group_id: GroupId
    producer: PeerId
    round: int
    size_bytes: int
    expires_at_s: int
    heard_from: PeerId  # who forwarded the advert: the second place to ask
    attempts: int = 0


@dataclass(slots=True)
class Producer:
    round: int = 0  # this and the next two: of its newest advert
    created_at_s: int = 0
    addresses: tuple[str, ...] = ()
    proven: bool = False
    slow: bool = False  # its last fetch brought something, but late
    failures: Counter[float] = field(default_factory=Counter)  # in a row, by their first rests
    rests_until: float = -inf
    rest_s: float = 0.0  # how long its last rest was meant to be
    heard_at: float = -inf  # when its newest advert came
    held_by_others: bool = False  # its last fetch was served by others in its place
    offers: OrderedDict[GroupId, Offer] = field(default_factory=OrderedDict)


class OfferTable:
    """Offers by producer, least recently heard producer first."""

    def __init__(self, limits: OfferLimits) -> None:
        self._limits = limits
        self._producers: BoundedTable[PeerId, Producer] = BoundedTable(
            limits.producers_max, rank_of=lambda _, producer: int(producer.proven)
        )

    def of(self, producer: PeerId) -> Producer:
        """The producer's entry; a blank one, which is not kept, if it is not on the table."""
        return self._producers.get(producer) or Producer()

    def __len__(self) -> int:
        return sum(len(producer.offers) for producer in self._producers.values())

    def hear(
        self,
        advert: AdvertBody,
        heard_from: PeerId,
        now: float,
        told_by: OriginPath | None = None,
        addresses: Sequence[str] = (),
    ) -> int:
        """Take in a checked advert; returns the number of new offers.

        `told_by`: origin of `heard_from`. `addresses`: those that may be dialled. The advert
        created last gives the producer's round, which may be lower than before.
        """
        name = PeerId(advert.producer)
        producer = self._producers.obtain(name, Producer, told_by or (heard_from,))
        newest = (producer.created_at_s, producer.round)
        if (advert.created_at_s, advert.round) >= newest:
            producer.created_at_s, producer.round = advert.created_at_s, advert.round
            producer.addresses = tuple(addresses)
            if now - producer.heard_at >= producer.rest_s / 2:
                producer.rests_until = -inf
            producer.heard_at = now
        elif advert.round <= producer.round - self._limits.rounds_max:
            return 0
        new = 0
        for entry in advert.groups:
            group_id = GroupId(entry.group_id)
            if group_id in producer.offers:
                continue
            producer.offers[group_id] = Offer(
                group_id, name, advert.round, entry.size_bytes, advert.expires_at_s, heard_from
            )
            new += 1
        self._trim(producer)
        return new

    def _trim(self, producer: Producer) -> None:
        oldest = producer.round - self._limits.rounds_max
        for offer in [o for o in producer.offers.values() if o.round <= oldest]:
            del producer.offers[offer.group_id]
        while len(producer.offers) > self._limits.groups_per_producer_max:
            producer.offers.popitem(last=False)

    def available(self, now: float) -> int:
        return sum(
            len(producer.offers)
            for producer in self._producers.values()
            if now >= producer.rests_until or producer.held_by_others
        )

    def choose(
        self,
        count: int,
        rng: Random,
        now: float,
        busy: Collection[PeerId] = (),
        *,
        proven_only: bool = False,
        slow_last: bool = False,
    ) -> list[Offer]:
        """Up to `count` random offers of producers that are neither busy nor resting; of each
        producer only the newest few. `slow_last`: slow producers only if the others do not
        suffice. Drawn from a list sorted by id, so that the order of arrival is no matter."""
        newest: list[Offer] = []
        slow: list[Offer] = []
        for name, producer in self._producers.items():
            rests = now < producer.rests_until and not producer.held_by_others
            if name in busy or rests or (proven_only and not producer.proven):
                continue
            offers = reversed(producer.offers.values())
            chosen_from = slow if slow_last and producer.slow else newest
            chosen_from += islice(offers, self._limits.choice_per_producer_max)
        found: list[Offer] = []
        for offered in (newest, slow):
            offered.sort(key=lambda offer: (offer.group_id, offer.producer))
            found += rng.sample(offered, min(count - len(found), len(offered)))
        return found

    def delivered(self, producer: PeerId, *, late: bool = False) -> None:
        """Record that a fetch brought a good group, in good time or `late`."""
        known = self.of(producer)
        known.slow = late
        known.proven, known.rests_until = True, -inf
        known.failures.clear()
        known.held_by_others = False

    def delivered_by_others(self, producer: PeerId, rest_s: float, now: float) -> None:
        """Others had the producer's groups: it rests for `rest_s`, its offers do not."""
        known = self.of(producer)
        known.proven = known.held_by_others = True
        known.failures.clear()
        known.rest_s, known.rests_until = rest_s, now + rest_s

    def rest(self, producer: PeerId, first_s: float, now: float) -> None:
        """Let the producer rest for `first_s`, doubled with each further failure in a row. Each
        `first_s` is a row of its own, so that held-back dials lengthen no other rest."""
        known = self.of(producer)
        known.proven = known.held_by_others = False
        rests = Backoff(first_s, self._limits.rest_s_max)
        known.rest_s = rests.after(known.failures[first_s])
        known.failures[first_s] += 1
        known.rests_until = now + known.rest_s

    def is_back(self, producer: PeerId, now: float) -> None:
        """The producer itself told of new groups: forget a first failure, but not repeated ones."""
        known = self.of(producer)
        if known.failures.total() == 1:
            known.rests_until = min(known.rests_until, now)

    def forget(self, producer: PeerId) -> None:
        self._producers.pop(producer)

    def drop(self, group_id: GroupId, producer: PeerId) -> None:
        self.of(producer).offers.pop(group_id, None)

    def failed(self, offer: Offer) -> None:
        """Count a fetch that brought nothing; after `attempts_max` the offer is dropped."""
        offer.attempts += 1
        if offer.attempts >= self._limits.attempts_max:
            self.drop(offer.group_id, offer.producer)

    def expire(self, now_s: float) -> None:
        for producer in self._producers.values():
            for offer in [o for o in producer.offers.values() if o.expires_at_s <= now_s]:
                del producer.offers[offer.group_id]
