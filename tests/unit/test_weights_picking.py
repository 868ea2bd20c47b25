"""Which chunk goes from whom to whom: each rule alone."""

from random import Random

import pytest

from swarm.identity import PeerId
from swarm.weights.piece_selection import (
    CONFIRM_CYCLES,
    CONFIRM_S,
    LAG_S,
    ORPHAN_S,
    OVERDUE_LAGS,
    OVERDUE_S,
    UNCLAIMED_S,
    Picker,
    from_bytes,
    members,
    to_bytes,
)

A, B, C, D = (PeerId(name) for name in "abcd")
PUBLISHER = PeerId("publisher")
ALL = 0b1111_1111


def publisher(*peers: PeerId) -> Picker:
    picker = Picker(8, ALL, Random(1), None)
    for peer in peers:
        picker.meet(peer)
    return picker


def receiver(*peers: PeerId, have: int = 0) -> Picker:
    picker = Picker(8, have, Random(1), PUBLISHER)
    picker.learn(PUBLISHER, ALL, 0, (), 0.0)
    for peer in peers:
        picker.meet(peer)
    return picker


def everybody_is_free(peer: PeerId) -> bool:
    return True


def test_the_publisher_gives_each_chunk_once_before_it_gives_any_again() -> None:
    picker = publisher(A, B)
    given = [picker.fresh_for(peer, 0.0) for peer in (A, B) * 4]
    assert sorted(given) == list(range(8))  # type: ignore[type-var]
    assert picker.fresh_for(A, 0.0) is None


def test_it_relays_itself_only_with_an_uplink_to_spare_and_fresh_chunks_first() -> None:
    picker = publisher(A, B)
    assert picker.relayed_for(A, 0.0, spare=False) is None
    assert picker.relayed_for(A, 0.0, spare=True) == 0
    assert picker.fresh_for(B, 0.0) == 1  # not 0 again
    assert picker.relayed_for(B, 0.0, spare=False) == 0


def test_a_relay_sends_what_a_neighbour_lacks_oldest_first_and_to_each_once() -> None:
    picker = receiver(A, B)
    for chunk in (5, 2):
        picker.got(chunk, relay=True, now_s=0.0)
    assert [picker.relayed_for(A, 0.0, spare=True) for _ in range(3)] == [5, 2, None]
    picker.learn(B, 1 << 5, 0, (), 0.0)
    assert [picker.relayed_for(B, 0.0, spare=True) for _ in range(2)] == [2, None]


def test_what_was_not_fresh_is_not_relayed() -> None:
    picker = receiver(A)
    picker.got(3, relay=False, now_s=0.0)
    assert picker.relayed_for(A, 0.0, spare=True) is None
    assert picker.wanted_by(A, 3, 0.0) == 3  # but whoever asks for it gets it


def test_a_relay_owes_each_neighbour_each_chunk_and_claims_it_until_all_say_they_have_it() -> None:
    picker = receiver(A, B)
    picker.learn(PUBLISHER, ALL, 0, (), 0.0)
    picker.got(0, relay=True, now_s=0.0)
    assert picker.copies_owed() == 2
    picker.relayed_for(A, 0.0, spare=False)
    picker.relayed_for(B, 0.0, spare=False)
    assert picker.copies_owed() == 0
    assert picker.relaying == 1  # on their way, not there
    picker.learn(A, 1, 0, (), 0.1)
    picker.learn(B, 1, 0, (), 0.1)
    picker.copies_owed()
    assert picker.relaying == 0


def test_what_a_peer_never_confirms_is_sent_again() -> None:
    picker = receiver(A)
    picker.got(0, relay=True, now_s=0.0)
    assert picker.relayed_for(A, 0.0, spare=False) == 0
    picker.learn(A, 0, 0, (), CONFIRM_S / 2)
    assert picker.relayed_for(A, CONFIRM_S / 2, spare=False) is None
    picker.learn(A, 0, 0, (), CONFIRM_S)
    assert picker.relayed_for(A, CONFIRM_S, spare=False) == 0


