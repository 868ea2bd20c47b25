"""The adverts that a node keeps to pass on."""

from random import Random

from swarm.exchange.adverts import AdvertCache
from swarm.identity import PeerId
from swarm.wire.messages import AdvertBody, AdvertEntry


def advert(producer: str, number: int, life_s: int = 600) -> tuple[bytes, bytes, AdvertBody]:
    body = AdvertBody(
        type="advert",
        run_id="run",
        producer=producer,
        round=number,
        addresses=(),
        groups=(AdvertEntry(group_id=bytes(32), size_bytes=9),),
        created_at_s=100 + number,
        expires_at_s=100 + number + life_s,
    )
    return f"{producer}/{number}".encode(), f"record {producer}/{number}".encode(), body


def records(*names: tuple[str, int]) -> list[bytes]:
    return [advert(*name)[1] for name in names]


def test_an_old_advert_that_comes_late_takes_no_newer_ones_place() -> None:
    cache = AdvertCache(100, 2)
    assert cache.put(*advert("a", 2))
    assert cache.put(*advert("a", 3))
    assert not cache.put(*advert("a", 1))
    assert cache.choose(9, 0, Random(0)) == records(("a", 3), ("a", 2))
    assert cache.put(*advert("a", 4))
    assert cache.choose(9, 0, Random(0)) == records(("a", 4), ("a", 3))


def test_an_advert_is_kept_once_in_whatever_wrapping() -> None:
    cache = AdvertCache(100, 2)
    advert_id, record, body = advert("a", 1)
    assert cache.put(advert_id, record, body)
    assert not cache.put(advert_id, b"wrapped otherwise", body)
    assert cache.holds(record)
    assert not cache.holds(b"wrapped otherwise")


def test_every_producer_comes_before_any_comes_twice() -> None:
    cache = AdvertCache(100, 4)
    for producer in "abc":
        for number in range(4):
            cache.put(*advert(producer, number))
    seen: set[bytes] = set()
    for seed in range(20):
        chosen = cache.choose(5, 0, Random(seed))
        assert set(records(("a", 3), ("b", 3), ("c", 3))) < set(chosen)
        seen.update(chosen)
    assert len(seen) == 12  # who asks often comes to know all
    assert len(cache.choose(2, 0, Random(0))) == 2


def test_the_cache_is_bounded_and_forgets() -> None:
    cache = AdvertCache(5, 4)
    for number in range(9):
        cache.put(*advert(f"p{number}", number))
    assert len(cache) == len(cache._by_producer) == len(cache._records) == 5
    assert cache.choose(9, 100 + 600 + 7, Random(0)) == records(("p8", 8))
    cache.expire(100 + 600 + 7)
    assert len(cache) == len(cache._by_producer) == len(cache._records) == 1


def test_invented_producers_take_places_from_each_other() -> None:
    cache = AdvertCache(64, 4, PeerId("own"), {PeerId("proven")}.__contains__)
    cache.put(*advert("own", 1))
    cache.put(*advert("proven", 1), told_by=("liar",))
    cache.put(*advert("new", 1), told_by=("honest",))
    for number in range(512):
        cache.put(*advert(f"sybil{number}", 1), told_by=("liar",))
    kept = cache.choose(64, 0, Random(0))
    assert len(cache) == len(kept) == 64
    assert set(records(("own", 1), ("proven", 1), ("new", 1), ("sybil511", 1))) < set(kept)


def test_a_cache_of_own_and_proven_adverts_gives_up_the_oldest_foreign_one() -> None:
    cache = AdvertCache(3, 4, PeerId("own"), lambda producer: True)
    for producer, number in (("own", 1), ("a", 1), ("b", 1), ("c", 1)):
        cache.put(*advert(producer, number))
    assert set(cache.choose(9, 0, Random(0))) == set(records(("own", 1), ("b", 1), ("c", 1)))
