"""Addresses of simulated hosts: public, in blocks as drawn, the same for the same seed."""

from collections import Counter
from random import Random

import pytest

from swarm.limits.address_blocks import block_of, is_public
from swarm.simulation.links import HOUSEHOLD_MAX, draw_ips, separate_ips


def blocks(ips: tuple[str, ...]) -> Counter[str | None]:
    return Counter(block_of(ip) for ip in ips)


@pytest.mark.parametrize("hosts", [1, 2, 3, 8, 64, 1088])
def test_each_host_has_a_public_address_of_its_own_and_most_a_block(hosts: int) -> None:
    for ips in (draw_ips(hosts, Random(1)), separate_ips(hosts)):
        assert len(set(ips)) == hosts
        assert all(is_public(ip) for ip in ips)
        assert max(blocks(ips).values()) <= HOUSEHOLD_MAX
        alone = sum(number == 1 for number in blocks(ips).values())
        assert 3 * alone >= hosts
    assert set(blocks(separate_ips(hosts)).values()) == {1}


@pytest.mark.parametrize("seed", range(20))
def test_some_hosts_are_neighbours_and_both_kinds_of_address_are_there(seed: int) -> None:
    ips = draw_ips(8, Random(seed))
    assert sorted(blocks(ips).values())[-1] == 2
    assert {":" in ip for ip in ips} == {True, False}


def test_those_that_are_together_have_a_block_to_themselves() -> None:
    ips = draw_ips(12, Random(1), together=(4, 9, 10, 11))
    assert {host for host, ip in enumerate(ips) if block_of(ip) == block_of(ips[4])} == {
        4,
        9,
        10,
        11,
    }


def test_the_seed_alone_decides() -> None:
    assert draw_ips(16, Random("a")) == draw_ips(16, Random("a")) != draw_ips(16, Random("b"))
