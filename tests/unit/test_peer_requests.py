"""Whom to ask for news."""

from random import Random

from swarm.identity import PeerId
from swarm.peers.requests import PeersToAsk

PEERS = [PeerId(f"p{number}") for number in range(6)]


def test_each_new_peer_is_drawn_once_and_then_one_of_all_now_and_then() -> None:
    to_ask = PeersToAsk(10.0, 4, Random(1), now_s=0.0)
    first, second = to_ask.draw(PEERS, 0.0), to_ask.draw(PEERS, 1.0)
    assert (len(first), len(second)) == (4, 2)
    assert {*first, *second} == set(PEERS)
    drawn = [len(to_ask.draw(PEERS, float(now_s))) for now_s in range(2, 102)]
    assert max(drawn) == 1
    assert 8 <= sum(drawn) <= 12
    assert to_ask.draw([], 200.0) == []


def test_who_left_or_is_forgotten_is_new_again() -> None:
    to_ask = PeersToAsk(1e9, 4, Random(1), now_s=0.0)
    to_ask.draw(PEERS[:3], 0.0)
    to_ask.draw(PEERS[:2], 1.0)
    assert to_ask.draw(PEERS[:3], 2.0) == [PEERS[2]]
    to_ask.forget(PEERS[0])
    assert to_ask.draw(PEERS[:3], 3.0) == [PEERS[0]]
    to_ask.forget_all()
    assert set(to_ask.draw(PEERS[:3], 4.0)) == set(PEERS[:3])
