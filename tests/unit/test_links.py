"""How long simulated messages take."""

import math
from random import Random

import pytest

from swarm.errors import ConfigError
from swarm.identity import PeerId
from swarm.simulation.links import (
    OVERHEAD_BYTES,
    PACKET_BYTES,
    PROBES_MAX,
    PROFILES,
    LinkProfile,
    SimulatedLinks,
    links_of,
)

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
@pytest.mark.parametrize(("packets", "repair_s"), [(1, 0.2), (PROBES_MAX, 0.2), (100, 0.05)])
def test_a_reliable_message_comes_late_by_each_repair(
    loss: float, packets: int, repair_s: float
) -> None:
    size, messages, rng = packets * PACKET_BYTES - OVERHEAD_BYTES, 8000, Random(1)

    def last_s(links: SimulatedLinks) -> float:
        return links.send(A, B, size, 0.0, rng, reliable=True).last_s

    without_s = last_s(SimulatedLinks(LinkProfile(latency_s=0.025)))
    lossy = SimulatedLinks(LinkProfile(latency_s=0.025, loss=loss))
    repairs = [(last_s(lossy) - without_s) / repair_s for _ in range(messages)]
    assert all(each == pytest.approx(round(each), abs=1e-6) for each in repairs)
    # the largest number of times that one of the packets is lost
    expected = sum(1.0 - (1.0 - loss**times) ** packets for times in range(1, 60))
    assert sum(repairs) / messages == pytest.approx(expected, rel=0.15)


def test_what_is_sent_again_occupies_the_uplink() -> None:
    rate, loss, packets = 1e6, 0.5, 10_000
    links = SimulatedLinks(LinkProfile(up_bytes_per_s=rate, loss=loss))
    links.send(A, B, packets * PACKET_BYTES - OVERHEAD_BYTES, 0.0, Random(1), reliable=True)
    after = links.send(A, C, 0, 0.0, Random(1), reliable=False)
    assert after.first_s == pytest.approx(packets * PACKET_BYTES / (1.0 - loss) / rate, rel=0.05)


def slow_s(size: int, rate: float = math.inf, latency_s: float = 0.05) -> float:
    """How long it takes until the last byte left, on an unused path."""
    links = SimulatedLinks(LinkProfile(latency_s=latency_s, down_bytes_per_s=rate))
    flight = links.send(A, B, size - OVERHEAD_BYTES, 0.0, Random(1), reliable=True)
    return flight.last_s - latency_s


def test_a_message_starts_slowly_and_doubles_its_rate_in_each_round_trip() -> None:
    assert slow_s(PACKET_BYTES) == pytest.approx(0.0)
    # 2.885 * 14600 bytes in the first round trip if the rate stayed, so 60766 as it doubles
    doubled = [PACKET_BYTES + 60_766 * (2**trips - 1) for trips in range(6)]
    assert [slow_s(size) for size in doubled] == pytest.approx(
        [0.1 * trips for trips in range(6)], abs=1e-4
    )
    assert slow_s(10**6, latency_s=0.0) == 0.0


def test_a_message_has_no_slow_start_beyond_the_rate_of_its_path() -> None:
    assert slow_s(10**6, rate=4e5) == pytest.approx(0.0)  # 40 KB in a round trip: full at once
    # four times as fast: full after two round trips, then no more is lost
    extra_s = slow_s(10**6, rate=4 * 421_270)
    assert 0.0 < extra_s < 0.2
    assert slow_s(10**7, rate=4 * 421_270) == pytest.approx(extra_s, rel=1e-4)


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


def test_a_clogged_host_sends_and_receives_nothing_for_a_while() -> None:
    links = SimulatedLinks(LinkProfile(0.5))
    links.clog(A, 10.0)
    assert arrival_s(links, A, B, 2000, 1.0) == pytest.approx(10.5, abs=0.05)
    assert arrival_s(links, B, A, 2000, 1.0) == pytest.approx(10.0, abs=0.05)
    assert arrival_s(links, B, C, 2000, 1.0) == pytest.approx(1.5, abs=0.05)
    assert arrival_s(links, A, B, 2000, 20.0) == pytest.approx(20.5, abs=0.05)


def test_a_reordered_message_is_overtaken() -> None:
    rng = Random(1)
    links = SimulatedLinks(LinkProfile(0.1, reordering=0.2))
    delays = [links.send(A, B, 0, 0.0, rng, reliable=False).last_s for _ in range(2000)]
    held = [delay for delay in delays if delay > 0.1 + 1e-9]
    assert len(held) / len(delays) == pytest.approx(0.2, abs=0.03)
    assert max(held) <= 1.1
    assert links.send(A, B, 0, 0.0, rng, reliable=True).last_s == pytest.approx(0.1)


def test_a_host_may_get_another_link() -> None:
    links = SimulatedLinks(LinkProfile(0.1))
    links.change(A, LinkProfile(0.3))
    assert links.path(A, B).latency_s == pytest.approx(0.2)
    assert links.profile_of(B) == LinkProfile(0.1)


def test_every_profile_gives_each_host_a_link() -> None:
    for name in PROFILES:
        assert len(links_of(name, 33)) == 33
    volunteer = [round(8 * link.up_bytes_per_s / 1e6) for link in links_of("volunteer", 32)]
    assert sorted(volunteer) == [20] * 8 + [100] * 16 + [1000] * 8
    with pytest.raises(ConfigError, match="no such profile"):
        links_of("satellite", 2)
