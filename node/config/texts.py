"""The forms of addresses and names in settings. An error says what the form is."""

import ipaddress
import re
from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from node.system.hours import Hours
from swarm.errors import ConfigError, RemoteProtocolError
from swarm.identity import public_key_of
from swarm.peers.invite import Invitation
from swarm.telemetry.broker_address import Broker
from swarm.telemetry.web_hosts import checked_name
from swarm.wire.messages import ADDRESS_CHARS_MAX

_ADDRESS = re.compile(
    r"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[!-.0-~]{1,128})/tcp/(?P<port>[0-9]{1,5})"
    r"(/p2p/(?P<peer>[!-.0-~]+))?"
)
_DNS_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DNS_NAME = re.compile(rf"({_DNS_LABEL}\.)*{_DNS_LABEL}")


def _listed(value: Any) -> Any:
    """A list from text with commas, as flags and environment variables have it."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(value) if isinstance(value, list) else value


Listed = BeforeValidator(_listed)


def _check_address(text: str, *, with_peer: bool) -> str:
    shape = "/ip4/<address>/tcp/<port>" + ("/p2p/<peer id>" if with_peer else "")
    match = _ADDRESS.fullmatch(text)
    if match is None or (with_peer and match["peer"] is None) or int(match["port"]) > 65_535:
        raise ValueError(f"must look like {shape}")
    try:
        if match["kind"] == "ip4":
            ipaddress.IPv4Address(match["host"])
        elif match["kind"] == "ip6":
            ipaddress.IPv6Address(match["host"])
        elif not _DNS_NAME.fullmatch(match["host"]):
            raise ValueError(f"{match['host']} is no DNS name")
        if match["peer"] is not None:
            public_key_of(match["peer"])
    except ipaddress.AddressValueError:
        raise ValueError(f"{match['host']} is no {match['kind']} address") from None
    except RemoteProtocolError as error:
        raise ValueError(f"{match['peer']}: {error.detail}; copy it whole") from None
    return text


def _peer_address(text: str) -> str:
    relay, through, peer = text.partition("/p2p-circuit/p2p/")
    _check_address(relay, with_peer=True)
    if through:  # to the peer through the relay before it
        _check_address(f"{relay.partition('/p2p/')[0]}/p2p/{peer}", with_peer=True)
    return text


def _announce_address(text: str) -> str:
    return _check_address(text, with_peer=False)


def _listen_address(text: str) -> str:
    _check_address(text, with_peer=False)
    if not text.startswith(("/ip4/", "/ip6/")) or "/p2p/" in text:
        raise ValueError("must look like /ip4/0.0.0.0/tcp/0 or /ip6/::/tcp/0")
    return text


def _publisher_id(text: str) -> str:
    try:
        public_key_of(text)
    except RemoteProtocolError as error:
        raise ValueError(
            f"{error.detail}; swarm-node keygen prints the id that goes with a key"
        ) from None
    return text


def _parsed(parse: Callable[[str], object], skipped: str = "") -> AfterValidator:
    """Text that a parser takes. `skipped`: the parser's message begins with a part that ends so."""

    def check(text: str) -> str:
        try:
            parse(text)
        except ConfigError as error:
            said = str(error)
            raise ValueError(said.partition(skipped)[2] if skipped else said) from None
        return text

    return AfterValidator(check)


def _server_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ValueError("must look like http://127.0.0.1:8080/v1")
    if parts.username or parts.password:
        raise ValueError("must hold no key: engine_key_env names the variable that does")
    return text.rstrip("/")


def _host_and_port(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError("must look like 127.0.0.1:9464")
    return text


_AddressText = Annotated[str, Field(max_length=ADDRESS_CHARS_MAX)]
ListenAddress = Annotated[_AddressText, AfterValidator(_listen_address)]
AnnounceAddress = Annotated[_AddressText, AfterValidator(_announce_address)]
PeerAddress = Annotated[_AddressText, AfterValidator(_peer_address)]
PublisherId = Annotated[str, AfterValidator(_publisher_id)]
InvitationText = Annotated[str, _parsed(Invitation.decode)]
BrokerUrl = Annotated[str, _parsed(Broker.parse, ": ")]
HoursText = Annotated[str, _parsed(Hours.of)]
ServerUrl = Annotated[str, AfterValidator(_server_url)]
HostAndPort = Annotated[str, AfterValidator(_host_and_port)]
WebName = Annotated[str, _parsed(checked_name)]
Name = Annotated[str, Field(min_length=1)]
