"""Settings in words, read from the classes that declare them, and the types of their values.

Flags, `--help`, error messages, `swarm-node config` and docs/settings.md all read this.
"""

import ast
import functools
import inspect
import ipaddress
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field
from pydantic_core import PydanticUndefined

from node.system.pause_rules import Hours
from swarm.errors import ConfigError, RemoteProtocolError
from swarm.identity import public_key_of
from swarm.peers.invite import Invitation
from swarm.telemetry.broker_address import Broker
from swarm.telemetry.web_hosts import checked_name
from swarm.wire.messages import ADDRESS_CHARS_MAX

# The part of a setting's name that says its unit.
_UNIT: Final = re.compile(r"(?:^|_)(bytes|tokens|chars|s)(_per_s)?(?:_|$)")
METHOD: Final = "METHOD"  # metavar of a setting that is the name of a method, and what it is set to
_KINDS: Final[Mapping[Any, str]] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
}


@dataclass(frozen=True, slots=True)
class Flag:
    """The parts of a setting's flag that do not follow from its name and type."""

    name: str = ""  # without dashes
    alias: str = ""  # a second name
    metavar: str = ""
    often: bool = False  # `--help` lists it; `--help-all` lists every setting


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: `kind` is its type, unit and bounds in words."""

    name: str
    kind: str
    default: str
    meaning: str
    annotation: Any = None
    flag: Flag = Flag()

    @property
    def option(self) -> str:
        return f"--{self.flag.name or self.name.replace('_', '-')}"

    @property
    def brief(self) -> str:
        """The first sentence of the meaning."""
        return self.meaning.partition(". ")[0].rstrip(".").replace("`", "")


@functools.cache
def meanings(model: type[Any]) -> Mapping[str, str]:
    """The docstring below each field of a class and its bases, by the field's name."""
    found: dict[str, str] = {}
    for each in reversed(model.__mro__[:-1]):
        if each.__module__.partition(".")[0] in ("pydantic", "typing"):
            continue
        body = _classes_of(each.__module__)[each.__name__].body
        for field, below in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                text = ast.literal_eval(below.value)
                found[ast.unparse(field.target)] = " ".join(text.split())
    return found


@functools.cache
def _classes_of(module: str) -> Mapping[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}


@functools.cache
def settings_of(model: type[BaseModel]) -> Mapping[str, Setting]:
    """All settings of a model, by name."""
    told, found = meanings(model), {}
    for name, field in model.model_fields.items():
        flag = next((each for each in field.metadata if isinstance(each, Flag)), Flag())
        kind = with_unit(name, kind_of(field.annotation) + _bounds(field.metadata))
        kind = "method" if flag.metavar == METHOD else kind
        found[name] = Setting(
            name,
            "table" if name == "parameters" else kind,  # kept as text
            default_of(field.default),
            told.get(name, ""),
            _plain(field.annotation),
            flag,
        )
    return found


def groups_of(model: type[BaseModel]) -> Iterator[tuple[str, list[Setting]]]:
    """The settings of each base of a model; the base's docstring is the title."""
    settings = settings_of(model)
    for base in model.__bases__:
        title = (base.__doc__ or "").partition(".")[0]
        yield title, [settings[name] for name in base.__annotations__ if name in settings]


def with_unit(name: str, kind: str) -> str:
    """A type in words, with the unit of its number."""
    if not kind.startswith(("number", "whole number")):
        return kind
    found = _UNIT.search(name)
    number, _, bounds = kind.partition("number")
    return f"{number}number, {found[1]}{'/s' if found[2] else ''}{bounds}" if found else kind


def _plain(annotation: Any) -> Any:
    """A type without its metadata and without None."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        inner = [each for each in get_args(annotation) if each is not type(None)]
        return _plain(inner[0]) if len(inner) == 1 else annotation
    return annotation


def kind_of(annotation: Any) -> str:
    """A type in words, with its bounds."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind_of(inner[0]) + _bounds(inner[1:])
    if origin in (Union, types.UnionType):
        kinds = dict.fromkeys(kind_of(each) for each in inner if each is not type(None))
        return " or ".join(kinds)
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in inner)
    if origin is tuple:
        of = "pairs" if get_origin(inner[0]) is tuple else f"{kind_of(inner[0])}s"
        return f"list of {of}"
    return _KINDS.get(annotation, "table")


def _bounds(metadata: Any) -> str:
    flat = [each for entry in metadata for each in (getattr(entry, "metadata", None) or [entry])]
    found = {
        bound: _number(value)
        for bound in ("ge", "gt", "le", "lt")
        for each in flat
        if (value := getattr(each, bound, None)) is not None
    }
    if found.keys() == {"ge", "le"}:
        return f" from {found['ge']} to {found['le']}"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return "".join(f", {words[bound]} {value}" for bound, value in found.items())


