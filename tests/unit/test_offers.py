"""The table of what is on offer: bounds, uniform choice, supersession."""

from collections import Counter
from random import Random

import pytest

from swarm.exchange.offers import OfferLimits, OfferTable
from swarm.identity import PeerId
from swarm.wire.messages import AdvertBody, AdvertEntry

ME = PeerId("forwarder")


def advert(
    producer: str, round_: int, ids: range, expires_at_s: int = 1000, created_at_s: int = 0
) -> AdvertBody:
    return AdvertBody(
        type="advert",
        run_id="run",
        producer=producer,
        round=round_,
        addresses=(f"/memory/{round_}",),
        groups=tuple(
            AdvertEntry(group_id=f"{producer}{n}".encode().ljust(32), size_bytes=100) for n in ids
        ),
        created_at_s=created_at_s,
        expires_at_s=expires_at_s,
    )


def test_a_producers_old_rounds_leave_the_table() -> None:
    table = OfferTable(OfferLimits(rounds_max=2))
    for round_ in (1, 2, 3):
        assert table.hear(advert("p", round_, range(4 * round_, 4 * round_ + 4)), ME, 0.0) == 4
    assert len(table) == 8
    assert {offer.round for offer in table.choose(99, Random(0), 0.0)} == {2, 3}
    assert table.hear(advert("p", 1, range(90, 91)), ME, 0.0) == 0
    assert len(table) == 8


def test_an_older_advert_that_arrives_late_does_not_move_the_addresses_back() -> None:
    table = OfferTable(OfferLimits())
    table.hear(advert("p", 5, range(1)), ME, 0.0, addresses=("/memory/5",))
    table.hear(advert("p", 4, range(1, 2)), ME, 0.0, addresses=("/memory/4",))
    assert table.of(PeerId("p")).addresses == ("/memory/5",)
    assert table.of(PeerId("p")).round == 5


def test_bounds_hold_against_a_flood() -> None:
    limits = OfferLimits(producers_max=10, groups_per_producer_max=20)
    table = OfferTable(limits)
    for producer in range(50):
        for part in range(3):
            table.hear(advert(f"{producer:02}", 1, range(part * 20, part * 20 + 20)), ME, 0.0)
    assert len(table) == 200


def test_choice_is_uniform_over_groups_and_skips_busy_producers() -> None:
    table = OfferTable(OfferLimits())
    table.hear(advert("a", 1, range(2)), ME, 0.0)
    table.hear(advert("b", 1, range(10)), ME, 0.0)
    rng, counts = Random(0), Counter[bytes]()
    for _ in range(6000):
        counts.update(offer.group_id for offer in table.choose(2, rng, 0.0))
    chi_square = sum((n - 1000) ** 2 / 1000 for n in counts.values())
    assert len(counts) == 12
    assert chi_square < 31.3, chi_square  # 99.9 % quantile, 11 degrees of freedom
    assert {o.producer for o in table.choose(99, rng, 0.0, {PeerId("b")})} == {"a"}


def test_failures_give_an_offer_up_and_expiry_forgets_it() -> None:
    table = OfferTable(OfferLimits(attempts_max=2))
    table.hear(advert("a", 1, range(1)), ME, 0.0)
    table.hear(advert("b", 1, range(1), expires_at_s=10), ME, 0.0)
    (offer,) = [o for o in table.choose(2, Random(0), 0.0) if o.producer == "a"]
    table.failed(offer)
    assert len(table) == 2
    table.failed(offer)
    assert [o.producer for o in table.choose(2, Random(0), 0.0)] == ["b"]
    table.expire(10.0)
    assert len(table) == 0


def test_a_flood_of_ids_crowds_nobody_out() -> None:
    limits = OfferLimits(choice_per_producer_max=4)
    table = OfferTable(limits)
    table.hear(advert("honest", 1, range(4)), ME, 0.0)
    table.hear(advert("flood", 1, range(60)), ME, 0.0)
    chosen = table.choose(99, Random(0), 0.0)
    assert Counter(offer.producer for offer in chosen) == {"honest": 4, "flood": 4}
    newest = {f"flood{n}".encode().ljust(32) for n in range(56, 60)}
    assert {o.group_id for o in chosen if o.producer == "flood"} == newest


def test_a_producer_that_fails_is_left_alone_twice_as_long_each_time() -> None:
    table = OfferTable(OfferLimits(rest_s_max=100.0))
    name = PeerId("p")
    table.hear(advert(name, 1, range(4)), ME, 0.0)
    now = 0.0
    for rest_s in (30.0, 60.0, 100.0, 100.0):
        table.rest(name, 30.0, now)
        assert not table.choose(1, Random(0), now + rest_s - 0.1)
        now += rest_s
        assert table.choose(1, Random(0), now)
    table.delivered(name)
    assert table.of(name).proven
    table.rest(name, 30.0, now)
    assert not table.of(name).proven
    assert table.choose(1, Random(0), now + 30.0)
    assert not table.choose(1, Random(0), now + 30.0, proven_only=True)


def test_dials_held_back_do_not_prolong_the_rest_after_a_silence() -> None:
    table = OfferTable(OfferLimits())
    name = PeerId("p")
    table.hear(advert(name, 1, range(4)), ME, 0.0)
    now = 0.0
    for first_s, rest_s in ((2.0, 2.0), (2.0, 4.0), (2.0, 8.0), (30.0, 30.0), (2.0, 16.0)):
        table.rest(name, first_s, now)
        assert table.of(name).rests_until > now + rest_s - 0.1
        now += rest_s
        assert table.of(name).rests_until <= now
    table.rest(name, 30.0, now)  # each kind goes on where it was
    assert table.of(name).rests_until > now + 59.9
    assert table.of(name).rests_until <= now + 60.0


