"""The host names that our web servers answer to. Pure.

Any web page can point its own host name at this machine (DNS rebinding), and a browser then lets
it read the answers. So a server answers only to names that a stranger cannot redirect: loopback's
names, IP addresses, this machine's own name, and names that a person gave.

A server on loopback accepts loopback's addresses alone. A server elsewhere accepts any IP address:
behind a router it does not know its own. Ports are not compared, because a tunnel has its own.
"""

import ipaddress
import re
from collections.abc import Sequence
from typing import Final

from swarm.errors import ConfigError

NAMES_MAX: Final = 32
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
MISDIRECTED, FORBIDDEN = 421, 403

_NAME: Final = re.compile(r"(?=.{1,253}\Z)[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?")
_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:/@\s]+))(?::[0-9]{1,5})?")


def checked_name(text: str) -> str:
    """A name that a person gives, without a port.

    Raises:
        ConfigError: it is none.
    """
    if _NAME.fullmatch(text.lower()) is None:
        raise ConfigError(f"{text!r}: give a host's name, such as node1.example.org")
    return text.lower()


class WebHosts:
    """The names of one server. `bound_ip`: where it listens; `names`: further ones, that a person
    gave or that this machine has."""

    def __init__(self, bound_ip: str, names: Sequence[str] = ()) -> None:
        bound = ipaddress.ip_address(bound_ip.partition("%")[0])
        self._on_loopback = bound.is_loopback
        self._names = LOOPBACK | {str(bound)} | {name.lower() for name in names[:NAMES_MAX]}

    def objection(self, hosts: Sequence[str], origins: Sequence[str]) -> tuple[int, str] | None:
        """The HTTP status and the text with which a request with these `Host` and `Origin` headers
        is refused; None: it is answered."""
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            what = "an unknown name" if hosts else "no name"
            told = f"called by {what}: use an IP address, or give the name with --web-name"
            return MISDIRECTED, told
        # without one, as of programs and of pages that are typed in, nothing is asked by a page
        if any(origin.partition("://")[2].lower() != hosts[0].lower() for origin in origins):
            return FORBIDDEN, "asked by a page of another host"
        return None

    def _is_ours(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = (match[1] or match[2]).lower().removesuffix(".")
        try:
            ip = ipaddress.ip_address(name)
        except ValueError:
            return match[1] is None and name in self._names
        # what an address ends in leads to it and nowhere else
        return not self._on_loopback or ip.is_loopback or str(ip) in self._names
