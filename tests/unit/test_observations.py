"""What a node believes of its own address, while some of those who tell it are liars."""

from collections.abc import Iterable
from random import Random

import pytest

from swarm.identity import PeerId
from swarm.limits.address_blocks import canonical_ip
from swarm.transport.libp2p import observed_addresses
from swarm.transport.libp2p.observed_addresses import (
    ASK_AGAIN_S,
    FORGET_S,
    VOICES_MAX,
    VOICES_WANTED,
    Observations,
    Opinion,
    ReachVerdict,
)

OWN, WRONG = "198.51.100.7", "203.0.113.66"
PORT = 4001


def public(block: int, host: int = 1) -> str:
    return f"8.{block}.1.{host}"


def say(
    heard: Observations, witness_ip: str, ip: str = OWN, *ports: int, at_s: float = 0.0,
    name: str = "", keeps_port: bool | None = None,
) -> None:  # fmt: skip
    peer = PeerId(name or witness_ip)
    heard.record(peer, Opinion(witness_ip, ip, frozenset(ports), keeps_port, at_s))


def believed(*said: tuple[str, str], now_s: float = 0.0) -> ReachVerdict:
    """The verdict on what witnesses say one after the other, each with our port."""
    heard = Observations()
    for witness_ip, ip in said:
        say(heard, witness_ip, ip, PORT)
        heard.decide(now_s)
    return heard.decide(now_s)


# --- which address -----------------------------------------------------------------------------


def test_two_address_blocks_are_believed_and_one_is_not() -> None:
    one_block = believed(*((public(1, host), OWN) for host in range(1, 40)))
    assert (one_block.observed_ip, one_block.reachable, one_block.proven) == (None, None, ())
    two_blocks = believed((public(1), OWN), (public(2), OWN))
    assert two_blocks.observed_ip == OWN
    assert (two_blocks.reachable, two_blocks.proven) == (True, ((OWN, PORT),))


def test_what_is_agreed_on_is_not_moved_by_one_block() -> None:
    honest = [(public(1), OWN), (public(2), OWN)]
    crowd = [(public(3, host), WRONG) for host in range(1, 40)]
    for said in (honest + crowd, crowd + honest):
        verdict = believed(*said)
        assert (verdict.observed_ip, verdict.proven) == (OWN, ((OWN, PORT),))


def test_as_many_liars_move_nothing_and_more_of_them_do() -> None:
    honest = [(public(1), OWN), (public(2), OWN)]
    liars = [(public(block), WRONG) for block in (3, 4, 5)]
    assert believed(*honest, *liars[:2]).observed_ip == OWN
    assert believed(*honest, *liars).observed_ip == WRONG, "nobody could know better"


def test_a_new_address_is_believed_when_the_old_one_has_no_voices_left() -> None:
    heard = Observations()
    for block in (1, 2, 3):
        say(heard, public(block), OWN)
    assert heard.decide(0.0).observed_ip == OWN
    say(heard, public(1), WRONG, at_s=FORGET_S)
    assert heard.decide(FORGET_S + 1).observed_ip == OWN, "one voice is not enough to move"
    say(heard, public(2), WRONG, at_s=FORGET_S)
    assert heard.decide(FORGET_S + 1).observed_ip == WRONG


def test_before_anything_is_agreed_on_there_is_something_to_try() -> None:
    verdict = believed((public(1), OWN))
    assert (verdict.observed_ip, verdict.likely_ip) == (None, OWN)
    assert (
        believed(*((public(block), OWN) for block in (1, 2)), (public(3), WRONG)).likely_ip == OWN
    )


@pytest.mark.parametrize("ip", ["127.0.0.1", "192.168.1.9", "100.64.0.9", "fd00::9"])
def test_in_a_home_or_a_laboratory_one_witness_is_enough_and_nobody_overrules_it(ip: str) -> None:
    mine = "192.168.1.5"
    assert believed((ip, mine)).observed_ip == mine
    heard = Observations()
    for name, own in (("first", mine), ("second", "192.168.1.66")):
        say(heard, ip, own, PORT, name=name)
        verdict = heard.decide(0.0)
    assert verdict.observed_ip == mine
    assert verdict.proven == (), "with two to ask, two must say the same"


