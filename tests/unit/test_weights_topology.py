"""The bound of a broadcast and its predicted time, against hand-computed cases."""

import pytest

from swarm.identity import PeerId
from swarm.weights.broadcast_time import PeerLink, bound_s, broadcast_s

MB = 1_000_000


def peers(*ups_mb: float, down_mb: float = 100.0) -> list[PeerLink]:
    return [PeerLink(PeerId(f"p{at:03d}"), up * MB, down_mb * MB) for at, up in enumerate(ups_mb)]


@pytest.mark.parametrize(
    ("up_mb", "links", "bound"),
    [
        (10, peers(10, 10), 10.0),  # the publisher sends everything once
        (100, peers(100, 100, down_mb=5), 20.0),  # the slowest downlink takes everything
        (10, peers(1, 1, 1, 1), 400 / 14),  # all uplinks carry four copies
        (10, [], 0.0),
    ],
)
def test_the_bound_is_the_largest_of_its_three(
    up_mb: float, links: list[PeerLink], bound: float
) -> None:
    assert bound_s(100 * MB, up_mb * MB, links) == pytest.approx(bound)


def test_a_broadcast_takes_the_bound_and_what_was_measured_on_top() -> None:
    links = peers(*[10] * 4)  # the bound of 100 MB is 10 s
    assert broadcast_s(100 * MB, MB, 10 * MB, links, 0.05) == pytest.approx(
        1.04 * 10 + 2 * 4 * MB / (10 * MB) + 3 * 2 * 0.05
    )


def test_slow_peers_relay_little_of_what_is_handed_out_last() -> None:
    equal, unlike = peers(10, 10, 10, 10), peers(30, 3, 3, 4)
    times_s = [broadcast_s(MB, MB, 1000 * MB, links, 0.0) for links in (equal, unlike)]
    assert times_s[0] > times_s[1]


def test_without_peers_a_broadcast_takes_no_time() -> None:
    assert broadcast_s(20 * MB, 65_536, MB, [], 0.03) == 0.0