def test_a_chunk_is_not_pulled_while_its_relay_may_still_bring_it() -> None:
    picker = receiver(A, B)
    picker.learn(A, 1, 1, (), 0.0)
    overdue_s = max(OVERDUE_S, OVERDUE_LAGS * LAG_S)
    assert picker.pull(overdue_s - 0.01, everybody_is_free, idle=False) is None
    assert picker.pull(overdue_s, everybody_is_free, idle=False) == (A, 0)


def test_a_chunk_that_nobody_relays_is_pulled_once_that_is_sure() -> None:
    picker = receiver(A, B)
    picker.learn(B, 1, 0, (), 0.0)
    assert picker.pull(UNCLAIMED_S - 0.01, everybody_is_free, idle=False) is None
    assert picker.pull(UNCLAIMED_S, everybody_is_free, idle=False) == (B, 0)


def test_at_the_end_an_idle_node_waits_for_no_relay() -> None:
    picker = receiver(A, have=ALL ^ 0b11)
    picker.learn(A, 1, 1, (), 0.0)
    assert picker.pull(0.01, everybody_is_free, idle=True) is None  # 1 is with nobody yet
    picker.learn(A, 0b11, 0b11, (), 0.0)
    assert picker.pull(0.01, everybody_is_free, idle=False) is None
    assert picker.pull(0.01, everybody_is_free, idle=True) in ((A, 0), (A, 1))


def test_the_rarest_is_pulled_first() -> None:
    picker = receiver(A, B, C)
    picker.learn(A, 0b011, 0, (), 0.0)
    picker.learn(B, 0b001, 0, (), 0.0)
    picker.learn(C, 0b001, 0, (), 0.0)
    assert picker.pull(UNCLAIMED_S, everybody_is_free, idle=False) == (A, 1)


def test_a_busy_holder_is_not_asked() -> None:
    picker = receiver(A, B)
    picker.learn(A, 1, 0, (), 0.0)
    picker.learn(B, 1, 0, (), 0.0)
    for _ in range(8):
        found = picker.pull(UNCLAIMED_S, lambda peer: peer == B, idle=False)
        assert found == (B, 0)


def test_a_pending_chunk_is_not_pulled_twice_and_a_failed_pull_frees_it() -> None:
    picker = receiver(A)
    picker.learn(A, 1, 0, (), 0.0)
    picker.pending |= 1
    assert picker.pull(UNCLAIMED_S, everybody_is_free, idle=False) is None
    picker.give_up(0)
    assert picker.pull(UNCLAIMED_S, everybody_is_free, idle=False) == (A, 0)


def test_what_others_only_asked_for_does_not_count_as_held() -> None:
    """Else peers that all wait for one chunk would ask each other for it in a circle."""
    picker = receiver(A)
    picker.learn(A, 0, 0, (0,), 0.0)
    assert picker.pull(60.0, everybody_is_free, idle=True) is None
    picker.learn(A, 1, 0, (), 0.0)
    assert picker.pull(120.0, everybody_is_free, idle=True) == (A, 0)


def test_what_the_publisher_has_does_not_make_its_chunks_overdue() -> None:
    picker = receiver(A)
    assert picker.pull(60.0, everybody_is_free, idle=True) is None


@pytest.mark.parametrize("complaints", [1, 2])
def test_a_relay_that_several_accuse_is_given_no_more_and_loses_what_it_was_given(
    complaints: int,
) -> None:
    picker = publisher(A, B, C, D)
    assert picker.fresh_for(A, 0.0) == 0
    for peer in (B, C)[:complaints]:
        picker.holds_back(peer, 0, 0.1, accused=A)
    assert (picker.fresh_for(A, 0.2) is None) == (complaints == 2)
    assert bool(picker.fresh & 1) == (complaints == 2)


def test_accusing_somebody_else_or_twice_counts_for_nothing() -> None:
    picker = publisher(A, B, C, D)
    picker.fresh_for(A, 0.0)
    for _ in range(3):
        picker.holds_back(B, 0, 0.1, accused=A)
        picker.holds_back(C, 0, 0.1, accused=D)
        picker.holds_back(C, 0, 0.1, accused=None)
    assert picker.fresh_for(A, 0.2) is not None


def test_the_publisher_holds_back_what_it_has_just_given_to_another() -> None:
    picker = publisher(A, B)
    picker.fresh_for(A, 0.0)
    assert picker.holds_back(B, 0, ORPHAN_S - 0.01, None)
    assert not picker.holds_back(B, 0, ORPHAN_S, None)
    assert not picker.holds_back(B, 5, 0.0, None)