def test_private_witnesses_say_nothing_of_public_addresses_and_public_ones_nothing_else() -> None:
    assert believed(("192.168.1.9", OWN)) == ReachVerdict()
    assert believed((public(1), "192.168.1.5"), (public(2), "127.0.0.1")) == ReachVerdict()


def test_who_is_far_away_counts_more_than_neighbours() -> None:
    near = [(f"192.168.1.{host}", "192.168.1.5") for host in range(10, 20)]
    verdict = believed(*near, (public(1), OWN), (public(2), OWN))
    assert (verdict.observed_ip, verdict.proven) == (OWN, ((OWN, PORT),))


def test_both_families_are_believed_each_by_its_own_voices() -> None:
    six = "2001:4860::7"
    said = [(public(1), OWN), ("2a00:1:1::1", six), (public(2), OWN), ("2a00:2:2::1", six)]
    assert believed(*said).proven == ((OWN, PORT), (six, PORT))


@pytest.mark.parametrize("witness", ["2a00:6:6::1", "2a00:6:6::2"])
def test_who_has_an_address_of_each_family_is_one_voice(witness: str) -> None:
    """It sees us over the one that it speaks over."""
    lies = believed((public(66), WRONG), (witness, WRONG))
    assert (lies.observed_ip, lies.proven, lies.reachable) == (None, (), None)
    six = "2001:4860::66"
    assert believed((public(66), six), (witness, six)).observed_ip is None
    mapped = [(f"::ffff:{public(block)}", OWN) for block in (1, 2)]
    assert believed(*mapped).observed_ip == OWN


@pytest.mark.parametrize("text", ["nonsense", "", "0.0.0.0", "224.0.0.1", "::", "fe80::1%eth0"])
def test_what_is_no_address_is_none(text: str) -> None:
    assert canonical_ip(text) is None


def test_an_address_has_one_spelling() -> None:
    assert canonical_ip("2001:4860:0::7") == canonical_ip("2001:4860::7") == "2001:4860::7"
    assert canonical_ip("::ffff:198.51.100.7") == OWN


# --- whether it can be dialled --------------------------------------------------------------------


def ports(*said: tuple[str, tuple[int, ...]]) -> ReachVerdict:
    heard = Observations()
    for witness_ip, led in said:
        say(heard, witness_ip, OWN, *led)
    return heard.decide(0.0)


def test_nobody_gets_through() -> None:
    assert ports((public(1), ()), (public(2), ())).reachable is False
    alone = ports((public(1), ()))
    assert (alone.reachable, alone.needs_relay) == (False, True), "such a lie costs a reservation"


def test_where_voices_differ_the_port_needs_two_of_them() -> None:
    assert ports((public(1), (PORT,)), (public(2), ())).reachable is None
    differ = ports((public(1), (PORT,)), (public(2), ()), (public(3), (PORT, 9)))
    assert (differ.reachable, differ.proven) == (True, ((OWN, PORT),))


def test_a_port_at_another_address_than_the_agreed_one_is_not_told() -> None:
    heard = Observations()
    for block in (1, 2, 3):
        say(heard, public(block), OWN)
    for block in (4, 5):
        say(heard, public(block), WRONG, PORT)
    verdict = heard.decide(0.0)
    assert (verdict.observed_ip, verdict.proven) == (OWN, ())


def test_relays_are_kept_until_somebody_else_has_come_in() -> None:
    heard = Observations()
    heard.record_inbound(PeerId("early"), public(9))  # before anything was believed
    for block in (1, 2):
        say(heard, public(block), OWN, PORT)
    assert heard.decide(0.0).needs_relay
    for ip in (public(1), public(2, 200), "192.168.1.9", "2a00:1:1::1"):
        heard.record_inbound(PeerId(ip), ip)
        assert heard.decide(0.0).needs_relay, f"{ip} proves nothing of {OWN}"
    heard.record_inbound(PeerId("else"), public(9))
    assert not heard.decide(0.0).needs_relay


