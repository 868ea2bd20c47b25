"""Standings and bans, on a clock of their own."""

from math import ceil

import pytest

from swarm.errors import Reject
from swarm.identity import PeerId
from swarm.limits.address_blocks import Block, block_of, is_public
from swarm.peers import reputation as rules
from swarm.peers.reputation import LITTLE, MUCH, NOTHING, Reputation
from swarm.simulation.invariants import LIARS_FOR_BLOCK_BAN

LIAR, OTHER = PeerId("liar"), PeerId("other")
BLOCK = Block("192.0.2.0/24")
MOST = sorted(MUCH)


def tell(reputation: Reputation, peer: PeerId, reason: Reject, times: int, now: float) -> bool:
    for _ in range(times):
        reputation.record_offence(peer, reason, None, now)
    return reputation.is_banned(peer, now)


def test_a_block_ban_takes_as_many_peers_as_simulations_expect() -> None:
    assert ceil(rules.BLOCK_BAN_AT / rules.BAN_AT) == LIARS_FOR_BLOCK_BAN


def test_every_reason_has_a_weight_and_no_more_than_one() -> None:
    assert sorted([*MUCH, *LITTLE, *NOTHING]) == sorted(Reject)


@pytest.mark.parametrize("reason", MOST)
def test_three_lies_get_a_peer_banned_and_one_does_not(reason: Reject) -> None:
    reputation = Reputation()
    assert not tell(reputation, LIAR, reason, 1, 0.0)
    assert tell(reputation, LIAR, reason, 2, 1.0)
    assert not reputation.is_banned(OTHER, 1.0)
    (ban,) = reputation.bans(1.0)
    assert (ban.subject, ban.why, ban.number) == (LIAR, f"{reason} 3", 1)


def test_what_happens_to_honest_peers_never_bans_whatever_the_number() -> None:
    reputation = Reputation()
    for second in range(2_000):
        for reason in [*LITTLE, *NOTHING]:
            reputation.record_offence(LIAR, reason, BLOCK, float(second))
    assert not reputation.bans(2_000.0)
    assert reputation.score(LIAR, 2_000.0) <= rules.LITTLE_MAX < rules.BAN_AT


