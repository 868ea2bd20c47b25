"""Keys on disk, peer ids and signatures."""

import os
from pathlib import Path

import pytest

from swarm.errors import ConfigError, RemoteProtocolError
from swarm.identity import Identity, public_key_of, verify


def test_a_key_survives_the_disk_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    identity = Identity.generate()
    identity.save(tmp_path / "deep" / "key.pem")
    assert Identity.load(tmp_path / "deep" / "key.pem").peer_id == identity.peer_id
    assert (tmp_path / "deep" / "key.pem").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "deep") == ["key.pem"]


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    first = Identity.generate()
    first.save(tmp_path / "key.pem")
    with pytest.raises(ConfigError, match="exists already"):
        Identity.generate().save(tmp_path / "key.pem")
    assert Identity.load(tmp_path / "key.pem").peer_id == first.peer_id


def test_a_passphrase_is_needed_and_a_wrong_one_is_told(tmp_path: Path) -> None:
    Identity.generate().save(tmp_path / "key.pem", "open sesame")
    assert Identity.load(tmp_path / "key.pem", "open sesame")
    for wrong in (None, "open barley"):
        with pytest.raises(ConfigError, match="passphrase"):
            Identity.load(tmp_path / "key.pem", wrong)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    Identity.generate().save(tmp_path / "key.pem")
    (tmp_path / "key.pem").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Identity.load(tmp_path / "key.pem")


def test_a_signature_holds_for_its_bytes_its_domain_and_its_signer_alone() -> None:
    signer, other = Identity(bytes(32)), Identity(bytes([1] * 32))
    signature = signer.sign(b"a/1\x00", b"data")
    verify(signer.peer_id, b"a/1\x00", b"data", signature)
    for peer, domain, data in (
        (other.peer_id, b"a/1\x00", b"data"),
        (signer.peer_id, b"b/1\x00", b"data"),
        (signer.peer_id, b"a/1\x00", b"Data"),
    ):
        with pytest.raises(RemoteProtocolError):
            verify(peer, domain, data, signature)


@pytest.mark.parametrize("change", ["{} ", "\t{}", "1{}", "{}1", "x", "", "ä" * 50, "1" * 500])
def test_only_the_canonical_peer_id_passes(change: str) -> None:
    with pytest.raises(RemoteProtocolError):
        public_key_of(change.format(Identity(bytes(32)).peer_id))


def test_the_secret_is_not_in_the_repr() -> None:
    identity = Identity(bytes(range(32)))
    assert identity.seed.hex() not in repr(identity)
    assert repr(identity.seed) not in repr(identity)