def test_a_producer_that_was_set_back_is_heard_again() -> None:
    table = OfferTable(OfferLimits(rounds_max=2))
    name = PeerId("p")
    table.hear(advert(name, 50, range(4), created_at_s=100), ME, 0.0)
    back = advert(name, 3, range(4, 8), created_at_s=200)
    assert table.hear(back, ME, 0.0, addresses=("/memory/3",)) == 4
    assert table.of(name).round == 3
    assert table.of(name).addresses == ("/memory/3",)
    assert table.hear(advert(name, 1, range(8, 9), created_at_s=90), ME, 0.0) == 0
    table.hear(advert(name, 49, range(9, 10), created_at_s=95), ME, 0.0)
    assert table.of(name).round == 3


def resting(table: OfferTable, name: PeerId, failures: int) -> float:
    """Let it fail in a row from now = 0 on; when the last rest began."""
    now = 0.0
    for _ in range(failures):
        table.rest(name, 30.0, now)
        began, now = now, now + table._producers[name].rest_s
    return began


def test_one_that_is_heard_again_after_a_long_silence_gets_a_trial_at_once() -> None:
    table = OfferTable(OfferLimits())
    name = PeerId("p")
    table.hear(advert(name, 1, range(4)), ME, 0.0)
    began = resting(table, name, 4)  # until 30 + 60 + 120 + 240
    assert not table.choose(1, Random(0), began + 130.0)
    table.hear(advert(name, 2, range(4, 8), created_at_s=9), ME, began + 130.0)
    assert table.choose(1, Random(0), began + 130.0)
    table.rest(name, 30.0, began + 130.0)  # it failed once more: the back-off goes on
    assert not table.choose(1, Random(0), began + 130.0 + 470.0)


def test_one_that_goes_on_to_advertise_while_it_rests_gets_none() -> None:
    table = OfferTable(OfferLimits())
    name = PeerId("p")
    table.hear(advert(name, 1, range(4)), ME, 0.0)
    began = resting(table, name, 4)
    for second in range(0, int(began) + 239, 10):
        table.hear(advert(name, 2, range(4, 8), created_at_s=second), ME, float(second))
        if second > began:
            assert not table.choose(1, Random(0), float(second))


@pytest.mark.parametrize(("failures", "asked_again"), [(1, True), (2, False)])
def test_one_that_speaks_itself_is_forgiven_a_first_failure_and_no_second(
    failures: int, asked_again: bool
) -> None:
    table = OfferTable(OfferLimits())
    name = PeerId("p")
    table.hear(advert(name, 1, range(4)), name, 0.0)
    for second in range(40):  # it is not silent meanwhile
        table.hear(advert(name, 1, range(4), created_at_s=second), name, float(second))
    began = resting(table, name, failures)
    table.hear(advert(name, 2, range(4, 8), created_at_s=50), name, began + 1.0)
    assert not table.available(began + 1.0)  # the advert may have been on its way for long
    table.is_back(name, began + 1.0)
    assert bool(table.available(began + 1.0)) == asked_again
    table.rest(name, 30.0, began + 2.0)  # it fails again: that is one more in a row
    table.is_back(name, began + 3.0)
    assert not table.available(began + 3.0)


def test_what_others_hold_is_still_chosen_while_its_producer_rests() -> None:
    table = OfferTable(OfferLimits())
    name = PeerId("p")
    table.hear(advert(name, 1, range(4)), ME, 0.0)
    table.delivered_by_others(name, 30.0, 0.0)
    assert table.of(name).rests_until > 29.0
    assert table.of(name).rests_until <= 30.0
    assert table.choose(1, Random(0), 29.0)
    table.rest(name, 30.0, 1.0)  # nobody had the next ones
    assert not table.choose(1, Random(0), 29.0)


def test_a_thousand_invented_producers_take_places_from_each_other() -> None:
    table = OfferTable(OfferLimits(producers_max=20))
    for number in range(4):
        table.hear(advert(f"proven{number}", 1, range(1)), ME, 0.0)
        table.delivered(PeerId(f"proven{number}"))
    for number in range(8):
        table.hear(advert(f"new{number}", 1, range(1)), PeerId(f"friend{number}"), 0.0)
    for number in range(1000):
        table.hear(
            advert(f"sybil{number}", 1, range(1)), PeerId(f"s{number}"), 0.0, ("192.0.2.0/24",)
        )
    left = set(table._producers)
    assert left >= {f"proven{number}" for number in range(4)}
    assert left >= {f"new{number}" for number in range(8)}
    assert len(left) == 20
    assert "sybil999" in left


def test_slow_producers_come_last_where_that_is_asked_for() -> None:
    table = OfferTable(OfferLimits())
    for name in ("quick", "slow"):
        table.hear(advert(name, 1, range(10)), ME, 0.0)
        table.delivered(PeerId(name), late=name == "slow")
    first = [table.choose(5, Random(seed), 0.0) for seed in range(20)]
    assert {offer.producer for chosen in first for offer in chosen} == {"quick", "slow"}
    for seed in range(20):
        chosen = table.choose(15, Random(seed), 0.0, slow_last=True)
        assert [offer.producer for offer in chosen] == ["quick"] * 10 + ["slow"] * 5
    table.delivered(PeerId("slow"))
    assert not table.of(PeerId("slow")).slow
