"""How long simulated messages take."""

import math
from random import Random

import pytest

from swarm.errors import ConfigError
from swarm.identity import PeerId
from swarm.simulation.links import OVERHEAD_BYTES, RETRANSMIT_AFTER_S, LinkProfile, SimulatedLinks

A, B, C, D = PeerId("a"), PeerId("b"), PeerId("c"), PeerId("d")
RNG = Random(0)


def arrival_s(
    links: SimulatedLinks, source: PeerId, target: PeerId, wire_bytes: int, now_s: float
) -> float:
    flight = links.send(source, target, wire_bytes - OVERHEAD_BYTES, now_s, RNG, reliable=True)
    return links.receive(target, flight, flight.last_s)


def test_a_message_takes_latency_and_its_time_on_the_slower_link() -> None:
    for up, down in ((1e3, 1e6), (1e6, 1e3), (1e3, 1e3)):
        links = SimulatedLinks(LinkProfile(0.5, up_bytes_per_s=up, down_bytes_per_s=down))
        assert arrival_s(links, A, B, 2000, 10.0) == pytest.approx(10.0 + 2.0 + 0.5)


def test_all_messages_of_a_host_share_its_uplink() -> None:
    links = SimulatedLinks(LinkProfile(0.5, up_bytes_per_s=1000.0))
    assert arrival_s(links, A, B, 1000, 0.0) == pytest.approx(1.5)
    assert arrival_s(links, A, C, 1000, 0.0) == pytest.approx(2.5)  # waits for the first
    assert arrival_s(links, B, D, 1000, 0.0) == pytest.approx(1.5)  # another host's
    assert arrival_s(links, A, C, 1000, 9.0) == pytest.approx(10.5)  # idle again


def test_all_messages_to_a_host_share_its_downlink() -> None:
    links = SimulatedLinks(LinkProfile(0.5, down_bytes_per_s=1000.0))
    assert arrival_s(links, A, C, 1000, 0.0) == pytest.approx(1.5)
    assert arrival_s(links, B, C, 1000, 0.0) == pytest.approx(2.5)
    assert arrival_s(links, B, A, 1000, 0.0) == pytest.approx(1.5)


def test_between_unlike_hosts_each_side_counts() -> None:
    links = SimulatedLinks(
        LinkProfile(0.1, up_bytes_per_s=10.0, down_bytes_per_s=20.0, loss=0.19),
        {B: LinkProfile(0.3, 0.2, up_bytes_per_s=30.0, down_bytes_per_s=40.0)},
    )
    path = links.path(A, B)
    assert (path.latency_s, path.jitter_s) == (pytest.approx(0.2), pytest.approx(0.1))
    assert (path.up_bytes_per_s, path.down_bytes_per_s) == (10.0, 40.0)
    assert path.loss == pytest.approx(0.1)  # half a path of 19 % loss, half a path of none


def test_jitter_has_its_mean_and_never_hurries() -> None:
    links = SimulatedLinks(LinkProfile(0.1, jitter_s=0.05))
    rng = Random(1)
    delays = [links.send(A, B, 0, 0.0, rng, reliable=False).last_s for _ in range(4000)]
    assert min(delays) >= 0.1
    assert sum(delays) / len(delays) == pytest.approx(0.15, abs=0.005)


def test_gossip_is_lost_and_duplicated_as_often_as_said() -> None:
    links = SimulatedLinks(LinkProfile(loss=0.1, duplication=0.2))
    rng = Random(1)
    copies = [links.send(A, B, 0, 0.0, rng, reliable=False).copies for _ in range(8000)]
    assert copies.count(0) / len(copies) == pytest.approx(0.1, abs=0.015)
    assert copies.count(2) / len(copies) == pytest.approx(0.18, abs=0.015)


@pytest.mark.parametrize("loss", [0.01, 0.5])
def test_a_reliable_message_comes_late_by_each_lost_packet(loss: float) -> None:
    links = SimulatedLinks(LinkProfile(loss=loss))
    rng = Random(1)
    packets, messages = 100, 400
    flights = [
        links.send(A, B, packets * 1460 - OVERHEAD_BYTES, 0.0, rng, reliable=True)
        for _ in range(messages)
    ]
    assert {flight.copies for flight in flights} == {1}
    lost = [flight.last_s / RETRANSMIT_AFTER_S for flight in flights]
    assert all(each == pytest.approx(round(each)) for each in lost)
    expected = packets * loss / (1.0 - loss)  # retransmissions may be lost as well
    assert sum(lost) / messages == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize(
    "values",
    [
        {"latency_s": -1.0},
        {"latency_s": math.nan},
        {"jitter_s": math.inf},
        {"up_bytes_per_s": 0.0},
        {"down_bytes_per_s": -5.0},
        {"loss": 1.0},
        {"duplication": -0.1},
    ],
)
def test_impossible_links_are_refused(values: dict[str, float]) -> None:
    (name,) = values
    with pytest.raises(ConfigError, match=name):
        LinkProfile(**values)