def test_what_only_a_relay_that_left_was_given_is_fresh_again() -> None:
    picker = publisher(A, B)
    assert [picker.fresh_for(A, 0.0), picker.fresh_for(A, 0.0)] == [0, 1]
    picker.learn(B, 0b10, 0, (), 0.1)
    picker.leave(A)
    assert [chunk for chunk in (0, 1) if picker.fresh >> chunk & 1] == [0]


def test_what_a_liar_says_it_has_is_fresh_again() -> None:
    picker = publisher(A, B, C, D)
    assert picker.fresh_for(A, 0.0) == 0
    picker.learn(B, 0b1, 0b1, (), 0.1)
    picker.meet(B).distrusted = True
    picker.leave(A)
    assert picker.fresh & 0b1


def test_what_nobody_got_from_its_relay_in_time_is_fresh_again() -> None:
    picker = publisher(A, B)
    assert [picker.fresh_for(A, 0.0), picker.fresh_for(A, 0.0)] == [0, 1]
    picker.learn(A, 0b11, 0b11, (), 0.1)
    picker.learn(B, 0b10, 0, (), 0.1)
    picker.reclaim(CONFIRM_S - 0.01)
    assert not picker.fresh & 0b11
    picker.reclaim(CONFIRM_S)
    assert picker.fresh & 0b11 == 0b01


def test_the_publisher_takes_over_what_a_slow_relay_holds_up() -> None:
    picker = publisher(A, B, C, D)
    for _ in range(7):
        picker.fresh_for(A, 0.0)
    late_s = OVERDUE_S + 0.01
    picker.take_over(99.0, late_s)
    assert not picker.relaying  # while something is fresh
    picker.fresh_for(A, 0.0)
    picker.learn(A, ALL, ALL, (), 0.1)
    for peer, lacks in ((B, 0b0111), (C, 0b0011), (D, 0)):
        picker.learn(peer, ALL ^ lacks, 0, (), 0.1)
    picker.take_over(99.0, OVERDUE_S)
    assert not picker.relaying  # its relay may still bring it
    picker.take_over(1.0, late_s)
    assert not picker.relaying  # the uplink has no room
    picker.take_over(2.0, late_s)
    assert picker.relaying in (0b01, 0b10)  # what most lack
    picker.take_over(99.0, late_s)
    assert picker.relaying == 0b111
    assert [picker.relayed_for(D, late_s, spare=False)] == [None]
    assert picker.relayed_for(B, late_s, spare=False) in (0, 1)


def test_on_slow_links_a_relay_has_as_long_as_it_needs() -> None:
    """It may have others to send first, and those that got it tell of it later."""
    picker = publisher(A, B)
    picker.cycle_s = CONFIRM_S
    assert picker.fresh_for(A, 0.0) == 0
    assert picker.relayed_for(B, 0.0, spare=True) == 1
    picker.learn(A, 0b01, 0b01, (), 0.1)
    late_s = CONFIRM_CYCLES * CONFIRM_S
    picker.reclaim(late_s - 0.01)
    picker.learn(B, 0, 0, (), late_s - 0.01)
    assert not picker.fresh & 1
    assert picker.relayed_for(B, late_s - 0.01, spare=False) is None
    picker.reclaim(late_s)
    picker.learn(B, 0, 0, (), late_s)
    assert picker.fresh & 1
    assert picker.relayed_for(B, late_s, spare=False) == 1


def test_whoever_sent_garbage_gets_nothing() -> None:
    picker = receiver(A, B)
    picker.got(0, relay=True, now_s=0.0)
    picker.meet(A).distrusted = True
    assert picker.relayed_for(A, 0.0, spare=True) is None
    assert picker.wanted_by(A, 0, 0.0) is None
    assert picker.copies_owed() == 1  # to B alone: else the relay would wait for A for ever


def test_sets_travel_as_bytes() -> None:
    chunks = 1 << 0 | 1 << 9 | 1 << 15
    assert to_bytes(chunks, 16) == bytes([0b1, 0b10000010])
    assert from_bytes(to_bytes(chunks, 17)) == chunks
    assert list(members(chunks)) == [0, 9, 15]