def test_a_wrong_weight_would_ban_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above."""
    monkeypatch.setattr(rules, "MUCH", {**MUCH, Reject.EXPIRED: 4.0})
    monkeypatch.setattr(rules, "LITTLE", {})
    assert tell(Reputation(), LIAR, Reject.EXPIRED, 3, 0.0)


def test_a_few_bad_records_outweigh_many_good_ones() -> None:
    reputation = Reputation()
    for now in range(3):
        for _ in range(20):
            reputation.record_good(LIAR, float(now))
        reputation.record_offence(LIAR, Reject.BAD_SIGNATURE, None, float(now))
    assert reputation.is_banned(LIAR, 3.0)


def test_nobody_saves_up_for_a_lie() -> None:
    reputation = Reputation()
    reputation.record_offence(LIAR, Reject.MALFORMED, None, 0.0)
    for _ in range(10_000):
        reputation.record_good(LIAR, 0.0)
    assert reputation.score(LIAR, 0.0) == 0.0
    assert tell(reputation, LIAR, Reject.MALFORMED, 3, 0.0)


def test_a_standing_fades() -> None:
    reputation = Reputation()
    reputation.record_offence(LIAR, Reject.MALFORMED, None, 0.0)
    assert reputation.score(LIAR, rules.HALF_LIFE_S) == pytest.approx(2.0)
    assert not tell(reputation, LIAR, Reject.MALFORMED, 1, rules.HALF_LIFE_S)
    assert not tell(reputation, LIAR, Reject.MALFORMED, 1, 4 * rules.HALF_LIFE_S)


def test_bans_end_and_grow_longer_up_to_a_bound() -> None:
    reputation, now, lengths = Reputation(), 0.0, []
    for number in range(1, 9):
        assert tell(reputation, LIAR, Reject.MALFORMED, 3, now)
        (ban,) = reputation.bans(now)
        assert ban.number == number
        lengths.append(ban.until - now)
        assert reputation.is_banned(LIAR, ban.until - 0.01)
        now = ban.until
        assert not reputation.is_banned(LIAR, now)
    assert lengths == [300.0, 1200.0, 4800.0, 19200.0, 76800.0] + [rules.BAN_S_MAX] * 3
    now += rules.CLEAN_S + 1
    assert tell(reputation, LIAR, Reject.MALFORMED, 3, now)
    assert reputation.bans(now)[0].number == 1


def test_what_was_on_its_way_at_a_ban_does_not_make_the_next_one_sooner() -> None:
    reputation = Reputation()
    tell(reputation, LIAR, Reject.MALFORMED, 500, 0.0)
    assert [ban.number for ban in reputation.bans(0.0)] == [1]
    assert not tell(reputation, LIAR, Reject.EXPIRED, 3, rules.BAN_S)
    assert tell(reputation, LIAR, Reject.MALFORMED, 1, rules.BAN_S)


def test_one_bad_peer_takes_no_neighbour_with_it() -> None:
    reputation = Reputation()
    now = 0.0
    for _ in range(8):  # bans in a row
        for _ in range(50):
            reputation.record_offence(LIAR, Reject.MALFORMED, BLOCK, now)
        assert reputation.is_banned(LIAR, now)
        assert not reputation.is_banned(BLOCK, now)
        now = reputation.bans(now)[0].until


def test_many_bad_peers_get_their_block_banned_even_with_one_lie_each() -> None:
    reputation = Reputation()
    for number in range(8):
        reputation.record_offence(PeerId(f"liar{number}"), Reject.MALFORMED, BLOCK, 0.0)
    assert not reputation.is_banned(BLOCK, 0.0)
    (ban,) = reputation.record_offence(PeerId("liar9"), Reject.MALFORMED, BLOCK, 0.0)
    assert (ban.subject, ban.is_block) == (BLOCK, True)
    assert not reputation.is_banned(Block("198.51.100.0/24"), 0.0)
    assert not reputation.is_banned(BLOCK, rules.BAN_S)


def test_peers_without_a_block_are_held_to_nobodys_account() -> None:
    reputation = Reputation()
    for number in range(100):
        reputation.record_offence(PeerId(f"liar{number}"), Reject.MALFORMED, None, 0.0)
    assert not reputation.bans(0.0)


def test_everything_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in {"PEERS": 8, "BANS": 4, "BLOCKS": 2, "PEERS_PER_BLOCK": 3}.items():
        monkeypatch.setattr(rules, f"{name}_MAX", most)
    reputation = Reputation()
    for number in range(100):
        block = Block(f"192.0.{number}.0/24")
        for _ in range(3):
            reputation.record_offence(
                PeerId(f"liar{number}"), Reject.MALFORMED, block, float(number)
            )
    assert len(reputation._accounts) == 8
    assert len(reputation._bans) == 4
    assert len(reputation._blocks) == 2
    assert reputation.is_banned(PeerId("liar99"), 99.0)
    for number in range(10):
        reputation.record_offence(PeerId(f"other{number}"), Reject.MALFORMED, BLOCK, 99.0)
    assert len(reputation._blocks[BLOCK]) == 3


@pytest.mark.parametrize(
    ("ip", "block", "public"),
    [
        ("192.0.2.77", "192.0.2.0/24", True),
        ("::ffff:192.0.2.77", "192.0.2.0/24", True),
        ("2001:db8:1:2ff::1", "2001:db8:1:200::/56", True),
        ("127.0.0.1", "127.0.0.0/24", False),
        ("10.1.2.3", "10.1.2.0/24", False),
        ("100.64.0.1", "100.64.0.0/24", False),
        ("::ffff:10.1.2.3", "10.1.2.0/24", False),
        ("::1", "::/56", False),
        ("fe80::1%eth0", "fe80::/56", False),
        ("not an address", None, False),
        ("", None, False),
        (None, None, False),
    ],
)
def test_blocks(ip: str | None, block: str | None, public: bool) -> None:
    assert block_of(ip) == block
    assert is_public(ip) is public
