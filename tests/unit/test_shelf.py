"""The adverts that a node keeps to pass on."""

from random import Random

from swarm.exchange.advert_cache import AdvertShelf
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
    shelf = AdvertShelf(100, 2)
    assert shelf.put(*advert("a", 2))
    assert shelf.put(*advert("a", 3))
    assert not shelf.put(*advert("a", 1))
    assert shelf.choose(9, 0, Random(0)) == records(("a", 3), ("a", 2))
    assert shelf.put(*advert("a", 4))
    assert shelf.choose(9, 0, Random(0)) == records(("a", 4), ("a", 3))


def test_an_advert_is_kept_once_in_whatever_wrapping() -> None:
    shelf = AdvertShelf(100, 2)
    advert_id, record, body = advert("a", 1)
    assert shelf.put(advert_id, record, body)
    assert not shelf.put(advert_id, b"wrapped otherwise", body)
    assert shelf.holds(record)
    assert not shelf.holds(b"wrapped otherwise")


def test_every_producer_comes_before_any_comes_twice() -> None:
    shelf = AdvertShelf(100, 4)
    for producer in "abc":
        for number in range(4):
            shelf.put(*advert(producer, number))
    seen: set[bytes] = set()
    for seed in range(20):
        chosen = shelf.choose(5, 0, Random(seed))
        assert set(records(("a", 3), ("b", 3), ("c", 3))) < set(chosen)
        seen.update(chosen)
    assert len(seen) == 12  # who asks often comes to know all
    assert len(shelf.choose(2, 0, Random(0))) == 2


def test_the_shelf_is_bounded_and_forgets() -> None:
    shelf = AdvertShelf(5, 4)
    for number in range(9):
        shelf.put(*advert(f"p{number}", number))
    assert len(shelf) == len(shelf._by_producer) == len(shelf._records) == 5
    assert shelf.choose(9, 100 + 600 + 7, Random(0)) == records(("p8", 8))
    shelf.expire(100 + 600 + 7)
    assert len(shelf) == len(shelf._by_producer) == len(shelf._records) == 1


def test_invented_producers_take_places_from_each_other() -> None:
    shelf = AdvertShelf(64, 4, PeerId("own"), {PeerId("proven")}.__contains__)
    shelf.put(*advert("own", 1))
    shelf.put(*advert("proven", 1), told_by="liar")
    shelf.put(*advert("new", 1), told_by="honest")
    for number in range(512):
        shelf.put(*advert(f"sybil{number}", 1), told_by="liar")
    kept = shelf.choose(64, 0, Random(0))
    assert len(shelf) == len(shelf._told_by) == len(kept) == 64
    assert set(records(("own", 1), ("proven", 1), ("new", 1), ("sybil511", 1))) < set(kept)


def test_a_shelf_of_own_and_proven_adverts_gives_up_the_oldest_foreign_one() -> None:
    shelf = AdvertShelf(3, 4, PeerId("own"), lambda producer: True)
    for producer, number in (("own", 1), ("a", 1), ("b", 1), ("c", 1)):
        shelf.put(*advert(producer, number))
    assert set(shelf.choose(9, 0, Random(0))) == set(records(("own", 1), ("b", 1), ("c", 1)))
