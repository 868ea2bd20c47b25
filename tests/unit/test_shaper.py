"""When packets arrive, on links that are drawn from a seed."""

import math
from random import Random

import pytest

from swarm.simulation.links import LinkProfile
from swarm.simulation.shaper import JITTER_HOLD_S, QUEUE_BYTES_MIN, PacketLinks

PACKET = 1500


def links(profile: LinkProfile, seed: int = 1, **others: LinkProfile) -> PacketLinks:
    return PacketLinks({"a": profile, "b": profile, **others}, Random(seed))


def test_latency_is_added_once() -> None:
    assert links(LinkProfile(latency_s=0.05)).send("a", "b", PACKET, 10.0) == pytest.approx(10.05)


def test_uplink_is_shared_by_all_that_a_host_sends() -> None:
    slow = LinkProfile(up_bytes_per_s=PACKET)
    shaper = links(slow, c=slow)
    assert shaper.send("a", "b", PACKET, 0.0) == pytest.approx(1.0)
    assert shaper.send("a", "c", PACKET, 0.0) == pytest.approx(2.0)
    assert shaper.send("b", "c", PACKET, 0.0) == pytest.approx(1.0)  # another host's


def test_downlink_is_shared_by_all_who_send_there() -> None:
    slow = LinkProfile(down_bytes_per_s=PACKET)
    shaper = links(slow, c=slow)
    assert shaper.receive("a", "b", PACKET, 5.0) == pytest.approx(6.0)
    assert shaper.receive("c", "b", PACKET, 5.0) == pytest.approx(7.0)


def test_queue_is_bounded_and_says_what_it_lost() -> None:
    shaper = links(LinkProfile(up_bytes_per_s=1000.0))
    sent = [shaper.send("a", "b", PACKET, 0.0) for _ in range(100)]
    taken = QUEUE_BYTES_MIN // PACKET
    assert sum(at is not None for at in sent) == taken
    assert shaper.counters["a"].overflowed == 100 - taken
    # as bytes leave, there is room again
    assert shaper.send("a", "b", PACKET, 100.0) is not None


def test_unlimited_link_has_no_queue() -> None:
    shaper = links(LinkProfile())
    assert all(shaper.send("a", "b", PACKET, 0.0) == 0.0 for _ in range(1000))


def test_loss_is_drawn_from_the_seed() -> None:
    lossy = LinkProfile(loss=0.1)

    def fate(seed: int) -> list[bool]:
        shaper = links(lossy, seed)
        return [shaper.send("a", "b", PACKET, 0.0) is None for _ in range(2000)]

    assert fate(1) == fate(1) != fate(2)
    assert sum(fate(1)) == pytest.approx(200, abs=60)


def test_jitter_delays_a_burst_as_one_and_keeps_the_order() -> None:
    shaper = links(LinkProfile(latency_s=0.01, jitter_s=0.05))
    step_s = JITTER_HOLD_S / 4
    arrivals = [shaper.send("a", "b", PACKET, i * step_s) for i in range(4000)]
    known = [at for at in arrivals if at is not None]
    assert len(known) == 4000
    assert known == sorted(known)
    delays = {round(at - i * step_s, 9) for i, at in enumerate(known)}
    assert min(delays) >= 0.01
    assert 100 < len(delays) <= 4000
    # those that came within one hold of the first share its delay
    assert round(known[3] - 3 * step_s, 9) == round(known[0], 9)


def test_cut_is_one_way_until_healed() -> None:
    shaper = links(LinkProfile())
    shaper.cut(["a"], ["b"])
    assert shaper.send("a", "b", PACKET, 0.0) is None
    assert shaper.send("b", "a", PACKET, 0.0) == 0.0
    assert shaper.counters["a"].cut == 1
    shaper.heal()
    assert shaper.send("a", "b", PACKET, 0.0) == 0.0


def test_unlike_hosts_meet_in_the_middle() -> None:
    near, far = LinkProfile(latency_s=0.01), LinkProfile(latency_s=0.03)
    shaper = links(near, c=far)
    at = shaper.send("a", "c", PACKET, 0.0)
    assert at is not None
    assert math.isclose(at, 0.02)
