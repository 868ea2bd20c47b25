"""Invitations to a swarm: one line with addresses, run, model, and the join key of a private swarm.
The key is in a file with mode 0600 and never in logs, errors or status. The wire uses only keys
derived from it. A link says the same of an open swarm in the form of an address."""

import hashlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import base58
from pydantic import Field

from swarm.errors import ConfigError, RemoteProtocolError
from swarm.identity import public_key_of
from swarm.storage import write_new
from swarm.texts import printable
from swarm.wire import codec
from swarm.wire.messages import NAME_CHARS_MAX, Addresses, RunId, WireModel

INVITE_PREFIX = "swarm1-"
INVITE_BYTES_MAX = 2048
INVITE_CHARS_MAX = 4096
INVITE_ADDRESSES_MAX = 4
CHECKSUM_BYTES = 4
JOIN_KEY_BYTES = 32
HANDSHAKE_DOMAIN = b"swarm/join-key/handshake/1\x00"
DISCOVERY_DOMAIN = b"swarm/join-key/discovery/1\x00"
_LINK: Final = re.compile(
    r"(/.+)/run/([a-z0-9-]{1,46}-[0-9a-f]{32})(?:/model/([\w.-]{1,64}))?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class JoinKey:
    """Secret of all members of a private swarm."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        assert len(self.secret) == JOIN_KEY_BYTES

    @classmethod
    def generate(cls) -> "JoinKey":
        return cls(os.urandom(JOIN_KEY_BYTES))

    def handshake_key(self) -> bytes:
        """32 bytes that both ends of a connection must know."""
        return hashlib.sha256(HANDSHAKE_DOMAIN + self.secret).digest()

    def discovery_key(self) -> bytes:
        """32 bytes that mark members on a local network."""
        return hashlib.sha256(DISCOVERY_DOMAIN + self.secret).digest()

    def save(self, path: Path) -> None:
        """Write a new file with mode 0600; ConfigError if it exists or cannot be written."""
        try:
            write_new(path, self.secret.hex().encode() + b"\n")
        except OSError as error:
            raise ConfigError(f"join key {path}: {error.strerror}") from None

    @classmethod
    def load(cls, path: Path) -> "JoinKey | None":
        """None: no file. ConfigError: unreadable, readable by others, or no key."""
        try:
            if path.stat().st_mode & 0o077:
                raise ConfigError(f"join key {path} can be read by others: run chmod 600 {path}")
            text = path.read_text()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"join key {path} cannot be read: {error}") from None
        try:
            return cls(bytes.fromhex(text.strip()))
        except (ValueError, AssertionError):
            raise ConfigError(
                f"join key {path} is damaged: delete it and join by an invitation again"
            ) from None


class _Body(WireModel):
    run_id: RunId
    addresses: Addresses
    key: Annotated[bytes, Field(min_length=JOIN_KEY_BYTES, max_length=JOIN_KEY_BYTES)] | None
    model: Annotated[str, Field(max_length=NAME_CHARS_MAX)] = ""


@dataclass(frozen=True, slots=True)
class Invitation:
    """Address of a swarm. `key` None: it is open. `model`: to begin with; empty: unsaid."""

    run_id: str
    addresses: tuple[str, ...]
    key: JoinKey | None = None
    model: str = ""

    def encode(self) -> str:
        body = _Body(
            run_id=self.run_id,
            addresses=self.addresses[:INVITE_ADDRESSES_MAX],
            key=self.key.secret if self.key else None,
            model=self.model,
        )
        raw = codec.encode(body)
        return INVITE_PREFIX + base58.b58encode(raw + _checksum(raw)).decode()

    @classmethod
    def decode(cls, text: str) -> "Invitation":
        """Parse an invitation; ConfigError, which quotes nothing of it, if it is invalid."""
        text = text.strip()
        if not text.startswith(INVITE_PREFIX) or len(text) > INVITE_CHARS_MAX:
            raise ConfigError(f"no invitation: it starts with {INVITE_PREFIX}; copy it whole")
        try:
            raw = base58.b58decode(text.removeprefix(INVITE_PREFIX))
            raw, checksum = raw[:-CHECKSUM_BYTES], raw[-CHECKSUM_BYTES:]
            if checksum != _checksum(raw):
                raise ConfigError("the invitation is damaged or cut short: copy it whole")
            body = codec.decode(raw, _Body, INVITE_BYTES_MAX)
            for address in body.addresses:
                public_key_of(address.rpartition("/p2p/")[2])
        except (ValueError, RemoteProtocolError):
            raise ConfigError("the invitation is of another version or damaged") from None
        key = JoinKey(body.key) if body.key else None
        return cls(body.run_id, body.addresses, key, body.model)

    @classmethod
    def of_link(cls, text: str) -> "Invitation | None":
        """The content of a link, whose address is unchecked; None: the text is no link.
        ConfigError: it is cut short or changed."""
        if "/run/" not in text and "/model/" not in text:
            return None
        match = _LINK.fullmatch(text)
        if match is None:
            raise ConfigError(f"{printable(text, 100)}: no whole link; copy it again")
        return cls(match[2], (match[1],), model=match[3] or "")

    @property
    def links(self) -> tuple[str, ...]:
        """A link for each address."""
        more = f"/run/{self.run_id}" + (f"/model/{self.model}" if self.model else "")
        return tuple(f"{address}{more}" for address in self.addresses)


def _checksum(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()[:CHECKSUM_BYTES]


def read_allow_list(path: Path) -> frozenset[str]:
    """Peer ids in a file, one a line; `#` begins a comment. ConfigError: a bad file."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--allow {path}: cannot be read: {error}") from None
    allowed = set()
    for number, line in enumerate(lines, 1):
        peer = line.partition("#")[0].strip()
        if not peer:
            continue
        try:
            public_key_of(peer)
        except RemoteProtocolError as error:
            raise ConfigError(f"--allow {path}: line {number}: {error.detail}") from None
        allowed.add(peer)
    return frozenset(allowed)
