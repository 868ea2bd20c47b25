"""IP addresses of simulated hosts, drawn by the caller's random generator.

They are reserved ranges that the code takes for public ones (198.18.0.0/15 of RFC 2544,
2001:db8::/32 of RFC 3849), so bans and quotas of address blocks apply.
"""

import ipaddress
from collections.abc import Collection
from random import Random
from typing import Final

from swarm.limits.address_blocks import IPV4_BITS, IPV6_BITS

IPV4_RANGE: Final = ipaddress.IPv4Network("198.18.0.0/15")
IPV6_RANGE: Final = ipaddress.IPv6Network("2001:db8::/32")
IPV4_SHARE: Final = 0.5  # share of IPv4 blocks while there are any
IPV4_BLOCKS_MAX: Final = 1 << (IPV4_BITS - IPV4_RANGE.prefixlen)
IPV6_BLOCKS_MAX: Final = 1 << (IPV6_BITS - IPV6_RANGE.prefixlen)
NEIGHBOUR_SHARE: Final = 6  # one host in so many shares another's block
HOUSEHOLD_MAX: Final = 4  # hosts in a shared block: as many as its quota serves


def draw_ips(hosts: int, rng: Random, together: Collection[int] = ()) -> tuple[str, ...]:
    """A distinct address for each host, by index.

    Most hosts have a block of their own. One in `NEIGHBOUR_SHARE`, but at least one of three or
    more, shares another's block. The hosts in `together` share one more block.
    """
    apart = [host for host in range(hosts) if host not in together]
    number = min(len(apart) // 2, max(1, len(apart) // NEIGHBOUR_SHARE)) if len(apart) > 2 else 0
    neighbours = set(rng.sample(apart, number))
    households = [[host] for host in apart if host not in neighbours]
    for host in sorted(neighbours):
        rng.choice([each for each in households if len(each) < HOUSEHOLD_MAX]).append(host)
    if together:
        households.append(sorted(together))
    ips = [""] * hosts
    for block, household in zip(_blocks(len(households), rng), households, strict=True):
        lowest = 1 + rng.randrange(100)
        for place, host in enumerate(household):
            ips[host] = str(block[lowest + place])
    return tuple(ips)


def separate_ips(hosts: int) -> tuple[str, ...]:
    """An address for each host, each in a block of its own."""
    return tuple(str(_ipv6_block(number)[1]) for number in range(hosts))


def _blocks(number: int, rng: Random) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Distinct address blocks of both families in random order."""
    old = min(IPV4_BLOCKS_MAX, round(IPV4_SHARE * number))
    base = int(IPV4_RANGE.network_address)
    blocks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = [
        ipaddress.IPv4Network((base + (each << (32 - IPV4_BITS)), IPV4_BITS))
        for each in rng.sample(range(IPV4_BLOCKS_MAX), old)
    ]
    blocks += [_ipv6_block(each) for each in rng.sample(range(IPV6_BLOCKS_MAX), number - old)]
    rng.shuffle(blocks)
    return blocks


def _ipv6_block(number: int) -> ipaddress.IPv6Network:
    base = int(IPV6_RANGE.network_address)
    return ipaddress.IPv6Network((base + (number << (128 - IPV6_BITS)), IPV6_BITS))
