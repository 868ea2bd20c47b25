"""Multiaddrs: parsing, listening, DNS names, and which addresses to tell others."""

import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

import ifaddr
import trio
from libp2p.exceptions import BaseLibp2pError
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError
from trio.lowlevel import RunVar

from swarm.errors import ConfigError, RemoteProtocolError
from swarm.identity import PeerId, public_key_of

LISTEN_MAX = 16
FAMILIES = {
    "dns": socket.AF_UNSPEC,
    "dns4": socket.AF_INET,
    "dns6": socket.AF_INET6,
}
DIALLED = ("ip4", "ip6", *FAMILIES)
OWN_BEFORE_RELAYED_MAX = 4  # own addresses listed before those through relays
NAME_ADDRESSES_MAX = 4  # dialled per DNS name
LOOK_UPS_MAX = 4  # at a time: a hanging resolver keeps its thread
LOOK_UP_TIMEOUT_S = 10.0

_limiter: RunVar[trio.CapacityLimiter] = RunVar("look_ups")


def parse_peer_address(text: str) -> tuple[Multiaddr, PeerId]:
    """Split `/…/p2p/<peer id>` into the address and the peer id. ConfigError: the text is no such
    multiaddr."""
    where, _, peer = text.rpartition("/p2p/")
    try:
        public_key_of(peer)
        return parse_tcp_address(where), PeerId(peer)
    except RemoteProtocolError:
        raise ConfigError(f"{text!r}: give an address that ends in /p2p/<peer id>") from None


def parse_tcp_address(text: str) -> Multiaddr:
    """Parse a multiaddr of an IP address or DNS name and a TCP port. ConfigError: the text is
    something else."""
    try:
        address = Multiaddr(text)
        names = [protocol.name for protocol in address.protocols()]
    except (MultiaddrError, ValueError):
        names = []
    if len(names) != 2 or names[0] not in DIALLED:
        raise ConfigError(f"{text!r}: give a multiaddr like /ip4/203.0.113.7/tcp/4001")
    if names[1] != "tcp":
        raise ConfigError(f"{text!r}: only TCP is supported, for example /ip4/0.0.0.0/tcp/4001")
    return address


async def dial_in_turn(address: Multiaddr, dial: Callable[[Multiaddr], Awaitable[object]]) -> None:
    """Dial an address; a DNS name's addresses in turn until one answers. The last error of `dial`
    propagates. OSError: the name is unknown, or the lookup timed out."""
    targets = await _resolve(address)
    for target in targets[:-1]:
        with suppress(BaseLibp2pError, OSError):
            await dial(target)
            return
    await dial(targets[-1])


async def _resolve(address: Multiaddr) -> list[Multiaddr]:
    kind = next(iter(address.protocols())).name
    if kind not in FAMILIES:
        return [address]
    name, port = address.value_for_protocol(kind), address.value_for_protocol("tcp")
    try:
        with trio.fail_after(LOOK_UP_TIMEOUT_S):
            found = await trio.to_thread.run_sync(
                socket.getaddrinfo, name, port, FAMILIES[kind], socket.SOCK_STREAM,
                abandon_on_cancel=True, limiter=_lookup_threads(),
            )  # fmt: skip
    except UnicodeError:
        raise OSError("no DNS name") from None
    except trio.TooSlowError:
        raise OSError(f"the name was not found within {LOOK_UP_TIMEOUT_S} s") from None
    targets = [
        Multiaddr(f"/{'ip6' if family == socket.AF_INET6 else 'ip4'}/{where[0]}/tcp/{port}")
        for family, _, _, _, where in found[:NAME_ADDRESSES_MAX]
        if "%" not in str(where[0])  # has a zone, which no multiaddr can carry
    ]
    if not targets:
        raise OSError("the name has no address that can be dialled")
    return targets


def _lookup_threads() -> trio.CapacityLimiter:
    """Threads for lookups alone; trio's own serve all other work."""
    try:
        return _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(LOOK_UPS_MAX)
        _limiter.set(limiter)
        return limiter


def parse_listen(listen: Sequence[str]) -> list[Multiaddr]:
    if not 0 < len(listen) <= LISTEN_MAX:
        raise ConfigError(f"listen: give 1 to {LISTEN_MAX} addresses like /ip4/0.0.0.0/tcp/0")
    addresses = [parse_tcp_address(text) for text in listen]
    for address in addresses:
        if next(iter(address.protocols())).name not in ("ip4", "ip6"):
            raise ConfigError(f"listen {address}: give an IP address, not a name")
    return addresses


def port_of(address: Multiaddr) -> int:
    return int(address.value_for_protocol("tcp") or 0)


def on_free_ports(listen: Sequence[str], ports: Sequence[int]) -> list[str]:
    """Give addresses with port 0 a free one of `ports`. ConfigError: a malformed address."""
    chosen = list(listen)
    for i, (address, port) in enumerate(zip(parse_listen(listen), ports, strict=False)):
        if port_of(address) == 0:
            wanted = address.decapsulate("/tcp/0").encapsulate(f"/tcp/{port}")
            with suppress(ConfigError):
                probe_port(wanted)
                chosen[i] = str(wanted)
    return chosen


def probe_port(address: Multiaddr) -> None:
    """Check that the port is free: upstream silently shares it with another program of the same
    user. ConfigError: the port is taken, or the address is not ours."""
    protocols = [protocol.name for protocol in address.protocols()]
    family = socket.AF_INET6 if protocols[0] == "ip6" else socket.AF_INET
    host = address.value_for_protocol(protocols[0])
    port = port_of(address)
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address}: {error.strerror}: choose another address or port"
            ) from None


def _expand(address: Multiaddr) -> list[str]:
    """The address, or one per interface where it is a wildcard."""
    text = str(address)
    for any_host, is_ip6 in (("/ip4/0.0.0.0/", False), ("/ip6/::/", True)):
        if text.startswith(any_host):
            port = text.removeprefix(any_host)
            hosts = _interface_hosts(is_ip6)
            return [f"/{'ip6' if is_ip6 else 'ip4'}/{host}/{port}" for host in hosts]
    return [text]


def _interface_hosts(is_ip6: bool) -> list[str]:
    """IP addresses of this machine without link-local ones, which need a zone."""
    ips = [ip for adapter in ifaddr.get_adapters() for ip in adapter.ips if ip.is_IPv6 == is_ip6]
    hosts = [ip.ip[0] if isinstance(ip.ip, tuple) else ip.ip for ip in ips]
    return [host for host in hosts if not host.startswith("fe80")]


def own_addresses(bound: Iterable[Multiaddr]) -> list[str]:
    """Addresses that this machine listens on, loopback last."""
    texts = dict.fromkeys(text for address in bound for text in _expand(address))
    return sorted(texts, key=_is_loopback)


def _is_loopback(text: str) -> bool:
    return text.startswith(("/ip4/127.", "/ip6/::1/"))


def usable(
    own: Sequence[str], outside: Sequence[str], relayed: Sequence[str], peer: PeerId
) -> tuple[str, ...]:
    """All addresses to tell others: external ones first, relayed ones after a few of our own,
    loopback last. A cut at the end then never removes all of one kind."""
    near = [f"{text}/p2p/{peer}" for text in own]
    first = near[:OWN_BEFORE_RELAYED_MAX] if relayed else near
    if not all(_is_loopback(text) for text in own):
        first = [text for text in first if not _is_loopback(text)]
    told = [f"{text}/p2p/{peer}" for text in outside]
    return tuple(dict.fromkeys([*told, *first, *relayed, *near]))
