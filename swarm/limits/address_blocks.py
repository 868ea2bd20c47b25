"""Address blocks: what one person can easily have many addresses in. Pure.

A block is a /24 of IPv4 or a /56 of IPv6: about what one line or one hosting contract comes with.
Behind a private or loopback address there may be a whole swarm on one machine, in one home or in
one laboratory, and a relayed connection has no address of its own. So such blocks are never
banned and share no quota: see `is_public`.
"""

import ipaddress
from functools import lru_cache
from typing import Final, NewType

Block = NewType("Block", str)
OriginPath = tuple[str, ...]
"""An origin: names from wide to narrow, of which each is within the one before; () is anywhere."""

BLOCK_LENGTH: Final = 2  # of a path: it names a network, then an address block, then an address
RELAYED_PATH: Final[OriginPath] = ("relayed",)  # whom relays hide: they may all be one person

IPV4_BITS: Final = 24
IPV6_BITS: Final = 56
NOWHERE, THIS_MACHINE, LOCAL, GLOBAL = range(4)  # from how far an address can be dialled
PARSED_MAX: Final = 4_096  # addresses whose blocks are remembered: each message asks for them

# Listed and not asked of `ipaddress`, whose idea of private differs from release to release.
_PRIVATE: Final = tuple(
    ipaddress.ip_network(text)
    for text in (
        "127.0.0.0/8",
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "169.254.0.0/16",
        "100.64.0.0/10",  # providers' and overlay networks' shared addresses
        "::1/128",
        "fc00::/7",
        "fe80::/10",
    )
)

_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


@lru_cache(maxsize=PARSED_MAX)
def block_of(ip: str | None) -> Block | None:
    """The block of an address; None for none, or for a text that is no address."""
    address = _parse(ip)
    if address is None:
        return None
    bits = IPV4_BITS if address.version == 4 else IPV6_BITS
    return Block(str(ipaddress.ip_network((address, bits), strict=False)))


@lru_cache(maxsize=PARSED_MAX)
def is_public(ip: str | None) -> bool:
    """Whether whoever has this address is alone with its block, as far as can be known."""
    address = _parse(ip)
    return address is not None and not any(address in network for network in _PRIVATE)


@lru_cache(maxsize=PARSED_MAX)
def path_of(ip: str | None) -> OriginPath:
    """Where an address is: in a /16, in a /24, itself; of IPv6 in a /32, in a /56, in a /64, whose
    holder has each address in it. None: it came through a relay."""
    address = _parse(ip)
    if address is None:
        return RELAYED_PATH
    bits = (16, IPV4_BITS, 32) if address.version == 4 else (32, IPV6_BITS, 64)
    if address.version == 6 and not is_public(ip):
        bits = (32, IPV6_BITS, 128)
    return tuple(str(ipaddress.ip_network((address, each), strict=False)) for each in bits)


@lru_cache(maxsize=PARSED_MAX)
def is_public_network(network: str) -> bool:
    """As `is_public`, of a network that `path_of` names."""
    parsed = ipaddress.ip_network(network)
    return not any(each.version == parsed.version and each.overlaps(parsed) for each in _PRIVATE)


def _parse(ip: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    return None if ip is None else plain_ip(ip.partition("%")[0])


def plain_ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Where packets to an address end up: an IPv4 address that is written as an IPv6 one (mapped,
    6to4, NAT64) comes out as itself. None: the text is no address, or has a zone."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.scope_id is not None:
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(address.packed[-4:])
    return address.ipv4_mapped or address.sixtofour or address


def reach_of_ip(ip: str) -> int:
    """How widely an address can be dialled; LOCAL are private, link-local and carrier-grade NAT
    addresses."""
    parsed = plain_ip(ip)  # none with a zone, which means something on one machine alone
    if parsed is None or parsed.is_unspecified or parsed.is_multicast:
        return NOWHERE
    if parsed.is_loopback:
        return THIS_MACHINE
    return GLOBAL if parsed.is_global else LOCAL


def canonical_ip(text: str) -> str | None:
    """An IP address in its one spelling; None for what is none, or none of a single host."""
    if reach_of_ip(text) < THIS_MACHINE:
        return None
    address = ipaddress.ip_address(text)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
