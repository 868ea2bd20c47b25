"""Node identity: an Ed25519 key, the libp2p peer id that contains it, and signatures. These
cover a domain tag, so one made for one purpose is worthless for another."""

import os
from functools import lru_cache
from pathlib import Path
from typing import NewType

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm.errors import ConfigError, Reject, RemoteProtocolError
from swarm.storage import write_new

PeerId = NewType("PeerId", str)

# multihash "identity", 36 bytes; protobuf: field 1 (type) = 1 (Ed25519), field 2 (data), 32 bytes
_PEER_ID_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
_PEER_ID_TEXT_MAX = 64
PEER_IDS_CACHED_MAX = 4096


def peer_id_of(public_key: bytes) -> PeerId:
    return PeerId(base58.b58encode(_PEER_ID_PREFIX + public_key).decode())


@lru_cache(maxsize=PEER_IDS_CACHED_MAX)
def public_key_of(peer_id: str) -> bytes:
    """Raw public key inside a peer id; RemoteProtocolError for any other text."""
    if len(peer_id) > _PEER_ID_TEXT_MAX:
        raise RemoteProtocolError(Reject.MALFORMED, "peer id too long")
    try:
        raw = base58.b58decode(peer_id)
    except ValueError:
        raise RemoteProtocolError(Reject.MALFORMED, "peer id is not base58") from None
    if len(raw) != len(_PEER_ID_PREFIX) + 32 or not raw.startswith(_PEER_ID_PREFIX):
        raise RemoteProtocolError(Reject.MALFORMED, "not an Ed25519 peer id")
    if base58.b58encode(raw).decode() != peer_id:  # only one spelling per key
        raise RemoteProtocolError(Reject.MALFORMED, "peer id is not in its canonical form")
    return raw[len(_PEER_ID_PREFIX) :]


@lru_cache(maxsize=PEER_IDS_CACHED_MAX)
def _key_of(peer_id: str) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public_key_of(peer_id))


def verify(peer_id: str, domain: bytes, data: bytes, signature: bytes) -> None:
    """Check the signature of `peer_id` over `data` under `domain`; RemoteProtocolError if wrong."""
    try:
        _key_of(peer_id).verify(signature, domain + data)
    except (InvalidSignature, ValueError):
        raise RemoteProtocolError(Reject.BAD_SIGNATURE, f"not signed by {peer_id}") from None


class Identity:
    """A private key. `peer_id` is public, `seed` is the 32-byte secret."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.seed = seed
        self.peer_id = peer_id_of(
            self._key.public_key().public_bytes(
                serialization.Encoding.Raw, serialization.PublicFormat.Raw
            )
        )

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"  # never the secret

    def sign(self, domain: bytes, data: bytes) -> bytes:
        return self._key.sign(domain + data)

    @classmethod
    def generate(cls) -> "Identity":
        return cls(os.urandom(32))

    def save(self, path: Path, passphrase: str | None = None) -> None:
        """Write the key as PKCS #8 PEM with mode 0600; ConfigError if the file exists."""
        encryption: serialization.KeySerializationEncryption = (
            serialization.BestAvailableEncryption(passphrase.encode())
            if passphrase
            else serialization.NoEncryption()
        )
        pem = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_new(path, pem)  # a truncated key file would lock its owner out
        except FileExistsError:
            raise ConfigError(f"key file {path} exists already: name another or use it") from None

    @classmethod
    def load(cls, path: Path, passphrase: str | None = None) -> "Identity":
        """ConfigError: missing, readable by others, no Ed25519 key, or a wrong passphrase."""
        try:
            if path.stat().st_mode & 0o077:
                raise ConfigError(f"key file {path} can be read by others: run chmod 600 {path}")
            pem = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"key file {path}: {error.strerror}") from None
        try:
            key = serialization.load_pem_private_key(
                pem, passphrase.encode() if passphrase else None
            )
        except (ValueError, TypeError) as error:
            encrypted = b"ENCRYPTED" in pem
            hint = "wrong or missing passphrase" if encrypted else f"no private key ({error})"
            raise ConfigError(f"key file {path}: {hint}") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(f"key file {path}: not an Ed25519 key; make one with keygen")
        return cls(
            key.private_bytes(
                serialization.Encoding.Raw,
                serialization.PrivateFormat.Raw,
                serialization.NoEncryption(),
            )
        )
