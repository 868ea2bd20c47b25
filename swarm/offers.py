"""What is on offer in the swarm, and which of it to fetch. Pure: no clock, no network.

An offer is a group that a signed advert names. Only a producer's last few rounds stay on offer:
a policy learns little from what a peer's much older policy wrote, and it bounds the table.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from swarm.identity import PeerId
from swarm.messages import AdvertBody
from swarm.rollouts import GroupId


@dataclass(frozen=True, slots=True)
class OfferLimits:
    """Bounds on the table; a producer over its own bound loses its oldest offers."""

    producers_max: int = 1024
    groups_per_producer_max: int = 128
    rounds_max: int = 4  # a producer's newest rounds that stay on offer
    attempts_max: int = 3  # fetches tried before an offer is given up


@dataclass(slots=True)
class Offer:
    """One group that can be fetched."""

    group_id: GroupId
    producer: PeerId
    round: int
    size_bytes: int
    expires_at_s: int
    heard_from: PeerId  # who forwarded the advert: the second place to ask
    attempts: int = 0


@dataclass(slots=True)
class _Producer:
    round: int = 0
    addresses: tuple[str, ...] = ()
    offers: OrderedDict[GroupId, Offer] = field(default_factory=OrderedDict)


class OfferTable:
    """Offers by producer, least recently heard producer first."""

    def __init__(self, limits: OfferLimits) -> None:
        self._limits = limits
        self._producers: OrderedDict[PeerId, _Producer] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(producer.offers) for producer in self._producers.values())

    def hear(self, advert: AdvertBody, heard_from: PeerId) -> int:
        """Take in a checked advert. Returns how many groups are new on the table: none where the
        producer has moved on, for an advert may travel slowly through no fault of anybody."""
        name = PeerId(advert.producer)
        producer = self._producers.setdefault(name, _Producer())
        self._producers.move_to_end(name)
        if advert.round <= producer.round - self._limits.rounds_max:
            return 0
        if advert.round >= producer.round:
            producer.round = advert.round
            producer.addresses = advert.addresses
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
        while len(self._producers) > self._limits.producers_max:
            self._producers.popitem(last=False)
        return new

    def _trim(self, producer: _Producer) -> None:
        oldest = producer.round - self._limits.rounds_max
        for offer in [o for o in producer.offers.values() if o.round <= oldest]:
            del producer.offers[offer.group_id]
        while len(producer.offers) > self._limits.groups_per_producer_max:
            producer.offers.popitem(last=False)

    def choose(self, count: int, rng: Random, busy: Iterable[GroupId] = ()) -> list[Offer]:
        """Up to `count` offers, uniformly without replacement over all producers' groups.

        The order of arrival does not matter: offers are drawn from a list sorted by id.
        """
        taken = set(busy)
        offers = sorted(
            (o for p in self._producers.values() for o in p.offers.values()),
            key=lambda offer: offer.group_id,
        )
        free = [offer for offer in offers if offer.group_id not in taken]
        return rng.sample(free, min(count, len(free)))

    def addresses(self, producer: PeerId) -> tuple[str, ...]:
        """Where the producer said that it listens, in its newest advert."""
        known = self._producers.get(producer)
        return known.addresses if known else ()

    def newest_round(self, producer: PeerId) -> int:
        """The highest round that the producer has advertised; 0 if none is known."""
        known = self._producers.get(producer)
        return known.round if known else 0

    def drop(self, group_id: GroupId, producer: PeerId) -> None:
        """Take an offer off the table: fetched, or found worthless."""
        known = self._producers.get(producer)
        if known:
            known.offers.pop(group_id, None)

    def failed(self, offer: Offer) -> None:
        """Count a fetch that brought nothing; gives the offer up after `attempts_max`."""
        offer.attempts += 1
        if offer.attempts >= self._limits.attempts_max:
            self.drop(offer.group_id, offer.producer)

    def expire(self, now_s: float) -> None:
        """Forget offers past their expiry."""
        for producer in self._producers.values():
            for offer in [o for o in producer.offers.values() if o.expires_at_s <= now_s]:
                del producer.offers[offer.group_id]
