"""Address blocks: a /24 of IPv4 or a /56 of IPv6, which one person easily gets. Pure. Behind a
private address there may be a whole swarm, so private blocks are not banned."""

import ipaddress
from functools import lru_cache
from typing import Final, NewType

Block = NewType("Block", str)
OriginPath = tuple[str, ...]
"""An origin: names from wide to narrow, each within the one before. () is everything."""

RELAYED_PATH: Final[OriginPath] = ("relayed",)  # all relayed peers: they may be one person

IPV4_BITS: Final = 24
IPV6_BITS: Final = 56
NOWHERE, THIS_MACHINE, LOCAL, GLOBAL = range(4)  # scope of an address
PARSED_MAX: Final = 4_096  # cached addresses: every message looks them up

# Listed here because `ipaddress.is_private` differs between releases.
_PRIVATE: Final = tuple(
    ipaddress.ip_network(text)
    for text in (
        "127.0.0.0/8",
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "169.254.0.0/16",
        "100.64.0.0/10",  # carrier-grade NAT and overlay networks
        "::1/128",
        "fc00::/7",
        "fe80::/10",
    )
)

_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


@lru_cache(maxsize=PARSED_MAX)
def block_of(ip: str | None) -> Block | None:
    address = _parse(ip)
    if address is None:
        return None
    bits = IPV4_BITS if address.version == 4 else IPV6_BITS
    return Block(str(ipaddress.ip_network((address, bits), strict=False)))


@lru_cache(maxsize=PARSED_MAX)
def is_public(ip: str | None) -> bool:
    """False: other nodes may share the block or address, as in one home or laboratory."""
    address = _parse(ip)
    return address is not None and not any(address in network for network in _PRIVATE)


@lru_cache(maxsize=PARSED_MAX)
def path_of(ip: str | None) -> OriginPath:
    """Origin of an address: its /16, /24 and itself (IPv6: /32, /56, /64). None: relayed."""
    address = _parse(ip)
    if address is None:
        return RELAYED_PATH
    bits = (16, IPV4_BITS, 32) if address.version == 4 else (32, IPV6_BITS, 64)
    if address.version == 6 and not is_public(ip):
        bits = (32, IPV6_BITS, 128)
    return tuple(str(ipaddress.ip_network((address, each), strict=False)) for each in bits)


@lru_cache(maxsize=PARSED_MAX)
def is_public_network(network: str) -> bool:
    parsed = ipaddress.ip_network(network)
    return not any(each.version == parsed.version and each.overlaps(parsed) for each in _PRIVATE)


def _parse(ip: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    return None if ip is None else plain_ip(ip.partition("%")[0])


def plain_ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an address without a zone. IPv4 in IPv6 form (mapped, 6to4, NAT64) becomes IPv4."""
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
    """Scope of an address. LOCAL: private, link-local and carrier-grade NAT."""
    parsed = plain_ip(ip)  # None with a zone
    if parsed is None or parsed.is_unspecified or parsed.is_multicast:
        return NOWHERE
    if parsed.is_loopback:
        return THIS_MACHINE
    return GLOBAL if parsed.is_global else LOCAL


def canonical_ip(text: str) -> str | None:
    """The canonical spelling of an address; None: it is not of a single host."""
    if reach_of_ip(text) < THIS_MACHINE:
        return None
    address = ipaddress.ip_address(text)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