def _number(value: float) -> str:
    if value != int(value):
        return f"{value:g}"
    whole = int(value)
    is_power = whole > 2**40 and whole & (whole - 1) == 0
    return f"2^{whole.bit_length() - 1}" if is_power else f"{whole:_}"


def default_of(value: Any) -> str:
    """A default as a file would give it, or `none`."""
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        return "its defaults"
    return f"{value:g}" if isinstance(value, float) else written(value) or "none"


def written(value: Any) -> str:
    """A value as a user types it; empty if that is impossible."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ",".join(map(written, value))
    return "" if value is None else str(value)


# The forms of addresses and names in settings. An error says what the form is.

_ADDRESS = re.compile(
    r"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[!-.0-~]{1,128})/tcp/(?P<port>[0-9]{1,5})"
    r"(/p2p/(?P<peer>[!-.0-~]+))?"
)
_DNS_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DNS_NAME = re.compile(rf"({_DNS_LABEL}\.)*{_DNS_LABEL}")


def _listed(value: Any) -> Any:
    """Split text at commas, for flags and environment variables."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(value) if isinstance(value, list) else value


Listed = BeforeValidator(_listed)


_UNSPOKEN = {
    "dnsaddr": "is a list in DNS, which is not looked up: take an address in it, which",
    "quic": "is QUIC, and nodes speak TCP alone: it",
    "quic-v1": "is QUIC, and nodes speak TCP alone: it",
    "udp": "is UDP, and nodes speak TCP alone: it",
    "ws": "is a websocket, and nodes speak plain TCP alone: it",
    "wss": "is a websocket, and nodes speak plain TCP alone: it",
    "tls": "is TLS, and nodes speak plain TCP with Noise alone: it",
}  # by a part of an address; the first that is there tells


def _unspoken(text: str) -> str:
    """The part of an address that no node speaks, in words; empty: there is none."""
    parts = text.split("/")
    return next((f"{told} " for name, told in _UNSPOKEN.items() if name in parts), "")


def _check_address(text: str, *, with_peer: bool = False) -> str:
    shape = "/ip4/<address>/tcp/<port>" + ("/p2p/<peer id>" if with_peer else "")
    match = _ADDRESS.fullmatch(text)
    if match is None or (with_peer and match["peer"] is None) or int(match["port"]) > 65_535:
        raise ValueError(f"{_unspoken(text)}must look like {shape}")
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


def _listen_address(text: str) -> str:
    _check_address(text)
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
    """Check text with a parser. `skipped` ends the part of its message that is left out."""

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


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", text):
        raise ValueError("must be auto, cpu, cuda, or one GPU such as cuda:1")
    return text


def _fork(text: str) -> str:
    """A whole path, because a later command may run elsewhere."""
    place, _, number = text.rpartition("@")
    if not place or not re.fullmatch(r"[0-9]{1,9}", number):
        raise ValueError("must be a data directory and a round, such as base@40")
    return f"{os.path.abspath(place)}@{int(number)}"


def _seed(value: Any) -> Any:
    if isinstance(value, str) and ".." in value:
        raise ValueError("a range is a sweep, which only the flag of swarm-node join takes")
    return value


def _start_name(text: str) -> str:
    if "/" in text or not text.isprintable() or " " in text:
        raise ValueError("must have no blanks and no /")
    return text


_AddressText = Annotated[str, Field(max_length=ADDRESS_CHARS_MAX)]
ListenAddress = Annotated[_AddressText, AfterValidator(_listen_address)]
AnnounceAddress = Annotated[_AddressText, AfterValidator(_check_address)]
PeerAddress = Annotated[_AddressText, AfterValidator(_peer_address)]
PublisherId = Annotated[str, AfterValidator(_publisher_id)]
InvitationText = Annotated[str, _parsed(Invitation.decode)]
BrokerUrl = Annotated[str, _parsed(Broker.parse, ": ")]
HoursText = Annotated[str, _parsed(Hours.parse)]
ServerUrl = Annotated[str, AfterValidator(_server_url)]
HostAndPort = Annotated[str, AfterValidator(_host_and_port)]
WebName = Annotated[str, _parsed(checked_name)]
Name = Annotated[str, Field(min_length=1)]
DeviceName = Annotated[str, AfterValidator(_device)]
ForkSource = Annotated[str, AfterValidator(_fork)]
Seed = Annotated[int, BeforeValidator(_seed)]
StartName = Annotated[str, Field(max_length=64), AfterValidator(_start_name)]
