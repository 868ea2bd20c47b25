"""Signed adverts that a node passes on: the newest of each producer. Pure and bounded. A full
cache gives up those of producers that never delivered first, own ones last."""

import hashlib
from collections.abc import Callable
from random import Random

from swarm.identity import PeerId
from swarm.limits.address_blocks import OriginPath
from swarm.limits.bounded_table import BoundedTable
from swarm.wire.messages import AdvertBody


class AdvertCache:
    """Adverts by id, in order of arrival."""

    def __init__(
        self,
        adverts_max: int,
        per_producer_max: int,
        own: PeerId | None = None,
        is_proven: Callable[[PeerId], bool] = lambda producer: False,
    ) -> None:
        """`own`: the producer whose adverts stay. `is_proven`: it has delivered."""
        self._per_producer_max = per_producer_max
        self._adverts: BoundedTable[bytes, tuple[bytes, AdvertBody]] = BoundedTable(
            adverts_max, rank_of=self._rank
        )
        self._own = own
        self._is_proven = is_proven
        self._by_producer: dict[PeerId, list[bytes]] = {}
        self._records: set[bytes] = set()  # hashes of the records that are kept

    def __len__(self) -> int:
        return len(self._adverts)

    def holds(self, record: bytes) -> bool:
        """True if these bytes are kept, and so were checked before."""
        return hashlib.sha256(record).digest() in self._records

    def put(
        self, advert_id: bytes, record: bytes, advert: AdvertBody, told_by: OriginPath = ()
    ) -> bool:
        """Keep a checked advert unless it is here or too old; True if it is kept."""
        if advert_id in self._adverts:
            return False
        gone = self._adverts.put(advert_id, (record, advert), told_by)
        if gone is not None and gone.key == advert_id:
            return False
        if gone is not None:
            self._forget(gone.key, *gone.value)
        self._records.add(hashlib.sha256(record).digest())
        ids = self._by_producer.setdefault(PeerId(advert.producer), [])
        ids.append(advert_id)
        ids.sort(key=lambda each: _age(self._adverts[each][1]))
        if len(ids) > self._per_producer_max:
            self._remove(ids[0])
        return advert_id in self._adverts

    def choose(self, count: int, now_s: float, rng: Random) -> list[bytes]:
        """Up to `count` live records, newest first: one of each producer, then random others."""
        newest: list[bytes] = []
        others: list[bytes] = []
        for ids in self._by_producer.values():
            alive = [each for each in ids if self._adverts[each][1].expires_at_s > now_s]
            newest += alive[-1:]
            others += alive[:-1]
        chosen = rng.sample(newest, min(count, len(newest)))
        chosen += rng.sample(others, min(count - len(chosen), len(others)))
        chosen.sort(key=lambda each: (_age(self._adverts[each][1]), each), reverse=True)
        return [self._adverts[each][0] for each in chosen]

    def expire(self, now_s: float) -> None:
        for each in [i for i, (_, a) in self._adverts.items() if a.expires_at_s <= now_s]:
            self._remove(each)

    def _rank(self, _: bytes, entry: tuple[bytes, AdvertBody]) -> int:
        producer = PeerId(entry[1].producer)
        return 2 if producer == self._own else int(self._is_proven(producer))

    def _remove(self, advert_id: bytes) -> None:
        self._forget(advert_id, *self._adverts[advert_id])
        self._adverts.pop(advert_id)

    def _forget(self, advert_id: bytes, record: bytes, advert: AdvertBody) -> None:
        self._records.discard(hashlib.sha256(record).digest())
        producer = PeerId(advert.producer)
        self._by_producer[producer].remove(advert_id)
        if not self._by_producer[producer]:
            del self._by_producer[producer]


def _age(advert: AdvertBody) -> tuple[int, int]:
    return advert.created_at_s, advert.round


REMEMBERED_MAX = 4_096  # producers of one round; beyond that, none is taken in


class ProducerSampler:
    """Takes in the adverts of about `enough` producers a round, drawn anew in each."""

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
        self._before = len(self._taken)
        self._taken.clear()