def test_what_is_believed_next_has_to_be_shown_again() -> None:
    heard = Observations()
    for block in (1, 2):
        say(heard, public(block), OWN, PORT)
    heard.decide(0.0)
    heard.record_inbound(PeerId("else"), public(9))
    assert not heard.decide(0.0).needs_relay
    for block in (3, 4, 5):
        say(heard, public(block), WRONG, PORT)
    verdict = heard.decide(0.0)
    assert verdict.proven == ((WRONG, PORT),)
    assert verdict.needs_relay, "liars of three blocks have taken the relays away"


def test_at_home_who_can_be_reached_needs_no_relay() -> None:
    assert not believed(("192.168.1.9", "192.168.1.5")).needs_relay
    heard = Observations()
    say(heard, "192.168.1.9", "192.168.1.5")
    assert heard.decide(0.0).needs_relay


def test_whether_ports_are_kept_is_for_the_majority_to_say() -> None:
    heard = Observations()
    for block, kept in ((1, True), (2, True), (3, False), (4, None)):
        say(heard, public(block), OWN, keeps_port=kept)
    assert heard.decide(0.0).keeps_ports is True


def test_what_was_said_is_forgotten() -> None:
    heard = Observations()
    for block in (1, 2):
        say(heard, public(block), OWN, PORT)
    assert heard.decide(FORGET_S).observed_ip == OWN
    assert heard.decide(FORGET_S + 1) == ReachVerdict()
    for block in (1, 2):
        say(heard, public(block), OWN, PORT)
    heard.forget()
    assert heard.decide(0.0) == ReachVerdict()


# --- whom to ask ---------------------------------------------------------------------------------


def peers(ips: Iterable[str]) -> list[tuple[PeerId, str]]:
    return [(PeerId(ip), ip) for ip in ips]


def asked(heard: Observations, ips: list[str], seed: int, liars: str = "8.66.") -> list[str]:
    """Ask one after the other, as long as there is somebody to ask."""
    order: list[str] = []
    rng = Random(seed)
    left = peers(ips)
    while (chosen := heard.choose_peer(left, 0.0, rng)) is not None:
        left.remove(chosen)
        order.append(chosen[1])
        say(heard, chosen[1], WRONG if chosen[1].startswith(liars) else OWN, PORT)
    return order


def test_three_blocks_of_one_mind_are_enough_and_none_is_asked_twice() -> None:
    heard = Observations()
    order = asked(heard, [public(block, host) for block in range(9) for host in (1, 2)], seed=1)
    assert len({ip.rpartition(".")[0] for ip in order}) == len(order) == VOICES_WANTED
    assert heard.choose_peer(peers([public(50)]), ASK_AGAIN_S, Random(1)), "all of it is old"


def test_a_crowd_of_one_block_is_asked_once_and_is_not_asked_first() -> None:
    crowd = [public(66, host) for host in range(1, 200)]
    honest = [public(block) for block in range(10)]
    first = 0
    for seed in range(50):
        heard = Observations()
        order = asked(heard, crowd + honest, seed)
        assert sum(ip.startswith("8.66.") for ip in order) <= 1
        first += order[0].startswith("8.66.")
        assert heard.decide(0.0).observed_ip == OWN
    assert first < 25


def test_more_are_asked_where_they_disagree() -> None:
    heard = Observations()
    say(heard, "8.66.1.1", WRONG, PORT)
    order = asked(heard, [public(block) for block in range(50)], seed=3)
    assert len(order) == VOICES_MAX - 1
    for block in range(300):
        say(heard, f"9.{block // 200}.{block % 200}.1")
    assert len(heard) == VOICES_MAX


def test_who_is_far_away_is_asked_though_neighbours_were() -> None:
    heard = Observations()
    asked(heard, [f"192.168.1.{host}" for host in range(1, 10)], seed=1, liars="none")
    assert (
        heard.choose_peer(peers(["192.168.1.77", public(1)]), 0.0, Random(1))
        == peers([public(1)])[0]
    )


# --- faults that the tests above would find ------------------------------------------------------


def test_without_blocks_a_crowd_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed_addresses, "voice_of", lambda peer, ip: peer)
    crowd = [(public(3, host), WRONG) for host in range(1, 10)]
    assert believed(*crowd).proven == ((WRONG, PORT),)


def test_without_agreement_one_peer_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed_addresses, "AGREE", 1)
    assert believed((public(3), WRONG)).proven == ((WRONG, PORT),)
